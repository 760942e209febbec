"""`repro doctor`: each check finds its planted fault, and says nothing where all is well."""

import base64
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from http.server import HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from clone import commit, copied, project_in
from conftest import PACKAGE, PROJECT, WORD, python
from project.config import Config
from project.repro.address import locks as requested
from project.repro.analysis.doctor import checks, doctor, hardware, packages
from project.repro.analysis.doctor.found import Context, Found, State
from project.repro.environment import canary
from server import Quiet

OK, WARNING, FAULT, UNKNOWN = State


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A committed copy of this project's files."""
    files = "params.yaml", "pyproject.toml", "Dockerfile", "dvc.yaml", ".gitignore"
    commit(copied(tmp_path / "own", ("src", "requirements"), files))
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
    ((row),) = doctor.examine(context.project, context.settings, (doctor.Check("area", "name", look),))
    return row.found


# Those that look at this machine: they may have something to tell of it.
MACHINE = hardware.gpu, hardware.memory, packages.package_files, packages.installed


@pytest.mark.parametrize("check", [c for c in doctor.CHECKS if c.look not in MACHINE], ids=lambda check: check.name)
def test_nothing_is_found_where_all_is_well(check: doctor.Check, context: Context, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REPRO_IMAGE", raising=False)
    monkeypatch.setattr(checks, "CONTAINER", ())
    found = looked(check.look, context)
    assert (found.state, found.fix) == (OK, ""), found


def break_git(own: Path) -> None:
    (own / "src" / PACKAGE / "model.py").write_text("# changed\n")


def break_repository(own: Path) -> None:
    shutil.rmtree(own / ".git")


def break_library(own: Path) -> None:
    with (own / "src" / PACKAGE / "repro" / "analysis" / "diff.py").open("a") as file:
        file.write("\n")


def break_address(own: Path) -> None:
    (own / "src" / PACKAGE / "linked").symlink_to(own / "requirements")


def break_locks(own: Path) -> None:
    text = (own / "pyproject.toml").read_text()
    (own / "pyproject.toml").write_text(text.replace('"numpy>=2.1,<3"', '"numpy>=99"'))


def break_installed(own: Path) -> None:
    path = own / "requirements" / "train-cpu.txt"
    path.write_text(path.read_text().replace("\nrfc8785==", "\nrfc8785==0.0.") + "nobody==1.0\n")


def break_clock(own: Path) -> None:
    (own / "later").touch()
    os.environ["GIT_COMMITTER_DATE"] = "2099-01-01T00:00:00Z"
    commit(own, "from the future")
    del os.environ["GIT_COMMITTER_DATE"]


PLANTED = [
    (break_git, checks.git, WARNING, f"uncommitted changes: src/{PACKAGE}/model.py"),
    (break_repository, checks.git, WARNING, "no git commit"),
    (break_library, checks.library_as_released, WARNING, "modified: analysis/diff.py"),
    (break_address, checks.code_of_the_address, FAULT, "a link to a folder"),
    (break_locks, checks.locks, FAULT, "numpy"),
    (break_installed, packages.installed, FAULT, "missing: nobody; rfc8785 "),
    (break_clock, hardware.clock, FAULT, "in the future"),
]


@pytest.mark.parametrize(("plant", "look", "state", "seen"), PLANTED, ids=lambda each: getattr(each, "__name__", ""))
def test_planted_fault_is_found(
    plant: Callable[[Path], None], look: Callable[[Context], Found], state: State, seen: str, context: Context
):
    plant(context.project.root)
    found = looked(look, context)
    assert found.state is state and seen in found.seen, found


REQUESTED = [
    ("data", {"sha256": "0" * 64}, checks.dataset, FAULT, "0000 wanted"),
    ("data", {"raw": "nowhere"}, checks.dataset, FAULT, "nowhere: missing"),
    ("data", {"test_percent": 21}, checks.prepared, FAULT, "prepared with other keys"),
    ("data", {"prepared": "nowhere"}, checks.prepared, WARNING, "nowhere: not prepared yet"),
    ("determinism", {"relax": ("nnpack",)}, checks.flags_effective, WARNING, "relaxed: nnpack"),
    ("determinism", {"relax": ("nonsense",)}, checks.flags_effective, FAULT, "unknown flag 'nonsense'"),
    ("determinism", {"cpu": "native"}, checks.arithmetic, WARNING, "determinism.cpu is native"),
    ("receipt", {"key": "/nowhere/key"}, checks.signing, FAULT, "/nowhere/key is missing"),
    ("tracking", {"enabled": True, "uri": "http://127.0.0.1:1"}, checks.mlflow, WARNING, "127.0.0.1:1: "),
]


@pytest.mark.parametrize(("section", "keys", "look", "state", "seen"), REQUESTED)
def test_wrong_key_is_found(
    section: str, keys: dict[str, Any], look: Callable[[Context], Found], state: State, seen: str, context: Context,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = looked(look, changed(context, section, **keys))
    assert found.state is state and seen in found.seen, found


SPOILED: list[tuple[Callable[[pytest.MonkeyPatch], object], Callable[[Context], Found], State, str]] = [
    (
        lambda patch: patch.setenv("MKL_CBWR", "AVX2"),
        checks.flags_effective,
        FAULT,
        "MKL_CBWR=AVX2 is set, COMPATIBLE is wanted",
    ),
    (lambda patch: patch.setattr(canary, "arithmetic_canary", lambda: "f" * 64), checks.arithmetic, WARNING, ""),
    (lambda patch: patch.setattr(checks, "CONTAINER", (Path("/"),)), checks.image, WARNING, ""),
    (lambda patch: patch.setitem(sys.modules, "numpy", None), checks.generators, FAULT, "numpy"),
    (lambda patch: patch.setattr(hardware, "SPACE", 2**80), hardware.disk, FAULT, ""),
    # root may write anywhere
    (lambda patch: patch.setattr(hardware.os, "access", lambda path, mode: False), hardware.disk, FAULT, ""),
    (
        lambda patch: patch.setattr(hardware.time, "time", lambda now=hardware.time.time: now() - 3600),
        hardware.clock,
        WARNING,
        "+3600 s",
    ),
]


@pytest.mark.parametrize(("spoil", "look", "state", "seen"), SPOILED)
def test_fault_of_this_process_or_machine_is_found(
    spoil: Callable[[pytest.MonkeyPatch], object], look: Callable[[Context], Found], state: State, seen: str,
    context: Context, monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """A package that cannot be loaded is a fault, too, and no traceback."""
    monkeypatch.delenv("REPRO_IMAGE", raising=False)
    spoil(monkeypatch)
    found = looked(look, context)
    assert found.state is state and seen in found.seen, found


def test_generator_that_ignores_the_seed_is_found(context: Context, monkeypatch: pytest.MonkeyPatch):
    assert looked(checks.generators, context).state is OK
    monkeypatch.setattr(random, "random", random.SystemRandom().random)
    found = looked(checks.generators, context)
    assert found.state is FAULT and found.seen.endswith(" of python")


@pytest.mark.parametrize(
    ("image", "state"),
    [("sha256:" + "0" * 64, OK), ("org/image@sha256:" + "0" * 64, OK), ("latest", FAULT), ("sha256:\n", FAULT)],
)
def test_image_without_a_digest_is_found(image: str, state: State, context: Context, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REPRO_IMAGE", image)
    assert looked(checks.image, context).state is state


# ---- packages


LOCKS = {
    "torch-cpu.txt": "torch==1.0+cpu\n",
    "train-cpu.txt": "click==8.1\n",
    "train-cuda.txt": "torch==1.0\nclick==9.0\n",
    "run.txt": "click==8.1\n",
}


@pytest.fixture
def package(tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of an environment, which its locks have; the file that it brought."""
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
    monkeypatch.setattr(requested.sysconfig, "get_path", lambda name: str(site))
    return site / "click.py"


def test_packages_as_locked_are_fine(package: Path, context: Context):
    assert looked(packages.installed, context) == Found(OK, "2 packages in their locked versions")
    assert looked(packages.package_files, context) == Found(OK, "1 files are as their packages brought them")


def test_environment_of_no_lock_is_found(package: Path, context: Context):
    (context.project.root / "requirements" / "torch-cpu.txt").write_text("torch==2.0+cpu\n")
    found = looked(packages.installed, context)
    assert found.state is FAULT and found.seen == "torch 1.0+cpu, and no lock has that"
    assert looked(packages.package_files, context).state is UNKNOWN


def test_other_version_is_found(package: Path, context: Context):
    (context.project.root / "requirements" / "run.txt").write_text("click==8.2\n")
    assert looked(packages.installed, context).seen == "click 8.1, 8.2 locked"


@pytest.mark.parametrize("plant", [lambda path: path.write_text("x = 2\n"), Path.unlink])
def test_file_of_a_package_that_was_edited_is_found(plant: Callable[[Path], Any], package: Path, context: Context):
    before = package.stat()
    plant(package)
    if package.exists():
        os.utime(package, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = looked(packages.package_files, context)
    assert found.state is FAULT and found.seen == "altered: click.py"


@pytest.mark.parametrize("name", ["own.pth", "sitecustomize.py"])
def test_file_that_python_runs_when_it_starts_is_found(name: str, package: Path, context: Context):
    package.with_name("__editable__.own.pth").touch()  # the project itself, as make setup installs it
    assert looked(packages.package_files, context).state is OK
    package.with_name(name).touch()
    found = looked(packages.package_files, context)
    assert found.state is FAULT and name in found.seen


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


def test_gpu_that_is_asked_for_and_not_there_is_found(context: Context, monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    requested = Context(context.project, context.settings.model_copy(update={"device": "cuda"}))
    assert looked(hardware.gpu, requested).state is FAULT


@pytest.mark.parametrize(("wrong", "mended", "state"), [(0, 0, OK), (0, 2, WARNING), (1, 0, FAULT)])
def test_errors_of_the_memory_are_found(
    wrong: int, mended: int, state: State, tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hardware, "EDAC", tmp_path)
    assert looked(hardware.memory, context).state is UNKNOWN
    (tmp_path / "mc0").mkdir()
    (tmp_path / "mc0" / "ue_count").write_text(f"{wrong}\n")
    (tmp_path / "mc0" / "ce_count").write_text(f"{mended}\n")
    assert looked(hardware.memory, context).state is state


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


def test_command_lists_all_and_ends_with_one_at_a_fault(prepared: Path):
    keys = f"data.prepared={prepared}", "tracking.enabled=false"
    sets = [word for key in keys for word in ("--set", key)]
    done = python("-m", PACKAGE, "doctor", *sets, "--json")
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == [check.name for check in doctor.CHECKS]
    faults = [row for row in rows if row["state"] == "FAULT"]
    assert (done.returncode, faults, done.stderr) == (0, [], "")
    done = python("-m", PACKAGE, "doctor", *sets, "--set", "data.sha256=" + "0" * 64)
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split()[1:3] for line in lines if line.startswith("FAULT")] == [
        ["data", "dataset"],
        ["data", "prepared"],
    ]
    assert lines[-1].startswith("2 of 18 checks found a fault")


def test_names_cannot_pass_for_lines(context: Context):
    row = doctor.Row("area", "name", Found(FAULT, "a\nok  b\x1b[2J", "mend\nit"))
    assert [line.isprintable() for line in row.lines()] == [True, True]
