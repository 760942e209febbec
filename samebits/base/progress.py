"""Progress of a run: a bar on a terminal; elsewhere, as in the log of a job, plain lines in columns."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..core.observer import Observer, View

LINES = 10  # where there is no terminal, evenly over the steps
SILENT = 60  # seconds after which there is a further one
WIDTH = 10  # of a number there: -0.0001234, -1.234e-05 and 12345.6789 fit

Latest = Callable[[], Mapping[str, float]]


Steps = Generator[int, bool | None, None]


def shown(start: int, stop: int, latest: Latest) -> Steps:
    """Yield the steps from `start` to `stop`, showing the count and the `latest` numbers after each.

    True is sent after a step that ends the run before `stop`. A name keeps its place among the numbers; a new one comes
    last.
    """
    console = Console()
    return _bar(start, stop, latest, console) if console.is_terminal else _lines(start, stop, latest)


class Shown(Observer):
    """Shows the steps that are done."""

    name = "progress"
    vital = False

    def __init__(self, start: int, stop: int, latest: Latest) -> None:
        self._numbers = shown(start, stop, latest)
        next(self._numbers, None)

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """One more is done."""
        with suppress(StopIteration):
            self._numbers.send(view.is_last)

    def close(self, error: BaseException | None) -> None:
        """Give the terminal back."""
        self._numbers.close()


def number(value: float) -> str:
    """A number as people read it: counts whole, others with four decimals, small and huge ones to four digits."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if value == 0 or 0.1 <= abs(value) < 1e5 else f"{value:#.4g}"


def _bar(start: int, stop: int, latest: Latest, console: Console) -> Steps:
    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()
    fields = TextColumn("{task.fields[rate]}  {task.fields[latest]}")
    began = time.monotonic()
    with Progress(*columns, fields, console=console) as progress:
        task = progress.add_task("", total=stop, completed=start, latest="", rate="")
        for step in range(start, stop):
            yield step
            rate = _rate((step + 1 - start) / max(time.monotonic() - began, 1e-9))
            news = "  ".join(f"{name} {number(value)}" for name, value in latest().items())
            progress.update(task, advance=1, latest=news, rate=rate)


def _lines(start: int, stop: int, latest: Latest) -> Steps:
    every, began = max(1, stop // LINES), time.monotonic()
    latest_line = began
    for step in range(start, stop):
        ends = yield step
        now, done = time.monotonic(), step + 1
        if done % every == 0 or done == stop or ends or now - latest_line >= SILENT:
            latest_line, took = now, max(now - began, 1e-9)
            left = 0 if ends else took / (done - start) * (stop - done)
            counts = f"step {done:{len(str(stop))}}/{stop}", f"{_clock(took):>8}", f"{_rate((done - start) / took):>9}"
            numbers = (f"{name} {number(value):{WIDTH}}" for name, value in latest().items())
            print("  ".join([*counts, f"{_clock(left):>8} left", *numbers]).rstrip(), flush=True)


def _rate(steps: float) -> str:
    """Steps per second, without an exponent."""
    return f"{steps:.0f}/s" if steps >= 100 else f"{steps:.3g}/s"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
