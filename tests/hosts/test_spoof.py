"""The library that plays other CPUs by CPUID faulting: everything that asks sees the same one."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

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


@pytest.fixture(scope="session")
def library() -> Path:
    """Return the library; conftest.py leaves this file out where it cannot work."""
    return spoof.library()


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
