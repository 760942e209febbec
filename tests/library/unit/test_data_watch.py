"""Changes by the loop to what samples are made from: each is named, and nothing else is refused."""

import logging
import multiprocessing
from collections.abc import Callable
from functools import cached_property, partial, wraps
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

from samebits.core.errors import UserError
from samebits.core.orders import ByLength, Weighted
from samebits.guards.data_watch import DataWatch

LOG = logging.getLogger(__name__)
STRENGTH, UNRELATED, SCALES = 0.0, 0, {"inner": {"scale": 1.0}}


class Noise:
    limits: ClassVar = [0.0, 1.0]

    def __init__(self) -> None:
        self.strength, self.generator = 0.0, numpy.random.default_rng(0)

    def __call__(self, value: float) -> float:
        LOG.debug("called")
        return value + STRENGTH + SCALES["inner"]["scale"] + self.strength * self.generator.normal()


class Samples:
    """A dataset with attributes of many kinds."""

    shared_by_class = 1

    def __init__(self) -> None:
        self.epoch, self.nothing, self.rate = 0, None, float("nan")
        self.transforms = [Noise(), partial(Noise(), 2.0)]
        self.labels, self.table = numpy.zeros(10), torch.zeros(3)
        self.large = numpy.zeros(1 << 20)
        self.names = [f"sample {number}" for number in range(100_000)]
        self.cache: dict[int, float] = {}
        self.shared = multiprocessing.Value("d", 0.0)
        self.calls = 0

    @cached_property
    def classes(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        self.calls += 1
        return self.cache.setdefault(index, self.transforms[0](index))


class Trainer(nn.Module):
    """Holds far more than its `collate` uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.embedding = nn.Linear(2, 2), nn.Embedding(2, 2)
        self.step, self.width = 0, 8

    def collate(self, items: list[Any]) -> Any:
        return self.padded(items)

    def padded(self, items: list[Any]) -> Any:
        return self.embedding, items[: self.width]


def set_global(name: str, value: object) -> Callable[[Any], None]:
    return lambda _: globals().__setitem__(name, value)


def multiply(tensor: Tensor) -> None:
    tensor.data.mul_(2).add_(1)


def swap_transform(samples: Samples) -> None:
    samples.transforms = [nn.Identity(), samples.transforms[1]]


CHANGES: dict[str, Callable[[Samples], object]] = {
    "samples.epoch": lambda samples: setattr(samples, "epoch", 1),
    "samples.nothing": lambda samples: setattr(samples, "nothing", 0.5),
    "samples.added": lambda samples: setattr(samples, "added", True),
    "samples.rate": lambda samples: setattr(samples, "rate", 0.1),
    "samples.transforms[0]": swap_transform,
    "samples.transforms[0].strength": lambda samples: setattr(samples.transforms[0], "strength", 0.1),
    "samples.transforms[1].func.strength": lambda samples: setattr(samples.transforms[1].func, "strength", 0.1),
    "samples.labels": lambda samples: samples.labels.__setitem__(3, 1),
    "samples.table": lambda samples: multiply(samples.table),
    "samples.large": lambda samples: samples.large.fill(1),
    "samples.names": lambda samples: samples.names.append("more"),
    "samples.cache[7]": lambda samples: samples.cache.update({7: 1.0}),
    "samples.shared": lambda samples: setattr(samples.shared, "value", 0.5),
    "Samples.shared_by_class": lambda samples: setattr(Samples, "shared_by_class", 2),
    "Noise.limits[1]": lambda samples: Noise.limits.__setitem__(1, 2.0),
    "test_data_watch.STRENGTH": set_global("STRENGTH", 0.1),
    "test_data_watch.SCALES['inner']['scale']": lambda samples: SCALES["inner"].update(scale=2.0),
}


@pytest.fixture(autouse=True)
def same_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in [("STRENGTH", 0.0), ("UNRELATED", 0), ("SCALES", {"inner": {"scale": 1.0}})]:
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(Samples, "shared_by_class", 1)
    monkeypatch.setattr(Noise, "limits", [0.0, 1.0])


def refusal(watch: DataWatch) -> str:
    try:
        watch.require()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("path", CHANGES)
def test_change_is_named(path: str):
    samples = Samples()
    watch = DataWatch({"samples": samples}, ())
    watch.require()
    CHANGES[path](samples)
    assert refusal(watch).startswith(f"{path}: expected "), refusal(watch)
    with pytest.raises(UserError), watch.making():
        raise AssertionError("samples were made from what was changed")


@pytest.mark.parametrize("path", CHANGES)
def test_change_while_samples_are_made_is_that_of_the_dataset(path: str):
    samples = Samples()
    watch = DataWatch({"samples": samples}, ())
    with watch.making():
        CHANGES[path](samples)
    assert refusal(watch) == ""


def test_message_says_that_numbers_differ():
    samples = Samples()
    watch = DataWatch({"samples": samples}, ())
    samples.labels[3] = 1
    assert refusal(watch).startswith("samples.labels: expected an array of [10] in all steps, got other numbers. ")


def test_message_says_both_values_and_the_way_out():
    samples = Samples()
    watch = DataWatch({"samples": samples}, ())
    samples.epoch = 3
    assert refusal(watch) == (
        "samples.epoch: expected 0 in all steps, got 3. The loop changed it, and loader workers have copies that stay "
        "as they were. Compute it where samples are made, such as from samebits.item_epoch(). If no sample depends on "
        "it: run.steps(..., unsaved=('epoch',))"
    )


@pytest.mark.parametrize("names", [("calls", "cache"), ("samples.calls", "samples.cache")])
def test_unsaved_attributes_may_change(names: tuple[str, str]):
    samples = Samples()
    watch = DataWatch({"samples": samples}, names)
    samples[7]
    assert refusal(watch) == ""
    samples.epoch += 1
    assert refusal(watch).startswith("samples.epoch: ")


def test_what_decides_no_sample_may_change():
    samples, trainer = Samples(), Trainer()
    watch = DataWatch({"samples": samples, "collate": trainer.collate}, ())
    samples.epoch = 0  # the same value again
    _ = samples.classes
    samples.transforms[0].generator.normal()  # it is seeded for each sample
    set_global("UNRELATED", 1)(None)
    LOG.isEnabledFor(logging.INFO)  # which the logger remembers
    trainer.step += 1
    trainer.eval()
    with torch.no_grad():
        trainer.layer.weight.add_(1)
    assert refusal(watch) == ""


def test_decorator_that_counts_calls_everywhere_is_no_source_of_samples():
    """Such as a timer, which the loop uses, too; the function behind it is looked at."""
    calls = {"all": 0}

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any) -> Any:
            calls["all"] += 1
            return function(*args)

        return call

    class Counted(Samples):
        @counted
        def __getitem__(self, index: int) -> float:
            return super().__getitem__(index) + STRENGTH

    @counted
    def collate(items: list[Any]) -> Any:
        return items, SCALES

    watch = DataWatch({"samples": Counted(), "collate": collate}, ())
    calls["all"] += 1
    assert refusal(watch) == ""
    set_global("STRENGTH", 0.1)(None)
    assert refusal(watch).startswith("test_data_watch.STRENGTH: ")


def test_bound_method_is_looked_at_by_what_it_mentions():
    trainer = Trainer()
    watch = DataWatch({"trainer.collate": trainer.collate}, ())
    trainer.width = 4
    assert refusal(watch).startswith("trainer.width: expected 8 in all steps, got 4")
    trainer.width = 8
    with torch.no_grad():
        trainer.embedding.weight.add_(1)
    assert refusal(watch).startswith("trainer.embedding._parameters['weight']: expected a tensor of [2, 2], version ")


def test_variables_around_a_function_are_named():
    strength, settings = 0.0, {"padding": 0}

    def collate(items: list[Any]) -> Any:
        return items, strength, settings

    watch = DataWatch({"collate": collate}, ())
    strength = 0.5
    assert refusal(watch).startswith("strength: expected 0.0 in all steps, got 0.5")
    strength = 0.0
    settings["padding"] = 1
    assert refusal(watch).startswith("settings['padding']: expected 0 in all steps, got 1")


@pytest.mark.parametrize("kind", [list, numpy.array, torch.tensor])
@pytest.mark.parametrize(("order", "name"), [(Weighted, "weights"), (partial(ByLength, size=2), "lengths")])
def test_numbers_of_an_order_are_those_that_the_owner_gave(order: Any, name: str, kind: Any):
    """`Weighted` copies a list, and its sums do not change with an array."""
    numbers = kind([1.0, 2.0, 3.0])
    watch = DataWatch({"order": order(numbers)}, ())
    watch.require()
    numbers[1] = 5.0
    assert refusal(watch).startswith(f"order.{name}")


def test_tuples_are_looked_into_and_not_at():
    """Such as the paths and classes of an image folder: a look at each of them takes as long as a step."""
    samples = Samples()
    samples.files = [(f"{number}.png", number % 10, [0]) for number in range(10_000)]
    watch = DataWatch({"samples": samples}, ())
    samples.files[0][2][0] = 1
    assert refusal(watch).startswith("samples.files[0][2][0]: expected 0 in all steps, got 1")
    samples.files = [(f"{number}.png", number % 10) for number in range(10_000)]
    assert len(DataWatch({"samples": samples}, ())._probes) < 100


def test_memory_of_a_tensor_that_was_freed_is_not_read():
    samples = Samples()
    samples.table = torch.ones(4, 8)[2:]
    watch = DataWatch({"samples": samples}, ())
    samples.table.untyped_storage().resize_(0)
    assert refusal(watch).startswith("samples.table: expected a tensor of [2, 8]")


def test_large_datasets_are_looked_at_in_part():
    """A search of all would take longer than a step."""
    samples = Samples()
    samples.cache = {number: [float(number)] * 100 for number in range(10_000)}
    watch = DataWatch({"samples": samples}, ())
    assert sum(map(len, watch._entries)) < 2500
