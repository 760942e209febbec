"""What a sweep found: the metrics of its runs, with intervals over seeds, as a table and a picture."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..base.files import durable
from ..record.view import RunView
from . import statistics
from .groups import LARGEST, named
from .results import STEPS
from .sweep import Wanted
from .table import table

TABLE, PICTURE = "sweep.csv", "sweep.png"
WIDTH, HEIGHT = 4.6, 3.2  # inches, of a metric


class Swept:
    """The runs of a sweep that are done.

    Attributes:
        metrics: the names of their final metrics, without `steps`.
        groups: by the values other than the seed, in words; the runs in their order.
    """

    def __init__(self, runs: Sequence[Wanted]) -> None:
        self.runs = [(each, RunView(each.folder).metrics) for each in runs if each.is_done()]
        self.metrics = sorted({name for _, metrics in self.runs for name in metrics} - {STEPS})
        self.groups: dict[str, list[dict[str, float]]] = defaultdict(list)
        for each, metrics in self.runs:
            others = [f"{key}={value}" for key, value in each.values.items() if key != "seed"]
            self.groups[" ".join(others) or "all seeds"].append(dict(metrics))

    def rows(self) -> Iterator[tuple[str, str, list[float], tuple[float, float] | None]]:
        """Of each metric and group its values, and Student's 95 % interval of their mean, where there is one."""
        for metric in self.metrics:
            for group, runs in self.groups.items():
                values = [run[metric] for run in runs if metric in run]
                finite = bool(values) and all(abs(value) <= LARGEST for value in values)  # NaN is not, either
                yield metric, group, values, statistics.mean_interval(np.array(values)) if finite else None

    def lines(self) -> list[str]:
        """The table that is printed."""
        cells = []
        for metric, group, values, within in self.rows():
            finite = values and all(abs(value) <= LARGEST for value in values)
            middle = f"{statistics.mean(np.array(values)):.4g}" if finite else "-"
            ends = [f"{end:.4g}" for end in within] if within else ["-", "-"]
            cells.append([group, named(metric), str(len(values)), middle, *ends])
        return table(["values", "metric", "runs", "mean", "from", "to (95 %)"], cells)

    def write(self, out: Path) -> list[Path]:
        """Write a table with a row for each run, and the picture; their paths."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        keys = [*self.runs[0][0].values] if self.runs else []
        rows.writerow(["address", *keys, *self.metrics])
        for each, metrics in self.runs:
            rows.writerow([each.address, *each.values.values(), *(metrics.get(name, "") for name in self.metrics)])
        with durable(out / TABLE) as beside:
            beside.write_text(text.getvalue())
        if not (self.runs and self.metrics):
            return [out / TABLE]
        with durable(out / PICTURE) as beside:
            self._draw(beside)
        return [out / TABLE, out / PICTURE]

    def _draw(self, path: Path) -> None:
        """A part for each metric: a point for each run, and the interval of each group's mean."""
        from matplotlib.figure import Figure

        size = max(WIDTH, 0.7 * len(self.groups)), HEIGHT * len(self.metrics)
        figure = Figure(figsize=size, layout="constrained")
        axes = dict(zip(self.metrics, figure.subplots(len(self.metrics), squeeze=False).flat, strict=True))
        places = {group: place for place, group in enumerate(self.groups)}
        for metric, group, values, within in self.rows():
            drawn = [value for value in values if abs(value) <= LARGEST]
            axes[metric].plot([places[group]] * len(drawn), drawn, "o", color="#0072b2", alpha=0.5, markersize=4)
            if within:
                middle = sum(within) / 2
                axes[metric].errorbar(places[group], middle, middle - within[0], color="#d55e00", capsize=5, marker="_")
        for metric, axis in axes.items():
            axis.set_title(named(metric), loc="left", fontsize=9)
            axis.set_xticks([*places.values()], [*places], rotation=30, ha="right", fontsize=8)
            axis.set_xlim(-0.6, len(places) - 0.4)
        figure.savefig(path, format="png", dpi=120)
