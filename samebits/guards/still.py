"""The data that a run reads stay as they were when it began, also where they are mapped or read late.

Sizes, dates and inodes are compared, each time before the run saves its state and when it ends: so no checkpoint holds
what came of other data. To look at 100,000 files takes about a second; it needs no memory, for what is kept is a sum.
"""

import time
from pathlib import Path
from typing import Any

from ..address import hashing, manifest
from ..base.text import some
from ..config.settings import Data
from ..core.errors import UserError


class Still:
    """The prepared data, and the dataset where a run reads it, too.

    Attributes:
        manifest: of the prepared data, which are whole.
    """

    def __init__(self, data: Data) -> None:
        """Check the data as `manifest.require_prepared`.

        Raises:
            UserError: they are not whole, or were prepared otherwise.
        """
        self._data = data
        self._since = hashing.clock() or time.time_ns()
        raw = manifest.read(Path(data.prepared)).get("raw")
        self._roots = [Path(data.prepared), *([Path(data.raw)] if raw else [])]
        self._seen = self._look()  # before they are hashed: what changes from here on is seen
        self.manifest: dict[str, Any] = manifest.require_prepared(data)

    def require(self, local: bool = False) -> None:
        """Refuse to go on with data that changed. It is `local` where this rank alone looks at them.

        What changes no byte and no date, as a link to a file or another mode, is let through.

        Raises:
            UserError: names the files.
        """
        if (seen := self._look()) == self._seen:
            return
        restored = "No checkpoint was written since: restore them, and the same command goes on"
        try:
            manifest.require_prepared(self._data)
        except UserError as refused:
            raise UserError(f"data changed while the run read them: {refused}. {restored}", local) from None
        files = [(root / name, each) for root in self._roots for name, each in hashing.identities(root)]
        if written := sorted(str(path) for path, (_, changed, _, _) in files if changed >= self._since):
            raise UserError(f"{some(written)}: written again while the run read the data. {restored}", local)
        self._seen = seen

    def _look(self) -> int:
        return sum(hash((root, *found)) for root in self._roots for found in hashing.identities(root))
