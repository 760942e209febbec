"""The all-gather of a unit's weights under `parallel.shard: full`, as FSDP2 calls it.

With `parallel.gather: bfloat16` it sends half as much: weights that only a module of torch uses, and that autocast
rounds for it, are rounded before they are sent. Rounding twice is rounding once, so no bit changes. All other weights,
such as those of embeddings, travel as they are. A model may use a weight in other places as well, in float32. So the
first step of a run computes a micro-batch in both ways, and compares the gradients.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import Refused
from .world import World

ROUNDED = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d  # whose weight autocast rounds; not their subclasses


class Room:
    """Room for what is sent and received, as FSDP2 asks for it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor whose values do not matter."""
        return torch.empty(*size, dtype=dtype, device=device)


def rounds(device: torch.device) -> bool:
    """Whether autocast to bfloat16 is on."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.bfloat16


def rounded(module: nn.Module) -> dict[nn.Module, str]:
    """The modules that alone use their weight, which autocast rounds for them; with the weight's name."""
    users: Counter[Tensor] = Counter()
    for held in module.modules():
        users.update(held.parameters(recurse=False))
    return {
        held: f"{name}.weight".lstrip(".")
        for name, held in module.named_modules()
        if type(held) in ROUNDED and "forward" not in vars(held)
        if users[held.weight] == 1 and held.weight.dtype == torch.float32
    }


@dataclass
class Gather(Room):
    """The all-gather of one unit; a rank that is lost is told in plain words.

    Attributes:
        world: the ranks that hold the parts.
        widths: how many elements of each parameter a rank sends, in FSDP2's order.
        short: of each parameter, whether it may be sent in bfloat16; empty: none may.
        backward: whether a backward pass is under way. It gathers as the forward pass before it did.
        whole: whether this pass is to gather all in float32.
    """

    world: World
    widths: Sequence[int]
    short: Sequence[bool]
    backward: Callable[[], bool]
    whole: Callable[[], bool]
    in_short: bool = False

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False
    ) -> dist.Work | None:
        if not self.backward():
            self.in_short = any(self.short) and rounds(self.world.device) and not self.whole()
        if not self.in_short:
            return self.world.join(input_tensor, output_tensor, async_op)
        parts = input_tensor.split(list(self.widths))
        sent = [
            part.bfloat16() if short else part.view(torch.bfloat16)
            for part, short in zip(parts, self.short, strict=True)
        ]
        own = torch.cat(sent)
        received = own.new_empty(self.world.size * own.numel())
        self.world.join(own, received)
        arrived = received.view(self.world.size, -1).split([part.numel() for part in sent], 1)
        whole = output_tensor.view(self.world.size, -1).split(list(self.widths), 1)
        for out, values, short in zip(whole, arrived, self.short, strict=True):
            out.copy_(values if short else values.view(torch.float32))
        return None

    def watch(self, user: nn.Module, name: str) -> RemovableHandle:
        """Refuse a call of the module that uses a weight, where autocast would not round it."""

        def require_rounding(*call: object) -> None:
            if self.in_short and not rounds(self.world.device):
                raise Refused(f"{name}: sent in bfloat16, and used where autocast is off; set parallel.gather=float32")

        return user.register_forward_pre_hook(require_rounding)
