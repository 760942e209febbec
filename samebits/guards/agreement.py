"""Ranks compare values before step 0 and while they train; a rank that differs is named."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.alike import together
from ..core.digest import tensor_digests
from ..core.errors import Disagreement
from ..core.ranks import World
from ..core.shards import Held, Shard


def require_agreement(report: Mapping[str, Any], world: World, what: str) -> None:
    """Stop every rank alike if one reports another value than the rest.

    Raises:
        Disagreement: with the table of fields, values, ranks and hosts.
    """
    if world.size == 1:
        return
    digest = hashlib.sha256(repr(sorted(report.items())).encode()).hexdigest()
    if len(set(world.gather(digest))) == 1:  # a thousand ranks need not send each other a thousand reports
        return
    from .disagreement import blame, disagreements, table  # which few runs need

    hosts, reports = zip(*world.gather((world.place, dict(report))), strict=True)
    groups = disagreements(reports, hosts)
    if groups:
        raise Disagreement(f"{what}\n{table(groups)}\n{blame(groups, world.size)}")


def require_same_weights(
    weights: Mapping[str, Tensor], step: int, world: World, whose: str = "the ranks' weights"
) -> None:
    """Compare the weights of all ranks bit by bit, by their digests: one small all-reduce when they agree.

    `whose` says what they are, and of whom the world's ranks are the numbers.

    Raises:
        Disagreement: naming the tensors that differ, by rank, host and device.
    """
    if world.size == 1 or not weights:
        return
    digests = tensor_digests(weights)
    total = (digests * torch.arange(1, len(digests) + 1, device=digests.device)).sum()
    totals = digests.new_zeros(world.size)
    totals[world.rank] = total
    world.sum(totals)
    if bool((totals == total).all()):  # one synchronisation, however many ranks
        return
    report = {name: f"{value % 2**64:016x}" for name, value in zip(weights, digests.tolist(), strict=True)}
    require_agreement(report, world, f"step {step}: {whose} differ, by the digests of:")


def require_replicas(held: Mapping[str, Held], step: int, world: World, replicas: World, kind: str = "weights") -> None:
    """Compare what ranks hold alike: whole weights and buffers, and the shards that `replicas` of this rank hold.

    `kind` says in the message what they are.

    Raises:
        Disagreement: as `require_same_weights`; a fault in one replica ends them all.
    """
    uncut = {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}
    require_same_weights(uncut, step, world, f"the ranks' {kind}")
    cut = {name: shard.local for name, shard in held.items() if isinstance(shard, Shard)}
    if replicas.size > 1:
        together(world, lambda: require_same_weights(cut, step, replicas, f"the replicas' {kind}"))
