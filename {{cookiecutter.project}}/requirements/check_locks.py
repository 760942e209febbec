"""Whether the locks fit pyproject.toml, each other and the Dockerfile's base (`make lock-check`); offline.

Exit code 1 if they do not.

A lock has a purpose. What a training loads stands in two, with the same versions: `train-cpu.txt` with `torch-cpu.txt`,
which is the CPU build of torch alone, for it comes from an index of its own; and `train-cuda.txt`. `run.txt` has what a
run needs around it, `dev.txt` what developers need, `server.txt` the MLflow server: each whole, so that it may be
installed alone, and all alike in what they share.
"""

import datetime
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CPU, TORCH_CPU, CUDA = "requirements/train-cpu.txt", "requirements/torch-cpu.txt", "requirements/train-cuda.txt"
AROUND = {purpose: f"requirements/{purpose}.txt" for purpose in ("run", "dev", "server")}  # of pyproject.toml's extras
LOCKS = {"train-cpu": (CPU, TORCH_CPU), "train-cuda": (CUDA,), **{purpose: (name,) for purpose, name in AROUND.items()}}
DOCKERFILE = "Dockerfile"
# The bases of the image and of the MLflow server's: what is read of their tags, and how they are named in messages.
BASES = {
    "BASE_IMAGE": (
        r"nvidia/cuda:(?P<cuda>(?P<major>\d+)\.\d+)\.\d+-cudnn-runtime-ubuntu(?P<release>[\d.]+)",
        "nvidia/cuda:VERSION-cudnn-runtime-ubuntuRELEASE@sha256:DIGEST",
    ),
    "SERVER_BASE": (r"python:(?P<python>\d+\.\d+)\.\d+-slim-[a-z]+", "python:VERSION-slim-DEBIAN@sha256:DIGEST"),
}
SNAPSHOT = re.compile(r"^ARG APT_SNAPSHOT=(\d{8}T\d{6}Z)$", re.MULTILINE)
EPOCH = re.compile(r"^ARG SOURCE_DATE_EPOCH=(\d+)$", re.MULTILINE)
PYTHONS = {"24.04": "3.12"}  # of each Ubuntu release
DIRECT = "pyproject.toml"  # stands in a pin's `via` where the project itself asks for it


@dataclass(frozen=True)
class Pin:
    """One pinned package: `via` names the packages that ask for it, the project itself as `DIRECT`."""

    name: str
    version: str
    hashes: tuple[str, ...] = field(default=(), repr=False)
    via: tuple[str, ...] = field(default=(), repr=False)


def parse(text: str) -> list[Pin]:
    """The pins of a lock as pip-compile writes it; raises ValueError at anything but pins and hashes."""
    pins: list[Pin] = []
    for line in text.splitlines():
        code, _, comment = line.partition("#")
        code = code.strip().removesuffix("\\").strip()
        if match := re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)", code):
            pins.append(Pin(canonicalize_name(match[1]), match[2]))
        elif pins and (match := re.fullmatch(r"--hash=(sha256:[0-9a-f]{64})", code)):
            pins[-1] = replace(pins[-1], hashes=(*pins[-1].hashes, match[1]))
        elif code:
            raise ValueError(f"neither a pin nor a hash: {code!r}")
        elif pins and line.startswith("    #") and (asker := comment.strip().removeprefix("via").strip()):
            pins[-1] = replace(pins[-1], via=(*pins[-1].via, asker))
    return pins


