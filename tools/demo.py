"""Generate a project, train it through DVC, train it again in another way, and compare the bits.

    python tools/demo.py [FOLDER] [ANSWER=VALUE ...]

What must not matter differs on purpose: one process or two, no loader worker or one, through DVC or not.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from bake import ROOT, VENV, bake, in_venv


def run(project: Path, *command: str) -> int:
    """Run a command in the project, with its environment's programs first."""
    print(f"\n$ {' '.join(command)}", flush=True)
    return subprocess.run(command, cwd=project, env=in_venv(project)).returncode


def weights(out: Path) -> str:
    """SHA-256 of the weights that a run has written."""
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def main(folder: str | Path = ROOT / "build" / "demo", *answers: str) -> int:
    """Exit code 0 if the bits are equal and the released ones, or if this machine is known to have others."""
    print(f"$ cookiecutter --no-input {ROOT.name}", *answers, flush=True)
    project = bake(Path(folder), **dict(answer.split("=", 1) for answer in answers))
    released = run(project, "make", "--no-print-directory", "repro", f"VENV={VENV}")
    again = ("python", "-m", "samebits", "train", "--ranks", "2")
    if run(project, *again, "--set", "loader.workers=1", "--out", "artifacts-2") != 0:
        return 1  # it has said why
    first, second = weights(project / "artifacts"), weights(project / "artifacts-2")
    print(f"\none process, no worker, by dvc     {first}")
    print(f"two processes, one worker each     {second}")
    print("EQUAL" if first == second else "DIFFERENT")
    print("and what this template was released with" if released == 0 else "but see above: not as released")
    return 0 if first == second and released == 0 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
