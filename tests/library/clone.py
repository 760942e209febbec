"""A clone of this project with uncommitted code, in which runs are made and made again."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from click.testing import CliRunner, Result
from project.config import Config
from support import OURS, PACKAGE, PROJECT, TESTS, python, training
from warm import Warm

from samebits.base.project import Project, work_for
from samebits.cli import main
from samebits.front import STAGES, Ours
from samebits.start import trainings

COLD = trainings.run  # which tests replace
ELSEWHERE = TESTS / "elsewhere.py"
SETTINGS = "tracking.enabled=false", "train.learning_rate=0.003", "seed=5"


def project_in(folder: Path) -> Project:
    """The project that lies in a folder."""
    return Project(folder / "src" / PACKAGE)


def git(project: Path, *arguments: str) -> None:
    """Run git under a name of its own and without the user's settings."""
    identity = "-c", "user.name=tester", "-c", "user.email=tester@example.invalid"
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", *identity, *arguments]
    subprocess.run(command, cwd=project, env=os.environ | alone, check=True, capture_output=True)


def copied(folder: Path, parts: Iterable[str], files: Iterable[str]) -> Path:
    """Copy these of this project's folders and files into a folder."""
    for part in parts:
        shutil.copytree(PROJECT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "cache", "tmp"))
    for name in files:
        shutil.copyfile(PROJECT / name, folder / name)
    return folder


def edit(path: Path, *changes: tuple[str, str]) -> None:
    """Change texts in a file, the first time that each stands there."""
    text = path.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path.write_text(text)


def commit(project: Path, message: str = "start") -> None:
    """Commit all that is there, into a new repository if there is none."""
    if not (project / ".git").exists():
        git(project, "init", "--quiet")
    git(project, "add", ".")
    git(project, "commit", "--quiet", "--message", message)


def cold(project: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `samebits ARGUMENTS` in that project, as a user starts it."""
    path = os.pathsep.join(project_in(project).path)
    return python("-m", "samebits", *arguments, cwd=project, env={"PYTHONPATH": path})


def command(project: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `samebits ARGUMENTS` in that project, warm."""
    words = [str(project), "samebits", *map(str, arguments)]
    with TemporaryDirectory() as folder:
        files = Path(folder, "out"), Path(folder, "err")
        code = Warm(*words, out=files[0], err=files[1], script=ELSEWHERE).wait()
        return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))


def ours(project: Project) -> Ours:
    """What a verb is about, where it runs in this process."""
    ours = Ours()
    ours.project, ours.schema = project, Config
    return ours


def verb(*words: str | Path, project: Project = OURS) -> Result:
    """What a verb says and how it ends, in this process, which is in the project's folder."""
    done = CliRunner().invoke(main, [*map(str, words)], obj=ours(project))
    work_for(OURS)  # as before
    return done


class Forked:
    """In place of `trainings.run`: what analysis would start cold is forked.

    What needs other variables than this process has, and a verb, start cold. `trained` counts the trainings.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {"out": folder / "out", "err": folder / "err"}
        self.trained = 0

    def __call__(self, project: Project, words: Sequence[str], ends: Sequence[int] = (0,), environ: Any = None) -> str:
        stages = [at for at in range(1, len(words)) if words[at - 1] == "samebits" and words[at] in STAGES]
        place = next((at for at, word in enumerate(words) if word.startswith("samebits.") or at + 1 in stages), None)
        relaxed = any(word.startswith("determinism.") and word != "determinism.relax=[]" for word in words)
        if place is None or relaxed:
            return COLD(project, words, ends, environ)
        module, before, script = words[place], [], None
        trains = words[place : place + 2] == ["samebits", "train"]
        if project.root != PROJECT or not trains:
            before, script = [str(project.root), module], ELSEWHERE
        ranks = [int(word.partition("=")[2]) for word in words if word.startswith("--nproc-per-node=")]
        self._files["err"].write_text("")
        self.trained += trains
        rest = words[place + 1 :] if script else words[place + 2 :]  # Warm trains
        forked = Warm(*before, *rest, **self._files, ranks=ranks[0] if ranks else None, script=script)
        if (code := forked.wait()) not in ends:
            raise trainings.Ended(words, code, self._files["err"].read_text().splitlines()[-trainings.LINES :])
        return ""


def clone(folder: Path) -> Path:
    """Clone this project's files into a folder, edit some, and train into artifacts/ there."""
    files = "params.yaml", "results.lock", "dvc.yaml", "dvc.lock", "pyproject.toml", ".gitignore", "README.md"
    commit(copied(folder, ("src", "vendor", "requirements", ".dvc", "data/raw"), files))
    source = folder / "src" / PACKAGE
    (source / "added.py").write_text("WIDER = 1.25\n")
    with (source / "model.py").open("a") as model:
        model.write("\n\nfrom .added import WIDER  # noqa\n")
    (folder / "README.md").write_text("nothing that a run reads\n")
    forked, project = Forked(folder.parent), project_in(folder)
    arguments = training(folder / "artifacts", folder / "data" / "prepared", *SETTINGS)
    for module, *words in (("prepare",), ("train", *arguments)):
        forked(project, trainings.command(module, {}, *words))
    return folder
