"""Data parallelism: a global batch is always N micro-batches, whatever the world size.

`OrderFree` gives the same bits on any number of ranks, in any order of addition:

- Each micro-batch's gradient is rounded to whole multiples of 2**lsb.
- Whole multiples are added in float64, where integers below 2**53 add exactly. Exact addition is
  associative, so no rank count, micro-batch order or all-reduce algorithm can change the sum.
- A micro-batch's value may reach 2**(53 - log2(micro_batches)) multiples, so that N of them stay below 2**53.
  A larger one becomes infinite by itself and is reported, never wrapped.

With lsb = -44 and 8 micro-batches, an element has a resolution of 6e-14, and a micro-batch's share of it a range of
+-64. Down to 1e-6 that keeps every bit of float32; `resolution` tells where gradients are smaller. Buffers have limbs
of their own.

`Stock`, in stock.py, is DistributedDataParallel: its bits depend on the world size.

Both are used alike, and refuse a line that is missing:

    for micro_batch in gradients.micro_batches(mine):  # the micro-batches that this rank runs
        gradients.add(lambda: loss_function(gradients.module(inputs), targets))
    loss = gradients.reduce()  # every parameter's .grad is now the global mean
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..asked.settings import Parallel
from ..errors import Disagreement, Failure
from .buffers import Buffers
from .digest import tensor_digest
from .resolution import Resolution
from .turns import Turns
from .world import ALONE, World

BUCKET = 1 << 22  # elements: 32 MiB of float64 per all-reduce, large enough to hide latency
SMALL = 1 << 14  # elements: shorter gradients are rounded together, for a call costs more than the arithmetic
CHUNK = 1 << 15  # elements of longer ones that a CPU rounds at a time, so that its cache holds them
MAX_EXPONENT = {torch.float32: 128, torch.float64: 1024}  # 2**this overflows the format


class OrderFree:
    """Sums gradients, losses and buffer changes over all micro-batches, exactly.

    A parameter that no micro-batch used gets a zero gradient.
    """

    sharded = False  # whether a rank holds only a shard of each gradient
    replicas = ALONE  # the ranks that hold the same shards
    early = True  # whether a bucket is sent as soon as the last micro-batch has added to it
    doubted = False  # whether the next step is to add its first micro-batch twice over, as `rechecks` does

    def __init__(self, module: nn.Module, settings: Parallel, world: World) -> None:
        self.module, self.world, self.total = module, world, settings.micro_batches
        self._lsb = settings.lsb
        self._parameters = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        self.buffers = Buffers(module, settings.micro_batches, world)
        self._losses = torch.zeros(self.total, dtype=torch.float64, device=world.device)
        self._turns = Turns(module)
        self._factors = {dtype: _factors(dtype, settings) for dtype in MAX_EXPONENT}
        self._chunk = CHUNK if world.device.type == "cpu" else sys.maxsize
        self._resolution = Resolution(module, settings, world)

        # A fixed layout, in the order in which the backward pass is likely to finish.
        self._buckets = _buckets(self._parameters[::-1])
        self._bucket_of: dict[Tensor, int] = {}
        self._slot_of: dict[Tensor, Tensor] = {}
        self._sums: list[Tensor] = []
        for number, tensors in enumerate(self._buckets):
            sizes = self._sizes(tensors)
            self._sums.append(torch.zeros(sum(sizes), dtype=torch.float64, device=world.device))
            self._bucket_of.update(dict.fromkeys(tensors, number))
            slots = zip(tensors, self._sums[-1].split(sizes), strict=False)  # the last one may be room that is left
            self._slot_of.update((tensor, slot[: tensor.numel()]) for tensor, slot in slots)
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._take) for parameter in self._parameters]

    def micro_batches(self, mine: Sequence[int], measures: bool = False, rechecks: bool = False) -> Iterator[int]:
        """Yield this rank's micro-batches; `add` the loss of each before asking for the next.

        A step that `measures` sees whether the grid is fine enough for its gradients; `told` says so. In one that
        `rechecks`, one micro-batch of some rank is added twice over.

        Raises:
            Refused: a micro-batch was not added, the step before was not reduced, or other parameters are
            trainable now.
        """
        self._turns.begin(mine)
        self._resolution.begin(measures)
        for tensor in [*self._sums, self._losses]:
            tensor.zero_()
        for tensor in self._holders():
            tensor.grad = None  # else autograd would add the next gradient to the last step's
        self._pending = [0] * len(self._sums)  # tensors of each bucket that the last micro-batch has yet to add
        for number in self._bucket_of.values():
            self._pending[number] += 1
        self._works: list[torch.distributed.Work | None] = []
        self._small: list[tuple[Tensor, Tensor]] = []  # parameters, with short gradients that are not added yet
        self.buffers.begin()
        for micro_batch in mine:
            self._micro_batch, self._last = micro_batch, micro_batch == mine[-1]
            self.buffers.restore()
            yield micro_batch
            self._turns.require(micro_batch)

    def add(self, compute: Callable[[], Tensor], twice: bool = False) -> None:
        """Backpropagate one micro-batch's mean loss, which `compute` returns as a scalar, and add its gradients.

        With `twice` the gradients are computed on trial first, and both must agree to the last bit.

        Raises:
            Disagreement: they do not: this rank's hardware computes wrong, or `compute` is not repeatable.
            Refused: the loss depends on no parameter of the module, or a parameter gets two gradients.
        """
        self._turns.add(self._micro_batch)
        self._trial = self._twice = twice
        if twice:
            self._digests: dict[Tensor, Tensor] = {}
            first = self._backpropagate(compute)
            self.buffers.restore()
            self._trial, seen, self._digests = False, self._digests, {}
        loss = self._losses[self._micro_batch] = self._backpropagate(compute)
        if twice:
            self._require_equal([tensor_digest(each) for each in (first, loss)], seen, self._digests)
        self.buffers.add()

    def _backpropagate(self, compute: Callable[[], Tensor]) -> Tensor:
        loss = compute()
        with self._turns.backward():
            if loss.requires_grad:
                (loss / self.total).backward()
        self._add_small()
        return loss.detach()

    def _require_equal(self, losses: list[Tensor], first: dict[Tensor, Tensor], second: dict[Tensor, Tensor]) -> None:
        numbers = [{tensor: digest.item() for tensor, digest in digests.items()} for digests in (first, second)]
        names = [n for n, p in self.module.named_parameters() if numbers[0].get(p) != numbers[1].get(p)]
        if losses[0] != losses[1] or names:
            raise self._difference(f"the gradient differs in {', '.join(names)}" if names else "the loss differs")

    def _difference(self, seen: str) -> Failure:
        """What it means that a micro-batch that was computed twice differs."""
        return Disagreement(
            f"micro-batch {self._micro_batch}: computed twice on {self.world.place}, {seen}: this hardware computes "
            f"wrong, or an operation is not repeatable",
            local=True,
        )

    def reduce(self) -> Tensor:
        """Sum over the ranks; leave the means in `.grad` and the buffers; return the mean loss (float64).

        Raises:
            Refused: a micro-batch was not added.
        """
        self._turns.end()
        while len(self._works) < len(self._sums):  # buckets with unused parameters: no hook has sent them
            self._send()
        self.buffers.send()
        self.world.sum(self._losses)  # one rank writes each slot, and adding zeros is exact
        for work in self._works:
            self.world.wait(work)
        self._give()
        self.buffers.reduce()
        return self._losses.mean()

    def _give(self) -> None:
        """Leave the means in `.grad`."""
        for parameter in self._parameters:
            mean = self._value(self._slot_of[parameter], parameter).view_as(parameter)
            # laid out as the parameter is: fused optimizers take elements by their place in memory
            parameter.grad = mean if parameter.is_contiguous() else torch.empty_like(parameter).copy_(mean)

    def told(self) -> str | None:
        """A line on gradients for which the grid is too coarse, after a step that measures; each parameter once."""
        return self._resolution.told()

    def end(self) -> None:
        """The last step is done: from here on the model is its owner's alone."""
        for hook in self._hooks:
            hook.remove()

    def discard(self) -> None:
        """Undo the step: buffers as they were before it, no gradients."""
        self.buffers.restore()
        for tensor in self._holders():
            tensor.grad = None

    def _holders(self) -> Sequence[Tensor]:
        """All that holds a gradient after a step."""
        return self._parameters

    def _take(self, parameter: Tensor) -> None:
        """Autograd calls this when a micro-batch's gradient of `parameter` is complete."""
        self._turns.take(parameter)
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self._twice:
            self._digests[parameter] = tensor_digest(gradient)
        if self._trial:
            return
        values = (gradient if gradient.dtype in MAX_EXPONENT else gradient.float()).reshape(-1)
        if values.numel() < SMALL:
            self._small.append((parameter, values))
        else:
            self._add(parameter, values)
        if self._last and self.early:
            self._pending[self._bucket_of[parameter]] -= 1
            while len(self._works) < len(self._sums) and not self._pending[len(self._works)]:
                self._add_small()
                self._send()

    def _add(self, parameter: Tensor, values: Tensor) -> None:
        """Add a gradient, rounded to whole multiples of 2**lsb, to the sum of the parameter."""
        sums = self._slot_of[parameter].split(self._chunk)
        for value, sum_ in zip(values.split(self._chunk), sums, strict=True):
            multiples = self._multiples(value)
            sum_.add_(multiples)
            self._resolution.take(parameter, value, multiples)

    def _add_small(self) -> None:
        """Add the short gradients that have come since the last call."""
        small, self._small = self._small, []
        if not small:
            return
        parameters, values = zip(*small, strict=True)
        together = self._multiples(torch.cat(values)).double().split([value.numel() for value in values])
        torch._foreach_add_([self._slot_of[parameter] for parameter in parameters], together)
        for parameter, value, multiples in zip(parameters, values, together, strict=True):
            self._resolution.take(parameter, value, multiples)

    def _multiples(self, values: Tensor, in_place: bool = False) -> Tensor:
        """Values of float32 or float64 as rounded multiples of 2**lsb; infinite where they are out of range."""
        first, *rest = self._factors[values.dtype]
        multiples = values.mul_(first) if in_place else values.mul(first)
        for factor in rest:
            multiples.mul_(factor)
        return multiples.round_()

    def _send(self) -> None:
        """Start the all-reduce of the next bucket; every rank sends them in the same order."""
        self._works.append(self.world.sum(self._sums[len(self._works)], asynchronous=True))

    def _value(self, multiples: Tensor, like: Tensor) -> Tensor:
        if like.dtype == torch.float32:  # whose smallest number is no larger than 2**lsb, so scaling it is exact
            return multiples.float().mul_(2.0**self._lsb)
        return (multiples * 2.0**self._lsb).to(like.dtype)

    def _sizes(self, tensors: Sequence[Tensor]) -> list[int]:
        """How many elements of a bucket are for each of its tensors."""
        return [tensor.numel() for tensor in tensors]


def _factors(dtype: torch.dtype, settings: Parallel) -> list[Tensor]:
    """Powers of two by which values become multiples of 2**lsb, infinite where they are out of range.

    Scaling up first overflows exactly where a value is out of range; powers of two round nothing. One that the format
    cannot hold is two: only what is out of range anyway overflows at the first.

    Returns:
        Scalars on the CPU, which a tensor of any device takes. A Python number would be converted at each call.
    """
    top = MAX_EXPONENT[dtype]
    up = top - settings.limit_exponent - settings.lsb
    ups = [up] if up < top else [top - 1, up - top + 1]
    return [torch.tensor(2.0**exponent, dtype=dtype) for exponent in (*ups, settings.limit_exponent - top)]


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in a row, of one dtype, that are sent together."""
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not buckets or size + tensor.numel() > BUCKET or tensor.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel()
    return buckets
