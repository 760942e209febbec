"""A 64-bit digest of a tensor's bits that notices position: a sum of words times fixed keys, modulo 2**64.

The bytes are read as 64-bit words, in rows of `ROW`. A row is summed up as

    sum over i of  word[i] * keys[0, i] + (word[i] >> 32) * keys[1, i]

where the second term is for the upper half: a key alone would carry little of it, of the uppermost bit but
whether it flipped an even number of times. A row's sum is scrambled with its number, and those are added.
All sums are of integers, so threads and GPU blocks may add in any order. An XOR such as `torch.hash_tensor`
would not do: it is blind to permutations and to paired flips.
"""

from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from .address import digest as json_digest


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


GOLDEN, MIXER = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9)  # those of splitmix64
ROW = 1 << 14  # words with keys of their own
CHUNK = 1 << 22  # words joined at a time, so that large tensors need little memory beside them


def mix(words: Tensor, place: Tensor | int) -> Tensor:
    """Scramble int64 words, each in its own way for each place: splitmix64's finish, shifts being arithmetic."""
    mixed = words + (place * GOLDEN if isinstance(place, Tensor) else _signed(place * GOLDEN))
    mixed = (mixed ^ (mixed >> 30)) * MIXER
    return mixed ^ (mixed >> 27)


@cache
def _keys(device: torch.device) -> Tensor:
    """Odd numbers that look random, (2, ROW) of int64: a flipped bit times an odd number is never 0.

    The 2 is the first salt with which no two of them let flips of both uppermost bits cancel; a test looks.
    """
    numbers = torch.arange(2 * ROW, device=device)
    return (mix(mix(numbers, 2), numbers) | 1).view(2, ROW)


def _words(tensor: Tensor) -> Tensor:
    """A tensor's bytes in logical order as a vector of int64, zeros filling the last one up."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # else the bits are not yet those of the values
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8:
        return torch.cat([data, data.new_zeros(-data.numel() % 8)]).view(torch.int64)
    return (data.clone() if data.storage_offset() % 8 else data).view(torch.int64)


def _rows(words: Tensor) -> Tensor:
    """The sums of whole rows, and of what is left."""
    keys, whole = _keys(words.device), words.numel() // ROW * ROW
    last = _times(words[whole:][None], keys[:, : words.numel() - whole])
    return torch.cat([_times(words[:whole].view(-1, ROW), keys), last]) if whole else last


def _times(rows: Tensor, keys: Tensor) -> Tensor:
    if rows.device.type == "cpu":  # which has an integer matrix product, several times as fast
        return rows @ keys[0] + (rows >> 32) @ keys[1]
    return (rows * keys[0] + (rows >> 32) * keys[1]).sum(1)


def combined_digest(tensors: Iterable[Tensor]) -> Tensor:
    """One digest over some tensors, in order: few kernels, however many small ones there are.

    Returns:
        A scalar int64 on the tensors' device, without synchronisation.
    """
    tensors = list(tensors)
    words = [_words(tensor) for tensor in tensors]
    sums = torch.cat([_rows(torch.cat(group) if len(group) > 1 else group[0]) for group in _groups(words)])
    length = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return mix(sums, torch.arange(1, sums.numel() + 1, device=sums.device)).sum() + _signed(length * GOLDEN)


def _groups(words: list[Tensor]) -> Iterable[list[Tensor]]:
    group: list[Tensor] = []
    for part in words:
        if group and sum(other.numel() for other in group) + part.numel() > CHUNK:
            yield group
            group = []
        group.append(part)
    yield group


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
