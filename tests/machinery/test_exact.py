"""The exact square root: correctly rounded, differentiable, of any layout."""

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
