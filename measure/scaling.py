"""Steps on one, two and four processes, the project's beside a plain script's: the table of docs/scaling.md.

python measure/scaling.py [--only convnet] [--rounds N] [--out FILE]

All numbers of processes take turns in one run, so ratios are of pairs. Bytes are those that the kernel counted on the
loopback interface, so run it alone.
"""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from document import arguments, write
from ratios import ratio
from rounds import PINNED, ROOT, VENV, WAYS, WORKLOADS, Taken, about, in_venv, measured, prepared

RESULT = ROOT / "docs" / "scaling.md"
ASKED = "convnet", "large"
PROCESSES = 1, 2, 4
HEAD = """| workload | processes | way | ms per step | beside one process | beside plain | kB sent | by formula |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Sizes:
    """How many numbers a model holds: parameters, and in buffers those with fractions."""

    parameters: int
    buffers: int


# way -> bytes that each of many processes sends to add up gradients (float32) and changes of buffers (float64)
BYTES: dict[str, Callable[[Sizes], int]] = {
    PINNED: lambda sizes: 2 * 4 * sizes.parameters,
    "step": lambda sizes: 2 * (4 * sizes.parameters + 8 * sizes.buffers),
}
COUNT = """
from pathlib import Path
from repro_project.config import Config
from repro_project.model import build
from repro_project.repro.config.params import load
model = build(load(Config, Path("params.yaml"), {settings}))
print(sum(p.numel() for p in model.parameters()), sum(b.numel() for b in model.buffers() if b.is_floating_point()))
"""


def sizes(project: Path, workload: str) -> Sizes:
    """Those of the workload's model."""
    code = COUNT.format(settings=list(WORKLOADS[workload].settings))
    asked = [VENV / "bin" / "python", "-c", code]
    told = subprocess.run(asked, cwd=project, env=in_venv(project), check=True, text=True, stdout=subprocess.PIPE)
    return Sizes(*map(int, told.stdout.split()))


def rows(workload: str, held: Sizes, taken: dict[tuple[str, int], Taken]) -> Iterator[str]:
    """The lines of the table on one workload, from what each way on so many processes took."""
    for (way, ranks), one in taken.items():
        alone, plain = taken[way, PROCESSES[0]], taken[PINNED, ranks]
        cells = (
            WORKLOADS[workload].title, str(ranks), WAYS[way].title, f"{1000 * median(one.seconds):.1f}",
            str(ratio(one.seconds, alone.seconds)) if one is not alone else "1",
            str(ratio(one.seconds, plain.seconds)) if one is not plain else "1",
            f"{one.sent / 1000:.1f}", f"{BYTES[way](held) * (ranks - 1) / ranks / 1000:.1f}",
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def table(only: Sequence[str], rounds: int) -> str:
    """What stands between the marks."""
    with prepared() as project:
        place, lines = about(), []
        for workload in only:
            asked = [(way, ranks) for ranks in PROCESSES for way in BYTES]
            ways = {f"{way}-{ranks}": replace(WAYS[way], ranks=ranks) for way, ranks in asked}
            found = measured(project, ways, WORKLOADS[workload], 1, rounds)
            lines += rows(workload, sizes(project, workload), dict(zip(asked, found.values(), strict=True)))
    return "\n".join([f"{place} {rounds} rounds.", "", HEAD, *lines])


def main() -> None:
    """Measure, and write the table into the document."""
    asked = arguments(__doc__, ASKED, RESULT)
    made = table(asked.only or ASKED, asked.rounds)
    write(asked.out, made)
    print(made)


if __name__ == "__main__":
    main()
