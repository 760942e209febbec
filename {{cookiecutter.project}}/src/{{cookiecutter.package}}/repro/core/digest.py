"""A 64-bit digest of a tensor's bits that notices position: a sum of words times fixed keys, modulo 2**64.

The bytes are read as 64-bit words, in rows of `ROW`. A row is summed up as

    sum over i of  word[i] * keys[0, i] + (word[i] >> 32) * keys[1, i]

where the second term is for the upper half of each word. One key alone would lose most of it: of the uppermost bits
it would keep only whether an even number of them flipped. A row's sum is scrambled with its number; then all are added.
All sums are of integers, so threads and GPU blocks may add in any order. An XOR such as `torch.hash_tensor`
would not do: it is blind to permutations and to paired flips.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import cast

import torch
from torch import Tensor

from .ranks import World
from .shards import Held, Shard, joined


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
    for part in joined(words, CACHED if keys.device.type == "cpu" else CHUNK):
        whole = part.numel() // ROW * ROW
        if whole:
            sums.append(_times(part[:whole].view(-1, ROW), keys))
        if whole < part.numel():
            sums.append(_times(part[whole:][None], keys[:, : part.numel() - whole]))
    if sum(part.numel() for part in words) % ROW == 0:
        sums.append(keys.new_zeros(1))  # what is left, too
    return torch.cat(sums)


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
    return _finished(_rows([_words(tensor) for tensor in tensors]), _length(tensors))


def _finished(rows: Tensor, length: int) -> Tensor:
    """The digest that the sums of all rows give, of tensors that are `length` bytes long together."""
    return mix(rows, torch.arange(1, rows.numel() + 1, device=rows.device)).sum() + _signed(length * GOLDEN)


def _length(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held_digests(groups: Sequence[Sequence[Held]]) -> list[Tensor]:
    """As `combined_digest` of each group, where ranks may hold shards; of an empty group, 0.

    Sums of rows add up, whatever part of a row each rank has. All ranks have to ask together.
    """
    shards = [held for group in groups for held in group if isinstance(held, Shard)]
    if not shards:
        nothing = torch.zeros((), dtype=torch.int64)
        return [combined_digest(cast(Sequence[Tensor], group)) if group else nothing for group in groups]
    world = shards[0].world
    rows, lengths = zip(*(_own_rows(group, world) for group in groups), strict=True)
    together = torch.cat(rows)
    world.sum(together)
    found = zip(groups, together.split([len(sums) for sums in rows]), lengths, strict=True)
    return [_finished(sums, length) if group else sums.sum() for group, sums, length in found]


def _own_rows(group: Sequence[Held], world: World) -> tuple[Tensor, int]:
    """This rank's terms of the sums of all rows, and the group's length in bytes."""
    places, length, end = [], 0, 0  # the latter in words
    for held in group:
        tensor, start = (held.local, held.start) if isinstance(held, Shard) else (held, 0)
        size = tensor.element_size()
        if isinstance(held, Shard) or world.leads:  # of what all hold, one adds it
            places.append((end + start * size // 8, tensor))
        size *= held.shape.numel()
        length, end = length + size, end - (-size // 8)
    sums = torch.zeros(end // ROW + 1, dtype=torch.int64, device=world.device)
    for place, tensor in places:
        _add_rows(sums, _words(tensor.to(world.device)), place)
    return sums, length


def _add_rows(sums: Tensor, words: Tensor, place: int) -> None:
    """Add what words, of which the first is at this place of a vector, give to the sums of its rows."""
    keys = _keys(words.device)
    while words.numel():
        row, before = divmod(place, ROW)
        if before or words.numel() < ROW:
            taken = min(ROW - before, words.numel())
            sums[row] += _times(words[None, :taken], keys[:, before : before + taken])[0]
        else:
            taken = min(words.numel(), CHUNK) // ROW * ROW
            sums[row : row + taken // ROW] += _times(words[:taken].view(-1, ROW), keys)
        words, place = words[taken:], place + taken


def combined_digests(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """`combined_digest` of each group, (groups,) of int64; in a few kernels where they are small and alike."""
    lengths = [_length(group) for group in groups]
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
