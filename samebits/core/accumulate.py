"""Data parallelism: a global batch is always N micro-batches, whatever the world size, and their gradients are added
in one tree (tree.py) in the gradients' own format: float32, as a rule.

A rank adds the nodes whose leaves are all its own as soon as both siblings are there. Two micro-batches that are
siblings cost no addition of ours: autograd accumulates the second one in place, which is the same left + right.
Gradients of bfloat16 and float16 are added in float32, and rounded once, at the root.

Each bucket of gradients leaves (transport.py) as soon as the last micro-batch's backward pass has filled it.

`DDP`, in ddp.py, is DistributedDataParallel: its bits depend on the world size. Both are used alike, and refuse a
line that is missing:

    for number in gradients.micro_batches():    # those that this rank runs
        gradients.add(lambda: loss_function(gradients.module(inputs), targets))
    loss = gradients.reduce()                   # every parameter's .grad is now the global mean
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .buckets import Bucket, buckets_of
from .buffers import Buffers
from .digest import tensor_digest
from .errors import Disagreement, RunError
from .guard import Guard
from .options import Parallel
from .ranks import ALONE, World
from .state import State
from .transport import Transport, local_size
from .tree import are_siblings, blocks, nodes_of, total


class Accumulation:
    """Sums gradients, losses and changes of buffers over all micro-batches, in one tree.

    A parameter that a micro-batch does not use has a gradient of zeros there.

    Attributes:
        leaves: the micro-batches of each rank, from left to right.
    """

    sharded = False  # whether a rank holds only a shard of each gradient
    replicas = ALONE  # the ranks that hold the same shards
    early = True  # whether a bucket may leave while other ranks have micro-batches to run

    def __init__(self, state: State, settings: Parallel, world: World) -> None:
        self.module, self.world, self.total = state.model, world, settings.micro_batches
        self.leaves = self._deal(settings)
        self._parameters = [p for p in self.module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        nodes = [nodes_of(leaves, self.total) for leaves in self.leaves]
        self._transport = Transport(self._worlds(settings), nodes, self.total)
        self.buffers = Buffers(self.module, self.total, world, self._transport)
        self._losses = torch.zeros(self.total, dtype=torch.float64, device=world.device)
        self._guard = Guard(self.module)
        self._buckets = [Bucket(tensors, self._transport) for tensors in buckets_of(self._parameters[::-1])]
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._take, bucket))
            for bucket in self._buckets
            for tensor in bucket.tensors
        ]

    def _deal(self, settings: Parallel) -> Sequence[Sequence[int]]:
        """The micro-batches of each rank."""
        return blocks(self.total, self.world.size)

    def _worlds(self, settings: Parallel) -> list[World]:
        """The ranks of each exchange; none where this one is alone."""
        if self.world.size == 1:
            return []
        local = local_size(self.world)
        between, inside = self.world.split((self.world.size // local, local), settings.timeout_seconds)
        return [world for world in (inside, between) if world.size > 1]

    def micro_batches(self, rechecked: int | None = None) -> Iterator[int]:
        """Yield this rank's micro-batches; `add` the loss of each before asking for the next.

        The one that is `rechecked`, on its rank, is computed twice and compared.

        Raises:
            UserError: one was not added, the step before was not reduced, or other parameters are trainable now.
        """
        mine = self.leaves[self.world.rank]
        self._guard.begin(mine)
        self._losses.zero_()
        self._drop()
        self.buffers.begin()
        self._rechecked, self._sent = rechecked, 0
        for bucket in self._buckets:
            bucket.look_for_hooks()
        # the left ones of siblings whose gradients wait for autograd to add the right ones
        self._kept = {a for a, b in pairwise(mine) if are_siblings((a, a + 1), (b, b + 1), self.total)} - {
            leaf for leaf in mine if rechecked in (leaf, leaf + 1)
        }
        for number in mine:
            self._number, self._last = number, number == mine[-1]
            self.buffers.restore()
            yield number
            self._guard.require(number)

    def add(self, compute: Callable[[], Tensor]) -> None:
        """Backpropagate the mean loss of one micro-batch, which `compute` returns as a scalar; add its gradients.

        Raises:
            Disagreement: it was computed twice, and differs: this rank's hardware computes wrong, or `compute` is not
                repeatable.
            UserError: the loss depends on no parameter of the module, or a parameter gets two gradients.
        """
        self._guard.add(self._number)
        self._trial = self._twice = self._is_rechecked()
        if self._twice:
            self._digests: dict[Tensor, Tensor] = {}
            first = self._backpropagate(compute)
            self.buffers.restore()
            self._trial, seen, self._digests = False, self._digests, {}
        loss = self._losses[self._number] = self._backpropagate(compute)
        if self._twice:
            self._require_equal([tensor_digest(each) for each in (first, loss)], seen, self._digests)
        self.buffers.add(self._number)

    def _is_rechecked(self) -> bool:
        return self._number == self._rechecked

    def _backpropagate(self, compute: Callable[[], Tensor]) -> Tensor:
        for bucket in self._buckets:
            bucket.missing = len(bucket.tensors)
        loss = compute()
        for bucket in self._buckets:
            bucket.lend()
        with self._guard.backward():
            if loss.requires_grad:
                (loss / self.total).backward()
        if not self._trial:
            self._fill()
        return loss.detach()

    def _require_equal(self, losses: list[Tensor], first: dict[Tensor, Tensor], second: dict[Tensor, Tensor]) -> None:
        numbers = [{tensor: digest.item() for tensor, digest in digests.items()} for digests in (first, second)]
        names = [n for n, p in self.module.named_parameters() if numbers[0].get(p) != numbers[1].get(p)]
        if losses[0] != losses[1] or names:
            raise self._difference(f"the gradient differs in {', '.join(names)}" if names else "the loss differs")

    def _difference(self, seen: str) -> RunError:
        """What it means that a micro-batch that was computed twice differs."""
        return Disagreement(
            f"micro-batch {self._number}: computed twice on {self.world.place}, {seen}: this hardware computes wrong, "
            f"or an operation is not repeatable",
            local=True,
        )

    def _take(self, bucket: Bucket, parameter: Tensor) -> None:
        """Autograd calls this when a micro-batch's gradient of `parameter` is complete."""
        self._guard.take(parameter)
        if self._twice:
            assert parameter.grad is not None
            self._digests[parameter] = tensor_digest(parameter.grad)
        if self._trial:
            parameter.grad = None
            return
        bucket.missing -= 1
        if not bucket.missing:
            self._add(bucket)

    def _fill(self) -> None:
        """Give zeros to the parameters that this micro-batch did not use."""
        for bucket in self._buckets:
            if bucket.missing:
                for parameter in bucket.tensors:
                    if id(parameter) not in self._guard.taken:  # adding zero makes -0.0 what FSDP2 makes of it: 0.0
                        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad + 0
                self._add(bucket)

    def _add(self, bucket: Bucket) -> None:
        """Add this micro-batch's gradients of a bucket to their siblings; send the bucket if they were the last."""
        bucket.missing = 0
        if self._number in self._kept and bucket.accumulates:
            bucket.left = bucket.take()
            return
        accumulated = self._number - 1 in self._kept and bucket.accumulates
        bucket.push((self._number - accumulated, self._number + 1), self.total)
        if self._last:
            bucket.filled = True
            if self.early:
                self._send()

    def _send(self) -> None:
        """Start to exchange the buckets that are filled, in one order on all ranks."""
        while self._transport.parts > 1 and self._sent < len(self._buckets) and self._buckets[self._sent].filled:
            self._buckets[self._sent].send(self._transport)
            self._sent += 1

    def reduce(self) -> Tensor:
        """Add up over the ranks; leave the means in `.grad` and the buffers; return the mean loss (float64).

        Raises:
            UserError: a micro-batch was not added.
        """
        self._guard.end()
        self._send()
        self.buffers.send()
        # of a loss's slot all ranks but one have zero bits, so adding whole numbers moves it
        numbers = torch.cat([self._losses.view(torch.int64), self.buffers.counts])
        work = self.world.sum(numbers, asynchronous=True)
        self._give()
        self.world.wait(work)
        self.buffers.reduce(numbers[self.total :])
        return total(numbers[: self.total].view(torch.float64)) / self.total

    def _give(self) -> None:
        """Leave the means in `.grad`."""
        if self._transport.parts == 1:
            for bucket in self._buckets:
                ((_, gradients),) = bucket.nodes
                for parameter, gradient in zip(bucket.tensors, gradients, strict=True):
                    parameter.grad = gradient.to(parameter.dtype)
                bucket.nodes = []
            return
        gathered = [self._transport.gather(bucket.root(self._transport)) for bucket in self._buckets]
        for bucket, (means, work) in zip(self._buckets, gathered, strict=True):
            self.world.wait(work)
            for parameter, at in zip(bucket.tensors, bucket.places, strict=True):
                mean = means[at : at + parameter.numel()].view_as(parameter)
                # laid out as the parameter is: fused optimizers take elements by their place in memory
                parameter.grad = mean if parameter.is_contiguous() else torch.empty_like(parameter).copy_(mean)

    def end(self) -> None:
        """The last step is done: from here on the model is its owner's alone."""
        for hook in self._hooks:
            hook.remove()

    def discard(self) -> None:
        """Undo the step: buffers as they were before it, no gradients."""
        self.buffers.restore()
        self._drop()

    def _drop(self) -> None:
        for tensor in self._holders():
            tensor.grad = None  # else autograd would add the next gradient to the last step's
        for bucket in self._buckets:
            bucket.nodes, bucket.left, bucket.filled = [], [], False

    def _holders(self) -> Sequence[Tensor]:
        """All that holds a gradient after a step."""
        return self._parameters
