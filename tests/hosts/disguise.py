"""Other CPUs than this machine's to run programs on: played by CPUID faulting where it can, else by QEMU."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import spoof

# QEMU's names. It executes AVX2 (since 7.2) but no AVX-512, and takes twenty seconds to import torch: one of a kind.
QEMU = {"ivb": "IvyBridge", "haswell": "Haswell", "zen2": "EPYC-Rome"}
FAULTING = (*QEMU, "zen3", "skl", "zen1", "adl", "skx", "icx", "spr", "zen4", "zen5")
HERE = "here"  # this machine's own CPU


@cache
def faulting() -> bool:
    """Say whether this CPU and kernel can fault CPUID, as Intel's can, bare or under KVM."""
    return not spoof.why_unsupported(spoof.library(), "icx")


def profiles() -> tuple[str, ...]:
    """Return the names of the CPUs that can be played here."""
    return FAULTING if faulting() else tuple(QEMU)


def here_is(feature: str) -> bool:
    """Say whether this machine's CPU has a feature, or is of a maker, by its name in /proc/cpuinfo."""
    return feature in Path("/proc/cpuinfo").read_text().split()


def command(profile: str) -> list[str]:
    """Return what goes before a program to run it on a CPU.

    Programs that an emulated one starts are not emulated; those of a spoofed one are spoofed.
    """
    if profile == HERE or faulting():
        return []
    return ["qemu-x86_64", "-cpu", QEMU[profile]]


def variables(profile: str) -> Mapping[str, str]:
    """Return the variables that a program needs to run on a CPU."""
    return spoof.environment(spoof.library(), profile) if profile != HERE and faulting() else {}
