"""What a loop logs is what it held when it was logged, and nothing of it is lost."""

from typing import Any

import pytest
import torch

from samebits.core.errors import UserError
from samebits.trace.metrics import Metrics


def nowhere(step: int, numbers: dict[str, float]) -> None:
    """Write nothing."""


def read(metrics: Metrics) -> list[tuple[int, dict[str, float]]]:
    """The rows, with their tensors read as a run reads them."""
    return list(metrics.rows([float(tensor) for tensor in metrics.tensors]))


def test_rows_come_back_in_their_order_and_once():
    metrics = Metrics(nowhere)
    metrics.take(3, {"loss": torch.tensor(0.5), "rate": 0.25, "norm": torch.tensor([2.0], dtype=torch.float64)})
    metrics.take(3, {"accuracy": 1})
    assert read(metrics) == [(3, {"loss": 0.5, "rate": 0.25, "norm": 2.0}), (3, {"accuracy": 1.0})]
    assert read(metrics) == [] and metrics.tensors == []


def test_tensor_that_changes_later_was_logged_before():
    metrics, loss = Metrics(nowhere), torch.tensor(0.5)
    metrics.take(0, {"loss": loss})
    loss += 1
    assert read(metrics) == [(0, {"loss": 0.5})]


@pytest.mark.parametrize("value", [torch.zeros(2), torch.tensor(1j), "much", None])
def test_no_number_is_refused_when_it_is_logged(value: Any):
    with pytest.raises(UserError, match=r"^metric loss: .* given, one number wanted$"):
        Metrics(nowhere).take(0, {"loss": value})


@pytest.mark.parametrize("bits", [0.1, -0.0, 2.0**-1074, 2.0**1023, float("inf"), float("nan")])
def test_numbers_travel_among_the_sums_without_a_change(bits: float):
    from samebits.core.ranks import ALONE

    number = torch.tensor(bits, dtype=torch.float64)
    sums, (seen,) = ALONE.totals([1, 2], torch.tensor([-(2**63)]), [number])
    assert sums == [1, 2, -(2**63)]
    assert torch.equal(torch.tensor(seen, dtype=torch.float64).view(torch.int64), number.view(torch.int64))
