"""Reading of params.yaml, with `--set KEY=VALUE` applied. All problems are reported at once."""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from ..base.shape import shown
from ..base.text import flatten, some
from ..core.errors import UserError
from .settings import Settings
from .yaml_file import parse_yaml, read_yaml

PARAMS = Path("params.yaml")
PLAIN = (str, int, float, type(None))  # of a truth, too: it is a whole number to Python
S = TypeVar("S", bound=Settings)

# What was once a key, or a key's value -> what became of it.
FORMER = {
    "parallel.shards": "renamed parallel.micro_batches",
    "parallel.lsb": "gone: gradients are added in float32, remove it",
    "parallel.gather": "gone: weights are gathered in their own dtype, remove it",
    "parallel.reduce=order_free": "renamed tree",
}

# Kind of problem -> the value that is wanted. pydantic fills in the braces.
WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_too_short": "text of at least {min_length} character",
    "string_pattern_mismatch": "text of the form {pattern}",
    "literal_error": "{expected}",
    "greater_than": "a number greater than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "a number less than {lt}",
    "less_than_equal": "{le} or less",
    "multiple_of": "a multiple of {multiple_of}",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a group of keys",
    "model_attributes_type": "a group of keys",
}


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
        details = error.errors()
        # the file's own fault, which is told once
        missing = [_key(detail) for detail in details if detail["type"] == "missing"]
        lacking = tuple(f"--set {key}{mark}" for key in missing for mark in (": ", "."))  # also a whole section
        problems = [problem for problem in problems if not problem.startswith(lacking)]
        problems += _problems(path, schema, details, set_here)
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
    """Change a key of `tree`; return what is wrong with the override, if anything is."""
    key, separator, text = override.partition("=")
    known = flatten(tree)
    if not separator:
        return f"--set {override}: wanted KEY=VALUE, for example --set seed=1"
    if key not in known:
        return f"--set {key}: {FORMER.get(key) or f'unknown key{_nearest(key, list(known))}'}"
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    try:
        value = parse_yaml(text, key) if text else ""
    except UserError:
        value = text  # not YAML, hence plain text: the schema says whether text will do
    if next(_odd(value), None):
        value = text  # a date, say
    # a name such as 2026 or null stays text where text stands now
    tree[name] = text if isinstance(tree[name], str) and not isinstance(value, str) else value
    return None


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(known)}"


def _problems(path: Path, schema: Any, details: Sequence[Any], set_here: Iterable[str]) -> list[str]:
    """A line for each problem; keys that are missing, or unknown, share one, but for those of former times."""
    missing, unknown = (
        [detail for detail in details if detail["type"] == kind] for kind in ("missing", "extra_forbidden")
    )
    lines = [_problem(path, detail, set_here) for detail in details if detail not in missing and detail not in unknown]
    former = [key for detail in unknown if (key := _key(detail)) in FORMER]
    lines += [f"{path}: {key}: {FORMER[key]}" for key in former]
    named = {FORMER[key].removeprefix("renamed ") for key in former}
    missing = [detail for detail in missing if _key(detail) not in named]
    unknown = [detail for detail in unknown if _key(detail) not in former]
    if unknown:
        keys = some([_key(detail) for detail in unknown])
        known = [name for detail in unknown for name in _siblings(schema, detail)]
        hint = _nearest(_key(unknown[0]), known) if len(unknown) == 1 else "; remove them, or mend what stands above"
        lines.insert(0, f"{path}: {keys}: unknown key{'s' * (len(unknown) > 1)}{hint}")
    if missing:
        keys = some([_key(detail) for detail in missing])
        lines.insert(
            0, f"{path}: {keys}: missing; add the key{'s' * (len(missing) > 1)} (the project's README describes each)"
        )
    return lines


def _siblings(schema: Any, detail: Any) -> list[str]:
    """The keys that are known where an unknown one stands."""
    *sections, _ = detail["loc"]
    for section in sections:
        schema = schema.model_fields[section].annotation
    return [".".join([*sections, name]) for name in schema.model_fields]


def _key(detail: Any) -> str:
    return ".".join(str(part) for part in detail["loc"])


def _problem(path: Path, detail: Any, set_here: Iterable[str]) -> str:
    key = _key(detail)
    is_set = any(key == each or key.startswith(f"{each}.") for each in set_here)
    where = f"--set {key}" if is_set else f"{path}: {key}" if key else str(path)
    if former := FORMER.get(f"{key}={detail['input']}"):
        return f"{where}={detail['input']}: {former}"
    if detail["type"] == "value_error":  # of a check of our own
        return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
    wanted = WANTED.get(detail["type"])
    # An owner's own type may bring a kind without a row above: pydantic's sentence is used then.
    wanted = f"{wanted.format(**detail.get('ctx', {}))} wanted" if wanted else detail["msg"]
    seen = "" if isinstance(detail["input"], dict | BaseModel) else f"{shown(detail['input'])} given, "
    return f"{where}: {seen}{wanted}"
