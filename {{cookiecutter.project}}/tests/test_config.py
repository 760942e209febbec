"""Your keys: params.yaml and config.py fit each other, and a slip is refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT, tested
from ruamel.yaml import YAML

import samebits as sb


def leaves(tree: Any, *sections: str) -> Iterator[tuple[str, int]]:
    """Each key of params.yaml as `section.key`, with the number of its line."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, *sections, name)
        else:
            yield ".".join([*sections, name]), tree.lc.key(name)[0]


def test_each_key_of_the_file_is_explained_beside_it():
    text = (ROOT / "params.yaml").read_text()
    lines = text.splitlines()
    found = dict(leaves(YAML().load(text)))
    assert set(found) <= set(tested.config().flat())
    assert [key for key, line in found.items() if "#" not in lines[line]] == []


def test_unknown_key_is_refused_by_name():
    with pytest.raises(sb.UserError, match=r"^--set seeed: unknown key"):
        tested.config("seeed=1")


def test_wrong_values_are_refused_by_name():
    numbers = [key for key, value in tested.config().flat().items() if not isinstance(value, str)]  # text may be any
    with pytest.raises(sb.UserError) as refused:
        tested.config(*(f"{key}={{not: this}}" for key in numbers))
    message = str(refused.value)
    assert [key for key in numbers if f"--set {key}: " not in message] == []


def test_shortened_training_fits_the_config():
    assert tested.config(*tested.config().verify.shorten)
