"""Torch's list of nondeterministic operations is read whole, and each is known in what the dispatcher sees."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.analysis.audit import catalogue
from samebits.analysis.audit.catalogue import ROWS, UNSEEN, Call, entries


def test_every_entry_of_the_installed_catalogue_is_mapped():
    assert catalogue.unknown() == []
    assert {entry.name for entry in entries()} == {*ROWS, *UNSEEN}
    assert {throws: sum(entry.throws is throws for entry in entries()) for throws in (False, True)} == {
        False: 23,
        True: 25,
    }


def test_every_operation_of_the_table_is_one_of_torch():
    known = {catalogue.plain(name.partition(".")[0]) for name in torch._C._dispatch_get_all_op_names()}
    assert {operation for row in ROWS.values() for operation in row.operations} <= known


def test_conditions_are_read():
    by_name = {(entry.name, entry.throws): entry for entry in entries()}
    interpolate = by_name["torch.nn.functional.interpolate", True]
    assert interpolate.of_gradients and interpolate.devices == {"cuda"} and "trilinear" in interpolate.condition
    assert by_name["torch.Tensor.index_copy", False].devices == {"cpu", "cuda"}
    assert by_name["torch.nn.MaxUnpool2d", True].devices == set()
    assert by_name["torch.Tensor.scatter_reduce", False].keywords == {"reduce": {"sum", "mean"}}
    assert by_name["torch.gather", False].of_gradients


def test_entry_that_the_table_lacks_is_told(monkeypatch: pytest.MonkeyPatch):
    text = (torch.use_deterministic_algorithms.__doc__ or "").replace("torch.histc", "torch.newer")
    assert "torch.newer" in {entry.name for entry in entries(text)} and entries(None) == ()
    monkeypatch.setattr(catalogue, "entries", lambda: entries(text))
    assert catalogue.unknown() == ["torch.newer"]


class Names(TorchDispatchMode):
    """Collects the names in the catalogue of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {verdict.entry.name for verdict in catalogue.verdicts(Call(function, args, kwargs or {}))}
        return function(*args, **(kwargs or {}))


def unpooled(n: int) -> torch.Tensor:
    pool, unpool = getattr(F, f"max_pool{n}d"), getattr(F, f"max_unpool{n}d")
    return unpool(*pool(image(n), 2, return_indices=True), 2)


def image(n: int) -> torch.Tensor:
    return torch.rand(1, 2, *[4] * n, requires_grad=True)


LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # by what each is made, and for how many dimensions
    "Conv": ((2, 2, 3), (1, 2, 3)),
    "ConvTranspose": ((2, 2, 3), (1, 2, 3)),
    "ReplicationPad": ((1,), (1, 2, 3)),
    "ReflectionPad": ((1,), (1, 2, 3)),
    "FractionalMaxPool": ((2, 2), (2, 3)),
    "AdaptiveAvgPool": ((2,), (2, 3)),
    "AdaptiveMaxPool": ((2,), (2,)),
    "MaxPool": ((2,), (3,)),
    "AvgPool": ((2,), (3,)),
}


def layer(kind: str, n: int) -> torch.Tensor:
    return getattr(nn, f"{kind}{n}d")(*LAYERS[kind][0])(image(n))


def row() -> torch.Tensor:
    return torch.rand(6, requires_grad=True)


