"""Generate a project, train it through DVC, train it again in another way, and compare the bits.

What must not matter differs on purpose: one process or two, no loader worker or one, through DVC or not.
"""

import hashlib
import subprocess
import sys

from bake import NAME, ROOT, VENV, bake, in_venv

PROJECT = ROOT / "build" / "demo" / NAME


def run(*command: str) -> int:
    """Run a command in the project, with its environment's programs first."""
    print(f"\n$ {' '.join(command)}", flush=True)
    return subprocess.run(command, cwd=PROJECT, env=in_venv(PROJECT)).returncode


def weights(run_directory: str) -> str:
    """SHA-256 of the weights that a run has written."""
    return hashlib.sha256((PROJECT / run_directory / "model.safetensors").read_bytes()).hexdigest()


def main() -> int:
    """Exit code 0 if the bits are equal and the released ones, or if this machine is known to have others."""
    print(f"$ cookiecutter --no-input {ROOT.name}", flush=True)
    bake(PROJECT.parent)
    released = run("make", "--no-print-directory", "repro", f"VENV={VENV}")
    again = ("python", "-m", "samebits", "train", "--ranks", "2")
    if run(*again, "--set", "loader.workers=1", "--out", "artifacts-2") != 0:
        return 1  # it has said why
    first, second = weights("artifacts"), weights("artifacts-2")
    print(f"\none process, no worker, by dvc     {first}")
    print(f"two processes, one worker each     {second}")
    print("EQUAL" if first == second else "DIFFERENT")
    print("and what this template was released with" if released == 0 else "but see above: not as released")
    return 0 if first == second and released == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
