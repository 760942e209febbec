"""The exact square root: correctly rounded, differentiable, of any layout. The norm of gradients: exact however cut."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from threading import Barrier
from typing import Any, TypeVar

import numpy
import pytest
import torch

from samebits.core import exact
from samebits.core.ranks import World
from samebits.core.shards import Scattered, Shard

T = TypeVar("T")
CPU = torch.device("cpu")


@pytest.mark.parametrize(("kind", "word"), [(numpy.float32, numpy.uint32), (numpy.float64, numpy.uint64)])
def test_root_is_correctly_rounded_on_all_exponents(kind: Any, word: Any):
    """Against whole numbers: r is the nearest root of x if x lies between the squares of r's two midpoints."""
    bits = numpy.random.default_rng(1).integers(0, numpy.iinfo(word).max, 1 << 16, dtype=word, endpoint=True)
    edges = numpy.array([0.0, 1.0, numpy.finfo(kind).max, numpy.finfo(kind).tiny, numpy.finfo(kind).smallest_subnormal])
    x = numpy.concatenate([numpy.abs(bits.view(kind)), edges.astype(kind)])
    x = x[numpy.isfinite(x)]
    root = exact.sqrt(torch.from_numpy(x)).numpy()
    assert root.dtype == kind
    for value, found in zip(x[-5000:].tolist(), root[-5000:], strict=True):
        below, above = (float(numpy.nextafter(found, kind(to))) for to in (0, numpy.inf))
        value, middle = Fraction(value), Fraction(float(found))
        assert ((middle + Fraction(below)) / 2) ** 2 <= value <= ((middle + Fraction(above)) / 2) ** 2


def test_root_has_a_gradient_and_keeps_shape_layout_and_dtype():
    x = (torch.rand(5, 7, dtype=torch.float64) + 0.1).t().requires_grad_()
    assert torch.autograd.gradcheck(exact.sqrt, x) and torch.autograd.gradgradcheck(exact.sqrt, x)
    assert exact.sqrt(x).stride() == x.stride()
    assert exact.sqrt(torch.tensor(4.0)).item() == 2 and exact.sqrt(torch.tensor(-1.0)).isnan()
    x = torch.tensor([0.0, 4.0, 9.0], requires_grad=True)
    exact.sqrt(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([torch.inf, 0.25, 1 / 6]))
    with pytest.raises(TypeError, match=r"sqrt of torch.int64 asked for, float32 or float64 wanted"):
        exact.sqrt(torch.ones(2, dtype=torch.int64))


# ---- the norm of gradients


def with_gradients(*gradients: torch.Tensor) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


@pytest.mark.parametrize("scale", [1.0, 1e-44, 1e-20, 1e18, 3e38])
def test_norm_is_that_of_fractions(scale: float):
    gradients = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (3, 1000, 40_000)]
    gradients = [(gradient.clamp(-1, 1) * scale) for gradient in gradients]
    norm = exact.clip_grad_norm_(with_gradients(*gradients), 1.0)
    square = sum(Fraction(value) ** 2 for gradient in gradients for value in gradient.tolist())
    assert abs(Fraction(norm.item()) ** 2 / square - 1) < Fraction(1, 2**50)


