"""One digest for everybody: training on other CPUs than this machine's."""

import faulthandler
import gzip
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import disguise
import pytest
from bake import python_path
from disguise import HERE

WITH_AVX2 = [profile for profile in disguise.profiles() if profile != "ivb"]
# One CPU of each group whose bits differ unless they are pinned.
TRAINED_ON = [profile for profile in ("haswell", "icx", "zen2", "zen4") if profile in disguise.profiles()]
WIDEST = "icx" if disguise.faulting() else HERE if disguise.here_is("avx512f") else "haswell"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Project(Protocol):
    """A generated project with its environment installed."""

    path: Path
    python: Path
    package: str


def python(project: Project, profile: str, *arguments: str, **variables: str) -> str:
    """Run the project's python on a CPU, in the project, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in THREADS}
    environment |= {"PYTHONPATH": python_path(project.path), **disguise.variables(profile), **variables}
    command = [*disguise.command(profile), str(project.python), *arguments]
    done = subprocess.run(command, cwd=project.path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


STRICT = """
import json, os
from samebits.core.flags import apply, stated_variables
from samebits.config.settings import Determinism
flags = Determinism(cpu="{cpu}", relax={relax})
"""
VARIABLES = STRICT + "print(json.dumps(stated_variables(flags)))"
# What an emulated program starts is not emulated: a training that started itself again would run on the CPU here.
DISGUISED = (
    STRICT
    + """
def started_again(*words):
    raise AssertionError("started again, out of its disguise")
