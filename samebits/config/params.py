"""Reading of params.yaml, with `--set KEY=VALUE` applied. All problems are reported at once."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from ..base.shape import shown
from ..base.text import flatten
from ..core.errors import UserError
from .settings import IGNORED, Settings
from .yaml_file import parse_yaml, read_yaml

PARAMS = Path("params.yaml")
PLAIN = (str, int, float, type(None))  # of a truth, too: it is a whole number to Python
S = TypeVar("S", bound=Settings)


def load(schema: type[S], path: Path = PARAMS, overrides: Sequence[str] = ()) -> S:
    """Read `path` (YAML), apply `KEY=VALUE` overrides, and check everything against `schema`.

    Raises:
        UserError: no such file, broken YAML, an unknown or missing key, a value out of range; all at once.
    """
    if not path.exists():
        raise UserError(f"{path}: missing. Run from the project's root, where params.yaml lies.")
    tree = read_yaml(path, dict, f"Mend it, or restore it: git checkout {path.name}")
    if odd := [f"{path}: {message}" for message in _odd(tree)]:
        raise UserError("\n".join(odd))
    _fill(tree, schema)
    problems = [problem for override in overrides if (problem := _override(tree, override))]
    set_here = {override.partition("=")[0] for override in overrides}
    try:
        # as JSON, in which a list may be a tuple, while no number, truth or text may stand for another
        config = schema.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        from . import problems as worded

        details = error.errors()
        # the file's own fault, which is told once
        missing = [worded.key_of(detail) for detail in details if detail["type"] == "missing"]
        lacking = tuple(f"--set {key}{mark}" for key in missing for mark in (": ", "."))  # also a whole section
        problems = [problem for problem in problems if not problem.startswith(lacking)]
        problems += worded.problems(path, schema, details, set_here)
    if problems:
        raise UserError("\n".join(problems))
    return config


def _fill(tree: dict[str, Any], schema: type[BaseModel]) -> None:
    """Give the keys that a tree lacks their defaults, so that `--set` knows them."""
    for name, field in schema.model_fields.items():
        if not field.is_required():
            tree.setdefault(name, to_jsonable_python(field.get_default()))
        kind = field.annotation
        if isinstance(tree.get(name), dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
            _fill(tree[name], kind)


def _odd(value: Any, key: str = "") -> Iterator[str]:
    """What of a value no config can hold, each in words: keys that are no text, dates and other things of YAML."""
    if isinstance(value, dict):
        before = f"{key}." if key else ""
        yield from (
            f"{before}{shown(each)}: a key that is text wanted; put it in quotes"
            for each in value
            if not isinstance(each, str)
        )
        for name, inner in value.items():
            yield from _odd(inner, f"{before}{name}") if isinstance(name, str) else ()
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _odd(inner, f"{key}.{number}")
    elif not isinstance(value, PLAIN):
        yield f"{key}: {shown(value)} given, a number, text, a truth or a list wanted; put text in quotes"


def _override(tree: dict[str, Any], override: str) -> str | None:
    """Apply an override to `tree`, in place. Return the problem with the override, or None."""
    key, separator, text = override.partition("=")
    known = flatten(tree)
    if not separator:
        return f"--set {override}: wanted KEY=VALUE, for example --set seed=1"
    value = _value(text, key)
    if key not in known:
        from .problems import FORMER, nearest

        if key in IGNORED and value == IGNORED[key]:
            return None
        return f"--set {key}: {FORMER.get(key) or f'unknown key{nearest(key, list(known))}'}"
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    # If the key holds text now, a name such as 2026 or null stays text.
    tree[name] = text if isinstance(tree[name], str) and not isinstance(value, str) else value
    return None


def _value(text: str, key: str) -> Any:
    """Return the value in the text of an override: as YAML if a config can hold it, or else the text itself."""
    try:
        value = parse_yaml(text, key) if text else ""
    except UserError:
        return text
    return text if next(_odd(value), None) else value
