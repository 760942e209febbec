"""The memory that a run's process lends while parts of the run are trained again."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samebits.core.state import State
from samebits.prove import lent


@pytest.fixture
def state() -> State:
    """A model with tied weights and a buffer, after two steps of AdamW, and an average of its weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        average.update_parameters(model)
    return State.of(model, optimizer, {"average": average})


def all_of(state: State) -> list[Tensor]:
    optimizer, average = state.optimizers.all[0], state.objects["average"]
    moments = [each for of in optimizer.state.values() for each in of.values()]
    tensors = [*state.model.parameters(), *state.model.buffers(), *average.state_dict().values(), *moments]
    return [*tensors, *(each.grad for each in state.model.parameters())]


def test_all_that_a_run_holds_is_lent_and_comes_back_as_it_was(state: State):
    held = all_of(state)
    before, view = [each.clone() for each in held], state.model[0].weight.detach()[1]
    with lent.lent(lent.tensors_of(state), "cpu"):
        assert not any(each.untyped_storage().size() for each in held)
    assert all(map(torch.equal, before, held)) and state.model[2].weight is state.model[0].weight
    with torch.no_grad():
        state.model[0].weight.zero_()
    assert torch.equal(view, torch.zeros(4))


def test_it_comes_back_after_an_error_too(state: State):
    before = [each.clone() for each in all_of(state)]
    with pytest.raises(KeyError), lent.lent(lent.tensors_of(state), "cpu"):
        raise KeyError
    assert all(map(torch.equal, before, all_of(state)))


def refused(*given: Any) -> torch.UntypedStorage:
    """As where a limit of the process is reached."""
    raise RuntimeError("can't allocate memory")


@pytest.mark.parametrize("why", ["of numpy", "on another device", "no room", "refused"])
def test_what_cannot_be_moved_stays(why: str, monkeypatch: pytest.MonkeyPatch):
    held = torch.from_numpy(np.ones(3, np.float32)) if why == "of numpy" else torch.ones(3)
    if why == "no room":
        monkeypatch.setattr(lent, "free", lambda: 2 * 3 * 4 - 1)
    if why == "refused":
        monkeypatch.setattr(torch, "UntypedStorage", refused)
    with lent.lent([held], "cuda" if why == "on another device" else "cpu"):
        assert torch.equal(held, torch.ones(3))
    assert torch.equal(held, torch.ones(3))
