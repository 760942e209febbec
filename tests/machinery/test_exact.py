"""The exact square root: correctly rounded, differentiable, of any layout. The norm of gradients: exact however cut."""

from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from project.repro.training import exact


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


def test_norm_and_what_is_clipped_do_not_depend_on_the_cut_or_the_order():
    whole = torch.randn(70_001, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 3, 70_001)
    parts = [whole[:1], whole[1:33_000], whole[33_000:70_000], whole[70_000:]]
    ways = [with_gradients(whole), with_gradients(*parts), with_gradients(*parts[::-1])]
    norms = [exact.clip_grad_norm_(way, 1.0) for way in ways]
    assert torch.equal(norms[0], norms[1]) and torch.equal(norms[0], norms[2])
    clipped = [torch.cat([parameter.grad for parameter in way]) for way in (ways[0], ways[1], ways[2][::-1])]
    assert torch.equal(clipped[0], clipped[1]) and torch.equal(clipped[0], clipped[2])
    assert torch.nn.utils.get_total_norm([clipped[0]]).item() == pytest.approx(1.0, rel=1e-5)


def test_short_gradients_are_left_alone_and_missing_ones_left_out():
    short, missing = with_gradients(torch.ones(4), torch.ones(3))
    missing.grad = None
    assert exact.clip_grad_norm_([short, missing], 2.1).item() == 2.0
    assert torch.equal(short.grad, torch.ones(4)) and missing.grad is None
    assert exact.clip_grad_norm_([missing], 1.0).item() == 0.0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_norm_of_what_is_not_finite_is_infinite(value: float):
    assert exact.clip_grad_norm_(with_gradients(torch.tensor([1.0, value])), 1.0).item() == float("inf")
