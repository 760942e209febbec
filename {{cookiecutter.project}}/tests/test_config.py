"""Your keys: params.yaml and config.py fit each other, and a slip is refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT, params
from ruamel.yaml import YAML

from samebits.core.errors import UserError


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
    assert set(found) <= set(params().flat())
    assert [key for key, line in found.items() if "#" not in lines[line]] == []


def test_unknown_key_is_refused_by_name():
    with pytest.raises(UserError, match=r"^--set seeed: unknown key"):
        params("seeed=1")


def test_wrong_values_are_refused_by_name():
    numbers = [key for key, value in params().flat().items() if not isinstance(value, str)]  # text may be any
    with pytest.raises(UserError) as refused:
        params(*(f"{key}={{not: this}}" for key in numbers))
    message = str(refused.value)
    assert [key for key in numbers if f"--set {key}: " not in message] == []


def test_shortened_training_fits_the_config():
    assert params(*params().verify.shorten)
