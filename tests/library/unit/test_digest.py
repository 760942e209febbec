"""The tensor digest: every change of bits, type, shape, name or place shows; layout and threads do not."""

import itertools

import pytest
import torch
from torch import Tensor

from samebits.core.digest import (
    ROW,
    _keys,
    combined_digest,
    combined_digests,
    held_digests,
    mix,
    tensor_digest,
    tensor_digests,
)
from samebits.core.ranks import World
from samebits.core.shards import Shard

MASK = 2**64 - 1


def number(tensor: Tensor) -> int:
    return int(tensor_digest(tensor)) & MASK


def by_hand(words: list[int], length: int | None = None) -> int:
    """The digest in plain integers, from its definition; shifts keep the sign."""
    keys = [scrambled(scrambled(i, 2), i) | 1 for i in range(2 * ROW)]
    rows = [words[first : first + ROW] for first in range(0, len(words), ROW)]
    if len(words) % ROW == 0:
        rows.append([])  # what is left, too
    total = (8 * len(words) if length is None else length) * 0x9E3779B97F4A7C15  # in bytes
    for number, row in enumerate(rows, 1):
        sums = (word * keys[i] + (word >> 32) * keys[ROW + i] for i, word in enumerate(row))
        total += scrambled(signed(sum(sums)), number)
    return total & MASK


