"""Sums over a weight that FSDP2 has cut: torch adds the ranks' parts, so their bits would depend on the world size."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from .errors import UserError

aten = torch.ops.aten
REDUCTIONS = (
    aten.sum,
    aten.nansum,
    aten.mean,
    aten.prod,
    aten.var,
    aten.std,
    aten.var_mean,
    aten.std_mean,
    aten.norm,
    aten.linalg_vector_norm,
    aten._foreach_norm,
    aten.logsumexp,
    aten._softmax,
    aten._log_softmax,
    aten.cumsum,
    aten.dot,
    aten.vdot,
    aten.mv,
    aten.mm,
    aten.bmm,
    aten.addmm,
    aten.addmv,
)


def refuse_reductions() -> Callable[[], None]:
    """Refuse operations of torch that add up elements of a sharded weight. Returns what allows them again."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    operations = [getattr(packet, name) for packet in REDUCTIONS for name in packet.overloads()]
    before = {each: handlers[each] for each in operations if each in handlers}
    handlers.update({each: partial(_refuse, each) for each in operations})

    def allow() -> None:
        for each in operations:
            handlers.pop(each, None)
        handlers.update(before)

    return allow


def _refuse(operation: Any, *call: Any) -> NoReturn:
    raise UserError(
        f"{operation.overloadpacket.__name__} of a weight that is sharded over the ranks adds in another order on "
        f"another world size: for the norm of gradients call samebits.clip_grad_norm_; for a sum over weights set "
        f"parallel.shard=optimizer, where each rank holds all weights"
    )