PICK = torch.tensor([0, 2, 1])
DENSE = torch.rand(1, 3, 3)
CALLS: dict[str, Callable[[], torch.Tensor]] = {
    **{f"torch.nn.{kind}{n}d": partial(layer, kind, n) for kind, (_, dimensions) in LAYERS.items() for n in dimensions},
    **{f"torch.nn.MaxUnpool{n}d": partial(unpooled, n) for n in (1, 2, 3)},
    "torch.nn.functional.interpolate": lambda: F.interpolate(image(1), scale_factor=2, mode="linear"),
    "torch.nn.functional.grid_sample": lambda: F.grid_sample(image(2), torch.rand(1, 3, 3, 2), align_corners=False),
    "torch.nn.NLLLoss": lambda: F.cross_entropy(image(2), torch.zeros(1, 4, 4, dtype=torch.long)),
    "torch.nn.CTCLoss": lambda: F.ctc_loss(
        torch.rand(3, 1, 4, requires_grad=True).log_softmax(-1), torch.ones(1, 1, dtype=torch.long), (3,), (1,)
    ),
    "torch.nn.EmbeddingBag": lambda: nn.EmbeddingBag(4, 2, mode="max")(PICK.view(1, 3)),
    "torch.bmm": lambda: torch.bmm(DENSE.to_sparse(), DENSE),
    "torch.Tensor.__getitem__": lambda: row()[PICK],
    "torch.Tensor.index_put": lambda: row().index_put((PICK,), torch.ones(3)),
    "torch.Tensor.put_": lambda: torch.zeros(6).put_(PICK, torch.ones(3)),
    "torch.Tensor.scatter_add_": lambda: torch.zeros(6).scatter_add_(0, PICK, torch.ones(3)),
    "torch.Tensor.scatter_reduce": lambda: torch.zeros(6).scatter_reduce(0, PICK, torch.ones(3), "sum"),
    "torch.Tensor.scatter": lambda: torch.zeros(6).scatter(0, PICK, torch.ones(3)),
    "torch.Tensor.index_copy": lambda: torch.zeros(6).index_copy(0, PICK, torch.ones(3)),
    "torch.index_add": lambda: torch.zeros(6).index_add(0, PICK, torch.ones(3)),
    "torch.index_select": lambda: row().index_select(0, PICK),
    "torch.gather": lambda: row().gather(0, PICK),
    "torch.histc": lambda: torch.histc(row().detach(), 3),
    "torch.bincount": lambda: torch.bincount(PICK, torch.ones(3)),
    "torch.median": lambda: torch.median(row(), 0).values,
    "torch.cumsum": lambda: row().cumsum(0),
    "torch.Tensor.resize_": lambda: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.quint8).resize_(2),
}
HARMLESS: dict[str, Callable[[], torch.Tensor]] = {
    "slices": lambda: row()[1:3] * row()[::2].sum(),
    "index of what has no gradient": lambda: row().detach()[PICK],
    "sum of integers": lambda: PICK.cumsum(0),
    "median without indices": lambda: row().median(),
    "count without weights": lambda: torch.bincount(PICK),
    "loss of classes": lambda: F.cross_entropy(torch.rand(3, 4, requires_grad=True), PICK),
    "nearest": lambda: F.interpolate(image(2), scale_factor=2, mode="nearest"),
    "bag of sums": lambda: nn.EmbeddingBag(4, 2, mode="sum")(PICK.view(1, 3)),
    "dense product": lambda: torch.bmm(DENSE, DENSE),
    "value scattered": lambda: torch.zeros(6).scatter(0, PICK, 1.0),
    "largest scattered": lambda: torch.zeros(6).scatter_reduce(0, PICK, torch.ones(3), "amax"),
    "pooling": lambda: F.max_pool2d(F.avg_pool2d(image(2), 2), 2),
}


def repeated() -> torch.Tensor:
    return torch.repeat_interleave(row(), torch.tensor([1, 2, 1, 1, 2, 1]))


def seen(function: Callable[[], torch.Tensor]) -> set[str]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)  # whatever another test of this process has set
    try:
        with Names() as names:
            result = function()
            if result.requires_grad:
                result.sum().backward()
    finally:
        torch.set_deterministic_debug_mode(before)
    return names.seen


def test_every_entry_has_a_call():
    assert {*CALLS} == {*ROWS}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", ROWS)
def test_call_of_an_entry_is_known(name: str):
    assert name in seen(CALLS[name])


def test_repetition_is_told_as_the_selection_that_it_is():
    assert "torch.index_select" in seen(repeated) and {*UNSEEN} == {"torch.repeat_interleave"}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_call_is_not_told(name: str):
    assert seen(HARMLESS[name]) == set()