def clipped(*gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm, and the gradients as one vector after they were scaled."""
    parameters = with_gradients(*gradients)
    norm = exact.clip_grad_norm_(parameters, 1.0)
    return norm, torch.cat([parameter.grad.reshape(-1) for parameter in parameters])


def test_norm_and_what_is_clipped_do_not_depend_on_the_cut():
    whole = torch.randn(70_001, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 3, 70_001)
    (norm, scaled), *others = (clipped(whole), clipped(*whole.split([1, 32_999, 37_000, 1])), clipped(*whole.split(7)))
    assert all(torch.equal(norm, other) and torch.equal(scaled, same) for other, same in others)
    assert torch.nn.utils.get_total_norm([scaled]).item() == pytest.approx(1.0, rel=1e-5)


def test_short_gradients_are_left_alone_and_missing_ones_left_out():
    short, missing = with_gradients(torch.ones(4), torch.ones(3))
    missing.grad = None
    assert exact.clip_grad_norm_([short, missing], 2.1).item() == 2.0
    assert torch.equal(short.grad, torch.ones(4)) and missing.grad is None
    assert exact.clip_grad_norm_([missing], 1.0).item() == 0.0


@pytest.mark.parametrize(
    "gradient",
    [
        *(torch.tensor([1.0, value]) for value in (torch.inf, -torch.inf, torch.nan)),
        torch.tensor([1.0, torch.nan], dtype=torch.float64),
        torch.full((4,), 1e308, dtype=torch.float64),  # its norm is beyond the range
    ],
)
def test_norm_of_what_is_not_finite_is_infinite(gradient: torch.Tensor):
    assert exact.clip_grad_norm_(with_gradients(gradient), 1.0).item() == float("inf")


# ---- the order in which its squares are added


def by_the_rule(vector: torch.Tensor) -> float:
    """The norm as `exact._norm` describes it, of numbers whose squares float64 holds."""
    squares = numpy.square(vector.double().numpy())
    blocks = numpy.pad(squares, (0, -len(squares) % exact.BLOCK)).reshape(-1, exact.BLOCK)
    while (half := blocks.shape[1] // 2) > 0:
        blocks = blocks[:, :half] + blocks[:, half:]

    def tree(sums: list[float]) -> float:
        """The perfect tree, cut off after its last leaf: on the left of each node lies the largest power of two."""
        if len(sums) == 1:
            return sums[0]
        left = 1 << (len(sums) - 1).bit_length() - 1
        return tree(sums[:left]) + tree(sums[left:])

    return math.sqrt(tree(blocks[:, 0].tolist()))


def numbers(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Over eight powers of ten, so that any other order of additions gives other bits."""
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, generator=generator) * torch.logspace(-4, 4, size)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 768, 2817, 12_345, 400_000])
def test_squares_are_added_as_the_rule_says(size: int, dtype: torch.dtype):
    vector = numbers(size, dtype)
    norm = exact.clip_grad_norm_(with_gradients(vector), 1.0).item()
    assert norm == by_the_rule(vector)
    assert norm == pytest.approx(math.sqrt(math.fsum(value**2 for value in vector.tolist())), rel=1e-12)


def test_neither_threads_nor_room_change_a_bit(monkeypatch: pytest.MonkeyPatch):
    gradients = [numbers(size) for size in (300, 1_000_003, 5, 70_000)]
    wanted, threads = by_the_rule(torch.cat(gradients)), torch.get_num_threads()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            for room in (exact.BLOCK, 3 * exact.BLOCK, 1 << 15, 1 << 17, 1 << 22):
                monkeypatch.setattr(exact, "ROOM", {"cpu": room})
                assert exact._norm(gradients).item() == wanted, (count, room)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1.7e308, 5e-324, 1e-310, 1.0])
def test_norm_of_float64_neither_overflows_nor_vanishes(scale: float):
    """Dividing by a power of two rounds nothing: the bits are those of the numbers near 1."""
    vector = numbers(5000, torch.float64)
    vector = vector / vector.abs().max() * scale / 100
    exponent = math.frexp(vector.abs().max().item())[1] if vector.any() else 0
    near = torch.tensor([math.ldexp(value, -exponent) for value in vector.tolist()], dtype=torch.float64)
    norm = exact._norm([vector[:1234], vector[1234:]]).item()
    assert norm == math.ldexp(by_the_rule(near), exponent)
    assert exact._norm([vector[:0]]).item() == 0.0 and exact._norm([vector, torch.ones(3)]).item() >= math.sqrt(3)


# ---- on ranks


def on_ranks(ranks: int, work: Callable[[World], T]) -> list[T]:
    """What work returns on each rank. Ranks are threads; they exchange numbers as an all-reduce does."""
    sent: list[Any] = [None] * ranks
    barrier = Barrier(ranks, timeout=60)

    class Threads(World):
        def _reduce(self, tensor: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
            sent[self.rank] = tensor.clone()
            barrier.wait()
            tensor.copy_(reduce(torch.stack(sent)))
            barrier.wait()

        def sum(self, tensor: torch.Tensor, asynchronous: bool = False) -> None:
            assert not tensor.is_floating_point(), "a backend adds in its own order"
            self._reduce(tensor, lambda all_: all_.sum(0))

        def largest(self, tensor: torch.Tensor) -> None:
            self._reduce(tensor, lambda all_: all_.amax(0))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: work(Threads(rank, ranks, CPU)), range(ranks)))


Cuts = Sequence[Sequence[int] | None]  # for each gradient the edges of its shards; None: every rank holds it


def sharded(gradients: Sequence[torch.Tensor], cuts: Cuts, world: World) -> list[torch.Tensor]:
    """What stands in `.grad` on a rank."""
    held = []
    for gradient, edges in zip(gradients, cuts, strict=True):
        part = gradient[edges[world.rank] : edges[world.rank + 1]].clone() if edges else gradient.clone()
        held.append(Scattered(Shard(part, edges, gradient.shape, world)) if edges else part)
    return held


