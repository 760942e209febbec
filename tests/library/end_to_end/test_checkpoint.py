"""Checkpoints: what is read is what was taken, bit by bit; a crash at any instant costs no older one."""

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from states import FILES, OPTIMIZERS, ORIGIN, Training, assert_equal, silent, snapshot
from torch import nn

from samebits.address import manifest
from samebits.checkpoint import checkpoint, stored
from samebits.checkpoint.checkpoint import found, newest, read, write
from samebits.core.errors import UserError
from samebits.core.optimizers import Optimizers
from samebits.core.state import Snapshot, State, copy
from samebits.core.trees import unpack

# ---- what is read is what was taken


def written(taken: Snapshot, folder: Path) -> Snapshot:
    """What is read of it from the disk."""
    return read(write(taken, folder, ORIGIN, keep=1), ORIGIN)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_comes_back_bit_by_bit_and_goes_on_alike(kind: str, tmp_path: Path):
    kept, resumed = Training(OPTIMIZERS[kind]), Training(OPTIMIZERS[kind])
    kept.step(5)
    resumed.state.put(written(kept.take(), tmp_path))
    resumed.done = 5
    for steps in (0, 5):
        kept.step(steps)
        resumed.step(steps)
        assert_equal(kept.take(), resumed.take())
    without = [
        [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]
        for training in (kept, resumed)
    ]
    assert without[0] == without[1]


def test_shared_weights_come_back(tmp_path: Path):
    def tied() -> tuple[nn.Module, Optimizers]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model, Optimizers(torch.optim.SGD(model.parameters(), lr=0.1), model)

    (one, optimizers), (other, others) = tied(), tied()
    State(other, others).put(written(State(one, optimizers).look(1).changed(copy), tmp_path))
    assert torch.equal(one[1].weight, other[1].weight) and other[1].weight is other[0].weight


# ---- state belongs to names


class Shuffled:
    """A small training whose optimizers were given their parameters in any order, as a set has them."""

    def __init__(self, order: int, registered: int = 1, **layout: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 3, 3), nn.Conv2d(3, 4, 3, bias=False)]
        self.model = nn.ModuleDict({str(place): layers[place] for place in range(3)[::registered]})
        self.model.to(**layout)
        named = list(self.model.named_parameters())
        shuffled = [named[place] for place in torch.randperm(4, generator=torch.Generator().manual_seed(order))]
        self.group = {"params": shuffled, "amsgrad": True}
        self.optimizer = torch.optim.AdamW([self.group], lr=0.1, fused=True)
        self.optimizers = Optimizers(self.optimizer, self.model)
        self.state = State(self.model, self.optimizers)
        self.held = self.optimizer.param_groups[0]  # as a loop may hold it

    def step(self, times: int) -> None:
        for number in range(times):
            for name, parameter in self.model.named_parameters():
                torch.manual_seed(1000 * number + zlib.crc32(name.encode()))
                parameter.grad = torch.randn(parameter.shape).to(parameter).mul_(number + 1)
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
            self.held["lr"] *= 0.9
            self.optimizer.step()


def test_state_of_parameters_from_a_set_comes_back_by_name(tmp_path: Path):
    """Two of four have one shape: each would get the other's moments without a word, and the third those of none.

    The model's modules may come from a set, too.
    """
    for number, (registered, layout) in enumerate(((1, {}), (-1, {}), (-1, {"memory_format": torch.channels_last}))):
        kept, resumed = Shuffled(0, **layout), Shuffled(1, registered, **layout)
        for each in (kept, resumed):
            assert each.held["param_names"] == [name for name, _ in each.model.named_parameters()]
        kept.step(3)
        taken = kept.state.look(3).changed(copy)
        resumed.state.put(written(taken, tmp_path / str(number)))
        for steps in (0, 2):
            kept.step(steps)
            resumed.step(steps)
            one, other = (each.state.look(3).digested() for each in (kept, resumed))
            assert one.digests == other.digests and kept.held["lr"] == resumed.held["lr"]
        assert resumed.held is resumed.optimizer.param_groups[0]


class Drawing(torch.optim.SGD):
    """Draws for each parameter in turn."""

    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(torch.rand(parameter.shape))