def scrambled(word: int, place: int) -> int:
    mixed = signed(word + place * 0x9E3779B97F4A7C15)
    mixed = signed((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> 27)


def signed(word: int) -> int:
    return ((word & MASK) ^ 2**63) - 2**63


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flipped(tensor: Tensor, element: int, bit: int) -> Tensor:
    """A copy with one bit of one element changed."""
    other = tensor.clone()
    raw = other.view(-1).view(torch.uint8)
    raw[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    return other


GOLDEN = [
    (torch.tensor(1.0), "abd19cb8144ad568"),
    (torch.zeros(3), "6abd27f94b07a096"),
    (torch.arange(10), "9d10631ae2014909"),
    (torch.tensor([[1.5, -2.0], [0.0, -0.0]], dtype=torch.bfloat16), "47d531809d90a62b"),
    (torch.tensor([True, False, True]), "4b2cfd4c847cae1e"),
    (torch.tensor([1 + 2j, -3j]), "e998218c186e89d2"),
]


@pytest.mark.parametrize(("tensor", "expected"), GOLDEN, ids=lambda value: str(value)[:30])
def test_values_written_down_stay(tensor: Tensor, expected: str):
    assert f"{number(tensor):016x}" == expected


@pytest.mark.parametrize("length", [1, 1000, ROW - 1, ROW, ROW + 1, 2 * ROW, 3 * ROW + 5])
def test_definition_in_plain_integers_gives_the_same(length: int):
    tensor = torch.randint(-(2**62), 2**62, (length,), generator=torch.Generator().manual_seed(0))
    assert number(tensor) == by_hand(tensor.tolist())
    floats = torch.cat([values(2 * length - 1), torch.zeros(1)])  # the last word is half filled
    assert number(floats[:-1]) == by_hand(floats.view(torch.int64).tolist(), 4 * (2 * length - 1))


def test_no_two_keys_let_flips_of_upper_bits_cancel():
    """Two flips of bit 31 of a half word add up to 2**31 (k1 +- k2): never 0, if these differ modulo 2**33."""
    low = (_keys(torch.device("cpu")).flatten() % 2**33).tolist()
    assert all(key % 2 for key in low)
    assert len({min(key, 2**33 - key) for key in low}) == len(low)


def test_signs_flipped_in_pairs_show():
    for count in (2, 3, 4, 100, ROW):
        tensor = values(count)
        others = [tensor, -tensor] + [flipped(flipped(tensor, 0, 31), other, 31) for other in (1, count // 2)]
        assert len({number(other) for other in others}) == {2: 2, 3: 3}.get(count, 4), count
    wide = values(64).double()
    assert number(wide) != number(-wide)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int16, torch.float16, torch.bfloat16,
    torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5)], ids=str)
def test_every_flipped_bit_shows(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = values(*shape).mul(3).to(dtype)
    elements, bits = tensor.numel(), tensor.element_size() * 8
    places = sorted({0, elements // 2, elements - 1})
    changed = [flipped(tensor, *place) for place in itertools.product(places, range(bits))]
    digests = [number(other) for other in [tensor, *changed]]
    assert len(set(digests)) == len(digests)  # each is noticed, and each looks different


def test_flips_in_a_large_tensor_show_wherever_they_are():
    tensor = values(1 << 16)
    whole = number(tensor)
    for element in [*range(0, 1 << 16, 4099), (1 << 16) - 1]:
        assert all(number(flipped(tensor, element, bit)) != whole for bit in (0, 22, 23, 30, 31)), element


def test_what_an_xor_would_not_see_shows():
    rows = values(4, 6)
    pair = flipped(flipped(rows, 2, 13), 9, 13)  # one bit of two elements
    swapped = rows.flatten()[[1, 0, *range(2, 24)]].view(4, 6)
    others = [rows, rows[[1, 0, 2, 3]], rows.flip(0), swapped, rows.flatten()[torch.arange(24) ^ 1], pair]
    assert len({number(other) for other in others}) == len(others)


@pytest.mark.parametrize("constant", [0.0, 1.0, -2.5])
def test_runs_of_a_constant_show_their_length_and_what_is_flipped_in_pairs(constant: float):
    runs = [torch.full((length,), constant) for length in (0, 1, 2, 3, 4, 100, 101, 102)]
    pairs = [flipped(flipped(runs[-1], first, 7), second, 7) for first, second in ((0, 1), (0, 50), (3, 101))]
    assert len({number(tensor) for tensor in [*runs, *pairs]}) == len(runs) + len(pairs)


def test_zeros_and_nans_are_told_apart_by_their_bits():
    patterns = [0, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000]
    tensors = [torch.tensor([signed32(p)], dtype=torch.int32).view(torch.float32) for p in patterns]
    assert tensors[0].equal(tensors[1]) and tensors[2].isnan().all()
    assert len({number(tensor) for tensor in tensors}) == len(patterns)
    assert number(tensors[3]) == number(tensors[3].clone())  # a NaN equals itself here


def signed32(word: int) -> int:
    return (word ^ 2**31) - 2**31


def test_layout_in_memory_does_not_matter():
    images = values(2, 3, 4, 5)
    same = [
        images.to(memory_format=torch.channels_last),
        images.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.stack([images, images + 1], -1)[..., 0],  # every other element of a larger storage
        images.clone().requires_grad_(),
    ]
    assert not any(other.is_contiguous() for other in same[:3])
    assert {number(other) for other in same} == {number(images)}
    assert number(images.transpose(2, 3)) != number(images)
    complex_ = torch.complex(values(4), values(4, seed=1))
    for lazy in (complex_.conj(), complex_.conj().imag):  # negated only when read
        assert number(lazy) == number(lazy.clone().resolve_conj().resolve_neg()) != number(complex_)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 2)], ids=str)
def test_empty_tensors_have_a_digest(shape: tuple[int, ...]):
    assert number(torch.empty(shape)) == by_hand([])


def test_digests_of_a_mapping_are_those_of_its_tensors():
    tensors = {"b": values(3), "a": torch.arange(4), "c": torch.tensor(True)}
    assert tensor_digests(tensors).tolist() == [int(tensor_digest(t)) for t in tensors.values()]


# ---- over several tensors


def test_combined_digest_notices_order_and_every_part(monkeypatch: pytest.MonkeyPatch):
    parts = [values(70), torch.arange(9), torch.ones(3, 3, dtype=torch.bfloat16), torch.tensor(2.0)]
    seen = {int(combined_digest(order)) for order in itertools.permutations(parts)}
    assert len(seen) == 24
    whole = int(combined_digest(parts))
    for place, part in enumerate(parts):
        others = [*parts[:place], flipped(part, 0, 3), *parts[place + 1 :]]
        assert int(combined_digest(others)) != whole


@pytest.mark.parametrize("size", [ROW, 3 * ROW, 1 << 17])
def test_how_many_words_are_joined_does_not_matter(size: int, monkeypatch: pytest.MonkeyPatch):
    lengths = 7, 2 * ROW, 5, 2 * ROW - 1, 10 * ROW, 3, 0, 2 * ROW - 15  # in float32: half as many words
    tensors = [values(length, seed=length) for length in lengths]
    whole = torch.cat([t if t.numel() % 2 == 0 else torch.cat([t, torch.zeros(1)]) for t in tensors])
    monkeypatch.setattr("samebits.core.digest.CACHED", size)
    filled = 4 * sum(length % 2 for length in lengths)  # bytes that fill words up are not counted
    wanted = number(whole) - filled * 0x9E3779B97F4A7C15
    assert int(combined_digest(tensors)) & MASK == wanted & MASK


@pytest.mark.parametrize("shape", [(3,), (8, 1, 8, 8), (), (2 * ROW,), (2 * ROW - 1,), (5 * ROW,), (0,)])
def test_digests_of_groups_are_those_of_each(shape: tuple[int, ...]):
    groups = [[values(*shape, seed=n), torch.arange(n, n + 8)] for n in range(5)]
    assert combined_digests(groups).tolist() == [int(combined_digest(group)) for group in groups]
    groups.append([values(9)])
    assert combined_digests(groups).tolist() == [int(combined_digest(group)) for group in groups]


def test_mixing_depends_on_the_place():
    words, places = torch.tensor([9, 5]), torch.tensor([1, 2])
    assert mix(words, places).tolist() == [int(mix(words[0], 1)), int(mix(words[1], 2))]
    assert int(mix(words[0], 1)) == scrambled(9, 1) != scrambled(9, 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_digests_of_shards_are_those_of_the_whole(ranks: int, monkeypatch: pytest.MonkeyPatch):
    """The ranks' sums of rows, added up as an all-reduce does."""
    tensors = [torch.randn(2 * ROW * 4 + 96), torch.randn(5), torch.randn(64, 32).bfloat16()]
    edges = [sorted([0, *((tensor.numel() * rank // ranks // 64) * 64 for rank in range(1, ranks)), tensor.numel()])
             for tensor in tensors]  # fmt: skip
    sums: list[torch.Tensor] = []
    monkeypatch.setattr(World, "sum", lambda self, tensor: sums.append(tensor.clone()))
    groups = []
    for rank in range(ranks):
        world = World(rank, ranks, torch.device("cpu"))
        cut = [Shard(tensor.view(-1)[places[rank] : places[rank + 1]], places, tensor.shape, world)
               for tensor, places in zip(tensors, edges, strict=True)]  # fmt: skip
        groups.append([[cut[0], tensors[1], cut[2]], [cut[2]], []])  # what all hold is added once
        held_digests(groups[-1])
    together = torch.stack(sums).sum(0)
    monkeypatch.setattr(World, "sum", lambda self, tensor: tensor.copy_(together))
    wanted = [int(combined_digest(tensors)), int(tensor_digest(tensors[2])), 0]
    assert [int(digest) for digest in held_digests(groups[0])] == wanted
