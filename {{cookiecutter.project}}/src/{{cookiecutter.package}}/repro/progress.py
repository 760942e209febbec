"""How far a run has come: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 10  # where there is no terminal


def shown(start: int, stop: int, latest: Callable[[], str]) -> Iterator[int]:
    """Yield the steps from `start` to `stop`, showing the count and what `latest` says after each."""
    console = Console()
    return _bar(start, stop, latest, console) if console.is_terminal else _lines(start, stop, latest)


def number(value: float) -> str:
    """A number as people read it: counts whole, others with four decimals."""
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _bar(start: int, stop: int, latest: Callable[[], str], console: Console) -> Iterator[int]:
    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.fields[latest]}"), console=console) as progress:
        task = progress.add_task("", total=stop, completed=start, latest="")
        for step in range(start, stop):
            yield step
            progress.update(task, advance=1, latest=latest())


def _lines(start: int, stop: int, latest: Callable[[], str]) -> Iterator[int]:
    every, began = max(1, stop // LINES), time.monotonic()
    for step in range(start, stop):
        yield step
        if (step + 1) % every == 0 or step + 1 == stop:
            print(f"step {step + 1}/{stop}  {latest()}  {time.monotonic() - began:.0f} s", flush=True)
