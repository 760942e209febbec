"""The exact cosine: correctly rounded, against a library of arbitrary precision."""

import math

import mpmath
import pytest

from samebits.core.schedules import cosine

KNOWN = {(0, 7): 1.0, (7, 7): -1.0, (1, 2): 0.0, (1, 3): 0.5, (2, 3): -0.5, (14, 7): 1.0, (3, 2): 0.0, (-1, 3): 0.5}


@pytest.mark.parametrize(("angle", "value"), KNOWN.items())
def test_known_values_are_exact(angle: tuple[int, int], value: float):
    assert cosine(*angle) == value and math.copysign(1, cosine(*angle)) == math.copysign(1, value)


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 97, 1000, 2**31 - 1, 10**12])
def test_every_value_is_the_nearest_float(steps: int):
    points = {*range(0, 2 * steps + 1, max(1, steps // 300)), steps // 2, steps // 2 + 1, steps - 1}
    with mpmath.workprec(400):
        nearest = [float(mpmath.cospi(mpmath.mpf(point) / steps)) for point in sorted(points)]
    assert [cosine(point, steps) for point in sorted(points)] == nearest


def test_rate_falls_from_its_peak_to_zero():
    rates = [0.1 * (1 + cosine(step, 50)) / 2 for step in range(51)]
    assert rates[0] == 0.1 and rates[-1] == 0 and rates == sorted(rates, reverse=True)


def test_no_steps_are_refused():
    with pytest.raises(ZeroDivisionError):
        cosine(0, 0)
