"""One digest for everybody: training on other CPUs than this machine's, spoofed by CPUID faulting."""

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
import spoof


@dataclass(frozen=True)
class Cpu:
    """What a program must see when it looks at a spoofed CPU."""

    vendor: str
    brand: str
    features: str


INTEL, AMD = "GenuineIntel", "AuthenticAMD"
CPUS = {
    "ivb": Cpu(INTEL, "Intel(R) Core(TM) i7-3770 CPU @ 3.40GHz", ""),
    "haswell": Cpu(INTEL, "Intel(R) Core(TM) i7-4770 CPU @ 3.40GHz", " avx2"),
    "skl": Cpu(INTEL, "Intel(R) Core(TM) i5-6500 CPU @ 3.20GHz", " avx2"),
    "adl": Cpu(INTEL, "12th Gen Intel(R) Core(TM) i7-12700", " avx2"),
    "skx": Cpu(INTEL, "Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz", " avx2 avx512f"),
    "icx": Cpu(INTEL, "Intel(R) Xeon(R) Platinum 8352Y CPU @ 2.20GHz", " avx2 avx512f"),
    "spr": Cpu(INTEL, "Intel(R) Xeon(R) Platinum 8480+", " avx2 avx512f"),
    "zen1": Cpu(AMD, "AMD EPYC 7551 32-Core Processor", " avx2"),
    "zen2": Cpu(AMD, "AMD EPYC 7742 64-Core Processor", " avx2"),
    "zen3": Cpu(AMD, "AMD EPYC 7763 64-Core Processor", " avx2"),
    "zen4": Cpu(AMD, "AMD EPYC 9654 96-Core Processor", " avx2 avx512f"),
    "zen5": Cpu(AMD, "AMD EPYC 9755 128-Core Processor", " avx2 avx512f"),
}
PLACES = {
    "main",
    "thread",
    "thread with all signals blocked",
    "/proc/cpuinfo",
    "own handler of a real segfault",
    "after that segfault",
    "fork",
    "exec",
}
# One CPU of each group whose bits differ unless they are pinned.
TRAINED_ON = ("haswell", "icx", "zen2", "zen4")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Project(Protocol):
    """A generated project with its environment installed."""

    path: Path
    python: Path
    package: str


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the spoofing library; fail where this machine cannot fault CPUID, rather than prove nothing."""
    library = spoof.build(tmp_path_factory.mktemp("spoof"))
    if why := spoof.why_unsupported(library, "icx"):
        pytest.fail(f"{why}\nRun this on an Intel CPU with AVX-512, bare or under KVM")
    return library


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program that prints the CPU it sees, then dies of a real segfault."""
    return spoof.compile_c(tmp_path_factory.mktemp("probe") / "probe", "probe.c", "-pthread")


def look(probe: Path, library: Path, profile: str) -> subprocess.CompletedProcess[str]:
    """Run the probe under `profile`."""
    spoofed = os.environ | spoof.environment(library, profile)
    return subprocess.run([probe], env=spoofed, capture_output=True, text=True)


@pytest.mark.parametrize("profile", CPUS)
def test_one_cpu_is_seen_from_everywhere(profile: str, probe: Path, library: Path) -> None:
    """Threads, handlers, forks, exec'd programs and /proc/cpuinfo agree; a real segfault still kills."""
    seen, cpu = look(probe, library, profile), CPUS[profile]
    lines = dict(line.split(": ", 1) for line in seen.stdout.splitlines())
    assert lines == dict.fromkeys(PLACES, f"{cpu.vendor}, {cpu.brand},{cpu.features}")
    assert seen.returncode == -11


def test_unspoofed_cpu_is_none_of_the_profiles(probe: Path) -> None:
    """The control: without the library the probe sees this machine."""
    seen = subprocess.run([probe, "plain"], capture_output=True, text=True, check=True).stdout
    assert seen.startswith("plain: ")
    assert not any(cpu.brand in seen for cpu in CPUS.values())


def test_unknown_profile_is_refused(probe: Path, library: Path) -> None:
    """A mistyped name runs nothing, and the known names are listed."""
    seen = look(probe, library, "zen22")
    assert (seen.returncode, seen.stdout) == (2, "")
    assert seen.stderr == f'cpuspoof: no CPU profile "zen22"; known: {" ".join(CPUS)}\n'


