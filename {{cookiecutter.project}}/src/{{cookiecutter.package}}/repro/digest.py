"""A 64-bit digest of a tensor's bits that notices position: sum of mix(word + place * odd constant).

The sum is over integers modulo 2**64, so threads and GPU blocks may add in any order. An XOR such as
`torch.hash_tensor` would not do: it is blind to permutations and to paired flips.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .address import digest as json_digest

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


GOLDEN, MIXER = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9)  # those of splitmix64


def tensor_digest(tensor: Tensor) -> Tensor:
    """A scalar int64 on the tensor's device, without synchronisation; elements count in logical order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # else the bits are not yet those of the values
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    words = tensor.contiguous().view(-1).view(WORDS[tensor.element_size()]).to(torch.int64)
    place = torch.arange(1, words.numel() + 1, device=words.device)
    mixed = words + place * GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * MIXER
    return (mixed ^ (mixed >> 27)).sum()


def tensor_digests(tensors: Mapping[str, Tensor]) -> Tensor:
    """One digest per tensor, in the mapping's order: int64, on the tensors' device."""
    return torch.stack([tensor_digest(tensor) for tensor in tensors.values()])


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and digests; synchronises once."""
    digests = tensor_digests(tensors).tolist()
    return json_digest(
        {
            name: [str(tensor.dtype), list(tensor.shape), f"{digest % 2**64:016x}"]
            for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
        }
    )
