"""The shape that data read from a file must have: which keys, and what stands there."""

import re
from collections.abc import Iterator
from typing import Any

Shape = Any  # see `faults`

DEEPEST = 50  # levels of lists and mappings in one another; records have fewer than ten
LONGEST = 4000  # bits of a whole number: Python writes no longer ones than of 4300 digits
LARGEST = 1_000_000  # values in one level: an alias of YAML can multiply a short text
WORDS: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    None: "nothing",
}
ALSO: dict[Any, Any] = {float: (float, int)}  # JSON writes 1.0 as 1


def faults(value: Any, shape: Shape, place: str = "") -> Iterator[str]:
    """Where a value is not of a shape, in words; nothing where it is.

    A shape is a type (`object`: anything), None, a pattern that text must match, a tuple of alternatives, a list of the
    one shape of all items, or a dict of keys with their shapes. A key that ends with `?` may be missing, and `...`
    stands for every key that is not listed.
    """
    if isinstance(shape, tuple):
        if all(any(faults(value, each)) for each in shape):
            yield _unlike(value, " or ".join(map(_words, shape)), place)
    elif isinstance(shape, list) and isinstance(value, list):
        for number, item in enumerate(value):
            yield from faults(item, shape[0], f"{place}[{number}]")
    elif isinstance(shape, dict) and isinstance(value, dict):
        yield from _faults_of_keys(value, shape, f"{place}." if place else "")
    elif not _is(value, shape):
        yield _unlike(value, _words(shape), place)


def _faults_of_keys(value: dict[str, Any], shape: dict[Any, Shape], before: str) -> Iterator[str]:
    named = {key.removesuffix("?"): key for key in shape if key is not ...}
    for name, key in named.items():
        if name in value:
            yield from faults(value[name], shape[key], before + name)
        elif name == key:
            yield f"{before}{name}: missing"
    for name in value.keys() - named.keys() if ... in shape else ():
        yield from faults(value[name], shape[...], f"{before}{name}")


def _is(value: Any, shape: Shape) -> bool:
    if isinstance(shape, re.Pattern):
        return isinstance(value, str) and shape.fullmatch(value) is not None
    if shape is None or isinstance(shape, list | dict):
        return shape is value is None
    kind: Any = ALSO.get(shape, shape)
    # True and False are whole numbers to Python
    return isinstance(value, kind) and (shape in (bool, object) or not isinstance(value, bool))


def _words(shape: Shape) -> str:
    if isinstance(shape, re.Pattern):
        return f"text of the form {shape.pattern}"
    return WORDS[type(shape) if isinstance(shape, list | dict) else shape]


def _unlike(value: Any, wanted: str, place: str) -> str:
    return f"{f'{place}: ' if place else ''}{shown(value)} seen, {wanted} wanted"


def shown(value: Any, most: int = 60) -> str:
    """A value in one short line."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def plain(text: str) -> str:
    """Text without marks that would move a terminal's cursor, or begin a line of their own."""
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


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
