"""One step of the loop in `train.py`. `backward` does all that keeps the bits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..config.settings import Settings
from ..environment.watch import Operations
from ..guards.fit import require_fit
from ..guards.unsaved import Hidden
from ..guards.updates import Updates
from ..trace.trace import Trace
from ..tracking.logged import Shapes
from .batch import on_device, tensors_of
from .errors import NonFinite, Refused, some
from .finite import nonfinite, one_nan
from .optimizers import Optimizers
from .plan import Plan
from .ranks import World
from .seeds import derive, seed_everything
from .summing import gradients_of
from .trees import Stateful

Compute = Callable[[nn.Module, Any], Tensor]


class Training:
    """What all steps of a run share.

    Attributes:
        updates: what the optimizers do with the gradients.
        gradients: the way of summing the model's gradients.
        network: the model as it is to be called: compiled, or wrapped by DistributedDataParallel, as asked.
        batches: one item per micro-batch that this rank runs, in order.
        shapes: of the tensors that the network takes and gives.
    """

    def __init__(
        self,
        config: Settings,
        world: World,
        trace: Trace,
        plan: Plan,
        model: nn.Module,
        optimizers: Optimizers,
        objects: Mapping[str, Stateful],
        units: Sequence[nn.Module],
        log: Callable[..., None],
        operations: Operations,
    ) -> None:
        self.config, self.world, self.trace, self.plan, self.model, self.log = config, world, trace, plan, model, log
        require_fit(model, world.device, moves=config.parallel.shard == "full" and world.size > 1)
        self.updates = Updates(model, optimizers, objects)
        self.gradients = gradients_of(model, config.options.parallel, world, optimizers, units)
        module = self.gradients.module
        self.network = cast(nn.Module, torch.compile(module)) if config.compute.compile else module
        self.batches: Iterator[Any] = iter(())
        self.hidden = Hidden(model)
        self.operations = operations
        self.shapes = Shapes(self.network, model, config.parallel.global_batch // config.parallel.micro_batches)

    def end(self) -> None:
        """The last step is done: from here on nothing of the model is watched."""
        for watching in (self.updates, self.gradients, self.trace, self.shapes):
            watching.end()


class Step:
    """One step of a run.

    Attributes:
        number: counted from 0.
        of: how many steps the run has.
    """

    def __init__(self, training: Training, number: int, of: int) -> None:
        self._training, self.number, self.of = training, number, of
        self._begun = False
        training.updates.begin()
        self._seed(training.plan.micro_batches)  # for what the loop draws before `backward`

    def backward(self, compute: Compute) -> Tensor:
        """Leave the gradient of the global batch in every parameter's `.grad`, and return its mean loss.

        `compute(network, batch)` returns the mean loss of one micro-batch, a scalar: `network` is the model as it is to
        be called, `batch` a micro-batch's samples as the DataLoader collates them, on the device. It is called once for
        each micro-batch that this rank runs, with all generators seeded for that micro-batch; now and then twice, as
        `integrity.recompute_every` says.

        Returns:
            The mean loss over all micro-batches of all ranks: float64, a scalar, the same on every rank.

        Raises:
            NonFinite: a gradient holds an infinity or a NaN. There are no gradients then, and buffers are as before.
            Refused: the loss is no scalar or depends on no parameter of the model; the model is in evaluation mode;
                this step had its backward pass already.
        """
        training = self._training
        if self._begun:
            raise Refused(f"step {self.number}: step.backward() was called twice; call it once per step")
        self._begun = True
        if not training.model.training:
            raise Refused(
                f"step {self.number}: the model is in evaluation mode: call model.train() before the loop and after "
                f"each evaluation"
            )
        for number in training.gradients.micro_batches(self._rechecked()):
            with training.operations.paused():  # nor are workers to inherit the watch
                batch = on_device(next(training.batches), training.world.device)
            training.trace.batch(number, tensors_of(batch))
            training.gradients.add(partial(self._loss, compute, batch, number))
        loss = training.gradients.reduce()  # now every rank holds the same gradients, to the last bit
        self._seed(training.plan.micro_batches + 1)  # each rank ran others; after them all are to draw the same
        if names := nonfinite(training.model, training.gradients.buffers):
            one_nan(training.model)
        training.trace.gradients(torch.where(loss.isnan(), torch.nan, loss))
        if names:
            training.gradients.discard()
            raise NonFinite(f"step {self.number}: the gradient is not finite in: {some(names, 3)}")
        training.updates.ready = True
        return loss

    def _loss(self, compute: Compute, batch: Any, micro_batch: int) -> Tensor:
        """The loss of a micro-batch: a pure function of the weights, the batch and the micro-batch's place."""
        config, device = self._training.config, self._training.world.device
        self._seed(micro_batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.compute.precision == "bfloat16"):
            loss: Any = compute(self._training.network, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise Refused(f"step {self.number}: the loss function returned {seen}, expected a scalar mean loss")
        return loss

    def _seed(self, micro_batch: int) -> None:
        """Seed all generators for a micro-batch; numbers beyond the last one stand for what the loop itself draws."""
        seed_everything(derive(self._training.config.seed, "micro-batch", self.number, micro_batch))

    def _rechecked(self) -> int | None:
        """The micro-batch whose gradient is to be computed twice and compared."""
        every = self._training.config.integrity.recompute_every
        due = every and self.number % every == 0
        return self.number // every % self._training.plan.micro_batches if due else None

    def require_whole(self) -> None:
        """Refuse a step that ends without a backward pass, and a first one that ends without an update."""
        if not self._begun:
            raise Refused(f"step {self.number}: step.backward() was never called; without it nothing is trained")
        if self.number == 0 and self._training.updates.forgotten:
            raise Refused(
                "step 0: optimizer.step() was never called; call it after step.backward(...). Where a step is to "
                "leave the weights alone, drop the gradients: optimizer.zero_grad()"
            )

    @property
    def is_last(self) -> bool:
        """Whether the run ends with this step."""
        return self.number + 1 == self.of

    @property
    def epochs(self) -> float:
        """How many epochs have been seen once this step is done."""
        return self._training.plan.epoch(self.number + 1)

    def ends_epoch(self, every: int = 1) -> bool:
        """Whether this step completes an epoch whose number, counted from 1, is a multiple of `every`."""
        return self._training.plan.ends_epoch(self.number, every)

    def log(self, /, **metrics: float | Tensor) -> None:
        """Record numbers of this step."""
        self._training.log(self.number, **metrics)
