"""The table of portable operations says what was observed: an operation that differs once, anywhere, is marked."""

import pytest
from portability import HERE, HERE_SHORT, QEMU, compared, document, marked, of_builds

SAME = {"one": "aa", "two": "bb"}


def observed(**changed: dict[str, str | None]) -> dict[str, dict[str, object]]:
    """What three CPUs and an emulator give for two operations, equal but for what was changed on a CPU."""
    cpus = {"here": HERE, "short": HERE_SHORT, "played": "Zen 2", "emulated": QEMU}
    facts = {"torch": "0", "differentiable": ["exp", "sqrt", "tan"], "failed": {}}
    return {
        name: facts | {"calls": {"sqrt float32": SAME | changed.get(cpu, {}), "exp float32": SAME}}
        for cpu, name in cpus.items()
    }


def test_equal_calls_are_no_difference() -> None:
    assert marked(compared(observed())) == {"exp": ["float32"], "sqrt": ["float32"]}


@pytest.mark.parametrize(
    "changed",
    [
        {"played": {"two": "cc"}},
        {"emulated": {"two": "cc"}},
        {"here": {"two": None}},  # two outputs for one input
        {"played": {"two": None}},
        {"short": {"one": "cc"}},
    ],
)
def test_one_call_that_differs_marks_its_operation_alone(changed: dict[str, dict[str, str | None]]) -> None:
    seen = observed(**changed)
    result = compared(seen)
    assert marked(result) == {"exp": ["float32"], "sqrt": ["-float32"]}
    message = document(seen, result)
    assert (
        "| `sqrt float32` |" in message
        and "| `exp float32` |" not in message
        and "1 operations never differed" in message
    )


def test_calls_with_other_inputs_are_not_compared() -> None:
    """Where an operation before has differed, this one gets other inputs: that is no fault of its own."""
    seen = observed()
    seen["Zen 2"]["calls"] = {"sqrt float32": {"one": "aa", "three": "cc"}, "exp float32": SAME}
    assert marked(compared(seen))["sqrt"] == ["float32"]


@pytest.mark.parametrize("calls", [{}, {"three": "aa"}])
def test_operation_that_a_played_cpu_did_not_run_is_left_out(calls: dict[str, str]) -> None:
    seen = observed()
    seen["Zen 2"]["calls"] = {"sqrt float32": calls, "exp float32": SAME}
    assert marked(compared(seen)) == {"exp": ["float32"]}
    assert "`sqrt`, `tan`" in document(seen, compared(seen))  # among those that were not compared


@pytest.mark.parametrize(("changed", "said"), [({}, "0 operations differ.**"), ({"two": "cc"}, "`sqrt float32`.**")])
def test_builds_are_compared_call_by_call(changed: dict[str, str | None], said: str) -> None:
    """Inputs that one build alone has seen are no difference."""
    seen = observed(here=changed | {"three": "dd"})
    message = of_builds(seen[HERE] | {"build": "1+cpu"}, seen["Zen 2"] | {"build": "1+cu1"}, "A CPU.")
    assert "torch 1+cpu and 1+cu1" in message and said in message and "4 calls of 2 operations" in message