def test_parameters_from_a_set_are_updated_in_the_order_of_the_model():
    def trained(order: int) -> list[torch.Tensor]:
        made = Shuffled(order)
        optimizer = Drawing(made.group["params"])
        Optimizers(optimizer, made.model)
        torch.manual_seed(0)
        optimizer.step()
        return list(made.model.parameters())

    assert all(torch.equal(one, other) for one, other in zip(trained(0), trained(1), strict=True))


class Wide(torch.optim.SGD):
    """Its state has another format than the parameters."""

    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = torch.full(parameter.shape, 0.1, dtype=torch.float64)


def test_state_of_another_format_than_the_parameters_comes_back():
    model = nn.Linear(2, 2)
    one, other = (Optimizers(Wide(model.parameters()), model) for _ in range(2))
    one.all[0].step()
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.state_of(model.weight)[0], torch.full((2, 2), 0.1, dtype=torch.float64))


def test_state_of_other_optimizers_is_refused_by_name_before_anything_is_loaded(tmp_path: Path):
    def made(*kinds: str, split: int = 2, sizes: tuple[int, ...] = (2, 3)) -> tuple[nn.Module, Optimizers]:
        model = nn.ParameterDict({f"p{place}": nn.Parameter(torch.ones(size)) for place, size in enumerate(sizes)})
        held = list(model.values())
        groups = [[{"params": held[:split]}, {"params": held[split:]}]] if len(kinds) == 1 else [held[:1], held[1:]]
        return model, Optimizers([OPTIMIZERS[kind](group) for kind, group in zip(kinds, groups, strict=True)], model)

    def refusal(saved: tuple[nn.Module, Optimizers], other: tuple[nn.Module, Optimizers]) -> str:
        taken = State(*saved).look(1).changed(copy)
        for tensor in other[0].parameters():
            tensor.data.zero_()
        with pytest.raises(UserError) as refused:
            State(*other).put(taken)
        assert not any(tensor.any() for tensor in other[0].parameters()), "half loaded"
        return str(refused.value)

    one, two = made("AMSGrad"), made("AMSGrad", "plain SGD")
    State(*made("AMSGrad", "plain SGD")).put(State(*two).look(1))
    assert refusal(two, made("AMSGrad")) == "optimizers: the checkpoint holds 2, run.steps() was given 1"
    assert refusal(one, two) == "optimizers: the checkpoint holds 1, run.steps() was given 2"
    message = refusal(one, made("AMSGrad", split=1))
    assert message.startswith(
        "Adam, group 0: p1: other parameters than the checkpoint holds: shape none here, [3] there."
    )
    message = refusal(one, made("AMSGrad", sizes=(2, 4)))
    assert message.startswith(
        "the model: p1: shape (4,) here, (3,) in the checkpoint. Build the model that the run began"
    )


def test_snapshot_is_a_copy():
    training = Training()
    training.step(3)
    taken, again = training.take(), training.take()
    training.step(2)
    assert_equal(taken, again)
    assert not torch.equal(taken.model["0.weight"], training.take().model["0.weight"])
    held = unpack(taken.values["optimizer"], taken.optimizer)
    assert held["param_groups"][0]["lr"] != training.optimizer.param_groups[0]["lr"]


def test_there_is_no_pickle(tmp_path: Path):
    path = write(snapshot(2), tmp_path, ORIGIN, 1)
    assert {file.name for file in path.iterdir()} == FILES
    for file in path.iterdir():
        content = file.read_bytes()
        assert content[:2] not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), file
        if file.suffix == ".json":
            json.loads(content)
        else:
            length = int.from_bytes(content[:8], "little")
            sizes = [entry["data_offsets"][1] for name, entry in json.loads(content[8 : 8 + length]).items()]
            assert 8 + length + max(sizes, default=0) == len(content), f"{file} holds more than tensors"


def test_no_pickle_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a pickle")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, no)
    monkeypatch.setattr(torch, "load", no)
    monkeypatch.setattr(torch, "save", no)
    there = written(snapshot(2), tmp_path)
    resumed = Training()
    resumed.state.put(there)
    assert_equal(there, snapshot(2))


def test_only_the_newest_stay(tmp_path: Path):
    for steps in (1, 2, 3, 4, 5):
        write(snapshot(steps), tmp_path, ORIGIN, keep=2)
    assert not list(tmp_path.glob(".*")), "something half written is left"
    assert [int(path.name[:9]) for path in found(tmp_path)] == [4, 5]


