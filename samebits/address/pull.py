"""Data that are missing are brought by DVC, from its cache or its remote: git holds nothing but their pointers."""

import fcntl
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..base.redact import without_credentials

# DVC is loaded by a process of its own. It needs no git for this: an archive of a project has none. A work tree of an
# older commit has a remote of its own where that is a folder that git tracks; else it is given the owner's, with the
# credentials that the owner keeps in .dvc/config.local, and the owner's cache.
CHILD = """
import logging, os, sys
from dvc.exceptions import CheckoutError
from dvc.repo import Repo
root, owner, pointer = sys.argv[1:]
logging.getLogger("dvc").setLevel(logging.ERROR)
def pull(folder, core, **more):
    with Repo(folder, config={"core": {**core, "no_scm": True}, **more}) as repo:
        name = repo.config["core"].get("remote", "")
        print(name, repo.config["remote"].get(name, {}).get("url", ""), sep="\\n", flush=True)
        repo.pull([pointer])
try:
    with Repo(owner, config={"core": {"no_scm": True}}) as repo:
        name, remotes = repo.config["core"].get("remote", ""), repo.config["remote"]
        cache = {"dir": repo.config["cache"].get("dir") or os.path.join(repo.dvc_dir, "cache")}
    try:
        pull(root, {}, cache=cache)
    except Exception:
        if root == owner:
            raise
        pull(root, {"remote": name} if name else {}, remote=remotes, cache=cache)
except CheckoutError:
    print("neither that remote nor DVC's cache has it")
    sys.exit(1)
except Exception as error:
    print(*str(error).split() or [type(error).__name__])
    sys.exit(1)
"""


def bring(raw: Path, root: Path, owner: Path | None = None) -> str:
    """Have DVC bring a missing file or folder of the project in `root`, and say so; why it cannot, or "" where it has.

    `owner` is another project, of which `root` is a work tree: its remotes, credentials and cache serve, too.
    """
    owner = owner or root
    pointer = Path(f"{raw}.dvc")
    if not raw.parent.resolve().is_relative_to(root.resolve()):
        return "It lies outside the project, where DVC brings nothing: put it there"
    if not pointer.is_file():
        return f"DVC cannot bring it without its pointer, {pointer.name}: put it there"
    with alone(root, "pull"):
        if raw.exists():  # another rank has brought it
            return ""
        if root == owner:
            print(f"{raw}: missing; DVC brings it from its cache or its remote", file=sys.stderr, flush=True)
        words = [sys.executable, "-c", CHILD, str(root), str(owner), str(pointer.absolute())]
        # on a terminal DVC shows how far it is
        shown = None if sys.stderr.isatty() else subprocess.DEVNULL
        done = subprocess.run(
            words,
            cwd=root,
            stdin=subprocess.DEVNULL,  # and no terminal that a remote could ask for a password
            stdout=subprocess.PIPE,
            stderr=shown,
            text=True,
            start_new_session=True,
        )
    if done.returncode == 0:
        return ""
    *_, name, url, why = ["", "", "", *done.stdout.splitlines()] if done.stdout else ["", "", "DVC said no word"]
    inside = Path(url).is_relative_to(root) and url
    remote = f"its remote {name!r} ({without_credentials(url)})" if name else "it has no default remote"
    return (
        f"DVC cannot bring it: {remote}: {why}. Whoever has the data runs: dvc push {shlex.quote(str(pointer))}"
        f"{f', and commits {Path(url).relative_to(root)}' if inside else ''}. "
        f"Another remote is named with: dvc remote add --default NAME URL"
    )


@contextmanager
def alone(root: Path, work: str) -> Iterator[None]:
    """Wait while another process of this host does this work for the project."""
    lock = root / "build" / f"{work}.lock"
    with ExitStack() as held:
        with suppress(OSError):  # where nothing can be written, the work itself says so
            lock.parent.mkdir(exist_ok=True)
            fcntl.flock(held.enter_context(lock.open("a")), fcntl.LOCK_EX)
        yield
