"""This process's place among the ranks, and what they send each other."""

import atexit
import gc
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UserError
from .lost import contacting, meeting
from .options import Parallel
from .place import number, rank_and_size


class Works(dist.Work):
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Until all are done. The group's own timeout holds."""
        for work in self._works:
            work.wait()
        return True


@dataclass(frozen=True)
class World:
    """Rank, world size and device. At size 1 nothing is communicated, so no process group is needed.

    Attributes:
        group: of these ranks; None: all ranks of the run.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)

    def split(self, shape: Sequence[int], timeout_seconds: int) -> list["World"]:
        """For each axis of a grid of all ranks in rows, those that have this rank's place along all other axes."""
        grid, worlds = torch.arange(self.size).view(*shape), list[World]()
        for axis, size in enumerate(shape):
            rows = grid.movedim(axis, -1).reshape(-1, size)
            (mine,) = rows[(rows == self.rank).any(1)].tolist()
            if size == 1:
                worlds.append(World(0, 1, self.device))
            elif size == self.size:
                worlds.append(self)
            else:
                worlds.append(World(mine.index(self.rank), size, self.device, self._group_of(mine, timeout_seconds)))
        return worlds

    @contacting
    def _group_of(self, ranks: Sequence[int], timeout_seconds: int) -> dist.ProcessGroup:
        """A process group of some of these ranks, which ask for it together."""
        everywhere = [dist.get_global_rank(self.group, rank) if self.group else rank for rank in ranks]
        timeout = timedelta(seconds=timeout_seconds)
        return dist.new_group(everywhere, timeout, use_local_synchronization=True)

    @property
    def place(self) -> str:
        """Host and device of this rank."""
        return f"{socket.gethostname()} {self.device}"

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.rank == 0

    @contacting
    def sum(self, tensor: Tensor, asynchronous: bool = False) -> dist.Work | None:
        """Add `tensor` over all ranks, in place."""
        return dist.all_reduce(tensor, group=self.group, async_op=asynchronous) if self.size > 1 else None

    @contacting
    def all_to_all(self, sent: Tensor, received: Tensor, to: Sequence[int], of: Sequence[int]) -> dist.Work | None:
        """Start to send each rank so many elements, in the order of the ranks, and to receive so many of each."""
        return dist.all_to_all_single(received.view(-1), sent.view(-1), of, to, group=self.group, async_op=True)

    @contacting
    def all_gather(self, part: Tensor, gathered: Tensor, ring: bool = False) -> dist.Work:
        """Start to give every rank the equal parts of all of them as one vector.

        A `ring` sends the fewest bytes between hosts, where several of these ranks lie on each of several hosts.
        """
        if ring or self.device.type != "cpu":
            return cast(dist.Work, dist.all_gather_single(gathered, part, group=self.group, async_op=True))
        # Gloo's ring keeps a second such vector, and takes twice the time
        rows = gathered.view(self.size, -1)
        rows[self.rank].copy_(part)
        others = [(self.rank + ahead) % self.size for ahead in range(1, self.size)]
        sends = [dist.isend(part, group=self.group, group_dst=rank) for rank in others]
        receives = [dist.irecv(rows[rank], group=self.group, group_src=rank) for rank in others]
        return Works([work for work in [*sends, *receives] if work])

    @contacting
    def largest(self, tensor: Tensor) -> None:
        """Leave the largest of each element over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)

    @contacting
    def wait(self, work: dist.Work | None) -> None:
        """Wait for what an asynchronous collective began."""
        if work:
            work.wait()

    def total(self, *numbers: int) -> list[int]:
        """Sums over all ranks, modulo 2**64 and signed; all ranks get the same."""
        return self.totals(numbers, torch.zeros(0, dtype=torch.int64), [])[0]

    def totals(self, numbers: Sequence[int], more: Tensor, mine: Sequence[Tensor]) -> tuple[list[int], list[float]]:
        """Sums over all ranks of `numbers` and of `more`, as `total`; and `mine`, scalars of this rank alone.

        A GPU is waited for once: nothing is sent to it but in the order of its work, and all comes back together.
        """
        requested = torch.tensor(numbers, dtype=torch.int64).to(self.device, non_blocking=True)
        sums = torch.cat([requested, more.to(self.device)])
        self.sum(sums)
        own = [number.detach().to(self.device, torch.float64, non_blocking=True).reshape(1) for number in mine]
        read = torch.cat([sums, *(number.view(torch.int64) for number in own)]).tolist()
        return read[: len(sums)], np.array(read[len(sums) :], np.int64).view(np.float64).tolist()

    @contacting
    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        held = [value]
        if self.size > 1:
            dist.broadcast_object_list(held, device=self.device, group=self.group, group_src=0)
        return held[0]

    @contacting
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    @contacting
    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank rank 0's values, in place."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)


ALONE = World(0, 1, torch.device("cpu"))


def join(device: str, parallel: Parallel) -> World:
    """Take the place that torchrun's variables assign; without them, be the only rank.

    Raises:
        UserError: no such device, or more ranks than micro-batches.
        RunError: the ranks do not meet.
    """
    rank, size = rank_and_size()
    if size > parallel.micro_batches:
        most = f"parallel.micro_batches={parallel.micro_batches}"
        raise UserError(f"world size {size} seen, at most {most} wanted: each rank runs one")
    place = device_of(device)
    if size > 1:
        _meet(rank, size, place, timedelta(seconds=parallel.timeout_seconds))
    return World(rank, size, place)


@meeting
def _meet(rank: int, size: int, place: torch.device, timeout: timedelta) -> None:
    """Create the process group."""
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))  # type: ignore[attr-defined]
    # After a restart torchrun may hand out the store of the previous attempt. In it, Gloo would find the addresses of
    # processes that have ended, and would wait for them.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    # Naming the device up front binds NCCL's communicator to it, before the first collective.
    bound = place if place.type == "cuda" else None
    backend = "nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)


_left: list[Any] = []


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        # The user's code may train another model with DistributedDataParallel. If its reducer were the last owner of
        # the group, the reducer would join Gloo's threads while it holds the GIL. Such a thread may wait for the GIL:
        # the process would hang.
        _left[:] = [dist.group.WORLD]
        dist.destroy_process_group()


@atexit.register
def _end_threads() -> None:
    """Stop Gloo's threads: one that requests the GIL while the interpreter shuts down would abort the process."""
    gc.collect()  # frees a reducer that is part of a reference cycle
    _left.clear()


def device_of(device: str) -> torch.device:
    """The device that `device` in params.yaml means for this process."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    local_rank, seen = number("LOCAL_RANK", 0), torch.cuda.device_count()
    if local_rank >= seen:
        raise UserError(
            f"device: cuda asked for by local rank {local_rank}, {seen} GPUs seen. Try --set device=cpu",
            local=True,
        )
    place = torch.device("cuda", local_rank)
    torch.cuda.set_device(place)
    torch.cuda.init()  # from here on seeding finds the GPU's generator
    return place
