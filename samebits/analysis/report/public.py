"""What a page that is handed on may say of a record: no credential, and no place on the machine that made it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base.redact import CONTENTS, SECRET, without_credentials

HIDDEN = "(hidden)"
# A path from the root of a file system, its last part apart; also one that follows file:// or sqlite:///.
PLACE = re.compile(r"(?<![\w.~…/])(?:~|[A-Za-z]:(?=[\\/]))?(?:[/\\]{1,2}[^\s/\\:;,'\"]+)+[/\\]+(?=[^\s/\\])")
STORE = re.compile(r"\b(file|sqlite):/{2,}(?:[^\s/]+/)*")


def value(key: str, held: Any) -> str:
    """A value of a config or an environment."""
    text = "absent" if held is None else held if isinstance(held, str) else json.dumps(held, sort_keys=True)
    if held not in (None, "") and SECRET.search(key.upper()):
        return HIDDEN
    if any(re.search(form, text.encode()) for form in CONTENTS.values()):
        return HIDDEN
    return words(text) or "(empty)"


def words(text: str) -> str:
    """A sentence without what its URLs and paths would give away."""
    return PLACE.sub("…/", STORE.sub(r"\1:…/", without_credentials(text)))


def names(given: Sequence[str]) -> list[str]:
    """What runs are called: as they were given. Of a path from the root, the part below the current folder, or its end.

    No two runs have one name.
    """
    found: list[str] = []
    for name in given:
        path = Path(name)
        inside = path.is_absolute() and path.is_relative_to(Path.cwd())
        called = str(path.relative_to(Path.cwd())) if inside else f"…/{path.name}" if path.is_absolute() else name
        same = sum(each == called or each.startswith(f"{called} (") for each in found)
        found.append(f"{called} ({same + 1})" if same else called)
    return found
