"""The environment variables that the owner's code reads, by name and never by value.

A variable may decide bits, and no hash has it. Its name in the record says where to look. Loader workers, and what a
package reads for the owner, are not seen.
"""

import os
import sys

BETWEEN = "os", "collections.abc"  # modules through which a variable is read
_package = ""
_read: set[str] = set()


class Watched(os._Environ):  # type: ignore[type-arg]
    """The environment, which notes what modules of the owner's package read."""

    def __getitem__(self, key: str) -> str:
        """Its value."""
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") in BETWEEN:
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] == _package:
            _read.add(key)
        value: str = super().__getitem__(key)
        return value


def watch(package: str) -> None:
    """Note from now on what modules of this package read."""
    global _package
    _package = package
    os.environ.__class__ = Watched


def read() -> list[str]:
    """The names so far, of variables that are set and of others."""
    return sorted(_read)
