"""`make setup`: the same environment from the same locks, by uv or by pip."""

import csv
import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from bake import VENV
from baked import Bake, InstalledProject, run

INSTALLERS_OWN = {
    "INSTALLER",
    "RECORD",
    "REQUESTED",
    "direct_url.json",
    "uv_build.json",
    "uv_cache.json",
}  # who installed, when and how


def files(venv: Path) -> dict[str, Path]:
    """Every file that packages brought, by its name; without bytecode and the project itself."""
    (packages,) = venv.glob("lib/python3*/site-packages")
    editable = {path.parent.name for path in packages.glob("*/direct_url.json")}  # projects, which lie elsewhere
    found = [path for path in packages.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    named = {path.relative_to(packages).as_posix(): path for path in found if path.name not in INSTALLERS_OWN}
    return {
        name: path
        for name, path in named.items()
        if name.partition("/")[0] not in editable and not name.startswith("__editable__")
    }


def installed(venv: Path) -> dict[str, str]:
    """The SHA-256 of each of them."""
    return {name: digest(path) for name, path in files(venv).items()}


# What comes as source, and what each environment has from its beginning.
KEPT = "antlr4", "pip==", "setuptools=="
KNOWN: dict[tuple[int, int], str] = {}


def digest(path: Path) -> str:
    """The SHA-256 of a file, which is read once though it lies, linked, in several environments."""
    identity = path.stat().st_ino, path.stat().st_mtime_ns
    if identity not in KNOWN:
        KNOWN[identity] = hashlib.sha256(path.read_bytes()).hexdigest()
    return KNOWN[identity]


def by_hand(
    project: InstalledProject, venv: Path, installer: str, check: bool = True, path: str = "", locks: str = ""
) -> tuple[int, str]:
    """What `make setup` calls, for the locks alone: its exit code and what it prints."""
    requested = {"VENV": str(venv), "DEVICE": "cpu", "LOCKS_ONLY": "1", "INSTALLER": installer, "LOCKS": locks}
    (index,) = re.findall(r"^TORCH_INDEX \?= (.*)$", project.text("Makefile"), re.MULTILINE)
    env = {**project.env, **requested, "TORCH_INDEX": index}
    env |= {"PATH": path} if path else {}
    done = run("/bin/sh", project.path / "requirements" / "venv.sh", env=env, check=check)
    return done.returncode, done.stdout


@pytest.mark.long
def test_uv_and_pip_install_the_same_files(project: InstalledProject, tmp_path: Path) -> None:
    """The shared environment was made by one of them; here the other one makes another, of every fourth package.

    Also of each that comes as source. pip alone installs torch.
    """
    (metadata,) = VENV.glob("lib/python3*/site-packages/numpy-*.dist-info")
    first = (metadata / "INSTALLER").read_text().strip()
    other = {"uv": "pip", "pip": "uv"}[first]
    path = Path(shutil.copytree(project.path / "requirements", tmp_path / "project" / "requirements")).parent
    shutil.copy2(project.path / "Makefile", path)
    for lock in path.glob("requirements/*.txt"):
        pins = re.findall(r"(?m)^[^#\s].*\n(?: .*\n)*", lock.read_text())
        lock.write_text("".join([pin for number, pin in enumerate(pins) if number % 4 == 0 or pin.startswith(KEPT)]))
    _, printed = by_hand(replace(project, path=path), tmp_path / "venv", other, locks="run dev")
    assert f"packages by {other}\n" in printed
    found, known = installed(tmp_path / "venv"), files(VENV)
    packages = {name.partition("/")[0] for name in found if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)}
    rows = [row for name in packages for row in csv.reader((metadata.parent / name / "RECORD").open(newline=""))]
    assert len(packages) > 35 and found == {name: digest(known[name]) for name, *_ in rows if name in known}


@pytest.mark.long
def test_changed_locks_update_the_environment(bake: Bake, project: InstalledProject, tmp_path: Path):
    """A package goes with its pin and comes back with it; the rest stays, but not where a set-up was interrupted."""
    changed, venv = replace(project, path=bake().path), tmp_path / "venv"
    by_hand(changed, venv, "uv", locks="dev")
    before, own = installed(venv), venv / "own"
    own.touch()
    lock = changed.path / "requirements" / "dev.txt"
    pinned = lock.read_text()
    lock.write_text(re.sub(r"(?m)^iniconfig==[^\n]*\n(?: [^\n]*\n)*", "", pinned))
    assert by_hand(changed, venv, "uv", locks="dev")[1].startswith(f"updating {venv} ")
    assert {name.split("/")[0].split("-")[0] for name in before.keys() - installed(venv).keys()} == {"iniconfig"}
    lock.write_text(pinned)
    by_hand(changed, venv, "uv", locks="dev")
    assert installed(venv) == before and own.exists()
    (venv / ".locks").unlink()
    lock.write_text(re.sub(r"(?<=^setuptools==)\S+", "0", pinned, flags=re.MULTILINE))
    code, printed = by_hand(changed, venv, "uv", check=False, locks="dev")
    assert code == 2 and printed.startswith(f"making {venv} ") and not own.exists()


def test_installer_that_is_not_known_is_refused(project: InstalledProject, tmp_path: Path) -> None:
    message = "setup: INSTALLER=conda is not known: use INSTALLER=uv or INSTALLER=pip\n"
    assert by_hand(project, tmp_path / "venv", "conda", check=False) == (2, message)
    assert not (tmp_path / "venv").exists()


def test_purpose_that_is_not_known_is_refused(project: InstalledProject, tmp_path: Path) -> None:
    message = "setup: LOCKS=train tests: tests is not known: use some of train run dev server\n"
    assert by_hand(project, tmp_path / "venv", "", check=False, locks="train tests") == (2, message)
    assert not (tmp_path / "venv").exists()


def test_uv_that_is_not_there_is_refused(project: InstalledProject, tmp_path: Path) -> None:
    """Only where it was asked for: without a word, pip takes its place."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("dirname", "sed", "uname", "ls"):
        (tools / name).symlink_to(str(shutil.which(name)))
    message = "setup: INSTALLER=uv: there is no uv here; install it, or use INSTALLER=pip\n"
    assert by_hand(project, tmp_path / "venv", "uv", check=False, path=str(tools)) == (2, message)
