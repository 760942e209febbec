"""`dvc repro` in which the stages have the word: without DVC's advice about git, remotes and its own settings.

`make repro` calls it as `samebits pipeline`; the exit code is that of the stage that failed.
"""

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ..base.git import is_repository
from ..base.project import SETTINGS, Project
from ..core.errors import UserError
from ..guards import stages

TELLING = "dvc.stage.run", "dvc.stage.cache"  # which stage runs by which command, or comes from the cache
REPORTED = 1, 2, 3, 4, 130, 143  # exit codes of stages that have said why


def main() -> int:
    """Run the stages whose inputs have changed since dvc.lock; 0, or the exit code to end with."""
    from dvc.exceptions import DvcException  # type: ignore[import-untyped]
    from dvc.repo import Repo  # type: ignore[import-untyped]

    logging.getLogger("dvc").setLevel(logging.WARNING)
    for name in TELLING:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        if Path(SETTINGS).is_file() and (sentences := stages.core_unlisted(Project.at(Path.cwd()))):
            raise UserError(sentences[0])
        known = is_repository(Path())
        if not known:  # DVC would not begin
            print(
                "no git repository here: a receipt will name no commit, and `samebits replay` needs one. Take a clone"
            )
        with Repo(config={"core": {"no_scm": not known}}) as repo:
            if not repo.reproduce():
                print("nothing has changed since dvc.lock")
    except UserError as refused:
        refused.report()
        return refused.exit_code
    except DvcException as error:
        return _reported(": ".join(_causes(error)))
    except KeyboardInterrupt:
        return 130
    return 0


def _causes(error: BaseException | None) -> Iterator[str]:
    while error:
        yield str(error)
        error = error.__cause__


def _reported(words: str) -> int:
    """The exit code for DVC's words, which are printed where no stage has spoken."""
    ended = re.search(r"exited with (-?\d+)$", words)
    code = int(ended[1]) if ended else 1
    if not ended or code not in REPORTED:
        print(words, file=sys.stderr)
    return code if code > 0 else 128 - code


if __name__ == "__main__":  # as Makefiles of before call it
    sys.exit(main())
