"""The forms of data that are read from files, and what is wrong with a value that lacks its form."""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from .shape import shown

DEEPEST = 50  # levels of lists and mappings in one another; records have fewer than ten
LONGEST = 4000  # bits of a whole number: Python writes no longer ones than of 4300 digits
LARGEST = 1_000_000  # values in one level: an alias of YAML can multiply a short text
MAPPING = "a mapping"
WANTED = {  # by pydantic's name of what is wrong
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": MAPPING,
    "model_type": MAPPING,
    "list_type": "a list",
    "string_pattern_mismatch": "text of the form {pattern}",
    "greater_than": "more than {gt}",
}
Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
NotFinite = Annotated[str, StringConstraints(pattern="^(-?inf|nan)$")]  # JSON has no word for these
ABSENT: Any = Field(default=None)  # of a key that may be missing


class Form(BaseModel):
    """A mapping with certain keys. It may hold more.

    Others may have written it: commands are made of it, and paths. So no number, truth or text stands for another.
    """

    model_config = ConfigDict(strict=True)


def fault(value: Any, form: Any) -> str | None:
    """Where a parsed value is not of a form, a type, in words: the key, the value seen, what is wanted; else None."""
    try:
        _adapter(form).validate_python(value, strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        places = [_place(value, each["loc"], each["type"] == "missing") for each in errors]
        place = f"{places[0]}: " if places[0] else ""
        if errors[0]["type"] == "missing":
            return f"{place}missing"
        kinds = dict.fromkeys(_wanted(each) for each, other in zip(errors, places, strict=True) if other == places[0])
        return f"{place}{shown(errors[0]['input'])} seen, {' or '.join(kinds)} wanted"
    return None


@cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def _wanted(error: Any) -> str:
    if error["type"] in WANTED:
        return WANTED[error["type"]].format_map(error.get("ctx", {}))
    return str(error["msg"]).removeprefix("Input should be ")


def _place(value: Any, keys: tuple[str | int, ...], missing: bool) -> str:
    """The path of keys to a fault, without pydantic's names of alternatives."""
    path = ""
    for number, key in enumerate(keys, 1):
        if isinstance(value, list) and isinstance(key, int):
            path, value = f"{path}[{key}]", value[key]
        elif isinstance(value, dict) and (key in value or (missing and number == len(keys))):
            path, value = f"{path}.{key}" if path else str(key), value.get(key)
    return path


def unreadable(value: Any) -> str | None:
    """Why nobody can work with a parsed value, whatever its shape; None where one can."""
    level = [value]
    for _ in range(DEEPEST):
        if any(isinstance(each, str) and not _is_encodable(each) for each in level):
            return "it holds half a character (a lone surrogate)"
        if any(isinstance(each, int) and each.bit_length() > LONGEST for each in level):
            return f"it holds a whole number of more than {LONGEST} bits"
        level = [inner for each in level for inner in _inside(each)]
        if len(level) > LARGEST:
            return f"it has more than {LARGEST} values"
        if not level:
            return None
    return f"it is nested more than {DEEPEST} levels deep"


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
