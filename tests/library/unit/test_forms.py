"""What is wrong with data of another form is said in one line: the key, the value seen, the value wanted."""

import math
from typing import Any

import pytest
from pydantic import Field

from samebits.base.forms import ABSENT, Form, NotFinite, Sha256, fault


class Inner(Form):
    """One of a list."""

    name: str = Field(alias="class")
    sizes: list[int | None] = ABSENT


class Outer(Form):
    """A whole file."""

    of: dict[str, list[Inner]]
    hash: Sha256 | None
    items: list[str | dict[str, Any]] = ABSENT
    sure: bool = ABSENT
    value: float | NotFinite = ABSENT


SOUND: dict[str, Any] = {"of": {"a": [{"class": "x", "more": 1}]}, "hash": None, "more": 1}
FAULTS = {
    "[] seen, a mapping wanted": [],
    "hash: missing": {"of": {}},
    "hash: 'a\\n' seen, text of the form ^[0-9a-f]{64}$ wanted": SOUND | {"hash": "a\n"},
    "of: None seen, a mapping wanted": SOUND | {"of": None},
    "of.a: 1 seen, a list wanted": SOUND | {"of": {"a": 1}},
    "of.a[1]: 'x' seen, a mapping wanted": SOUND | {"of": {"a": [{"class": ""}, "x"]}},
    "of.a[0].class: missing": SOUND | {"of": {"a": [{}]}},
    "of.a[0].class: 1 seen, text wanted": SOUND | {"of": {"a": [{"class": 1}]}},
    "of.a[0].sizes[1]: True seen, a whole number wanted": SOUND | {"of": {"a": [{"class": "", "sizes": [None, True]}]}},
    "of.a[0].sizes[0]: 1.0 seen, a whole number wanted": SOUND | {"of": {"a": [{"class": "", "sizes": [1.0]}]}},
    "of.1: 1 seen, text wanted": SOUND | {"of": {1: []}},
    "items[0]: 1 seen, text or a mapping wanted": SOUND | {"items": [1]},
    "sure: 1 seen, true or false wanted": SOUND | {"sure": 1},
    "value: False seen, a number or text wanted": SOUND | {"value": False},
    "value: 'x' seen, a number or text of the form ^(-?inf|nan)$ wanted": SOUND | {"value": "x"},
    "hash: '" + "0" * 58 + "… seen, text of the form ^[0-9a-f]{64}$ wanted": SOUND | {"hash": "0" * 99},
}


@pytest.mark.parametrize("said", FAULTS)
def test_fault_is_told_by_its_key(said: str):
    assert fault(FAULTS[said], Outer) == said


@pytest.mark.parametrize("more", [{}, {"value": 1}, {"value": math.inf}, {"value": "-inf"}, {"hash": "0" * 64}])
def test_sound_value_has_no_fault(more: dict[str, Any]):
    assert fault(SOUND | more, Outer) is None and fault([SOUND, SOUND], list[Outer]) is None
    assert fault(object(), object) is None
