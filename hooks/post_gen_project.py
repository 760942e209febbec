"""Make the project a git repository with a first commit: no file name can do that, and DVC needs it.

The commit depends on the answers and the two git dates only, not on the machine nor on who generates.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

ANSWERS: dict[str, str] = json.loads(r'''{{ cookiecutter | tojson }}''')  # fmt: skip
TEMPLATE = f"repro-template {ANSWERS['__template_version']}"
ADDRESSED = re.fullmatch(r"([^<]*) <([\w.+-]+@[\w.-]+)>", ANSWERS["author"], re.ASCII)
NAME, EMAIL = ADDRESSED.groups() if ADDRESSED else (ANSWERS["author"], "noreply@example.invalid")
NAMELESS = not NAME.strip(" .,:;<>\"'\\")  # git drops these around a name, and refuses one of nothing else
AUTHOR = os.fsdecode((TEMPLATE if NAMELESS else NAME).encode())  # UTF-8 under any locale
BY_HAND = "The project is whole, but DVC needs git; run in it: git init && git add -A && git commit -m start"
BY_COPY = (
    "Put the template's folder samebits there; then, in the project: git init && git add -A && git commit -m start"
)
VENDORED = Path("vendor", "samebits")
STARTERS = Path("starters")
EXTENDED = {"finetuning": "digits"}  # a starter, and the one whose other files it has

DATES = ("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in DATES},
    # no settings of the user or the system: signatures, hooks, ignored files, line ends
    "HOME": os.devnull,
    "XDG_CONFIG_HOME": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_DEFAULT_HASH": "sha1",
    "GIT_AUTHOR_NAME": AUTHOR,
    "GIT_AUTHOR_EMAIL": EMAIL,
    "GIT_COMMITTER_NAME": AUTHOR,
    "GIT_COMMITTER_EMAIL": EMAIL,
}


def git(*arguments: str) -> None:
    """Run git in the project."""
    subprocess.run(["git", *arguments], env=ENVIRONMENT, check=True, capture_output=True, text=True)


def is_inside_repository(project: Path) -> bool:
    """Say whether the project's folder or one above it, below git's ceilings, holds a repository."""
    ceilings = os.environ.get("GIT_CEILING_DIRECTORIES", "").split(os.pathsep)
    for folder in (project, *project.parents):
        if any(ceiling and folder == Path(ceiling).resolve() for ceiling in ceilings):
            return False
        if (folder / ".git").exists():
            return True
    return False


def take_library() -> bool:
    """Have the library there as a real folder, without what Python left in it; say whether it is there.

    An archive of the template, and a clone without symbolic links, bring the link as a text file of its target.
    """
    if VENDORED.is_file():
        named = Path(ANSWERS.get("_repo_dir", os.devnull))  # cruft does not say where the template lies
        places = [Path(os.environ.get("PWD", os.curdir), named), Path(os.pardir, named)]  # it may be relative
        found = [place / VENDORED.name for place in places if (place / VENDORED.name / "__init__.py").is_file()]
        if not found:
            return False
        VENDORED.unlink()
        shutil.copytree(found[0], VENDORED)
    for left in [*VENDORED.rglob("__pycache__")]:
        shutil.rmtree(left)
    return True


def take_starter() -> None:
    """Put the chosen starter's files in their places, over those that it extends, and drop the others."""
    chosen = ANSWERS["starter"]
    for name in (EXTENDED.get(chosen, chosen), chosen):
        shutil.copytree(STARTERS / name, Path(), dirs_exist_ok=True)
    shutil.rmtree(STARTERS)


def share_data() -> None:
    """Put the dataset where `dvc push` would, so that a clone has it; for another remote, where that takes it from."""
    place = Path(".dvc", "cache") if ANSWERS["dvc_remote"] else Path("data", "remote")
    for pointer in Path("data", "raw").glob("*.dvc"):
        folder, name = re.findall("md5: (..)(.*)", pointer.read_text(encoding="utf-8"))[0]
        shared = place / "files" / "md5" / folder / name
        shared.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(pointer.with_suffix(""), shared)


def main() -> None:
    """Leave a whole project behind, whatever git can do here."""
    take_starter()
    share_data()
    complete = take_library()
    for folder in (".github/workflows", ".github"):  # made even when no file in it was wanted
        with contextlib.suppress(OSError):
            Path(folder).rmdir()

    project = Path.cwd()
    if not complete:
        print(f"{VENDORED} is no folder, for the template came without symbolic links. {BY_COPY}")
    elif is_inside_repository(project):
        print(f"{project.name} lies inside a git repository: commit it there")
    elif shutil.which("git") is None:
        print(f"git not found. {BY_HAND}")
    else:
        try:
            git("-c", "init.defaultBranch=main", "init", "--template=")
            git("add", "--all")
            git("commit", "--message", f"Generate with {TEMPLATE}")
        except subprocess.CalledProcessError as error:
            print(f"git failed: {error.stderr.strip()}. {BY_HAND}")
    if "_commit" in ANSWERS:  # cruft is at work
        print("cruft writes .cruft.json next: commit it too")


if __name__ == "__main__":
    main()