def direct_requirements(root: Path = ROOT) -> dict[str, list[Requirement]]:
    """What pyproject.toml asks for, by purpose: `train`, and those of `AROUND`."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = {"train": project["dependencies"], **project["optional-dependencies"]}
    return {purpose: [Requirement(line) for line in lines] for purpose, lines in groups.items()}


def direct_via(requirement: Requirement) -> str:
    """How `via` names the project: with the extras it asks for, which show nowhere else in a lock."""
    return f"{DIRECT} [{','.join(sorted(requirement.extras))}]" if requirement.extras else DIRECT


def read_locks(root: Path = ROOT) -> dict[str, dict[str, Pin]]:
    """The locks by name: package name -> pin."""
    return {
        lock: {pin.name: pin for name in names for pin in parse((root / name).read_text())}
        for lock, names in LOCKS.items()
    }


def against_pyproject(wanted: dict[str, Requirement], lock: dict[str, Pin], of: str) -> Iterable[str]:
    """One line per direct dependency that the lock does not hold as pyproject.toml wants it."""
    for name, requirement in wanted.items():
        pin = lock.get(name)
        if pin is None:
            yield f"{name}: wanted by pyproject.toml, missing in the {of} lock"
        elif not requirement.specifier.contains(pin.version, prereleases=True):
            yield f"{name}: pyproject.toml wants {requirement.specifier}, the {of} lock has {pin.version}"
        elif pin.via and direct_via(requirement) not in pin.via:
            yield f"{name}: the {of} lock was not made for {str(requirement)!r}"
    for name, pin in lock.items():
        if name not in wanted and any(asker.startswith(DIRECT) for asker in pin.via):
            yield f"{name}: a direct dependency in the {of} lock, not in pyproject.toml"


def between_devices(cpu: dict[str, Pin], cuda: dict[str, Pin]) -> Iterable[str]:
    """One line per package that only one device's lock has, but for what only torch's CUDA build brings."""
    only = sorted(cpu.keys() - cuda.keys())
    yield from (f"{name}: the train-cpu lock has it, the train-cuda lock does not" for name in only)
    brought = cuda.keys() - cpu.keys()
    for name in sorted(brought):
        strangers = set(cuda[name].via) - brought - {"torch"}
        if strangers or not cuda[name].via:
            yield f"{name}: only in the train-cuda lock, asked for by {sorted(strangers) or 'nobody'}, not by torch"


def against_each_other(locks: dict[str, dict[str, Pin]]) -> Iterable[str]:
    """One line per package of which two locks have other versions, or other hashes of one version."""
    first: dict[str, tuple[str, Pin]] = {}
    for lock, pins in locks.items():
        for name, pin in pins.items():
            other, seen = first.setdefault(name, (lock, pin))
            # torch's builds for CPU and CUDA are other files of one version
            if pin.version.removesuffix("+cpu") != seen.version.removesuffix("+cpu"):
                yield f"{name}: the {other} lock has {seen.version}, the {lock} lock {pin.version}"
            elif pin.version == seen.version and set(pin.hashes) != set(seen.hashes):
                yield f"{name}: other hashes in the {lock} lock than in the {other} lock"


def seconds(snapshot: str) -> str:
    """The seconds from 1970 to a moment such as 20261001T000000Z."""
    return f"{datetime.datetime.strptime(snapshot, '%Y%m%dT%H%M%S%z').timestamp():.0f}"


def base_of(dockerfile: str, name: str) -> re.Match[str] | None:
    """The match of a base of BASES in the Dockerfile; None if it is no such base or has no digest."""
    return re.search(rf"(?m)^ARG {name}={BASES[name][0]}@sha256:[0-9a-f]{{64}}$", dockerfile)


def against_base(dockerfile: str, cuda: dict[str, Pin], pythons: SpecifierSet) -> Iterable[str]:
    """One line per thing in which the Dockerfile's bases and the locks do not fit."""
    found = {name: base_of(dockerfile, name) for name in BASES}
    yield from (f"{DOCKERFILE}: {name} is not {BASES[name][1]}" for name, match in found.items() if not match)
    base, server = found.values()
    if server and not pythons.contains(f"{server['python']}.0"):
        yield f"{DOCKERFILE}: SERVER_BASE has Python {server['python']}, pyproject.toml wants {pythons}"
    if not base:
        return
    snapshot, epoch = SNAPSHOT.search(dockerfile), EPOCH.search(dockerfile)
    if not snapshot:
        yield f"{DOCKERFILE}: APT_SNAPSHOT is not a moment such as 20261001T000000Z"
    elif not epoch or epoch[1] != seconds(snapshot[1]):
        yield f"{DOCKERFILE}: SOURCE_DATE_EPOCH is not APT_SNAPSHOT's {seconds(snapshot[1])}"
    runtime = cuda["nvidia-cuda-runtime"].version if "nvidia-cuda-runtime" in cuda else "none"
    if not runtime.startswith(f"{base['cuda']}."):
        yield f"{DOCKERFILE}: the base has CUDA {base['cuda']}, torch in the train-cuda lock brings {runtime}"
    for name in ("nvidia-cudnn", "nvidia-nccl"):
        if (wanted := f"{name}-cu{base['major']}") not in cuda:
            yield f"{DOCKERFILE}: the base has CUDA {base['major']}, the train-cuda lock has no {wanted}"
    python = PYTHONS.get(base["release"])
    if not python:
        yield f"{DOCKERFILE}: nobody noted which Python Ubuntu {base['release']} has: add it to PYTHONS in {__file__}"
    elif not pythons.contains(f"{python}.0"):
        yield f"{DOCKERFILE}: Ubuntu {base['release']} has Python {python}, pyproject.toml wants {pythons}"


def misfits(root: Path = ROOT) -> list[str]:
    """One line per thing that does not fit; empty if the locks are as they should be."""
    direct = {
        purpose: {str(canonicalize_name(each.name)): each for each in requirements}
        for purpose, requirements in direct_requirements(root).items()
    }
    locks = read_locks(root)
    found = [*between_devices(locks["train-cpu"], locks["train-cuda"]), *against_each_other(locks)]
    for name, lock in locks.items():
        found += against_pyproject(direct[name.partition("-")[0]], lock, name)
        found += [f"{pin.name}: no hash in the {name} lock" for pin in lock.values() if not pin.hashes]
    pythons = SpecifierSet(tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"])
    return [*found, *against_base((root / DOCKERFILE).read_text(), locks["train-cuda"], pythons)]


def main() -> int:
    """Prints what does not fit, or that all does."""
    found = misfits()
    if found:
        print(*found, "make lock brings the locks up to pyproject.toml", sep="\n")
        return 1
    count = sum(map(len, direct_requirements().values()))
    print(f"{', '.join(LOCKS)}: they fit the Dockerfile's base and the {count} direct dependencies of pyproject.toml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
