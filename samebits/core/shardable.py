"""What can be sharded: parameters, units of a model, optimizers; the rest stays whole, or is refused by name."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UserError, some
from .shards import aligned

STEPS, LENGTH = 3, (1 << 17) + 7  # of the try whether an optimizer updates shards alike; so long that threads share it


def units_of(module: nn.Module, given: Sequence[nn.Module] = ()) -> Sequence[nn.Module]:
    """The parts of a model that are gathered one at a time.

    They are those `given`; without these, the children of the largest ModuleList or Sequential.

    Raises:
        UserError: one is no module of the model, or lies in another, or two share a parameter.
    """
    lists = [held for held in module.modules() if isinstance(held, nn.ModuleList | nn.Sequential)]
    units = given or (list(max(lists, key=_size).children()) if lists else [])
    _require_own(module, units)
    _require_untied(module, units)
    return units


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def kept_unsharded(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that no rank may hold a part of: their rows are no whole vectors, or of another dtype than most."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel()
    ((most, _),) = sizes.most_common(1)

    def is_cut(p: Tensor) -> bool:
        rows = p.ndim > 1 and p.numel() > 0 and p.is_contiguous()
        return rows and p.dtype == most and p[0].numel() % aligned(most) == 0

    return {parameter for parameter in module.parameters() if not is_cut(parameter)}


def _require_own(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse units that are not modules of the model, or lie in one another."""
    own = set(module.modules()) - {module}
    if foreign := [type(unit).__name__ for unit in units if unit not in own]:
        raise UserError(f"run.steps(units=...): {some(foreign, 3)} given, modules inside the model wanted")
    inner = [held for unit in units for held in unit.modules() if held is not unit]
    if len(units) > len(set(units)) or set(inner) & set(units):
        raise UserError("run.steps(units=...): a unit lies in another one, or is given twice; give each module once")


def _require_untied(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse a parameter that two units share: FSDP2 would untie it."""
    places: dict[Tensor, set[int]] = defaultdict(set)
    unit_of = {held: number for number, unit in enumerate(units) for held in unit.modules()}
    for held in module.modules():
        for parameter in held.parameters(recurse=False):
            places[parameter].add(unit_of.get(held, -1))
    if tied := [name for name, p in module.named_parameters() if len(places[p]) > 1]:
        raise UserError(
            f"{some(tied, 3)}: shared by two units, which parallel.shard=full would untie. Give run.steps(units=...) "
            f"units that share no parameter, or set parallel.shard=optimizer"
        )


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on where the tensor is cut.

    Raises:
        UserError: steps on a vector and on three parts of it differ.
    """
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        unit = aligned(group["params"][0].dtype)
        edges = [0, unit, 3 * unit, 1001 * unit, LENGTH]
        try:
            alike = torch.equal(_stepped(optimizer, group, [0, LENGTH]), _stepped(optimizer, group, edges))
            said = "its steps on a vector and on parts of it differ"
        except Exception as error:  # whatever an optimizer raises that wants more than a vector
            alike, said = False, f"it makes no step on a vector: {' '.join(str(error).split())[:100]}"
        if not alike:
            raise UserError(
                f"parallel.shard: {type(optimizer).__name__} does not update each element by itself ({said}), so bits "
                f"would depend on the world size. Use torch.optim.AdamW(..., fused=True) or SGD, or parallel.shard=none"
            )


def _stepped(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], edges: Sequence[int]) -> Tensor:
    """A vector after steps of such an optimizer on the parts between these edges."""
    like = group["params"][0]
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + STEPS, LENGTH, generator=generator).to(like.device, like.dtype)
    parts = []
    for first, last in pairwise(edges):
        part = nn.Parameter(start[first:last].clone())
        one = object.__new__(type(optimizer))
        vars(one).update(vars(optimizer))
        vars(one).pop("step", None)  # a scheduler's, which would count
        one.state, one.param_groups = defaultdict(dict), [{**group, "params": [part]}]
        one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        for gradient in gradients:
            part.grad = gradient[first:last].clone()
            one.step()
        parts.append(part.detach())
    return torch.cat(parts)
