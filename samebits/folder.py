"""A run's directory while the run is open: its lock, its record, and who uploads it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .address.address import ContentAddress
from .address.locks import LOCKS
from .base.project import Project
from .config.settings import Settings
from .record.lock import RunLock
from .record.opening import change_environment, open_run, require_run_directory
from .tracking.follower import Follower


class Folder:
    """Rank 0 has one.

    Attributes:
        record: is open for writing.
    """

    def __init__(
        self,
        project: Project,
        config: Settings,
        out: Path,
        address: ContentAddress,
        environment: dict[str, Any],
        calling: Callable[[Mapping[str, str]], dict[str, Any]],
        report: Callable[[str], None],
    ) -> None:
        """Open `out` as `opening.open_run` does, for nobody else as long as it is open.

        Raises:
            UserError: nothing is to be written there, or another process writes.
        """
        if config.receipt.key:  # before anything is written
            from .record.signature import require_key

            require_key(config.receipt.key)
        require_run_directory(project, out)
        self.out, self._plain = out, config.compute.plain
        self._lock = RunLock(out)
        self._lock.acquire()
        try:
            self.record = open_run(project, config, out, address, environment, calling, report)
            self._follower = Follower(out, project.root / LOCKS) if config.tracking.enabled else None
        except BaseException:
            self._lock.release()
            raise

    def change_environment(self, environment: dict[str, Any]) -> None:
        """The first step has shown that the run is in another numeric environment."""
        change_environment(self.out, self.record, environment, self._plain)

    def require(self) -> None:
        """Refuse to write what another process has taken over."""
        self._lock.require()

    def sync(self) -> None:
        """Return once the record is on the disk."""
        self.require()
        self.record.sync()

    def end(self, status: str, tags: dict[str, str], patience: float) -> str:
        """Close the record; wait so many seconds for its upload. Returns how that went."""
        self.record.end(status, tags)
        return self._follower.finish(patience) if self._follower else "off"

    def release(self) -> None:
        """Let others have it."""
        self._lock.release()
