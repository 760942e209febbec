"""`samebits doctor`: each check finds its planted fault, and says nothing where all is well."""

import base64
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from http.server import HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from clone import commit, copied, edit, git, project_in, verb
from project.config import Config
from server import Quiet
from support import PACKAGE, PROJECT, WORD, python

from samebits.address import locks as locks_module
from samebits.analysis.doctor import checks, doctor, hardware, leftovers, packages
from samebits.analysis.doctor.found import Context, Found, State
from samebits.environment import canary

OK, WARNING, FAULT, UNKNOWN = State


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A committed copy of this project's files."""
    files = "params.yaml", "pyproject.toml", "Dockerfile", "dvc.yaml", "results.lock", ".gitignore"
    commit(copied(tmp_path / "own", ("src", "vendor", "requirements"), files))
    return tmp_path / "own"


@pytest.fixture
def context(own: Path, config: Config, prepared: Path) -> Context:
    """The checks' subject: nothing is wrong with it."""
    data = config.data.model_copy(update={"raw": str(PROJECT / config.data.raw), "prepared": str(prepared)})
    tracking = config.tracking.model_copy(update={"enabled": False})
    return Context(project_in(own), config.model_copy(update={"data": data, "tracking": tracking}))


def changed(context: Context, section: str, **keys: Any) -> Context:
    """The same, asked otherwise."""
    held = getattr(context.settings, section).model_copy(update=keys)
    return Context(context.project, context.settings.model_copy(update={section: held}))


def looked(look: Callable[[Context], Found], context: Context) -> Found:
    """What the checklist says of one check."""
    return doctor.seen(doctor.Check("area", "name", look), context)


# Those that look at this machine: they may have something to tell of it.
MACHINE = hardware.gpu, hardware.memory, packages.package_files, packages.installed


