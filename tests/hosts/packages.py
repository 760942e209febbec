"""What the tests of this folder need of the machine: root, and programs from Debian's or Ubuntu's packages.

    python tests/hosts/packages.py

Says what is missing and installs it. Exit code 2: without root.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

# program -> package
PROGRAMS = {
    "debootstrap": "debootstrap",  # the image's stand-in for the CUDA base
    "runc": "runc",  # the container engine
    "xz": "xz-utils",
    "postgres": "postgresql",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",  # hosts with a network each
    "cc": "gcc libc6-dev",  # the library that makes this CPU look like others
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",  # a remote of DVC
    "chromium": "chromium",  # that reads reports
    "chromedriver": "chromium-driver",
    "qemu-x86_64": "qemu-user",  # that plays them where it cannot
}
NEEDS = (
    "these tests need root: they start a container engine, PostgreSQL, Slurm, an SSH server, a browser and "
    "network namespaces of their own"
)


def missing() -> list[str]:
    """Return the packages whose program is not there."""
    path = os.pathsep.join([*os.get_exec_path(), *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])
    names = [package for program, package in PROGRAMS.items() if not shutil.which(program, path=path)]
    return " ".join(names).split()


def refusal() -> str:
    """Return why the tests cannot run here, or ""."""
    if os.geteuid():
        return f"{NEEDS}; run as root: make test-hosts"
    return f"missing: {' '.join(missing())}; `make test-hosts` installs them" if missing() else ""


def main() -> int:
    """Tell, then install."""
    packages = missing()
    print(NEEDS)
    print(f"apt-get will install: {' '.join(packages)}" if packages else "the system packages they need are installed")
    print("the engine and its base image are downloaded into a temporary folder and removed afterwards", flush=True)
    if os.geteuid():
        print("this user is not root: nothing was installed", file=sys.stderr)
        return 2
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]) if packages else ():
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(["apt-get", "-qq", *command], env=env, stdout=subprocess.DEVNULL).returncode:
            return 1  # it has said why
    return 0


if __name__ == "__main__":
    sys.exit(main())
