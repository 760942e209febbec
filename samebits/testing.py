"""Public, for tests of a project: its config, prepared data, batches as a run gets them, and one step of its loop.

`tests/conftest.py` of a project makes a `Tested` of its folder. Importing this loads no torch, which reads variables
when it is loaded: `Tested.begin` sets them.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import front
from .address import manifest
from .base.project import Project
from .config.params import PARAMS, load
from .config.settings import Settings
from .core import seeds
from .core.flags import set_environment

if TYPE_CHECKING:
    import torch

    from .core.ranks import World
    from .core.sampling import Seeded


class Tested:
    """A project under test: the one in the folder `root`, installed or not."""

    def __init__(self, root: Path) -> None:
        self.root, self._project = root, Project.at(root)

    def begin(self) -> None:
        """Start this process again with the variables of a run, where one is missing; then have the dataset there.

        DVC brings it to a clone. Processes that the tests start find this project, too.

        Raises:
            UserError: the project, a variable or the dataset is refused.
        """
        paths = [*self._project.path, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        config = self.config()
        set_environment(config.options.determinism)
        manifest.require_raw(config.data)

    def ours(self, name: str) -> Any:
        """A module of the package: `ours("model").build` is the `build` of model.py."""
        return import_module(f"{self._project.name}.{name}")

    def config(self, *overrides: str) -> Settings:
        """The config that params.yaml asks for, with overrides as those of --set; `data.raw` is an absolute path.

        Raises:
            UserError: a key or a value is refused.
        """
        config = load(front.schema(self._project), self.root / PARAMS, overrides)
        return _placed(config, raw=self.root / config.data.raw)

    def prepared(self, folder: Path, raw: Path | None = None) -> Settings:
        """The config, with its data prepared in `folder` as `samebits prepare` does; `raw` is another dataset.

        Raises:
            SystemExit: with 2: the dataset or the code is refused.
        """
        config = _placed(self.config(), prepared=folder, **({"raw": raw} if raw else {}))
        work = front.STAGES["prepare"](self._project, self.ours("prepare").prepare)
        front.call(self._project, work, config, Path(), only="data")
        return config

    def world(self, config: Settings) -> "World":
        """One process, with its device, and with the flags of a run set."""
        from .stage import alone

        return alone(config)

    def model(self, config: Settings, world: "World") -> "torch.nn.Module":
        """A new model, seeded as in a run."""
        _seed(config)
        model: torch.nn.Module = self.ours("model").build(config).to(world.device)
        return model

    def micro_batches(self, config: Settings, world: "World", steps: int = 1, workers: int = 0) -> list[Any]:
        """The micro-batches of the first steps, as the loop of train.py gets them."""
        from .core import sampling
        from .core.batch import on_device

        config = config.model_copy(update={"loader": config.loader.model_copy(update={"workers": workers})})
        train_set, _ = self.ours("data").load(config)
        plan = sampling.Plan(len(train_set), config.parallel.global_batch, config.parallel.micro_batches, config.seed)
        keys = sampling.MicroBatches(plan, range(plan.micro_batches), 0, steps)
        loading = sampling.Loading(config.options, world, collate=getattr(self.ours("data"), "collate", None))
        return [on_device(batch, world.device) for batch in loading.loader(train_set, keys)]

    def items(self, config: Settings) -> "Seeded":
        """The items of the training set, as a run makes them: `items[epoch, index]`."""
        from .core.sampling import Seeded

        return Seeded(self.ours("data").load(config)[0], config.seed)

    def rehearsed(self, config: Settings, world: "World", batch: Any) -> "Rehearsal":
        """What one step of the loop in train.py gives, for this micro-batch."""
        rehearsal = Rehearsal(config, world, batch)
        _seed(config)
        with suppress(_Ended):
            self.ours("train").train(rehearsal)
        return rehearsal


class Rehearsal:
    """Stands in for a run and for its only step, of one micro-batch.

    Attributes:
        model: the loop's; `before` are its parameters before the step.
        loss, gradients: of the micro-batch.
    """

    number, of, epochs, is_last = 0, 100, 0.0, True  # the last one is not evaluated in the loop
    step, done = None, 0

    def __init__(self, config: Settings, world: "World", batch: Any) -> None:
        self.config, self.world, self.device, self._batch = config, world, world.device, batch

    def steps(self, model: "torch.nn.Module", *given: Any, **named: Any) -> Iterator["Rehearsal"]:
        """One step."""
        for kept in named.get("state", {}).values():
            if hasattr(kept, "begin"):  # samebits.Best, Patience and Average: no checkpoint is to hold them here
                kept.begin(self)
        self.model, self.before = model, [p.detach().clone() for p in model.parameters()]
        yield self
        raise _Ended

    def __iter__(self) -> Iterator[Any]:
        seeds.seed_everything(0)
        yield self._batch

    def backward(self, loss: "torch.Tensor") -> None:
        """Keep what the micro-batch gives."""
        loss.backward()
        self.loss = loss.detach()
        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def ends_epoch(self, every: int = 1) -> bool:
        """Nothing is evaluated."""
        return False

    def log(self, *given: Any, **named: Any) -> None:
        """Nothing is written."""

    stop = log_text = log_figure = log_artifact = _settle = log
    _making = staticmethod(nullcontext)


class _Ended(Exception):
    """The one step is made."""


def manifest_of(config: Settings) -> dict[str, Any]:
    """What the manifest of the prepared data states, such as its `files` with their SHA-256.

    Raises:
        UserError: the data are not those that it states.
    """
    return manifest.require_prepared(config.data)


def tensors(value: Any) -> "list[torch.Tensor]":
    """The tensors in nested lists, tuples and mappings, such as a batch, in order."""
    from .core.batch import tensors_in

    return list(tensors_in(value))


def same_bits(one: Any, other: Any) -> bool:
    """Whether the tensors of two batches, or of two items, have the same bits: a NaN, too, equals itself."""
    from .core.digest import tensor_digest

    first, second = ([tensor_digest(tensor).tolist() for tensor in tensors(value)] for value in (one, other))
    return first == second


def _placed(config: Settings, **places: Path) -> Settings:
    """The config with other places in `data`."""
    update = {name: str(place) for name, place in places.items()}
    return config.model_copy(update={"data": config.data.model_copy(update=update)})


def _seed(config: Settings) -> None:
    seeds.seed_everything(seeds.derive(config.seed, "init"))
