"""Reading of params.yaml, with `--set KEY=VALUE` applied. All problems are reported at once."""

import difflib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ..differences import flatten
from ..errors import Refused
from .settings import Settings

PARAMS = Path("params.yaml")
S = TypeVar("S", bound=Settings)

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
        Refused: no such file, broken YAML, an unknown or missing key, a value out of range; all at once.
    """
    try:
        tree = YAML(typ="safe").load(path.read_text("utf-8"))
    except FileNotFoundError:
        raise Refused(f"{path}: missing. Run from the project's root, where params.yaml lies.") from None
    except (UnicodeDecodeError, YAMLError) as error:
        raise Refused(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise Refused(f"{path}: {type(tree).__name__} seen, a mapping of keys wanted")
    problems = [problem for override in overrides if (problem := _override(tree, override))]
    set_here = {override.partition("=")[0] for override in overrides}
    try:
        config = schema.model_validate(tree)
    except ValidationError as error:
        problems += [_problem(path, schema, detail, set_here) for detail in error.errors()]
    if problems:
        raise Refused("\n".join(problems))
    return config


def _override(tree: dict[str, Any], override: str) -> str | None:
    """Change a key of `tree`; return what is wrong with the override, if anything is."""
    key, separator, text = override.partition("=")
    known = flatten(tree)
    if not separator:
        return f"--set {override}: wanted KEY=VALUE, for example --set seed=1"
    if key not in known:
        return f"--set {key}: unknown key{_nearest(key, list(known))}"
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    try:
        value = YAML(typ="safe").load(io.StringIO(text)) if text else ""
    except YAMLError:
        value = text  # not YAML, hence plain text: the schema says whether text will do
    # a name such as 2026 or null stays text where text stands now
    tree[name] = text if isinstance(tree[name], str) and not isinstance(value, str) else value
    return None


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(known)}"


def _problem(path: Path, schema: Any, detail: Any, set_here: Iterable[str]) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    where = f"--set {key}" if key in set_here else f"{path}: {key}" if key else str(path)
    if detail["type"] == "missing":
        return f"{where}: missing; add the key (the project's README describes each)"
    if detail["type"] == "extra_forbidden":
        *sections, _ = detail["loc"]
        for section in sections:
            schema = schema.model_fields[section].annotation
        known = [".".join([*sections, name]) for name in schema.model_fields]
        return f"{where}: unknown key{_nearest(key, known)}"
    if detail["type"] == "value_error":  # of a check of our own
        return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
    wanted = WANTED.get(detail["type"])
    # An owner's own type may bring a kind without a row above: pydantic's sentence is used then.
    wanted = f"{wanted.format(**detail.get('ctx', {}))} wanted" if wanted else detail["msg"]
    seen = "" if isinstance(detail["input"], dict | BaseModel) else f"{detail['input']!r} given, "
    return f"{where}: {seen}{wanted}"
