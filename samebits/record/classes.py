"""The class of a numeric environment: a function of what is recorded of it, for those who write it and who read it."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..address.address import digest

PORTABLE = "cpu-portable"
OWN = "own_variables"  # the field with the values of those that `environment.variables` lists
RELAXED, MIXED = "relaxed", "mixed"  # in these, a run need not repeat
TF32 = "backends.cudnn.allow_tf32"  # a flag that says whether a GPU rounds factors to TF32
# Every x86-64 CPU with AVX2 gives this digest with torch 2.13.0, NumPy 2.4.6 and the mathematics of glibc, while all
# portable pins are in force.
RELEASED = "c7c6a0ea250fcd71f8926fc2fb058efa6e74db09888b18d6d0f686b5eaaa24ec"
# Builds that gave the bits of their release, as the template's `tools/portability.py --builds` measured. Any other is a
# class of its own, though its canary is the same.
RELEASES = {"2.13.0+cpu": "2.13.0", "2.13.0+cu130": "2.13.0"}


def described(environment: Mapping[str, Any], plain: bool, before: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What a record holds of the environment of a run, and of those that it was in `before` it was resumed in this one.

    `plain` says that the arithmetic keeps to what was proved portable (see `Compute.plain`).
    """
    whole = [*before, environment]
    name = class_of(environment, plain)
    if any(class_of(each, plain) != name for each in before):
        name = f"{MIXED}/{digest(whole)[:16]}"
    stated = {"environment": digest(whole if before else environment), "class": name, "preimage": environment}
    return stated | ({"before": list(before)} if before else {})


def environments(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """Digests of the numeric environments that a record states that a run has been in; the present one is last."""
    return tuple(dict.fromkeys(map(digest, (*stated.get("before", ()), stated["preimage"]))))


def class_of(environment: Mapping[str, Any], plain: bool, arithmetic: str = RELEASED) -> str:
    """The name of the group of numeric environments that are known to share bits with this one.

    Outside the portable class, a numeric environment is a class of its own.
    """
    cpu = environment.get("cpu")
    cpu = cpu if isinstance(cpu, Mapping) else {}
    relaxed, device, torch = (environment.get(name) for name in ("relaxed", "device", "torch"))
    portable = (
        plain
        and device == "cpu"
        and cpu.get("arithmetic") == arithmetic
        and environment.get("threads") == 1
        and not cpu.get("non_portable")
        and not relaxed
    )
    if portable and isinstance(torch, Mapping):
        version, own = str(torch.get("version")), environment.get(OWN)
        values = f"/variables-{digest(own)[:16]}" if own else ""
        return f"{PORTABLE}/torch-{RELEASES.get(version, version)}{values}"
    flags = environment.get("flags")
    rounded = device == "cuda" and isinstance(flags, Mapping) and flags.get(TF32)
    return f"{RELAXED if relaxed else device}{'-tf32' * bool(rounded and not relaxed)}/{digest(environment)[:16]}"


def promises(name: str) -> bool:
    """Whether runs of one content address have equal bits in the class of this name."""
    return not name.startswith((f"{RELAXED}/", f"{MIXED}/"))
