"""Write the folder with which the GPU checks run where there is Python, torch and no network: build/gpu-bundle.

    python benchmarks/bundle.py [FOLDER]

It holds a generated project, the packages that a training imports beside torch, as the locks have them, and
run.sh, which says how it is used. What FOLDER/results holds stays.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from bake import ROOT, bake

BENCHMARKS = ROOT / "benchmarks"
PROGRAMS = ("run.sh", "gpu.py", "parts.py", "trainings.py", "sharing.py", "table.py")
PEERS = ROOT / "measure" / "peers.py"
# What a training imports beside torch when nothing is tracked: the test of the bundle has nothing else.
PACKAGES = (
    "annotated-types", "click", "numpy", "pydantic", "pydantic-core", "rfc8785", "rich", "ruamel-yaml", "safetensors",
    "typing-extensions", "typing-inspection",
)  # fmt: skip
PYTHONS = sorted({"3.12", "{}.{}".format(*sys.version_info)})
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LARGEST = 60 << 20  # bytes: what can be carried to a machine in one go


def main() -> int:
    """Exit code 0, or 1 where the folder became too large."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "gpu-bundle").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name != "results":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    add_project(folder)
    for program in (*(BENCHMARKS / name for name in PROGRAMS), PEERS):
        shutil.copy2(program, folder)
    download(folder)
    locked = re.search(r"^torch==(\S+)", (folder / "project/requirements/train-cuda.txt").read_text(), re.MULTILINE)
    assert locked
    (folder / "bundle.json").write_text(json.dumps({"bundle": digest(folder), "locked_torch": locked[1]}))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB; ./run.sh in it lists the parts")
    if size >= LARGEST:
        print(f"less than {LARGEST >> 20} MiB wanted", file=sys.stderr)
        return 1
    return 0


def add_project(folder: Path) -> None:
    """Generate a project; it is no repository, which would only record the bundle's own commit."""
    project = bake(folder).rename(folder / "project")
    shutil.rmtree(project / ".git", ignore_errors=True)


def download(folder: Path) -> None:
    """Get the packages' wheels for all Pythons, checked against the lock's hashes."""
    lock = (folder / "project" / "requirements" / "train-cpu.txt").read_text()
    pins = {pin[1]: pin[0] for pin in re.finditer(r"^([a-z0-9-]+)==.*(?:\n    --hash=.*)*", lock, re.MULTILINE)}
    wanted = folder / "wheels" / "requirements.txt"
    wanted.parent.mkdir()
    wanted.write_text("\n".join(pins[name] for name in PACKAGES) + "\n")
    for python in PYTHONS:
        tag = f"cp{python.replace('.', '')}"
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--require-hashes", "--implementation=cp", f"--python-version={python}", *platforms]
        subprocess.run([*command, "--dest", str(wanted.parent / tag), "-r", str(wanted)], check=True)


def digest(folder: Path) -> str:
    """A short name for all that the folder holds."""
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).parts[0] != "results":
            hasher.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return hasher.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
