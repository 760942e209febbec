"""The numbers that a loop logs, held until all are read at once: a GPU is waited for at each reading."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from .record import as_number


class Metrics:
    """Rows of numbers, in the order in which they were logged.

    Attributes:
        tensors: the numbers that are still to be read: scalars.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, dict[str, float | None]]] = []
        self.tensors: list[Tensor] = []

    def take(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Take in the numbers of a step; a tensor with the value that it has now.

        Raises:
            Refused: one is no number.
        """
        row: dict[str, float | None] = {}
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
                self.tensors.append(value.detach().clone())
                row[name] = None
            else:
                row[name] = float(as_number(name, value))
        self._rows.append((step, row))

    def rows(self, read: Sequence[float]) -> Iterator[tuple[int, dict[str, float]]]:
        """The rows since the last call, given the values of `tensors`."""
        values, rows = iter(read), self._rows
        self._rows, self.tensors = [], []
        for step, row in rows:
            yield step, {name: next(values) if value is None else value for name, value in row.items()}