@pytest.mark.parametrize("check", [c for c in doctor.CHECKS if c.look not in MACHINE], ids=lambda check: check.name)
def test_nothing_is_found_where_all_is_well(check: doctor.Check, context: Context, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REPRO_IMAGE", raising=False)
    monkeypatch.setattr(checks, "CONTAINER", ())
    found = looked(check.look, context)
    assert (found.state, found.fix) == (OK, ""), found


# ---- planted faults: what is changed in the project, in requested keys, or in this process and its machine

Plant = Callable[[Context, pytest.MonkeyPatch], Any]


def appended(name: str) -> Plant:
    """A line more in a file of the package."""

    def plant(context: Context, patch: pytest.MonkeyPatch) -> None:
        with context.project.file(name).open("a") as file:
            file.write("\n")

    return plant


def requested(section: str, **keys: Any) -> Plant:
    """Other values of keys."""
    return lambda context, patch: changed(context, section, **keys)


def no_repository(context: Context, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(context.project.root / ".git")


def linked(context: Context, patch: pytest.MonkeyPatch) -> None:
    (context.project.package / "linked").symlink_to(context.project.root / "requirements")


def another_pin(context: Context, patch: pytest.MonkeyPatch) -> None:
    edit(context.project.root / "pyproject.toml", ('"numpy>=2.1,<3"', '"numpy>=99"'))


def not_installed(context: Context, patch: pytest.MonkeyPatch) -> None:
    path = context.project.root / "requirements" / "train-cpu.txt"
    edit(path, ("\nrfc8785==", "\nrfc8785==0.0."))
    path.write_text(path.read_text() + "nobody==1.0\n")


def from_the_future(context: Context, patch: pytest.MonkeyPatch) -> None:
    (context.project.root / "later").touch()
    patch.setenv("GIT_COMMITTER_DATE", "2099-01-01T00:00:00Z")
    commit(context.project.root, "from the future")


def variable(name: str, value: str) -> Plant:
    return lambda context, patch: patch.setenv(name, value)


def patched(module: Any, name: str, value: Any) -> Plant:
    return lambda context, patch: patch.setattr(module, name, value)


def without_a_gpu(context: Context, patch: pytest.MonkeyPatch) -> Context:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    return Context(context.project, context.settings.model_copy(update={"device": "cuda"}))


def memory_errors(*counts: int) -> Plant:
    """Uncorrected and corrected errors, as the kernel counts them."""

    def plant(context: Context, patch: pytest.MonkeyPatch) -> None:
        folder = context.project.root / "edac" / "mc0"
        folder.mkdir(parents=True)
        for kind, count in zip(("ue", "ce"), counts, strict=False):
            (folder / f"{kind}_count").write_text(f"{count}\n")
        patch.setattr(hardware, "EDAC", folder.parent)

    return plant


PLANTED: list[tuple[Plant, Callable[[Context], Found], State, str]] = [
    (appended("model.py"), checks.git, WARNING, f"uncommitted changes: src/{PACKAGE}/model.py"),
    (no_repository, checks.git, WARNING, "no git commit"),
    (appended("samebits/analysis/diff.py"), checks.library_as_released, WARNING, "modified: analysis/diff.py"),
    (linked, checks.code_of_the_address, FAULT, "a link to a folder"),
    (another_pin, checks.locks, FAULT, "numpy"),
    (not_installed, packages.installed, FAULT, "missing: nobody; rfc8785 "),
    (from_the_future, hardware.clock, FAULT, "in the future"),
    (requested("data", sha256="0" * 64), checks.dataset, FAULT, "0000 wanted"),
    (requested("data", raw="nowhere"), checks.dataset, FAULT, "nowhere: missing"),
    (requested("data", test_percent=21), checks.prepared, FAULT, "prepared with other keys"),
    (requested("data", prepared="nowhere"), checks.prepared, WARNING, "nowhere: not prepared yet"),
    (requested("determinism", relax=("nnpack",)), checks.flags_effective, WARNING, "relaxed: nnpack"),
    (requested("determinism", relax=("nonsense",)), checks.flags_effective, FAULT, "unknown flag 'nonsense'"),
    (requested("determinism", cpu="native"), checks.arithmetic, WARNING, "determinism.cpu is native"),
    (requested("receipt", key="/nowhere/key"), checks.signing, FAULT, "/nowhere/key is missing"),
    (requested("tracking", enabled=True, uri="http://127.0.0.1:1"), checks.mlflow, WARNING, "127.0.0.1:1: "),
    (variable("MKL_CBWR", "AVX2"), checks.flags_effective, FAULT, "MKL_CBWR=AVX2 is set, COMPATIBLE is wanted"),
    (patched(canary, "arithmetic_canary", lambda: "f" * 64), checks.arithmetic, WARNING, "canary ffff"),
    (patched(checks, "CONTAINER", (Path("/"),)), checks.image, WARNING, "a container without REPRO_IMAGE"),
    (variable("REPRO_IMAGE", "sha256:" + "0" * 64), checks.image, OK, "0000"),
    (variable("REPRO_IMAGE", "org/image@sha256:" + "0" * 64), checks.image, OK, "org/image@sha256:0000"),
    (variable("REPRO_IMAGE", "latest"), checks.image, FAULT, "REPRO_IMAGE='latest'"),
    (variable("REPRO_IMAGE", "sha256:\n"), checks.image, FAULT, r"REPRO_IMAGE='sha256:\n'"),
    (lambda _, patch: patch.setitem(sys.modules, "numpy", None), checks.generators, FAULT, "numpy"),
    (patched(random, "random", random.SystemRandom().random), checks.generators, FAULT, "generators of python"),
    (patched(hardware, "SPACE", 2**80), hardware.disk, FAULT, "MiB free"),
    # root may write anywhere
    (patched(hardware.os, "access", lambda path, mode: False), hardware.disk, FAULT, "not writable"),
    (patched(hardware.time, "time", lambda now=time.time: now() - 3600), hardware.clock, WARNING, "+3600 s"),
    (without_a_gpu, hardware.gpu, FAULT, ""),
    (memory_errors(), hardware.memory, UNKNOWN, ""),
    (memory_errors(0, 0), hardware.memory, OK, ""),
    (memory_errors(0, 2), hardware.memory, WARNING, ""),
    (memory_errors(1, 0), hardware.memory, FAULT, ""),
]


@pytest.mark.parametrize(("plant", "look", "state", "seen"), PLANTED)
def test_planted_fault_is_found(
    plant: Plant, look: Callable[[Context], Found], state: State, seen: str, context: Context,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """A package that cannot be loaded is a fault, too, and no traceback."""
    for name in ("REPRO_IMAGE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    planted = plant(context, monkeypatch)
    found = looked(look, planted if isinstance(planted, Context) else context)
    assert found.state is state and seen in found.seen, found


# ---- leftovers of a starter


def in_file(name: str, *changes: tuple[str, str]) -> Plant:
    """Other texts in a file of the package, or of the root."""
    return lambda context, patch: edit(
        context.project.file(name) if name.endswith(".py") else context.project.root / name, *changes
    )


def there(*names: str) -> Plant:
    """Files that git tracks."""

    def plant(context: Context, patch: pytest.MonkeyPatch) -> None:
        for path in (context.project.root / name for name in names):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("outs: []\n")
        git(context.project.root, "add", "--force", *names)

    return plant


def key_read_by(line: str) -> Plant:
    """A key that no code reads but by this line."""

    def plant(context: Context, patch: pytest.MonkeyPatch) -> None:
        edit(context.project.file("data.py"), ("config.train.shift", "1"))
        with context.project.file("model.py").open("a") as file:
            file.write(f"\n\ndef more(config):\n    {line}\n")

    return plant


UNREAD = in_file("data.py", ("config.train.shift", "1"))
UNWRITTEN = in_file("evaluate.py", ('"confusion.csv"', '"pairs.csv"'))  # its docstring still speaks of it
LEFT: list[tuple[Plant, Callable[[Context], Found], str, str]] = [
    (requested("train", epochs=31), leftovers.expected, "this project has another config", "samebits accept"),
    (appended("model.py"), leftovers.expected, "this project has another code", "remove that row"),
    (requested("data", prepared="nowhere"), leftovers.expected, "", ""),  # of data that are missing nothing is known
    (in_file("results.lock", ("source: the digest this template", "source: ours")), leftovers.expected, "", ""),
    (lambda context, _: (context.project.root / "results.lock").unlink(), leftovers.expected, "", ""),
    (UNWRITTEN, leftovers.plots, "writes artifacts/confusion.csv", "remove those plots from dvc.yaml"),
    (in_file("train.py", ("gradient_norm=norm, ", "")), leftovers.plots, "writes gradient_norm of artifacts", ""),
    (in_file("evaluate.py", ("actual,predicted", "actual,other")), leftovers.plots, "predicted of artifacts", ""),
    (in_file("evaluate.py", ('"confusion.csv"', 'f"{stage.out.name}usion.csv"')), leftovers.plots, "", ""),
    (in_file("evaluate.py", ('"confusion.csv"', '"confusion" ".csv"')), leftovers.plots, "", ""),
    (in_file("dvc.yaml", ("learning_rate}", "[loss, learning_rate]}")), leftovers.plots, "", ""),
    (in_file("dvc.yaml", ("learning_rate}", "[loss, momentum]}")), leftovers.plots, "writes momentum of artifacts", ""),
    (UNREAD, leftovers.keys, "reads train.shift", "params.yaml and config.py"),
    (key_read_by("self.shift = 1"), leftovers.keys, "reads train.shift", ""),  # of a module, not of the config
    (key_read_by("return getattr(config.train, 'shift')"), leftovers.keys, "", ""),
    (key_read_by("return config.train.model_dump()"), leftovers.keys, "", ""),
    (key_read_by("return dict(config.train)"), leftovers.keys, "", ""),
    (key_read_by("settings = config.train; return [value for name, value in settings]"), leftovers.keys, "", ""),
    (there("data/raw/old.csv.dvc"), leftovers.raw_files, "names data/raw/old.csv", "with data/raw/old.csv.dvc"),
    (there("data/raw/old/a.csv"), leftovers.raw_files, "names data/raw/old", "or name it"),
    (there("data/raw/README.md", "data/raw/LICENSE", "data/raw/a.license.txt", "data/raw/.gitignore"),
     leftovers.raw_files, "", ""),
    (there("artifacts/old.csv"), leftovers.artifacts, "git tracks artifacts/old.csv", "git rm artifacts/old.csv"),
    (there("artifacts/confusion.csv", "artifacts/evaluation.json", "artifacts/files/curve.png", "artifacts/run.json"),
     leftovers.artifacts, "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "look", "seen", "fix"), LEFT)
def test_leftover_of_a_starter_is_named(
    plant: Plant, look: Callable[[Context], Found], seen: str, fix: str, context: Context,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """And what only looks like one is not."""
    planted = plant(context, monkeypatch)
    found = looked(look, planted if isinstance(planted, Context) else context)
    assert (found.state is WARNING) == bool(seen) and seen in found.seen and fix in found.fix, found


def test_dataset_that_a_key_names_is_no_leftover(context: Context, monkeypatch: pytest.MonkeyPatch):
    """Whether it is the file, a folder around it, or a folder that holds it."""
    there("data/raw/ours/a.csv")(context, monkeypatch)
    for raw in ("data/raw/ours", "data/raw", "data/raw/ours/a.csv"):
        assert leftovers.raw_files(changed(context, "data", raw=raw)).state is OK
    assert leftovers.raw_files(changed(context, "data", raw="data/raw/our")).state is WARNING


# ---- packages


LOCKS = {
    "torch-cpu.txt": "torch==1.0+cpu\n",
    "train-cpu.txt": "click==8.1\n",
    "train-cuda.txt": "torch==1.0\nclick==9.0\n",
    "run.txt": "click==8.1\n",
}


@pytest.fixture
def site(tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the packages of an environment lie, which its locks have; one has brought a file."""
    site = tmp_path / "site-packages"
    info = site / "click-8.1.dist-info"
    info.mkdir(parents=True)
    (site / "torch-1.0+cpu.dist-info").mkdir()
    (site / "click.py").write_text("x = 1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"click.py,sha256={digest},6\nclick-8.1.dist-info/RECORD,,\n")
    locks = context.project.root / "requirements"
    for lock, pins in LOCKS.items():
        (locks / lock).write_text(pins)
    monkeypatch.setattr(locks_module.sysconfig, "get_path", lambda name: str(site))
    return site


def pinned(lock: str, pin: str) -> Callable[[Path, Path], object]:
    return lambda site, locks: (locks / lock).write_text(f"{pin}\n")


def edited(site: Path, locks: Path) -> None:
    """The time of the file is the same."""
    before = (site / "click.py").stat()
    (site / "click.py").write_text("x = 2\n")
    os.utime(site / "click.py", ns=(before.st_atime_ns, before.st_mtime_ns))


def added(name: str) -> Callable[[Path, Path], object]:
    return lambda site, locks: (site / name).touch()


PACKAGES = [
    (added("any.txt"), packages.installed, OK, "2 packages in their locked versions"),
    (added("any.txt"), packages.package_files, OK, "1 files are as their packages brought them"),
    (pinned("torch-cpu.txt", "torch==2.0+cpu"), packages.installed, FAULT, "torch 1.0+cpu, and no lock has that"),
    (pinned("torch-cpu.txt", "torch==2.0+cpu"), packages.package_files, UNKNOWN, "no package of the locks is here"),
    (pinned("run.txt", "click==8.2"), packages.installed, FAULT, "click 8.1, 8.2 locked"),
    (edited, packages.package_files, FAULT, "altered: click.py"),
    (lambda site, locks: (site / "click.py").unlink(), packages.package_files, FAULT, "altered: click.py"),
    # the project itself, as make setup installs it
    (added("__editable__.own.pth"), packages.package_files, OK, "1 files are as their packages brought them"),
    (added("own.pth"), packages.package_files, FAULT, "added: own.pth, which Python runs when it starts"),
    (
        added("sitecustomize.py"),
        packages.package_files,
        FAULT,
        "added: sitecustomize.py, which Python runs when it starts",
    ),
]


@pytest.mark.parametrize(("plant", "look", "state", "seen"), PACKAGES)
def test_package_that_is_not_as_locked_is_found(
    plant: Callable[[Path, Path], object], look: Callable[[Context], Found], state: State, seen: str, site: Path,
    context: Context,
):  # fmt: skip
    plant(site, context.project.root / "requirements")
    found = looked(look, context)
    assert (found.state, found.seen) == (state, seen)


# ---- hardware


ROWS = [
    ([["550.1", "Enabled", "0"]], OK, "1, driver 550.1"),
    ([["550.1", "Enabled", "0"], ["550.1", "Enabled", "3"]], FAULT, "GPU 1: uncorrected memory errors"),
    ([["550.1", "Disabled", "[N/A]"]], WARNING, "ECC is off on GPU 0"),
    ([["550.1", "[N/A]", "[N/A]"]], OK, "1, driver 550.1"),
]


@pytest.mark.parametrize(("rows", "state", "seen"), ROWS)
def test_errors_of_a_gpus_memory_are_found(rows: list[list[str]], state: State, seen: str):
    found = hardware._ecc(rows)
    assert found.state is state and seen in found.seen


# ---- services


@pytest.mark.parametrize(
    ("status", "body", "state"),
    [(200, "3.4.0", OK), (200, "2.22.0", WARNING), (200, "<html>", WARNING), (401, "", OK), (404, "", WARNING)],
)
def test_server_is_asked_for_its_version(
    status: int, body: str, state: State, context: Context, monkeypatch: pytest.MonkeyPatch
):
    class Answering(Quiet):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{WORD}@127.0.0.1:{server.server_port}")
        found = looked(checks.mlflow, changed(context, "tracking", enabled=True))
        server.shutdown()
    assert found.state is state and WORD not in found.seen + found.fix


# ---- the command


def test_command_lists_all_and_ends_with_one_at_a_fault(prepared: Path, monkeypatch: pytest.MonkeyPatch):
    keys = f"data.prepared={prepared}", "tracking.enabled=false"
    sets = [word for key in keys for word in ("--set", key)]
    done = python("-m", "samebits", "doctor", *sets, "--json")
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == [check.name for check in doctor.CHECKS]
    faults = [row for row in rows if row["state"] == "FAULT"]
    assert (done.returncode, faults, done.stderr) == (0, [], "")
    monkeypatch.chdir(PROJECT)
    done = verb("doctor", *sets, "--set", "data.sha256=" + "0" * 64)
    lines = done.output.splitlines()
    faults = [line.split()[1:3] for line in lines if line.startswith("FAULT")]
    assert done.exit_code == 1 and faults == [["data", "dataset"], ["data", "prepared"]], done.output
    assert lines[-1].startswith("2 of 23 checks found a fault")


def test_names_cannot_pass_for_lines(context: Context):
    row = doctor.Row("area", "name", Found(FAULT, "a\nok  b\x1b[2J", "mend\nit"))
    assert [line.isprintable() for line in row.lines()] == [True, True]
