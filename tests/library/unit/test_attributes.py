"""Plain attributes of modules and of own optimizers: saved where they differ from the beginning, with their aliases."""

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samebits.core.errors import UserError
from samebits.core.state import Snapshot, State, copy


class Model(nn.Module):
    """Has an attribute of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 8), nn.Linear(8, 2)
        self.register_buffer("table", torch.zeros(3))
        self.temperature, self.count, self.gone = 1.0, 0, 5
        self.running = torch.zeros(3)
        self.same_running = self.other = self.running
        self.history: deque[Any] = deque(maxlen=3)
        self.nested: dict[Any, Any] = {"list": [1, 2], (1, 2): (torch.ones(2), {3})}
        self.counts: Any = defaultdict(int)
        self.array = np.zeros(3)
        self.tied, self.part = [self.embedding.weight], self.embedding.weight.detach()[1:]
        self.__dict__["raw"] = self.embedding.weight
        self.functions = [torch.relu, torch.tanh]
        self.function = self.functions[0]
        self.noise = torch.Generator()


class Optimizer(torch.optim.SGD):
    """Keeps something beside its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count, self.means = 0, [0.0]


def made() -> tuple[Model, Optimizer, State]:
    """A model, an optimizer and their state, at its beginning."""
    torch.manual_seed(0)
    model = Model()
    optimizer = Optimizer(model.parameters())
    state = State.of(model, optimizer, {})
    assert state.attributes.saved() == {}
    return model, optimizer, state


def changed(model: Any, optimizer: Any) -> None:
    """What a loop may do in some steps."""
    model.temperature *= 0.3
    model.count = 2**70
    del model.gone
    model.running += 1
    model.other = torch.full((2,), -0.0)
    model.history.extend([1.5, torch.ones(1), (1, None)])
    model.nested["list"].append(model.history)
    model.nested[1, 2][1].add(9)
    model.nested["me"] = model.nested
    model.counts["a"] += 2
    model.array = model.array + 1
    model.function = model.functions[1]
    model.fresh = OrderedDict(number=np.float32(0.1), text="ä", raw=b"\x00", kind=torch.int8, nan=float("nan"), z=1j)
    model.fresh_too = model.fresh
    model.parts = [model.embedding.weight, model.table, model.part, model.head.weight.detach()[0]]
    optimizer.count = 3
    optimizer.means.append(model.running)


def stored(state: State) -> Snapshot:
    """A snapshot as it is read again."""
    taken = state.look(1).changed(copy).digested()
    return replace(taken, values=json.loads(json.dumps(taken.values)))


def resumed() -> tuple[Any, Any, State, Snapshot]:
    """What another process has after a resume."""
    model, optimizer, state = made()
    changed(model, optimizer)
    there = stored(state)
    other, others, again = made()
    again.put(there)
    return other, others, again, there


def test_attributes_come_back_as_they_were():
    model, optimizer, state, there = resumed()
    assert state.look(1).digested().content == there.content
    assert (model.temperature, model.count, hasattr(model, "gone")) == (0.3, 2**70, False)
    assert torch.equal(model.running, torch.ones(3)) and str(model.other) == "tensor([-0., -0.])"
    assert model.history.maxlen == 3 and model.history[0] == 1.5 and model.nested[1, 2][1] == {3, 9}
    assert model.counts["b"] == 0 and type(model.array) is np.ndarray and model.array.tolist() == [1, 1, 1]
    kinds = [np.float32, str, bytes, torch.dtype, float, complex]
    assert [type(value) for value in model.fresh.values()] == kinds and type(model.fresh) is OrderedDict
    assert optimizer.count == 3 and optimizer.means[0] == 0.0


def test_aliases_stay_aliases():
    model, optimizer, _, _ = resumed()
    weight = model.embedding.weight
    assert model.tied[0] is model.raw is model.parts[0] is weight and model.parts[1] is model.table
    assert model.parts[2] is model.part and model.same_running is model.running is optimizer.means[1]
    assert model.nested["list"][2] is model.history and model.nested["me"] is model.nested
    assert model.fresh_too is model.fresh and model.function is model.functions[1] is torch.tanh
    with torch.no_grad():
        weight.fill_(7)
        model.head.weight.fill_(8)
    assert model.part.unique() == 7 and model.parts[3].unique() == 8


