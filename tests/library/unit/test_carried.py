"""Which local variables a loop carries from one turn to the next, as its bytecode says."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from samebits.guards.carried import carried

Loop = Callable[[Any, Any], object]


def found(loop: Loop) -> set[str]:
    """The variables that a function's loop over `steps` carries."""
    names: list[set[str]] = []

    def steps() -> Iterator[int]:
        frame = sys._getframe(1)
        while frame.f_code is not loop.__code__:
            frame = frame.f_back
        names.append({*carried(frame.f_code, frame.f_lasti)})
        yield from range(3)

    loop(steps(), lambda *given: 1.0)
    return names[0]


def best(steps: Any, f: Any) -> None:
    best, last = 0.0, None
    for step in steps:
        value = f(step)
        if value > best:
            best, last = value, step
    f(last)


def read_before_it_is_changed(steps: Any, f: Any) -> None:
    rate = 1.0
    for step in steps:
        f(rate)
        rate = f(step)


def changed_now_and_then(steps: Any, f: Any) -> None:
    rate = 1.0
    for step in steps:
        if step % 2:
            rate = f(step)
        f(rate)


def through_other_iterators(steps: Any, f: Any) -> None:
    total = 0.0
    for _, (step, _) in enumerate(zip(steps, range(9), strict=False)):
        total += f(step)


def in_a_comprehension_beside(steps: Any, f: Any) -> None:
    seen = 0
    for step in steps:
        seen = sum(each for each in [seen, step])


def left_by_continue(steps: Any, f: Any) -> None:
    waited = 0
    for step in steps:
        if f(step):
            waited = 0
            continue
        waited += 1
        if waited > 2:
            break


def guarded(steps: Any, f: Any) -> None:
    scale = 1.0
    for step in steps:
        try:
            scale = scale * f(step)
        finally:
            f(step)


def used_after_the_loop(steps: Any, f: Any) -> None:
    measured = {}
    for step in steps:
        if step % 2:
            measured = {"a": f(step)}
    f(**measured) if not measured else f(measured)


CARRIES: dict[Loop, set[str]] = {
    best: {"best", "last"},
    read_before_it_is_changed: {"rate"},
    changed_now_and_then: {"rate"},
    through_other_iterators: {"total"},
    in_a_comprehension_beside: {"seen"},
    left_by_continue: {"waited"},
    guarded: {"scale"},
    used_after_the_loop: {"measured"},
}


@pytest.mark.parametrize(("loop", "names"), CARRIES.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_variable_that_a_later_turn_reads_is_found(loop: Loop, names: set[str]):
    assert found(loop) == names


def plain(steps: Any, f: Any) -> None:
    model, value, names, table = f, 0.0, ["a"], {}
    for step in steps:
        for name in names:
            value = f(name)
            table[name] = value
        rest = [each for each in names if each]
        value = f(step)
        if value > 0.5:
            other = value
            f(other)
        else:
            other = 0.5
        with pytest.MonkeyPatch.context() as patch:
            f(patch, rest, other, model, step)


def begun_before_the_inner_loop(steps: Any, f: Any) -> None:
    loss, count = 0.0, None
    for step in steps:
        for batch in range(3):
            loss = f(step, batch)
            count = batch
            if batch % 2:
                continue
            f(count)
        f(loss, count)


def nested(steps: Any, f: Any) -> None:
    seed, found = 0, 0.0
    for seed in range(1):
        f(seed)
        for step in steps:
            f(step, seed)
        found += seed


def inner(steps: Any, f: Any) -> None:
    for step in steps:
        total = 0.0
        for each in range(3):
            total += f(each, step)
        f(total)


@pytest.mark.parametrize("loop", [plain, begun_before_the_inner_loop, nested, inner], ids=lambda loop: loop.__name__)
def test_variable_of_one_turn_or_of_another_loop_is_not(loop: Loop):
    assert found(loop) == set()
