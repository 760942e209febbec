"""A fresh process in other circumstances that forks trainings of a copy of the project."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from ..base.project import Project
from ..base.variables import RANKED
from ..config.settings import Settings
from ..core.flags import stated_variables
from ..start import trainings
from ..start.warm import Warm
from . import setting
from .elsewhere import copied

ELSEWHERE = "folder of the project"
LISTED = "environment.variables lists it"
FOLLOWED = "the number of threads follows it"
SILENT = {"WANDB_MODE": "disabled"}  # who follows the run is not to hear of parts that are trained again


class Fresh(Warm):
    """A process that has the circumstances `rows` changed and torch loaded; leaving ends it.

    Attributes:
        not_tried: those that stay as they are, each with the reason; all of them once it `has_begun`.
    """

    def __init__(
        self,
        project: Project,
        config: Settings,
        changed: Mapping[str, Any],
        folder: Path,
        rows: Sequence[setting.Row] = setting.ROWS,
    ) -> None:
        """It trains a copy of `project` in the new `folder`, with the keys of `config` and some `changed` ones."""
        copy, own = copied(project, config, changed, folder), config.environment.variables
        environ = {name: text for name, text in trainings.environment(copy).items() if not RANKED.fullmatch(name)}
        environ |= stated_variables(config.options.determinism, environ)
        kept = dict.fromkeys(own, LISTED)  # such as TZ
        if "OMP_NUM_THREADS" not in environ:  # then the number of threads, which decides bits, follows that of cores
            kept[setting.CORES] = FOLLOWED
        self.not_tried = {row.name: kept[row.name] for row in rows if row.name in kept}
        self._place = TemporaryDirectory()
        self._note = Path(self._place.name)
        words, environ = setting.started([row for row in rows if row.name not in kept], environ, self._note, own)
        # without all that a training wants, its forks would start themselves again, and load torch again
        environ |= SILENT | stated_variables(config.options.determinism, environ)
        super().__init__(copy, environ, words)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        self._place.cleanup()

    def without_place(self, text: str) -> str:
        """A text without the name of the folder that its HOME lies in, which is another one each time."""
        return text.replace(self._place.name, "")

    @property
    def has_begun(self) -> bool:
        """Whether it forks trainings, or has ended."""
        missed = setting.missed(self._note)
        self.not_tried |= missed or {}
        return missed is not None or not self.lives