def norms(gradients: Sequence[torch.Tensor], cuts: Cuts, ranks: int) -> list[torch.Tensor]:
    """The norm that each rank gets; what it scales has the bits of gradients that are not cut."""

    def work(world: World) -> tuple[torch.Tensor, list[torch.Tensor]]:
        parameters = with_gradients(*gradients)
        for parameter, gradient in zip(parameters, sharded(gradients, cuts, world), strict=True):
            parameter.grad = gradient
        norm = exact.clip_grad_norm_(parameters, 1.0)
        return norm, [exact._here(parameter.grad) for parameter in parameters]

    got = on_ranks(ranks, work)
    parts = zip(cuts, *(parts for _, parts in got), strict=True)
    scaled = [torch.cat(shards) if edges else shards[0] for edges, *shards in parts]
    assert torch.equal(torch.cat(scaled), clipped(*gradients)[1])
    return [norm for norm, _ in got]


SIZES = (100, 40_000, 7, 513, 0, 4096, 9000, 64, 32, 2560)


def any_cuts(ranks: int, unit: int, seed: int) -> Cuts:
    """Edges at multiples of a unit, some of them equal; some gradients are not cut."""
    draw = numpy.random.default_rng([ranks, unit, seed])
    inner = [sorted(draw.integers(0, size // unit + 1, ranks - 1) * unit) for size in SIZES]
    edges = [[0, *map(int, places), size] for places, size in zip(inner, SIZES, strict=True)]
    return [places if draw.random() < 0.7 or place == 1 else None for place, places in enumerate(edges)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_norm_is_the_same_wherever_shards_are_cut(ranks: int, dtype: torch.dtype):
    gradients = list(numbers(sum(SIZES), dtype).split(SIZES))
    wanted = exact._norm(gradients)
    for unit in (1, 32, 256):
        for seed in range(4):
            cuts = any_cuts(ranks, unit, seed)
            assert all(torch.equal(norm, wanted) for norm in norms(gradients, cuts, ranks)), cuts


def test_one_rank_may_hold_all_or_nothing():
    gradients = list(numbers(sum(SIZES)).split(SIZES))
    for owner in range(3):
        cuts = [[0] * (owner + 1) + [size] * (3 - owner) for size in SIZES]
        assert {norm.item() for norm in norms(gradients, cuts, 3)} == {by_the_rule(torch.cat(gradients))}


def test_infinity_on_one_rank_is_seen_by_all():
    for dtype in (torch.float32, torch.float64):
        for value in (torch.inf, torch.nan):
            gradient = numbers(1000, dtype)
            gradient[700] = value
            got = on_ranks(2, lambda world, whole=gradient: exact._norm(sharded([whole], [(0, 500, 1000)], world)))
            assert [norm.item() for norm in got] == [torch.inf, torch.inf]


def summed(halves: Any) -> torch.Tensor:
    """torch's sum, whose order is its own."""
    left, right = halves[0]
    return left.sum(1) + right.sum(1)


def neighbours(halves: Any) -> torch.Tensor:
    """Another order in a block."""
    squares = torch.cat(halves[0], 1)
    while squares.shape[1] > 1:
        squares = squares[:, ::2] + squares[:, 1::2]
    return squares[:, 0]


def odd_one_first(sums: torch.Tensor) -> torch.Tensor:
    """An odd last one is not passed up, but added to the first."""
    sums = sums[: int(sums.nonzero()[-1]) + 1].clone()
    while len(sums) > 1:
        if len(sums) % 2:
            sums[0] += sums[-1]
            sums = sums[:-1]
        sums = sums[::2] + sums[1::2]
    return sums[0]


def uncut(gradients: Any, mine: int, layout: Any = exact._layout) -> Any:
    """Ranks know of no block that lies on several of them: each adds what it holds of one."""
    return [], *layout(gradients, mine)[1:]


FAULTS = {"_folded": (summed, neighbours), "total": (torch.sum, odd_one_first), "_layout": (uncut,)}


@pytest.mark.parametrize(("part", "fault"), [(part, fault) for part, faults in FAULTS.items() for fault in faults])
def test_another_order_is_found(part: str, fault: Any, monkeypatch: pytest.MonkeyPatch):
    """In one of some draws, as the root hides some of a sum's last bits; without the fault, in none."""
    draws = torch.randn(16, sum(SIZES), generator=torch.Generator().manual_seed(1))
    cuts = any_cuts(3, 32, 0)

    def found(draw: torch.Tensor) -> set[float]:
        gradients = draw.split(SIZES)
        return {norm.item() for norm in on_ranks(3, lambda world: exact._norm(sharded(gradients, cuts, world)))}

    assert [found(draw) for draw in draws] == [{by_the_rule(draw)} for draw in draws]
    monkeypatch.setattr(exact, part, fault)
    assert [found(draw) for draw in draws] != [{by_the_rule(draw)} for draw in draws]
