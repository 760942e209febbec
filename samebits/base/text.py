"""The fields in which two nested mappings differ, each with both values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import some as some
from .shape import plain


@dataclass(frozen=True)
class Difference:
    """A field that has two values; None where one mapping lacks it."""

    field: str
    one: Any
    other: Any


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as `outer.inner` fields."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """The fields in which two nested mappings differ, sorted by name."""
    these, those = flatten(one), flatten(other)
    fields = sorted(field for field in these | those if these.get(field) != those.get(field))
    return [Difference(field, these.get(field), those.get(field)) for field in fields]


def named(found: Sequence[Difference], one: str, other: str) -> str:
    """The differences in one line; `one` and `other` say which value is whose."""
    return "; ".join(f"{d.field}: {d.one} {one}, {d.other} {other}" for d in found)


def short(value: Any, most: int = 40) -> str:
    """A value in few characters; a number as a receipt writes it."""
    text = "absent" if value is None else plain(value) if isinstance(value, str) else repr(value)
    text = text.removesuffix(".0") if isinstance(value, float) else text
    return text if len(text) <= most else f"{text[: most - 1]}…"
