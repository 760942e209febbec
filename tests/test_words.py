"""The words of the field stand everywhere, and the old ones nowhere: in code, keys, messages and documents."""

import ast
import re
from collections.abc import Iterator

import pytest
from bake import ROOT
from baked import PROJECT, tracked

# In parts, so that this file does not hold what it forbids.
IDENTIFIERS = {"Ref" + "used", "Fail" + "ure", "to" + "ld", "te" + "ll", "as" + "ked", "le" + "ads", "from_" + "lead"}
IDENTIFIERS |= {"SWI" + "TCHES", "swi" + "tches", "Tur" + "ns", "Sto" + "ck", "Pro" + "mise", "un" + "proven"}
IDENTIFIERS |= {"in_" + "pieces", "machi" + "nery", "Machi" + "nery", "Hid" + "den"}
WORDS = re.compile(rf"\b(machi{'nery'}|la{'b'}|in pie{'ces'}|the lea{'d'}|Ref{'used'}|un{'proven'})\b")
HISTORY = {"CHANGELOG.md"}


def texts() -> Iterator[tuple[str, str]]:
    for name in tracked():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".yaml", ".toml", ".j2"} and name not in HISTORY and path.is_file():
            yield name, path.read_text()


def names_in(source: str) -> set[str]:
    """The names of a Python file: of variables, attributes, parameters, functions, classes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                found |= {*name.split(".")}
    return found


def test_old_names_stand_nowhere() -> None:
    used = {name: sorted(names_in(text) & IDENTIFIERS) for name, text in texts() if name.endswith(".py")}
    assert len(used) > 300 and {name: old for name, old in used.items() if old} == {}


def test_old_words_stand_nowhere() -> None:
    lines = [f"{name}: {line}" for name, text in texts() for line in text.splitlines() if WORDS.search(line)]
    assert [line for line in lines if "importlib." not in line] == []


@pytest.mark.parametrize("planted", ["class {}: pass", "def f({}): pass", "x.{}()", "from y import {}", "f({}=1)"])
def test_old_name_is_found(planted: str) -> None:
    for name in IDENTIFIERS:
        assert names_in(planted.format(name)) & IDENTIFIERS == {name}
    assert PROJECT and not names_in(planted.format("UserError")) & IDENTIFIERS
