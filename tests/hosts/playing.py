"""What another CPU is given to do, in one process: the project's canary, draws, and trainings, each in a fork of it.

Under QEMU importing torch, the library, and what starters add takes longer than the rest, and what is forked from a
process stays on its CPU. So all trainings are of one copy of a project, in which the files of another one take the
place of the first's; the library is the same.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import disguise
import golden
from bake import python_path
from baked import InstalledProject, weights
from disguise import HERE

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
STRICT = """
import json, os
from samebits.core.flags import apply, stated_variables
from samebits.config.settings import Determinism
flags = Determinism(cpu="{cpu}", relax={relax})
"""
VARIABLES = STRICT + "print(json.dumps(stated_variables(flags)))"
# What an emulated program starts is not emulated: a training that started itself again would run on the CPU here.
PROGRAM = (
    STRICT
    + """
def started_again(*words):
    raise AssertionError("started again, out of its disguise")
os.execv = started_again
from samebits.base import loading
loading.load("torch", *(loading.TRAINING if {trainings} else ()))
apply(flags)
import hashlib, random, runpy, sys
import numpy, torch
from samebits.environment.canary import RELEASED, arithmetic_canary
from samebits.core.seeds import seed_everything
print("released" if arithmetic_canary() == RELEASED else "other")
seed_everything(5)
draws = [random.gauss(0, 1) for _ in range(999)], [random.betavariate(0.4, 0.4) for _ in range(999)]
draws += numpy.random.normal(size=999), numpy.random.beta(0.4, 0.4, 999), numpy.random.default_rng(5).gamma(0.5, 1, 999)
draws += torch.randn(999).numpy(), torch.randn(7).numpy(), torch.randn(999, dtype=torch.float64).numpy()
gammas = [numpy.random.rand(999).astype(kind) ** kind(2.2) for kind in (numpy.float32, numpy.float64)]
print(hashlib.sha256(b"".join(numpy.asarray(numbers).tobytes() for numbers in (*draws, *gammas))).hexdigest())
sys.stdout.flush()
for arguments in {networks}:
    if not os.fork():
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        sys.exit()
    assert os.wait()[1] == 0, arguments
for number, (project, arguments, imports) in enumerate({trainings}):
    if number == 0:
        import shutil
    for line in imports:
        exec(line)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, project
        continue
    shutil.rmtree("src")
    shutil.copytree(project, ".", ignore=shutil.ignore_patterns(".git", "build", "vendor"), dirs_exist_ok=True)
    sys.argv = ["samebits", "train", *arguments]
    runpy.run_module("samebits", run_name="__main__", alter_sys=True)
    sys.exit()
"""
)
DIGITS = Path("data", "raw", "digits.csv.gz")
FEW = 96  # samples: some steps and an evaluation, for each takes seconds where a CPU is emulated


@dataclass(frozen=True)
class Training:
    """A training of a project, with these overrides."""

    project: InstalledProject
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Played:
    """Results of a CPU.

    Attributes:
        canary: True if its canary is the released one.
        draws: SHA-256 (hex) of random draws.
        weights: SHA-256 (hex) of the final weights by training.
        networks: the digest of each network of the golden set, if they were trained.
    """

    canary: bool
    draws: str
    weights: Mapping[str, str]
    networks: Mapping[str, str]


def python(project: InstalledProject, profile: str, *arguments: str, **variables: str) -> str:
    """Run the project's python on a CPU, in the project, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in THREADS}
    environment |= {"PYTHONPATH": python_path(project.path), **disguise.variables(profile), **variables}
    command = [*disguise.command(profile), str(project.python), *arguments]
    done = subprocess.run(command, cwd=project.path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def few(project: InstalledProject, folder: Path) -> tuple[str, ...]:
    """Prepare the first `FEW` samples in a folder; return the overrides that train on them."""
    lines = gzip.decompress((project.path / DIGITS).read_bytes()).splitlines(keepends=True)[:FEW]
    folder.mkdir(parents=True)
    raw = folder / DIGITS.name
    raw.write_bytes(gzip.compress(b"".join(lines), mtime=0))
    sha256 = hashlib.sha256(raw.read_bytes()).hexdigest()
    return prepared(project, folder, f"data.raw={raw}", f"data.sha256={sha256}")


def prepared(project: InstalledProject, folder: Path, *overrides: str) -> tuple[str, ...]:
    """Prepare the data that these overrides name in a folder; return the overrides that train on them."""
    overrides += (f"data.prepared={folder / 'prepared'}",)
    python(project, HERE, "-m", "samebits", "prepare", *words(overrides))
    return overrides


def words(overrides: Sequence[str]) -> list[str]:
    """Return the arguments for these overrides."""
    return [word for override in overrides for word in ("--set", override)]


def copied(project: InstalledProject, out: Path) -> InstalledProject:
    """Copy a project into this folder, for trainings to change its files."""
    return replace(project, path=Path(shutil.copytree(project.path, out / "project", symlinks=True)))


def strict(
    project: InstalledProject, cpu: str = "portable", relax: tuple[str, ...] = (), **variables: str
) -> dict[str, str]:
    """Return the variables of a strict process: with them, it need not start itself again, out of its disguise."""
    program = VARIABLES.format(cpu=cpu, relax=relax)
    return variables | json.loads(python(project, HERE, "-c", program, **variables))


def brought(project: InstalledProject) -> list[str]:
    """Return the lines that import what takes longest of the packages that a starter adds."""
    texts = [path.read_text() for path in (project.path / "src").rglob("*.py")]
    return [line for text in texts for line in re.findall(r"^from transformers\S* import .*$", text, re.MULTILINE)]


def play(
    project: InstalledProject,
    profile: str,
    out: Path,
    trainings: Mapping[str, Training] | None = None,
    cpu: str = "portable",
    relax: tuple[str, ...] = (),
    networks: bool = False,
    **variables: str,
) -> Played:
    """Compute the project's canary on a CPU, and do these trainings, with the flags `relax` left off.

    With `networks`, train the golden networks, too, on one rank.
    """
    # where a CPU is emulated, the look where thousands of modules came from takes a fifth of a training
    common = "tracking.enabled=false", f"determinism.cpu={cpu}", "unhashed.modules=[all]"
    trainings = trainings or {}
    copy = copied(project, out)
    rows = [
        (str(training.project.path), [*words((*common, *training.overrides)), "--out", str(out / name)], imports)
        for name, training in trainings.items()
        for imports in [brought(training.project)]
    ]
    rows.sort(key=lambda row: len(row[-1]))  # a project must not see a package that its locks do not have
    file = out / "networks.json"
    cases = [f"{name},1,none,0,float32,," for name in golden.NETWORKS]
    golden_networks = [[str(golden.NETWORKS_SCRIPT), str(file), *cases]] if networks else []
    program = PROGRAM.format(cpu=cpu, relax=relax, trainings=rows, networks=golden_networks)
    canary, draws, *_ = python(copy, profile, "-c", program, **strict(project, cpu, relax, **variables)).splitlines()
    digests = json.loads(file.read_text()) if networks else {}
    by_name = {case.partition(",")[0]: digest for case, digest in digests.items()}
    return Played(canary == "released", draws, {name: weights(out / name) for name in trainings}, by_name)


def on_each(profiles: Sequence[str], work: Callable[[str], Played]) -> dict[str, Played]:
    """Do this on each CPU, some at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(profiles, pool.map(work, profiles), strict=True))
