"""Tensors of every layout that torch has: a run trains with them, or refuses them by name before its first step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attempt import inside
from loops import Parts, loss_of
from project.config import Config
from safetensors.torch import load_file
from support import OURS
from torch import Tensor, nn

from samebits.core import weights
from samebits.core.errors import Preempted, UserError
from samebits.record import names
from samebits.run import Run

pytestmark = pytest.mark.usefixtures("as_a_stage")


VALUES = torch.arange(12.0)
COMPLEX = torch.complex(VALUES, -VALUES)
STRIDED: dict[str, Callable[[], Tensor]] = {
    "one element, stride 11": lambda: torch.arange(11.0).flatten()[::11],
    "one row, strided": lambda: torch.arange(24.0).view(2, 12)[:1, ::3],
    "empty": lambda: torch.empty(0, 3),
    "zero-dimensional": lambda: torch.tensor(1.5),
    "transposed": lambda: VALUES.view(3, 4).t(),
    "expanded row": lambda: VALUES.expand(1, -1),
    "bfloat16": lambda: VALUES.bfloat16()[1::2],
    "float8": lambda: VALUES.to(torch.float8_e4m3fn),
    "bool": lambda: VALUES > 3,
    "complex": lambda: COMPLEX,
}
VIEWS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.tensor([2.0]).expand(5, 3),
    "conjugate": lambda: COMPLEX.conj(),
    "negative bit": lambda: COMPLEX.conj().imag,
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: VALUES.to_sparse(),
    "sparse rows": lambda: VALUES.view(3, 4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(VALUES, 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([VALUES, VALUES[:3]], layout=torch.jagged),
    "meta": lambda: torch.empty(3, device="meta"),
}
NAMES = {
    "buffer": "odd",
    "optimizer": "odd in the state of the optimizer",
    "object": r"kept.state_dict\(\)\['tensor'\]",
}


class Kept:
    """An object of the loop's that holds a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self.tensor = state_dict["tensor"]


def train(config: Config, prepared: Path, out: Path, tensor: Tensor, where: str, stops: int = -1) -> Path:
    """Train with this tensor as a buffer, in the optimizer's state or in an object of the loop's."""
    settings = inside(config, prepared, 0, every=2)
    trace = settings.trace.model_copy(update={"level": "tensor", "values": stops})
    with Run(OURS, settings.model_copy(update={"trace": trace}), out) as run:
        parts = Parts(run)
        if where == "buffer":
            parts.model.register_buffer("odd", tensor)
        state = {"kept": Kept(tensor)} if where == "object" else {}
        for step in parts.steps(run, 4, state=state):
            for batch in step:
                step.backward(loss_of(parts.model, batch))
            parts.optimizer.step()
            if where == "optimizer":
                parts.optimizer.state[parts.model[0].bias].setdefault("odd", tensor)
        run.finish()
    return out


def bits(out: Path) -> list[bytes]:
    return [(out / name).read_bytes() for name in (names.WEIGHTS, "trace/steps.bin", "trace/tensors.bin")]


def plain(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


CASES = [(layout, where) for where in NAMES for layout in [*STRIDED, *(VIEWS if where != "buffer" else ())]]


@pytest.mark.parametrize(("layout", "where"), CASES)
def test_strided_tensor_has_the_bits_of_a_copy(layout: str, where: str, config: Config, prepared: Path, tmp_path: Path):
    """Straight, and stopped and resumed from a checkpoint that holds it."""
    make = (STRIDED | VIEWS)[layout]
    copy = bits(train(config, prepared, tmp_path / "copy", plain(make()), where))
    assert bits(train(config, prepared, tmp_path / "straight", make(), where)) == copy
    with pytest.raises(Preempted):
        train(config, prepared, tmp_path / "resumed", make(), where, stops=1)
    assert bits(train(config, prepared, tmp_path / "resumed", make(), where)) == copy


def test_another_value_has_other_bits(config: Config, prepared: Path, tmp_path: Path):
    one, other = (
        bits(train(config, prepared, tmp_path / name, torch.full((11,), value)[::11], "optimizer"))
        for name, value in [("one", 0.0), ("other", -0.0)]
    )
    assert one[0] == other[0] and one[2] != other[2]


@pytest.mark.parametrize("where", NAMES)
@pytest.mark.parametrize("layout", OTHERS)
def test_other_tensor_is_refused_by_name(layout: str, where: str, config: Config, prepared: Path, tmp_path: Path):
    """Before the first step; of an optimizer's state, at the end of the step that makes it."""
    with pytest.raises(UserError, match=f"^{NAMES[where]}.*{type(OTHERS[layout]()).__name__}"):
        train(config, prepared, tmp_path / "odd", OTHERS[layout](), where)
    assert not [*(tmp_path / "odd").glob(f"{names.CHECKPOINTS}/*")]


@pytest.mark.parametrize("layout", VIEWS)
def test_view_as_a_buffer_is_refused_with_the_way_out(layout: str, config: Config, prepared: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"^odd \(Tensor\): expected a tensor of its own, got a view .* Hold a copy: "):
        train(config, prepared, tmp_path / "odd", VIEWS[layout](), "buffer")


def test_views_of_one_tensor_are_saved_as_tensors_of_their_own(tmp_path: Path):
    """Two equal views stay tied, so the file has them once."""
    flat = torch.arange(13.0)
    model, loaded = nn.Module(), nn.Module()
    for name, view in {"one": flat[:4], "same": flat[:4], "other": flat[4:12]}.items():
        model.register_buffer(name, view)
        loaded.register_buffer(name, torch.zeros(len(view)))
    weights.save(model, tmp_path / "weights")
    assert sorted(load_file(tmp_path / "weights")) == ["one", "other"]
    loaded.same = loaded.one
    weights.load(loaded, tmp_path / "weights")
    assert all(torch.equal(buffer, loaded.get_buffer(name)) for name, buffer in model.named_buffers())
