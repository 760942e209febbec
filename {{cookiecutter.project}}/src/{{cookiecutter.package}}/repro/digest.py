"""A 64-bit digest of a tensor's bits that notices position: sum of mix(word + place * odd constant).

The sum is over integers modulo 2**64, so threads and GPU blocks may add in any order. An XOR such as
`torch.hash_tensor` would not do: it is blind to permutations and to paired flips.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .address import digest as json_digest

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


GOLDEN, MIXER = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9)  # those of splitmix64


CHUNK = 1 << 22  # words mixed at a time, so that large tensors need little memory beside them


def mix(words: Tensor, place: Tensor | int) -> Tensor:
    """Scramble int64 words, each in its own way for each place: splitmix64's finish, shifts being arithmetic."""
    mixed = words + (place * GOLDEN if isinstance(place, Tensor) else _signed(place * GOLDEN % 2**64))
    mixed = (mixed ^ (mixed >> 30)) * MIXER
    return mixed ^ (mixed >> 27)


def _words(tensor: Tensor) -> Tensor:
    """A tensor's bits as a vector of integers, an element or half a complex one each."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # else the bits are not yet those of the values
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(-1).view(WORDS[tensor.element_size()])


def combined_digest(tensors: Iterable[Tensor]) -> Tensor:
    """One digest over some tensors as if they were one: few kernels, however many tensors.

    Returns:
        A scalar int64 on the tensors' device, without synchronisation; elements count in logical order.
    """
    words = [_words(tensor) for tensor in tensors]
    parts = (words[0] if len(words) == 1 else torch.cat([part.to(torch.int64) for part in words])).split(CHUNK)
    sums, first = [], 1
    for part in parts:
        place = torch.arange(first, first + part.numel(), device=part.device)
        sums.append(mix(part.to(torch.int64), place).sum())
        first += part.numel()
    return torch.stack(sums).sum()


def tensor_digest(tensor: Tensor) -> Tensor:
    """As `combined_digest`, of one tensor."""
    return combined_digest([tensor])


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