def test_planted_alias_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch):
    """All is compared after it was loaded, the aliases too."""
    model, optimizer, state = made()
    changed(model, optimizer)
    there = stored(state)
    *_, again = made()
    put = again.attributes.put

    def lose(saved: Any) -> None:
        put(saved)
        again.model.tied = [again.model.embedding.weight.detach().clone()]

    monkeypatch.setattr(again.attributes, "put", lose)
    with pytest.raises(Exception, match="other bits after loading than were saved"):
        again.put(there)


def refill(model: Any) -> None:
    model.large[4:6] = 1


LOST: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "function": (lambda model: setattr(model, "function", lambda: 0), "function", "is a function"),
    "large": (lambda model: setattr(model, "x", torch.zeros(1 << 25)), "x", "is a Tensor of 128 MiB, more than 64"),
    "written": (refill, "large", "is a ndarray of 64 MiB, more than 64"),
    "items": (lambda model: setattr(model, "x", [0] * 200_000), "x", "is a list of 200000 items, more than 100000"),
    "item": (lambda model: model.many.append("other"), "many", "is a deque of 100001 items, more than 100000"),
    "objects": (lambda model: setattr(model, "x", np.array([None])), "x", "is a ndarray of object"),
    "graph": (
        lambda model: model.history.append(model.head(torch.ones(8))),
        "history",
        "is a tensor with a graph (model.history[0])",
    ),
    "overlap": (
        lambda model: setattr(model, "x", (fresh := torch.ones(3), fresh[1:])),
        "x",
        "is a view of another attribute (model.x[1])",
    ),
}


@pytest.mark.parametrize(("change", "name", "said"), LOST.values(), ids=LOST)
def test_what_no_checkpoint_can_hold_is_named_and_left_out(change: Callable[[Any], object], name: str, said: str):
    """What else has changed is saved, though the same objects are in it."""
    model, _, state = made()
    model.large, model.many = np.zeros((8 << 20) + 1), deque([0] * 100_001, maxlen=100_001)
    state.attributes.begin()
    assert state.attributes.lost() == state.attributes.saved() == {}
    change(model)
    model.count = 3
    assert state.attributes.lost() == {f"model.{name}": f"has changed, and {said}"}
    assert json.loads(state.attributes.saved()["roots"]) == {"model.count": [{"int": "0x3"}]}
    state.attributes.leave_out(f"model.{name}")
    assert state.attributes.lost() == {} and state.attributes.saved()["objects"] == "{}"
    state.attributes.begin(unsaved=("function", "model.x", "large", "many", "history"))
    change(model)
    assert state.attributes.lost() == state.attributes.saved() == {}


def test_attribute_that_was_left_out_begins_anew_and_is_saved_again_once_it_can_be():
    model, _, state = made()
    model.history.append(shared := [1])
    model.temperature, model.fresh = (lambda: shared), [shared]
    there = stored(state)
    other, _, again = made()
    again.put(there)
    assert (other.temperature, other.fresh, other.history[0]) == (1.0, [[1]], [1])
    assert other.fresh[0] is other.history[0]
    model.temperature = 0.5
    again.put(stored(state))
    assert other.temperature == 0.5


@pytest.mark.parametrize("new", [torch.Generator(), np.random.default_rng(0), nn.Linear(1, 1)], ids=type)
def test_new_object_with_state_of_its_own_is_refused_by_name(new: Any):
    model, _, state = made()
    model.nested["new"] = new
    kind = type(new).__name__
    with pytest.raises(UserError, match=rf"^model\.nested holds a new {kind} \(model\.nested\['new'\]\), whose state"):
        state.attributes.lost()
    state.attributes.begin()
    assert state.attributes.saved() == {}  # a generator of the beginning is seeded


def test_module_of_the_model_stays_one():
    model, _, state = made()
    model.nested["chosen"] = [model.head]
    other, _, again = made()
    again.put(stored(state))
    assert other.nested["chosen"][0] is other.head


def test_module_that_takes_the_place_of_another_is_refused_by_name():
    model, _, state = made()
    model.activation = nn.GELU()
    with pytest.raises(UserError, match=r"^model\.activation is GELU, and was no module at the beginning"):
        state.attributes.saved()


def test_weight_that_a_hook_computes_is_no_state():
    """As torch's older weight_norm does: it is gone with its step, and made anew."""
    with pytest.warns(FutureWarning):
        model = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    state = State.of(model, torch.optim.SGD(model.parameters()), {})
    state.attributes.begin()
    model(torch.ones(4)).sum().backward()
    assert state.attributes.saved() == {}
