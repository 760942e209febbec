"""What can be sharded: parameters, units of a model, optimizers; the rest stays whole, or is refused by name."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .attributes import OF_OPTIMIZERS
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


def require_unhooked(module: nn.Module) -> None:
    """Refuse hooks on parameters that FSDP2 replaces, without which it would train.

    Raises:
        UserError: naming the parameters.
    """
    unsharded = kept_unsharded(module)
    hooked = [
        name
        for name, p in module.named_parameters()
        if p not in unsharded and (p._backward_hooks or p._post_accumulate_grad_hooks)
    ]
    if hooked:
        raise UserError(
            f"{some(hooked, 3)}: has a hook (register_hook), which parallel.shard=full would drop: change the gradient "
            f"in the loop, or the tensor in forward, or set parallel.shard=optimizer"
        )


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

    Those of torch.optim are known, and tried on a vector; another one is what its owner says, and is tried on the
    shapes of its parameters, too.

    Raises:
        UserError: it has a hook, which would see shards; its owner says nothing; or steps on a tensor and on parts of
            it differ.
    """
    name = type(optimizer).__name__
    if hooks := [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]:
        said = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise UserError(
            f"parallel.shard: {name} has a hook, {said}, which would see this rank's shards alone: do its work in the "
            f"loop, or set parallel.shard=none"
        )
    known = type(optimizer).__module__.startswith("torch.optim")
    if not known and not getattr(optimizer, "elementwise", False):
        raise UserError(
            f"parallel.shard: {name} is none of torch.optim. If it updates each element by that element's gradient, "
            f"weight and state alone, say so by {name}.elementwise = True; else set parallel.shard=none"
        )
    for group in optimizer.param_groups:
        shapes = dict.fromkeys(p.shape for p in group["params"] if p.numel() <= 2 * LENGTH)
        for shape in [torch.Size([LENGTH]), *([] if known else shapes)] if group["params"] else ():
            _require_alike(optimizer, group, shape)


def _require_alike(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: torch.Size) -> None:
    unit, length = aligned(group["params"][0].dtype), shape.numel()
    edges = sorted({min(edge, length) for edge in (0, unit, 3 * unit, 1001 * unit, length)})
    try:
        alike = torch.equal(_stepped(optimizer, group, [0, length], shape), _stepped(optimizer, group, edges))
        said = "its steps on a tensor and on parts of it differ"
    except Exception as error:  # whatever an optimizer raises that wants more than a vector
        alike, said = False, f"it makes no step on a vector: {' '.join(str(error).split())[:100]}"
    if not alike:
        raise UserError(
            f"parallel.shard: {type(optimizer).__name__} does not update each element by itself ({said}), so bits "
            f"would depend on the world size. Use torch.optim.AdamW(..., fused=True) or SGD, or parallel.shard=none"
        )


def _stepped(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], edges: Sequence[int], shape: torch.Size | None = None
) -> Tensor:
    """A vector after steps of such an optimizer on the parts between these edges; one part may have a `shape`."""
    like = group["params"][0]
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + STEPS, edges[-1], generator=generator).to(like.device, like.dtype)
    parts = []
    for first, last in pairwise(edges):
        form = shape or torch.Size([last - first])
        part = nn.Parameter(start[first:last].clone().view(form))
        one = _copied(optimizer)
        one.state, one.param_groups = defaultdict(dict), [{**group, "params": [part]}]
        one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        for gradient in gradients:
            part.grad = gradient[first:last].clone().view(form)
            one.step()
        parts.append(part.detach().reshape(-1))
    return torch.cat(parts)


def _copied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One that is alike, without parameters; what it keeps in attributes is its own."""
    one = object.__new__(type(optimizer))
    held = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    held.pop("step", None)  # a scheduler's, which would count
    shared = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    vars(one).update(
        {name: value if name in OF_OPTIMIZERS else deepcopy(value, shared) for name, value in held.items()}
    )
    return one
