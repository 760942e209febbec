"""One step of the loop in `train.py`: it yields micro-batches, and sums the gradients of their losses."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .batch import on_device, tensors_in, tensors_of
from .errors import NonFinite, UserError, some
from .finite import nonfinite, one_nan

if TYPE_CHECKING:
    from .loop import Loop


class Step:
    """One step of a run: iterate over it, and call `backward` for each micro-batch.

        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))

    When the loop ends, `.grad` of every parameter holds the mean over all micro-batches of all ranks, the same on every
    rank. To iterate once more is a further sum over the same micro-batches, with other seeds: in that, a parameter that
    no micro-batch has used has no gradient.

    Attributes:
        number: counted from 0.
        of: how many steps the run has.
    """

    def __init__(self, loop: "Loop", number: int) -> None:
        self._loop, self.number, self.of = loop, number, loop.stop
        self._passes = 0  # complete ones
        self._is_under_way = False
        self._loaded: dict[int, tuple[Any, int]] = {}  # this rank's micro-batches, and how often they were written into
        self._loss: Tensor | None = None
        self._failure: NonFinite | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's micro-batches as the DataLoader collates them, on the device.

        All generators are seeded for each one. Now and then one comes twice, as `integrity.recompute_every` says, or
        because `parallel.shard=full` makes as many passes on each rank.

        Raises:
            NonFinite: a gradient holds an infinity or a NaN, and `compute.nonfinite` is `stop`. With `skip` there are
                no gradients then, and buffers are as before.
            UserError: a micro-batch got no `backward`, the model is in evaluation mode, or the step is over.
        """
        loop, sums, number = self._loop, self._loop.gradients, self._passes
        self._require_now()
        if self._is_under_way:
            raise UserError(
                f"step {self.number}: a loop over its micro-batches is not at its end, and another one begins: let "
                f"`for batch in step` end before the next"
            )
        self._require_training()
        self._is_under_way = True
        if not number and loop.tamper:
            loop.tamper.weights(self.number, loop.model)
        if number:
            loop.require_pass(self.number)
        last = None
        for leaf in sums.micro_batches(self._rechecked(), number > 0):
            batch, last = self._batch(leaf, number, leaf == last), leaf
            loop.seed(self.number, leaf, number)
            with loop.autocast(True):
                yield batch
        self._reduce()
        self._passes, self._is_under_way = number + 1, False

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the mean loss of the micro-batch whose turn it is: a scalar.

        Raises:
            UserError: it is no scalar, depends on no parameter of the model, or comes at another time.
        """
        self._require_now()
        seen: Any = loss
        if not isinstance(seen, Tensor) or seen.ndim:
            shown = f"a tensor of shape {tuple(seen.shape)}" if isinstance(seen, Tensor) else repr(seen)
            raise UserError(f"step {self.number}: step.backward() was given {shown}, expected a scalar mean loss")
        self._require_training()
        with self._loop.autocast(False):
            self._loop.gradients.add(loss)

    @property
    def loss(self) -> Tensor:
        """The mean loss over all micro-batches of all ranks, of the last sum: float64, a scalar, the same on each."""
        if self._loss is None:
            raise UserError(f"step {self.number}: step.loss is known once the loop over its micro-batches has ended")
        return self._loss

    def _batch(self, leaf: int, number: int, again: bool) -> Any:
        """The micro-batch of this leaf: the rank's next one, or one that an earlier turn or pass has had."""
        loop = self._loop
        with loop.unwatched():
            if leaf not in self._loaded:
                loaded = next(loop.batches)
                self._loaded[leaf] = loaded, _writes(loaded)
            loaded, writes = self._loaded[leaf]
            if _writes(loaded) != writes:
                raise UserError(
                    f"step {self.number}: micro-batch {leaf} was written into, and is wanted once more: change a copy "
                    f"of it, such as images.clone()"
                )
            batch = on_device(loaded, loop.world.device)
            if loop.tamper:
                batch = loop.tamper.batch(self.number, leaf, batch)
            if not again:
                loop.report_batch(self.number, number, leaf, tensors_of(batch))
        return batch

    def _reduce(self) -> None:
        """Every rank holds the same gradients afterwards, to the last bit."""
        loop, sums, number = self._loop, self._loop.gradients, self._passes
        self._loss = loss = sums.reduce()
        with loop.unwatched():
            if loop.tamper:
                loop.tamper.gradients(self.number, loop.model)
            held = loop.state.gradients()
            names = nonfinite(sums.buffers, held)
            if names:
                one_nan(held.values())
            loop.report_gradients(self.number, number, torch.where(loss.isnan(), torch.nan, loss), bool(names))
        # each rank ran others; now all are to draw the same
        loop.seed(self.number, loop.plan.micro_batches + 1, number)
        if not names:
            return
        sums.discard()
        if loop.options.compute.nonfinite == "stop":
            self._failure = NonFinite(f"step {self.number}: the gradient is not finite in: {some(names, 3)}")
            raise self._failure
        loop.log(self.number, skipped=1)

    def _rechecked(self) -> int | None:
        """The micro-batch whose gradient is to be computed twice and compared."""
        every = self._loop.options.integrity.recompute_every
        due = every and self.number % every == 0
        return self.number // every % self._loop.plan.micro_batches if due else None

    def _require_now(self) -> None:
        if self._loop.step is not self:
            raise UserError(f"step {self.number}: it is over: iterate over each step of run.steps() in its own turn")

    def _require_training(self) -> None:
        if not self._loop.model.training:
            raise UserError(
                f"step {self.number}: the model is in evaluation mode: call model.train() before the loop and after "
                f"each evaluation"
            )

    @property
    def is_summed(self) -> bool:
        """Whether each loop over its micro-batches has come to its end, and there was one."""
        return self._passes > 0 and not self._is_under_way

    def require_complete(self) -> None:
        """Refuse a step that ends without its gradients."""
        if self._failure:  # which somebody has caught
            raise self._failure
        if self._is_under_way:
            raise UserError(
                f"step {self.number}: the loop over its micro-batches was left (break, return, zip() with "
                f"fewer others, or an error that was caught): let `for batch in step` go to its end"
            )
        if not self._passes:
            raise UserError(
                f"step {self.number}: nothing was trained: iterate over the step, and call step.backward(loss) for "
                f"each batch"
            )
        self._loaded = {}

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


def _writes(batch: Any) -> int:
    return sum(tensor._version for tensor in tensors_in(batch) if not tensor.is_inference())
