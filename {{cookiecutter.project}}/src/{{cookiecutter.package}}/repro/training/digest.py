"""A 64-bit digest of a tensor's bits that notices position: a sum of words times fixed keys, modulo 2**64.

The bytes are read as 64-bit words, in rows of `ROW`. A row is summed up as

    sum over i of  word[i] * keys[0, i] + (word[i] >> 32) * keys[1, i]

where the second term is for the upper half of each word. One key alone would lose most of it: of the uppermost bits
it would keep only whether an even number of them flipped. A row's sum is scrambled with its number; then all are added.
All sums are of integers, so threads and GPU blocks may add in any order. An XOR such as `torch.hash_tensor`
would not do: it is blind to permutations and to paired flips.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


GOLDEN, MIXER = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9)  # those of splitmix64
ROW = 1 << 14  # words with keys of their own
CHUNK = 1 << 22  # words joined at a time, so that large tensors need little memory beside them
CACHED = 1 << 16  # on a CPU: so that they stay in its cache


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
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()  # else the bits are not yet those of the values
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8:
        return torch.cat([data, data.new_zeros(-data.numel() % 8)]).view(torch.int64)
    return (data.clone() if data.storage_offset() % 8 else data).view(torch.int64)


def _rows(words: list[Tensor]) -> Tensor:
    """The sums of all rows, the tensors being one vector; how many words are joined at a time does not matter."""
    keys = _keys(words[0].device)
    sums = []
    for part in _parts(words, CACHED if keys.device.type == "cpu" else CHUNK):
        whole = part.numel() // ROW * ROW
        if whole:
            sums.append(_times(part[:whole].view(-1, ROW), keys))
        if whole < part.numel():
            sums.append(_times(part[whole:][None], keys[:, : part.numel() - whole]))
    if sum(part.numel() for part in words) % ROW == 0:
        sums.append(keys.new_zeros(1))  # what is left, too
    return torch.cat(sums)


def _parts(words: list[Tensor], size: int) -> Iterator[Tensor]:
    """The tensors as one vector, in parts of `size` words; the last one may be shorter."""
    pieces: list[Tensor] = []
    room = size
    for tensor in words:
        while tensor.numel() >= room:
            yield torch.cat([*pieces, tensor[:room]]) if pieces else tensor[:room]
            pieces, tensor, room = [], tensor[room:], size
        if tensor.numel():
            pieces.append(tensor)
            room -= tensor.numel()
    if pieces:
        yield torch.cat(pieces) if len(pieces) > 1 else pieces[0]


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
    sums = _rows([_words(tensor) for tensor in tensors])
    length = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return mix(sums, torch.arange(1, sums.numel() + 1, device=sums.device)).sum() + _signed(length * GOLDEN)


def combined_digests(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """`combined_digest` of each group, (groups,) of int64; in a few kernels where they are small and alike."""
    lengths = [sum(tensor.numel() * tensor.element_size() for tensor in group) for group in groups]
    words = [[_words(tensor) for tensor in group] for group in groups]
    counts = {sum(part.numel() for part in parts) for parts in words}
    if len(counts) > 1 or max(counts) >= ROW:
        return torch.stack([combined_digest(group) for group in groups])
    rows = torch.cat([part for parts in words for part in parts]).view(len(groups), -1)
    return mix(_times(rows, _keys(rows.device)[:, : rows.shape[1]]), 1) + rows.new_tensor(
        [_signed(length * GOLDEN) for length in lengths]
    )


def tensor_digest(tensor: Tensor) -> Tensor:
    """As `combined_digest`, of one tensor."""
    return combined_digest([tensor])


def tensor_digests(tensors: Mapping[str, Tensor]) -> Tensor:
    """One digest per tensor, in the mapping's order: int64, on the tensors' device."""
    return torch.stack([tensor_digest(tensor) for tensor in tensors.values()])
