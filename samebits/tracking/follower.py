"""The process that uploads the record of a training, as the training sees it: a training loads no more of this."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..base.files import read_json
from ..core.errors import UserError
from ..record import names
from ..record.reading import Upload

UPLOADER = f"{__package__}.tracking"  # the module that it runs


class Follower:
    """The uploading process of a running training: started with it, given a moment to finish after it."""

    def __init__(self, folder: Path, locks: Path) -> None:
        self.folder = folder
        (folder / names.UPLOAD).unlink(missing_ok=True)
        with (folder / names.UPLOAD_LOG).open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", UPLOADER, str(folder), str(locks), str(os.getpid())],
                stdin=subprocess.PIPE,  # its end tells the follower that the run has ended
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the training
            )

    def finish(self, seconds: float) -> str:
        """Wait for the upload, at most so many seconds. Return a line: where the run is tracked, or the next step."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        state = read_state(self.folder)
        if state.get("complete"):
            return state["where"]
        reason = state.get("error") or f"not done after {seconds:g} s"
        return f"tracking incomplete ({reason}); the record is kept, upload it with: samebits sync {self.folder}"


def read_state(folder: Path) -> dict[str, Any]:
    """How far the upload of a run came; empty before it began.

    Empty, too, where the file is damaged: the upload then begins anew, and what MLflow has it keeps once.
    """
    try:
        return read_json(folder / names.UPLOAD, Upload)
    except UserError:
        return {}
