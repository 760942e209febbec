"""Values and words of others in one line that a terminal may show."""

from typing import Any


def shown(value: Any, most: int = 60) -> str:
    """A value in one short line."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def plain(text: str) -> str:
    """Text without marks that would move a terminal's cursor, or begin a line of their own."""
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)
