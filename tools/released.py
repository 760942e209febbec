"""Make the released run, and write what it gave into the template.

    python tools/released.py [VENV]
    python tools/released.py --list       # the list of the library's files alone, after a change of one

Bakes a project with the default answers, runs its `make repro` (in VENV, if one is named), and takes over
dvc.lock, results.lock, the metrics and the digests that the README and the library's pages print. Before and after, it
lists the library's files with their digests, so that a project can say which of them were modified. Run it after every
change of the template that enters the content address, on any x86-64 CPU with AVX2: they all give the same bytes.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bake import PACKAGE, ROOT, bake

TEMPLATE = ROOT / "{{cookiecutter.project}}"
JINJA = "{{ cookiecutter.package }}"
LIBRARY = ROOT / "samebits"
LIST = "library.sha256"
SHOWN = [TEMPLATE / "README.md", *sorted((LIBRARY / "docs").glob("*.md"))]  # where a reader sees digests

ROW = """\
  - source: the digest this template was released with
    address: {address}
    parts:
{parts}
    environment: {environment}
    weights: {weights}
    metrics:
{metrics}
"""


def main() -> None:
    """Bake, run, take over."""
    list_library()
    if "--list" in sys.argv:
        return
    venv = f"VENV={Path(sys.argv[1]).absolute()}" if len(sys.argv) > 1 else "VENV=.venv"
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        project = bake(Path(folder))
        subprocess.run(["make", "repro", venv], cwd=project)  # its verdict is what we are here to renew
        take_over(project)
    list_library()  # its pages have the new digests


def list_library() -> None:
    """Write library.sha256, which `sha256sum --check` reads."""
    digests = {
        path.relative_to(LIBRARY).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in LIBRARY.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != LIST
    }
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(digests.items()))
    (LIBRARY / LIST).write_text(lines)


def take_over(project: Path) -> None:
    """Write the outcome of the finished run in `project` into the template."""
    (TEMPLATE / "dvc.lock").write_text((project / "dvc.lock").read_text().replace(PACKAGE, JINJA))

    run = project / "artifacts"
    address = json.loads((run / "address.json").read_text())
    weights = json.loads((run / "run.json").read_text())["tags"]["repro.weights"]
    results = TEMPLATE / "results.lock"
    opening, key, rows = results.read_text().partition("results:\n")
    (before,) = re.findall(r"^    weights: (.*)$", rows, re.MULTILINE)
    (core,) = re.findall(r"^      core: (.*)$", rows, re.MULTILINE)
    row = ROW.format(
        address=address["address"],
        parts=listed(address["parts"]),
        environment=json.loads((run / "environment.json").read_text())["class"],
        weights=weights,
        metrics=listed(json.loads((run / "metrics.json").read_text())),
    )
    results.write_text(opening + key + row)
    for name in ("metrics.json", "evaluation.json", "confusion.csv"):
        shutil.copyfile(run / name, TEMPLATE / "artifacts" / name)

    for shown in SHOWN:
        text = shown.read_text().replace(before, weights).replace(core[:16], address["parts"]["core"][:16])
        shown.write_text(text)
    print(f"released: weights {weights}, content address {address['address']}")


def listed(values: dict[str, object]) -> str:
    """Lines of YAML for a flat mapping."""
    return "\n".join(f"      {name}: {value}" for name, value in values.items())


if __name__ == "__main__":
    (ROOT / "build").mkdir(exist_ok=True)
    (TEMPLATE / "artifacts").mkdir(exist_ok=True)
    main()
