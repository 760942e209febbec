"""Make the released runs, and write what they gave into the starters' folders.

    python tools/released.py [STARTER…]   # by default all
    python tools/released.py --list       # only the two lists of digests, after a change of the library

Bakes a project of each starter, runs its `make repro` and a short `samebits verify`, and takes over dvc.lock, the row
of results.lock, the metrics, and the digests that READMEs and the library's pages print. The weights that a starter
begins from are trained anew before. At the end the library's files are listed with their digests, so that a project
can say which of them were modified. Run it after every change of the template that enters the content address, on any
x86-64 CPU with AVX2: they all give the same bytes.
"""

import argparse
import hashlib
import json
import re
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path

from bake import PACKAGE, ROOT, STARTERS, bake, in_venv, venv_of

JINJA = "{{ cookiecutter.package }}"
LIBRARY = ROOT / "samebits"
LIST = "library.sha256"
WEIGHTS = "model.safetensors"
BASES = {"finetuning": ("digits", "train.epochs=3")}  # the starter that trains the weights to start from, and how long

ROW = """\
results:
  - source: the digest this template was released with
    address: {address}
    parts:
{parts}
    environment: {environment}
    weights: {weights}
    metrics:
{metrics}
"""
POINTER = "outs:\n- md5: {md5}\n  size: {size}\n  hash: md5\n  path: {name}\n"  # as DVC writes it
# What READMEs show: the weights of the released run, and those and the trace root of a short one.
SHOWN = r"(?<=block digest %})(\w{64})", r"(?m)^one process +(\w{16})", r"(?m)^one process +\w{16} +(\w{16})"


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 (hex) of each file in a folder of the library, by its path from there."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc" and path.name != LIST]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def list_library(library: Path = LIBRARY) -> None:
    """Add core to core_releases.txt, then write library.sha256, which `sha256sum --check` reads."""
    arithmetic = runpy.run_path(str(library / "core" / "arithmetic.py"))
    path = library / arithmetic["RELEASES"]
    # The rows of the last commit, and not of the file: a core that was never committed is no release.
    show = subprocess.run(["git", "show", f"HEAD:./{path.name}"], cwd=library, capture_output=True, text=True)
    row = f"{arithmetic['digest'](digests(library / 'core'))}  {(library / 'core' / arithmetic['FILE']).read_text()}"
    rows = show.stdout if show.returncode == 0 else path.read_text() if path.is_file() else ""
    path.write_text("".join(dict.fromkeys([*rows.splitlines(keepends=True), row])))
    (library / LIST).write_text("".join(f"{sha256}  {name}\n" for name, sha256 in sorted(digests(library).items())))


def release(name: str, folder: Path) -> None:
    """Make the released run of a starter, and take it over."""
    if name in BASES:
        begin_from(name, *BASES[name], folder)
    project = bake(folder, starter=name)
    # its verdict is what we are here to renew
    subprocess.run(["make", "--no-print-directory", "repro", f"VENV={venv_of(name)}"], cwd=project)
    verified = samebits(name, project, "verify", "--only", "once more")
    take_over(name, project, *(re.findall(pattern, verified)[0] for pattern in SHOWN[1:]))


def samebits(name: str, project: Path, *words: str) -> str:
    """Return what a command prints in a project of this starter."""
    command, env = ["python", "-m", "samebits", *words], in_venv(project, venv=venv_of(name))
    return subprocess.run(command, cwd=project, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def begin_from(name: str, other: str, setting: str, folder: Path) -> None:
    """Train the weights that a starter begins from, by another starter; write them, their pointer and their SHA-256."""
    project = bake(folder, starter=other)
    samebits(other, project, "prepare")
    samebits(other, project, "train", "--set", setting, "--set", "tracking.enabled=false")
    weights = (project / "artifacts" / WEIGHTS).read_bytes()
    base, keys = STARTERS / name / "data" / "raw" / "base.safetensors", STARTERS / name / "params.yaml"
    base.write_bytes(weights)
    pointer = POINTER.format(md5=hashlib.md5(weights).hexdigest(), size=len(weights), name=base.name)
    base.with_name(f"{base.name}.dvc").write_text(pointer)
    keys.write_text(re.sub(r"(?<=base_sha256: )\w+", hashlib.sha256(weights).hexdigest(), keys.read_text()))


def take_over(name: str, project: Path, *short: str) -> None:
    """Write the outcome of the finished run in `project` into the starter's folder; `short` is of the short run."""
    starter, run = STARTERS / name, project / "artifacts"
    (starter / "dvc.lock").write_text((project / "dvc.lock").read_text().replace(PACKAGE, JINJA))
    for tracked in git(project, "ls-files", "--cached", "--others", "--exclude-standard", "artifacts"):
        (starter / tracked).parent.mkdir(exist_ok=True)
        shutil.copyfile(project / tracked, starter / tracked)

    address = json.loads((run / "address.json").read_text())
    weights = json.loads((run / "run.json").read_text())["tags"]["repro.weights"]
    results, readme = starter / "results.lock", starter / "README.md"
    before = [re.findall(pattern, readme.read_text())[0] for pattern in SHOWN]
    row = ROW.format(
        address=address["address"],
        parts=listed(address["parts"]),
        environment=json.loads((run / "environment.json").read_text())["class"],
        weights=weights,
        metrics=listed(json.loads((run / "metrics.json").read_text())),
    )
    results.write_text(re.sub(r"(?ms)^results:.*", row, results.read_text()))

    renewed = dict(zip(before, [weights, *short], strict=True))
    for shown in (readme, *sorted((LIBRARY / "docs").glob("*.md"))):
        text = shown.read_text()
        for old, new in renewed.items():
            text = text.replace(old, new)
        shown.write_text(text)
    print(f"released: {name}, weights {weights}, content address {address['address']}")


def git(project: Path, *words: str) -> list[str]:
    """Return the lines that git prints in a project."""
    return subprocess.run(["git", *words], cwd=project, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def listed(values: dict[str, object]) -> str:
    """Lines of YAML for a flat mapping."""
    return "\n".join(f"      {name}: {value}" for name, value in values.items())


def main() -> None:
    """Make the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = json.loads((ROOT / "cookiecutter.json").read_text())["starter"]
    parser.add_argument("starters", nargs="*", metavar="STARTER", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--list", action="store_true", help="write only the library's lists of digests")
    requested = parser.parse_args()
    if unknown := {*requested.starters} - {*known}:
        parser.error(f"{', '.join(sorted(unknown))}: some of {', '.join(known)} wanted")
    list_library()
    (ROOT / "build").mkdir(exist_ok=True)
    for name in [] if requested.list else requested.starters or known:
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
            release(name, Path(folder))
    list_library()  # its pages have the new digests


if __name__ == "__main__":
    main()
