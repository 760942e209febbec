"""What is wrong with a config, in lines; few runs need it."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..base.shape import shown
from ..base.text import some
from .settings import Settings

UPGRADE = "samebits docs upgrade"
# A key of earlier releases, or a value that a key does not accept -> the reason, or what to do.
FORMER = {
    "parallel.shards": "renamed parallel.micro_batches",
    "train.nonfinite": "renamed compute.nonfinite",
    "parallel.lsb": "gone: gradients are added in float32. Remove it",
    "parallel.gather": "gone: weights are gathered in their own dtype. Remove it",
    "parallel.reduce": "gone: gradients are always added in the tree. Remove it",
    "compute.precision=float16": "it needs a scaler, whose factor follows overflows; bfloat16 needs none",
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


def nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(known)}"


def problems(path: Path, schema: Any, details: Sequence[Any], set_here: Iterable[str]) -> list[str]:
    """Return a line for each problem. Missing keys share one, and unknown ones, except keys of earlier releases."""
    missing, unknown = (
        [detail for detail in details if detail["type"] == kind] for kind in ("missing", "extra_forbidden")
    )
    lines = [_problem(path, detail, set_here) for detail in details if detail not in missing and detail not in unknown]
    former = [key for detail in unknown if (key := key_of(detail)) in FORMER]
    lines += [f"{_where(path, key, set_here)}: {FORMER[key]} ({UPGRADE})" for key in former]
    named = {FORMER[key].removeprefix("renamed ") for key in former}
    missing = [detail for detail in missing if key_of(detail) not in named]
    unknown = [detail for detail in unknown if key_of(detail) not in former]
    if unknown:
        keys = some([key_of(detail) for detail in unknown])
        known = [name for detail in unknown for name in _siblings(schema, detail)]
        hint = nearest(key_of(unknown[0]), known) if len(unknown) == 1 else "; remove them, or mend what stands above"
        hint += "" if hint.endswith("?") else "."
        own = "A key of your own needs a line in config.py"
        lines.insert(0, f"{path}: {keys}: unknown key{'s' * (len(unknown) > 1)}{hint} {own}")
    if missing:
        keys = some([key_of(detail) for detail in missing])
        plural, ours = "s" * (len(missing) > 1), not unknown and any(map(_of_library, missing))
        older = f"; those that a newer library wants: {UPGRADE}" * ours
        add = f"missing; add the key{plural} (samebits docs config explains each{older})"
        lines.insert(0, f"{path}: {keys}: {add}")
    return lines


def _of_library(detail: Any) -> bool:
    """Whether the library itself reads this key."""
    known: Any = Settings
    for name in detail["loc"]:
        known = getattr(known, "model_fields", {}).get(name)
        known = known and known.annotation
    return known is not None


def _siblings(schema: Any, detail: Any) -> list[str]:
    """The keys that are known where an unknown one stands."""
    *sections, _ = detail["loc"]
    for section in sections:
        schema = schema.model_fields[section].annotation
    return [".".join([*sections, name]) for name in schema.model_fields]


def key_of(detail: Any) -> str:
    return ".".join(str(part) for part in detail["loc"])


def _where(path: Path, key: str, set_here: Iterable[str]) -> str:
    """Return the source of a key's value, for messages: `--set KEY`, or `FILE: KEY`."""
    is_set = any(key == each or key.startswith(f"{each}.") for each in set_here)
    return f"--set {key}" if is_set else f"{path}: {key}" if key else str(path)


def _problem(path: Path, detail: Any, set_here: Iterable[str]) -> str:
    key = key_of(detail)
    where = _where(path, key, set_here)
    if former := FORMER.get(f"{key}={detail['input']}"):
        return f"{where}={detail['input']}: {former}"
    if detail["type"] == "value_error":  # of a check of our own
        return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
    wanted = WANTED.get(detail["type"])
    # An owner's own type may bring a kind without a row above: pydantic's sentence is used then.
    wanted = f"{wanted.format(**detail.get('ctx', {}))} wanted" if wanted else detail["msg"]
    seen = "" if isinstance(detail["input"], dict | BaseModel) else f"{shown(detail['input'])} given, "
    return f"{where}: {seen}{wanted}"