def test_writing_a_state_again_gives_the_same_bytes_and_leaves_it_whole(tmp_path: Path):
    first = write(snapshot(2), tmp_path, ORIGIN, 1)  # its name is the digest of its bytes
    assert write(snapshot(2), tmp_path, ORIGIN, 1) == first
    assert_equal(read(first, ORIGIN), snapshot(2))
    assert list(tmp_path.iterdir()) == [first]


# ---- a crash at any instant


# Every call by which `write` touches the disk: (module, attribute).
OPERATIONS = (
    *((checkpoint, name) for name in ("write_json", "sync")),
    *((manifest, name) for name in ("stated", "sha256_file")),
    (stored, "save_file"),
    *((Path, name) for name in ("mkdir", "rename", "replace", "write_text")),
    *((os, name) for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open")),
    (shutil, "rmtree"),
)


def watched(monkeypatch: pytest.MonkeyPatch, before: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call `before` with each disk operation's name and arguments, before and after it happens."""

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            before(name, arguments)
            result = original(*arguments, **options)
            before(f"{name} done", arguments)
            return result

        return wrapped

    for owner, attribute in OPERATIONS:
        name = f"{owner.__name__.rpartition('.')[2]}.{attribute}"
        monkeypatch.setattr(owner, attribute, wrap(name, getattr(owner, attribute)))


def crashing(instant: int, folder: Path) -> int:
    """In a child process: write, and end for good at one instant, with exit code 9; 0: it came through."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            count = iter(range(10**9))

            def before(name: str, arguments: tuple[Any, ...]) -> None:
                if not name.endswith(" done") and next(count) == instant:  # after one is before the next
                    os._exit(9)

            with pytest.MonkeyPatch.context() as patch:
                watched(patch, before)
                write(snapshot(2), folder, ORIGIN, keep=1)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_crash_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path):
    torch.set_num_threads(1)
    older, newer = snapshot(1), snapshot(2)
    write(older, tmp_path / "template", ORIGIN, 1)
    kept, instant = [], 0
    while True:
        folder = tmp_path / str(instant)
        shutil.copytree(tmp_path / "template", folder)
        code = crashing(instant, folder)
        there = newest(folder, ORIGIN, silent)  # not even a damaged one is left for it to skip
        assert there and there.step in (1, 2), f"instant {instant}"
        assert_equal(there, older if there.step == 1 else newer)
        write(newer, folder, ORIGIN, 1)  # what comes next clears what the crash has left
        assert [path.name[:9] for path in folder.iterdir() if not path.name.startswith("damaged-")] == ["000000002"]
        if code == 0:
            break
        assert code == 9
        kept.append(there.step)
        instant += 1
    assert kept == sorted(kept) and set(kept) == {1, 2}, kept
    assert len(kept) > 30, "hardly an operation was watched"


WRITTEN: dict[str, Callable[[tuple[Any, ...]], str]] = {
    "stored.save_file": lambda arguments: arguments[1].name,
    "checkpoint.write_json": lambda arguments: arguments[0].name,
    "Path.write_text": lambda arguments: arguments[0].name,
}


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = write(snapshot(1), tmp_path, ORIGIN, 1)
    events: list[tuple[str, str]] = []

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "os.fsync":
            events.append(("sync", Path(f"/proc/self/fd/{arguments[0]}").readlink().name))
        if name == "os.unlink" and Path(arguments[0]).parent == old:
            events.append(("drop", old.name))
        if name == "Path.replace done":
            events.append(("named", arguments[1].name))
        if name in WRITTEN:
            events.append(("written", WRITTEN[name](arguments)))

    watched(monkeypatch, before)
    new = write(snapshot(2), tmp_path, ORIGIN, 1)
    named = events.index(("named", new.name))
    synced = {what for kind, what in events[:named] if kind == "sync"}
    aside = ".000000002.part"
    assert synced >= {*FILES, aside}, "all files and their folder come before the rename"
    order = [what for kind, what in events[:named] if kind == "sync"]
    assert order[-1] == aside, "the folder after its files"
    for name in FILES:
        places = [i for i, event in enumerate(events[:named]) if event == ("sync", name)]
        assert places and places[-1] > events.index(("written", name)), "nothing is written after it was synced"
    dropped = events.index(("drop", old.name))
    assert ("sync", tmp_path.name) in events[named:dropped], "new name synced, old one dropped"