def python(project: Project, *arguments: str, **variables: str) -> str:
    """Run the project's python in the project and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in THREADS} | variables
    command = [str(project.python), *arguments]
    done = subprocess.run(command, cwd=project.path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


CANARY = """
from {package}.repro.determinism import apply, set_environment
from {package}.repro.settings import Determinism
switches = Determinism(cpu="portable", relax={relax})
set_environment(switches)
apply(switches)
from {package}.repro.canary import RELEASED, arithmetic_canary
print(arithmetic_canary() == RELEASED)
"""


def is_canary_released(project: Project, *relax: str, **variables: str) -> bool:
    """Say whether the project's canary gives the released digest, with the switches `relax` left off."""
    program = CANARY.format(package=project.package, relax=relax)
    return python(project, "-c", program, **variables).strip() == "True"


@pytest.mark.parametrize("profile", [profile for profile, cpu in CPUS.items() if "avx2" in cpu.features])
def test_canary_is_released_on_every_cpu_with_avx2(profile: str, project: Project, library: Path) -> None:
    """Ten milliseconds of arithmetic tell that all portable switches are in force."""
    assert is_canary_released(project, **spoof.environment(library, profile))


def test_canary_differs_on_a_cpu_without_avx2(project: Project, library: Path) -> None:
    """Such a CPU is of another class, and says so."""
    assert not is_canary_released(project, **spoof.environment(library, "ivb"))


@pytest.mark.parametrize(
    "relax",
    [
        ("MKL_CBWR",),
        ("ATEN_CPU_CAPABILITY",),
        ("ONEDNN_MAX_CPU_ISA",),
        ("nnpack",),
        THREADS,  # either one pins both libraries
    ],
    ids=" ".join,
)
def test_canary_notices_each_switch_left_off(relax: tuple[str, ...], project: Project, library: Path) -> None:
    """On an Intel CPU with AVX-512 every portable switch matters, and two threads are not one."""
    threads = dict.fromkeys(THREADS, "2") if relax == THREADS else {}
    assert not is_canary_released(project, *relax, **spoof.environment(library, "icx"), **threads)


def train(project: Project, out: Path, *settings: str, **variables: str) -> str:
    """Train for one epoch into `out`; return the SHA-256 of the weights."""
    settings = ("train.epochs=1", "tracking.enabled=false", *settings)
    chosen = [word for setting in settings for word in ("--set", setting)]
    python(project, "-m", f"{project.package}.train", *chosen, "--out", str(out), **variables)
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def train_on_each(project: Project, library: Path, out: Path, *settings: str, **variables: str) -> dict[str, str]:
    """Train under each CPU of TRAINED_ON; return the weights' digests by profile."""
    digests = {}
    for profile in TRAINED_ON:
        spoofed = variables | spoof.environment(library, profile)
        digests[profile] = train(project, out / profile, *settings, **spoofed)
        record = (out / profile / "environment.json").read_text()
        assert CPUS[profile].brand in record, f"{profile}: the run recorded another CPU"
    return digests


@pytest.mark.parametrize("model", ["convnet", "transformer"])
def test_portable_training_is_one_digest_on_every_cpu(
    model: str, project: Project, library: Path, tmp_path: Path
) -> None:
    """Intel with and without AVX-512, Zen 2 and Zen 4 train to the weights of this very machine."""
    settings = ("determinism.cpu=portable", f"model.name={model}")
    here = train(project, tmp_path / "here", *settings)
    assert train_on_each(project, library, tmp_path, *settings) == dict.fromkeys(TRAINED_ON, here)


def test_native_training_differs_between_cpus(project: Project, library: Path, tmp_path: Path) -> None:
    """The control: unpinned, the same four CPUs give four digests, so spoofing reaches the arithmetic."""
    one_thread = {"OMP_NUM_THREADS": "1"}  # so that nothing but the CPU differs
    digests = train_on_each(project, library, tmp_path, "determinism.cpu=native", **one_thread)
    assert len(set(digests.values())) == len(TRAINED_ON), digests