os.execv = started_again
"""
)
# One process does all that is wanted of a CPU: under QEMU, importing torch takes longer than the rest.
CANARY_AND_TRAININGS = (
    DISGUISED
    + """
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
for arguments in {trainings}:
    sys.argv = ["samebits", "train", *arguments]
    try:
        runpy.run_module("samebits", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code
"""
)
MODELS = ("convnet", "transformer")
DIGITS = Path("data", "raw", "digits.csv.gz")
FEW = 96  # samples: some steps and an evaluation, for each takes seconds where a CPU is emulated


def few(project: Project, folder: Path) -> tuple[str, ...]:
    """Prepare the first `FEW` samples in a folder; return the overrides that train on them."""
    lines = gzip.decompress((project.path / DIGITS).read_bytes()).splitlines(keepends=True)[:FEW]
    raw = folder / DIGITS.name
    raw.write_bytes(gzip.compress(b"".join(lines), mtime=0))
    sha256 = hashlib.sha256(raw.read_bytes()).hexdigest()
    return prepared(project, folder, f"data.raw={raw}", f"data.sha256={sha256}")


def prepared(project: Project, folder: Path, *overrides: str) -> tuple[str, ...]:
    """Prepare the data that these overrides name in a folder; return the overrides that train on them."""
    overrides += (f"data.prepared={folder / 'prepared'}",)
    words = [word for override in overrides for word in ("--set", override)]
    python(project, HERE, "-m", "samebits", "prepare", *words)
    return overrides


@dataclass(frozen=True)
class Played:
    """What a CPU gave: whether its canary is the released one, the SHA-256 of draws, and of the weights by model."""

    canary: bool
    draws: str
    weights: Mapping[str, str]


def strict(project: Project, cpu: str = "portable", relax: tuple[str, ...] = (), **variables: str) -> dict[str, str]:
    """Return the variables of a strict process: with them, it need not start itself again, out of its disguise."""
    program = VARIABLES.format(cpu=cpu, relax=relax)
    return variables | json.loads(python(project, HERE, "-c", program, **variables))


def play(
    project: Project,
    profile: str,
    out: Path,
    *models: str,
    cpu: str = "portable",
    relax: tuple[str, ...] = (),
    **variables: str,
) -> Played:
    """Compute the project's canary on a CPU, and train each model for one epoch, with the flags `relax` left off."""
    out.mkdir(parents=True, exist_ok=True)
    data = few(project, out) if models else ()
    common = ("train.epochs=1", "tracking.enabled=false", f"determinism.cpu={cpu}", *data)
    settings = {model: (*common, f"model.name={model}") for model in models}
    trainings = [
        [*(word for setting in settings[model] for word in ("--set", setting)), "--out", str(out / model)]
        for model in models
    ]
    program = CANARY_AND_TRAININGS.format(cpu=cpu, relax=relax, trainings=trainings)
    printed = python(project, profile, "-c", program, **strict(project, cpu, relax, **variables))
    weights = {model: hashlib.sha256((out / model / "model.safetensors").read_bytes()) for model in models}
    canary, draws, *_ = printed.splitlines()
    return Played(canary == "released", draws, {model: digest.hexdigest() for model, digest in weights.items()})


def on_each(profiles: Sequence[str], work: Callable[[str], Played]) -> dict[str, Played]:
    """Do this on each CPU, some at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(profiles, pool.map(work, profiles), strict=True))


@pytest.fixture(scope="module")
def portable(project: Project, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    """What each CPU with AVX2 gives while all flags are on."""
    faulthandler.cancel_dump_traceback_later()  # it takes minutes
    out = tmp_path_factory.mktemp("portable")

    def work(profile: str) -> Played:
        return play(project, profile, out / profile, *(MODELS if profile in (*TRAINED_ON, HERE) else ()))

    return on_each([*WITH_AVX2, HERE], work)


@pytest.mark.parametrize("profile", WITH_AVX2)
def test_canary_is_released_on_every_cpu_with_avx2(profile: str, portable: dict[str, Played]) -> None:
    """Ten milliseconds of arithmetic tell that all portable flags are in force."""
    assert portable[profile].canary


WIDE = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "NPY_DISABLE_CPU_FEATURES", "OPENBLAS_CORETYPE")


def test_canary_differs_on_a_cpu_without_avx2(project: Project, tmp_path: Path) -> None:
    """Such a CPU is of another class, whatever else is pinned."""
    assert not play(project, "ivb", tmp_path, relax=WIDE).canary


NUMPYS = ("NPY_DISABLE_CPU_FEATURES",)
# The second column: whether only a CPU with AVX-512 can show what the flag is for.
LEFT_OFF = [
    (("MKL_CBWR",), False),
    (("ATEN_CPU_CAPABILITY",), True),
    (("ONEDNN_MAX_CPU_ISA",), True),
    (NUMPYS, True),
    (("OPENBLAS_CORETYPE",), True),
    (("nnpack",), False),
    (THREADS, False),  # either one pins both libraries
]
SHOWN = [relax for relax, wide in LEFT_OFF if not wide or WIDEST != "haswell"]


@pytest.mark.parametrize("relax", SHOWN, ids=" ".join)
def test_canary_notices_each_switch_left_off(
    relax: tuple[str, ...], project: Project, portable: dict[str, Played], tmp_path: Path
) -> None:
    """On a CPU with AVX-512 every portable flag matters, and two threads are not one."""
    threads = dict.fromkeys(THREADS, "2") if relax == THREADS else {}
    played = play(project, WIDEST, tmp_path, relax=relax, **threads)
    assert not played.canary
    assert (played.draws != portable[WIDEST].draws) == (relax == NUMPYS)


def test_draws_and_numpys_arithmetic_are_one_digest_on_every_cpu(portable: dict[str, Played]) -> None:
    """Normal, beta and gamma deviates of python, NumPy and torch, and powers, as an augmentation takes them."""
    digests = {profile: played.draws for profile, played in portable.items()}
    assert len(digests) >= 4 and len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("model", MODELS)
def test_portable_training_is_one_digest_on_every_cpu(model: str, portable: dict[str, Played]) -> None:
    """Intel and AMD, with AVX-512 and without, train to the weights of this very machine."""
    digests = {profile: portable[profile].weights[model] for profile in (*TRAINED_ON, HERE)}
    assert len(digests) >= 3 and len(set(digests.values())) == 1, digests


def test_training_that_leaves_its_disguise_is_found(project: Project, tmp_path: Path) -> None:
    """The planted fault: a variable is missing that a training sets by starting itself again."""
    program = CANARY_AND_TRAININGS.format(cpu="portable", relax=(), trainings=[[]])
    variables = strict(project)
    kept = {name: value for name, value in variables.items() if not name.startswith("MALLOC_")}
    assert kept != variables
    with pytest.raises(AssertionError, match="started again, out of its disguise"):
        python(project, HERE, "-c", program, **kept)


def test_native_training_differs_between_cpus(project: Project, tmp_path: Path) -> None:
    """The control: unpinned, the same CPUs give a digest each, so their disguise reaches the arithmetic."""
    one_thread = {"OMP_NUM_THREADS": "1"}  # so that nothing but the CPU differs

    def work(profile: str) -> Played:
        return play(project, profile, tmp_path / profile, "convnet", cpu="native", **one_thread)

    digests = {profile: played.weights["convnet"] for profile, played in on_each(TRAINED_ON, work).items()}
    assert len(set(digests.values())) == len(TRAINED_ON) >= 2, digests
