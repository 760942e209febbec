"""The measurements that need a GPU: their bundle runs with torch alone and no network, and keeps what it measured."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from bake import ROOT, TOOLS
from baked import InstalledProject, run

BENCHMARKS = ROOT / "benchmarks"
TABLE = BENCHMARKS / "gpu.md"
# torch, and what it needs to be imported: not even numpy, which is among a generated project's own requirements
TORCH = (
    "torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock",
    "typing_extensions.py", "setuptools",
)  # fmt: skip
QUICK = ("--device", "cpu", "--epochs", "1", "--pairs", "1")
# A package whose `verify` tells of one way, and then hangs with a process in a session of its own.
HANGS = """
import subprocess, time
print(f"{'one process':30}  {'0' * 16}  {'0' * 16}  EQUAL", flush=True)
subprocess.run(["sh", "-c", "echo $$ >pid; exec sleep 1000000"], start_new_session=True)
"""
MEASURE = """
import sys
from pathlib import Path
import gpu
from parts import PARTS
from trainings import Trainer
part = next(part for part in PARTS if part.name == "verify")
gpu.run(part, Trainer(Path("work"), "cpu", 1, 1), {}, Path("verify.jsonl"), float(sys.argv[1]))
"""
NO_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")

Bundle = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle, made as `make gpu-bundle` makes it."""
    folder = tmp_path_factory.mktemp("bundle")
    env = os.environ | {"PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}
    run(sys.executable, BENCHMARKS / "bundle.py", folder, env=env)
    return folder


@pytest.fixture(scope="module")
def python(project: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that has torch, and neither pip nor any other package of a project."""
    venv = tmp_path_factory.mktemp("torch")
    run(project.python, "-m", "venv", "--without-pip", venv)
    requested = "import sysconfig; print(sysconfig.get_path('purelib'))"
    there, here = (
        Path(run(each, "-c", requested).stdout.strip()) for each in (project.python, venv / "bin" / "python")
    )
    for name in TORCH:
        (here / name).symlink_to(there / name)
    return venv / "bin" / "python"


@pytest.fixture(scope="module")
def bundle(folder: Path, python: Path) -> Bundle:
    """Return a function that calls the bundle's run.sh in that environment; as root, without network."""
    before = () if os.geteuid() else NO_NETWORK
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": str(python), "GOMP_SPINCOUNT": "0"}
    return lambda *words: run(*before, folder / "run.sh", *words, cwd="/", env=env, check=False)


def rows(folder: Path, part: str) -> list[dict[str, Any]]:
    """Return all that a part has written."""
    return [json.loads(line) for line in (folder / "results" / f"{part}.jsonl").read_text().splitlines()]


def test_the_bundle_can_be_carried(folder: Path) -> None:
    """All of it is less than 60 MiB."""
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 60 << 20


def test_without_a_gpu_it_is_said_what_was_not_measured(bundle: Bundle, folder: Path) -> None:
    """In a line, with exit code 2, and nothing is written."""
    done = bundle("machine", "bits-convnet-float32-*")
    assert done.returncode == 2
    assert done.stdout.startswith("no GPU seen by torch ") and len(done.stdout.splitlines()) == 1
    assert done.stdout.endswith("Not measured: machine, bits-convnet-float32-eager, bits-convnet-float32-compiled\n")
    assert not (folder / "results").exists()


@pytest.mark.long
def test_with_torch_alone_parts_run_and_make_a_table(bundle: Bundle, folder: Path) -> None:
    """A training, too; the table says that a CPU is no GPU."""
    sides = {
        "machine": [],
        "peer-small-convnet-bfloat16-eager": ["project", "plain"],
    }
    done = bundle(*QUICK, *sides)
    assert done.returncode == 0, done.stdout
    for part in sides:
        header, row, end = rows(folder, part)
        assert header["device"] == "cpu" and header["torch"].startswith(header["locked_torch"])
        assert end["end"] == "whole"
        assert all(row[side]["ms"] > 0 for side in sides[part])
    done = bundle("table")
    assert done.returncode == 0
    assert done.stdout.startswith("# A rehearsal on a CPU")
    assert "| small | convnet | bfloat16 | eager | " in done.stdout


def test_a_project_knows_what_the_parts_ask_for(project: InstalledProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key, also of what only a GPU has time for."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from parts import PARTS

    requested = [
        (*part.settings, *part.on_a_card, *chain(*(side.settings for side in part.sides.values()))) for part in PARTS
    ]
    words = [word for setting in dict.fromkeys(chain(*requested)) for word in ("--set", setting)]
    assert "model.width=1024" in words
    project.run(project.python, "-m", "samebits", "address", *words)


def test_a_cpu_never_writes_the_table_of_gpus(tmp_path: Path) -> None:
    """`make gpu RESULTS=…` refuses what was measured on a CPU, alone and among others; a GPU's is written."""
    results, table = tmp_path / "results", tmp_path / "gpu.md"
    header = {"part": "machine", "epochs": 2, "gpu": "A card", "torch": "2", "locked_torch": "3", "cuda": "13"}
    header |= {"numpy": "2", "python": "3.12", "bundle": "0"}
    results.mkdir()

    def write(part: str, device: str, *rows: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        lines = [json.dumps(row) for row in (header | {"part": part, "device": device}, *rows)]
        (results / f"{part}.jsonl").write_text("\n".join(lines) + "\n" + '{"cut o')
        return run(sys.executable, BENCHMARKS / "table.py", results, table, check=False)

    assert write("machine", "cpu").returncode == 2 and not table.exists()
    equal, differs = ({"way": "again", "verdict": verdict} for verdict in ("EQUAL", "DIFFERS"))
    done = write("bits-convnet-float32-eager", "cuda", equal)
    assert done.returncode == 2 and "results of cpu and cuda seen, those of cuda wanted" in done.stdout
    assert write("machine", "cuda").returncode == 0
    assert table.read_text().startswith("# On a GPU\n") and "A card, torch 2 (the locks have 3)" in table.read_text()
    assert "- cut off: machine, bits-convnet-float32-eager" in table.read_text()
    assert write("bits-convnet-float32-eager", "cuda", differs).returncode == 1
    assert "| convnet | float32 | eager | DIFFERS | — |" in table.read_text()


def runs(pid: str) -> bool:
    """Say whether a process runs: it may have ended and wait to be reaped."""
    try:
        return bool(Path("/proc", pid, "environ").read_bytes())
    except OSError:
        return False


@pytest.fixture
def hanging(tmp_path: Path) -> Path:
    """Return a bundle whose project hangs."""
    for program in BENCHMARKS.glob("*.py"):
        shutil.copy2(program, tmp_path)
    library = tmp_path / "project" / "vendor" / "samebits"
    for folder in (library, tmp_path / "project" / "data" / "prepared"):
        folder.mkdir(parents=True)
    (library / "__init__.py").touch()
    (library / "__main__.py").write_text(HANGS)
    return tmp_path


def test_a_part_ends_with_its_time(hanging: Path) -> None:
    """It says so."""
    run(sys.executable, "-c", MEASURE, "0.01", cwd=hanging)
    *_, end = map(json.loads, (hanging / "verify.jsonl").read_text().splitlines())
    assert end["end"] == "stopped by its time limit"


def test_a_part_that_is_stopped_keeps_its_rows_and_leaves_no_process(hanging: Path) -> None:
    """Not even one that went into a session of its own."""
    process = subprocess.Popen([sys.executable, "-c", MEASURE, "1000000"], cwd=hanging)
    pid, written = hanging / "project" / "pid", hanging / "verify.jsonl"
    while not (pid.is_file() and pid.read_text().endswith("\n") and written.read_text().count("\n") == 2):
        assert process.poll() is None
        time.sleep(0.05)
    assert runs(pid.read_text().strip())
    process.terminate()
    process.wait()
    _, row, end = map(json.loads, written.read_text().splitlines())
    assert row == {"way": "one process", "verdict": "EQUAL"} and end["end"] == "stopped by a signal"
    assert not runs(pid.read_text().strip())


def test_bits_that_differ_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the weights or in the trace; what failed, or did not go on from its checkpoint, is not EQUAL either."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import parts
    from trainings import Failed

    class Planted:
        """Trains nothing; the run of 4 ranks ends with other weights, that of 4 workers with another trace."""

        device, printed = "cpu", "resumed runs/x after step 4\n"

        def train(self, name: str, *settings: str, **how: object) -> Path:
            if name == "2-ranks":
                raise Failed("no")
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "model.safetensors").write_text("other" if name == "4-ranks" else "weights")
            trace = "other" if name == "4-workers" else "root"
            (tmp_path / name / "run.json").write_text(json.dumps({"tags": {"repro.trace": trace}}))
            return tmp_path / name

        def killed(self, name: str, *settings: str) -> None: ...

        def output(self, name: str) -> str:
            return self.printed

        def lines(self, *words: str) -> list[str]:
            return ["they part in step 3"]

    def verdicts(planted: Planted) -> dict[str, str]:
        part = next(part for part in parts.PARTS if part.measure is parts.bits)
        _, *rows = parts.bits(part, planted)
        assert all(("said" in row) == (row["verdict"] != "EQUAL") for row in rows)
        return {row["way"]: row["verdict"] for row in rows}

    found = {"again": "EQUAL", "2 ranks": "FAILED", "4 ranks": "DIFFERS", "4 workers": "DIFFERS"}
    assert verdicts(Planted()) == found | {"killed, resumed": "EQUAL"}
    Planted.printed = "began anew\n"
    assert verdicts(Planted()) == found | {"killed, resumed": "FAILED"}
