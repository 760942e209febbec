"""One digest for everybody: training on other CPUs than this machine's."""

import hashlib
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import disguise
import pytest
from disguise import HERE

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
    environment |= {**disguise.variables(profile), **variables}
    command = [*disguise.command(profile), str(project.python), *arguments]
    done = subprocess.run(command, cwd=project.path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


STRICT = """
import json
from {package}.repro.determinism import apply, missing_variables
from {package}.repro.settings import Determinism
switches = Determinism(cpu="{cpu}", relax={relax})
"""
VARIABLES = STRICT + "print(json.dumps(missing_variables(switches)))"
CANARY = (
    STRICT
    + """
assert not missing_variables(switches)
apply(switches)
from {package}.repro.canary import RELEASED, arithmetic_canary
print(arithmetic_canary() == RELEASED)
"""
)


def strict(project: Project, cpu: str = "portable", relax: tuple[str, ...] = (), **variables: str) -> dict[str, str]:
    """Return the variables of a strict process: with them, it need not start itself again, out of its disguise."""
    program = VARIABLES.format(package=project.package, cpu=cpu, relax=relax)
    return variables | json.loads(python(project, HERE, "-c", program, **variables))


def is_canary_released(project: Project, profile: str, *relax: str, **variables: str) -> bool:
    """Say whether the project's canary gives the released digest, with the switches `relax` left off."""
    program = CANARY.format(package=project.package, cpu="portable", relax=relax)
    variables = strict(project, relax=relax, **variables)
    return python(project, profile, "-c", program, **variables).strip() == "True"


@pytest.mark.parametrize("profile", [profile for profile in disguise.profiles() if profile != "ivb"])
def test_canary_is_released_on_every_cpu_with_avx2(profile: str, project: Project) -> None:
    """Ten milliseconds of arithmetic tell that all portable switches are in force."""
    assert is_canary_released(project, profile)


def test_canary_differs_on_a_cpu_without_avx2(project: Project) -> None:
    """Such a CPU is of another class, whatever else is pinned."""
    assert not is_canary_released(project, "ivb", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


# The second column: whether only a CPU with AVX-512 can show what the switch is for.
LEFT_OFF = [
    (("MKL_CBWR",), False),
    (("ATEN_CPU_CAPABILITY",), True),
    (("ONEDNN_MAX_CPU_ISA",), True),
    (("nnpack",), False),
    (THREADS, False),  # either one pins both libraries
]
SHOWN = [relax for relax, wide in LEFT_OFF if not wide or WIDEST != "haswell"]


@pytest.mark.parametrize("relax", SHOWN, ids=" ".join)
def test_canary_notices_each_switch_left_off(relax: tuple[str, ...], project: Project) -> None:
    """On a CPU with AVX-512 every portable switch matters, and two threads are not one."""
    threads = dict.fromkeys(THREADS, "2") if relax == THREADS else {}
    assert not is_canary_released(project, WIDEST, *relax, **threads)


def train(project: Project, profile: str, out: Path, model: str, cpu: str) -> str:
    """Train for one epoch into `out` on a CPU; return the SHA-256 of the weights."""
    one_thread = {} if cpu == "portable" else {"OMP_NUM_THREADS": "1"}  # so that nothing but the CPU differs
    settings = ("train.epochs=1", "tracking.enabled=false", f"model.name={model}", f"determinism.cpu={cpu}")
    chosen = [word for setting in settings for word in ("--set", setting)]
    command = ("-m", f"{project.package}.train", *chosen, "--out", str(out))
    python(project, profile, *command, **strict(project, cpu, **one_thread))
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def train_on_each(project: Project, profiles: list[str], out: Path, model: str, cpu: str) -> dict[str, str]:
    """Train on each CPU, some at a time; return the weights' digests by profile."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = pool.map(lambda profile: train(project, profile, out / profile, model, cpu), profiles)
        return dict(zip(profiles, digests, strict=True))


@pytest.mark.parametrize("model", ["convnet", "transformer"])
def test_portable_training_is_one_digest_on_every_cpu(model: str, project: Project, tmp_path: Path) -> None:
    """Intel and AMD, with AVX-512 and without, train to the weights of this very machine."""
    digests = train_on_each(project, [*TRAINED_ON, HERE], tmp_path, model, "portable")
    assert len(digests) >= 3 and len(set(digests.values())) == 1, digests


def test_native_training_differs_between_cpus(project: Project, tmp_path: Path) -> None:
    """The control: unpinned, the same CPUs give a digest each, so their disguise reaches the arithmetic."""
    digests = train_on_each(project, TRAINED_ON, tmp_path, "convnet", "native")
    assert len(set(digests.values())) == len(TRAINED_ON) >= 2, digests
