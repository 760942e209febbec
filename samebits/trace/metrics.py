"""The numbers that a loop logs, held until all are read at once: a GPU is waited for at each reading."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from torch import Tensor

from ..core.errors import RunError
from ..core.observer import Ballot, Observer, View
from ..record.record import as_number


class Metrics(Observer):
    """Rows of numbers, in the order in which they were logged.

    Attributes:
        tensors: the numbers that are still to be read: scalars.
        latest: the last number of each name.
    """

    name = "metrics"

    def __init__(self, write: Callable[[int, dict[str, float]], None]) -> None:
        """`write` takes the numbers of a step."""
        self._write, self.latest = write, dict[str, float]()
        self._rows: list[tuple[int, dict[str, float | None]]] = []
        self.tensors: list[Tensor] = []

    def take(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Take in the numbers of a step; a tensor with the value that it has now.

        Raises:
            UserError: one is no number.
        """
        row: dict[str, float | None] = {}
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
                self.tensors.append(value.detach().clone())
                row[name] = None
            else:
                row[name] = float(as_number(name, value))
        self._rows.append((step, row))

    def ballot(self, view: View) -> Ballot:
        """The numbers are read with all else that is."""
        return Ballot(own=self.tensors)

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """Write what was logged."""
        self._put(own)

    def write(self) -> None:
        """Write what was logged since the last step; a GPU is waited for."""
        self._put([float(number) for number in self.tensors])

    def close(self, error: BaseException | None) -> None:
        """After a failure what was logged until then is written."""
        if isinstance(error, RunError):
            with suppress(RunError):
                self.write()

    def _put(self, read: Sequence[float]) -> None:
        for step, numbers in self.rows(read):
            self.latest |= numbers
            self._write(step, numbers)

    def rows(self, read: Sequence[float]) -> Iterator[tuple[int, dict[str, float]]]:
        """The rows since the last call, given the values of `tensors`."""
        values, rows = iter(read), self._rows
        self._rows, self.tensors = [], []
        for step, row in rows:
            yield step, {name: next(values) if value is None else value for name, value in row.items()}


class Live(Observer):
    """Gives the numbers of each step to a function of the owner's, whose failure ends no run.

    Attributes:
        name: it is reported with.
    """

    name, vital = "on_log", False

    def __init__(self, function: Callable[[int, dict[str, float]], object]) -> None:
        self._function: Callable[[int, dict[str, float]], object] | None = function
        self._rows: list[tuple[int, dict[str, float]]] = []

    def take(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take in the numbers of a step."""
        self._rows.append((step, dict(numbers)))

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """Give away what has come in."""
        self._give()

    def end(self, report: Callable[[str], None]) -> None:
        """Give away what has come in after the last step; `report` is called where that fails."""
        try:
            self._give()
        except Exception as error:
            report(f"{self.name} raised at its end: {type(error).__name__}: {error}")

    def _give(self) -> None:
        function, rows = self._function, self._rows
        self._function, self._rows = None, []  # after a failure it is not called again
        if function:
            for step, numbers in rows:
                function(step, numbers)
        self._function = function
