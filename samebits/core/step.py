"""One step of the loop in `train.py`. `backward` does all that keeps the bits."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .batch import on_device, tensors_of
from .errors import NonFinite, UserError, some
from .finite import nonfinite, one_nan

if TYPE_CHECKING:
    from .loop import Loop

Compute = Callable[[nn.Module, Any], Tensor]


class Step:
    """One step of a run.

    Attributes:
        number: counted from 0.
        of: how many steps the run has.
    """

    def __init__(self, loop: "Loop", number: int) -> None:
        self._loop, self.number, self.of = loop, number, loop.stop
        self._begun = False

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
            UserError: the loss is no scalar or depends on no parameter of the model; the model is in evaluation mode;
                this step had its backward pass already.
        """
        loop, sums = self._loop, self._loop.gradients
        if self._begun:
            raise UserError(f"step {self.number}: step.backward() was called twice; call it once per step")
        self._begun = True
        if not loop.model.training:
            raise UserError(
                f"step {self.number}: the model is in evaluation mode: call model.train() before the loop and after "
                f"each evaluation"
            )
        if loop.tamper:
            loop.tamper.weights(self.number, loop.model)
        for number in sums.micro_batches(self._rechecked()):
            with loop.unwatched():
                batch = on_device(next(loop.batches), loop.world.device)
                if loop.tamper:
                    batch = loop.tamper.batch(self.number, number, batch)
                loop.report_batch(self.number, number, tensors_of(batch))
            sums.add(partial(self._loss, compute, batch, number))
        loss = sums.reduce()  # now every rank holds the same gradients, to the last bit
        with loop.unwatched():
            if loop.tamper:
                loop.tamper.gradients(self.number, loop.model)
            held = loop.state.gradients()
            names = nonfinite(sums.buffers, held)
            if names:
                one_nan(held.values())
            loop.report_gradients(self.number, torch.where(loss.isnan(), torch.nan, loss))
        loop.seed(self.number, loop.plan.micro_batches + 1)  # each rank ran others; now all are to draw the same
        if names:
            sums.discard()
            raise NonFinite(f"step {self.number}: the gradient is not finite in: {some(names, 3)}")
        return loss

    def _loss(self, compute: Compute, batch: Any, micro_batch: int) -> Tensor:
        """The loss of a micro-batch: a pure function of the weights, the batch and the micro-batch's place."""
        loop = self._loop
        loop.seed(self.number, micro_batch)
        in_half = loop.options.compute.precision == "bfloat16"
        with torch.autocast(loop.world.device.type, torch.bfloat16, enabled=in_half):
            loss: Any = compute(loop.network, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise UserError(f"step {self.number}: the loss function returned {seen}, expected a scalar mean loss")
        return loss

    def _rechecked(self) -> int | None:
        """The micro-batch whose gradient is to be computed twice and compared."""
        every = self._loop.options.integrity.recompute_every
        due = every and self.number % every == 0
        return self.number // every % self._loop.plan.micro_batches if due else None

    def require_complete(self) -> None:
        """Refuse a step that ends without a backward pass."""
        if not self._begun:
            raise UserError(f"step {self.number}: step.backward() was never called; without it nothing is trained")

    @property
    def is_last(self) -> bool:
        """Whether the run ends with this step."""
        return self.number + 1 == self.of

    @property
    def epochs(self) -> float:
        """How many epochs have been seen once this step is done."""
        return self._loop.plan.epoch(self.number + 1)

    def ends_epoch(self, every: int = 1) -> bool:
        """Whether this step completes an epoch whose number, counted from 1, is a multiple of `every`."""
        return self._loop.plan.ends_epoch(self.number, every)

    def log(self, /, **metrics: float | Tensor) -> None:
        """Record numbers of this step."""
        self._loop.log(self.number, **metrics)
