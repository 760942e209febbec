"""Prove the contract for networks of other people: the table of docs/networks.md.

    python tools/networks.py [NAME ...]

Each network of tests/machinery/networks.py is trained by `repro verify` in a generated project. What it prints stays in
build/networks; a network whose result lies there already is not trained again.
"""

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path

import recipe
from about import about
from bake import MORE, PACKAGE, ROOT, bake, in_venv, make_venv

RESULT = ROOT / "docs" / "networks.md"
OUT = ROOT / "build" / "networks"
WAYS = (
    "2 ranks", "3 ranks, 1 worker", "4 ranks", "optimizer sharded on 2 ranks", "weights sharded on 2 ranks",
    "weights sharded on 3 ranks", "killed and resumed on 2 ranks",
)  # fmt: skip
SHARDED = "parallel.shard=full: "  # begins the line that says how much of the weights is sharded
SHORT = "test_percent: 85"  # 270 samples to train on, so that an epoch has four steps
LOOK = """
import json, sys, torch
from repro_project.model import NETWORKS
found = {}
for name, make in NETWORKS.items():
    torch.manual_seed(0)
    network, images = make(), torch.randint(17, (8, 1, 8, 8)) / 16
    torch.nn.functional.cross_entropy(network(images), torch.arange(8)).backward()
    parameters = [*network.parameters()]
    found[name] = sum(p.numel() for p in parameters), max(p.grad.abs().max().item() for p in parameters)
json.dump(found, sys.stdout)
"""


def lay(project: Path) -> None:
    """Have a project train any of the networks, named by `model.name`, on few samples."""
    recipe.add_packages("language", project)
    package = project / "src" / PACKAGE
    shutil.copy(ROOT / "tests" / "machinery" / "networks.py", package / "model.py")
    for path, pattern, new in (
        (package / "config.py", r"name: Literal\[.*\]", "name: str"),
        (project / "params.yaml", r"name: convnet  ", "name: resnet  "),
        (project / "params.yaml", r"test_percent: \d+", SHORT),
    ):
        text, count = re.subn(pattern, new, path.read_text())
        assert count == 1, f"{path}: {pattern!r} stands there {count} times"
        path.write_text(text)


def listed() -> list[str]:
    """The networks of the document's table."""
    return re.findall(r"^\| ([a-z0-9-]+) \| [\d,]+ \|", RESULT.read_text(), re.MULTILINE)


def prove(name: str, project: Path) -> None:
    """Run `repro verify` on a network; keep what it prints, and how much of it was sharded."""
    only = [word for way in WAYS for word in ("--only", way)]
    command = ["python", "-m", PACKAGE, "verify", *only, "--set", f"model.name={name}"]
    env = in_venv(project, venv=MORE)
    done = subprocess.run(command, cwd=project, env=env, text=True, stdout=subprocess.PIPE, check=False)
    log = project / "build" / "verify" / "weights-sharded-on-2-ranks.log"
    told = [line for line in log.read_text().splitlines() if line.startswith(SHARDED)] if log.is_file() else []
    (OUT / f"{name}.txt").write_text("\n".join([done.stdout.rstrip(), *told[:1], ""]))


def row(name: str, parameters: int, largest: float) -> str:
    """A line of the table."""
    printed = (OUT / f"{name}.txt").read_text()
    weights, verdict = (
        re.findall(pattern, printed, re.MULTILINE)
        for pattern in (r"^one process +([0-9a-f]{16})", r"^([A-Z ]+: \d+ of \d+) trainings$")
    )
    (share,) = re.findall(rf"^{SHARDED}([\d.]+%)", printed, re.MULTILINE) or ["refused"]
    cells = name, f"{parameters:,}", f"{largest:.2g}", share, f"`{weights[0]}`", verdict[0]
    return f"| {' | '.join(cells)} |"


def main(names: list[str]) -> None:
    """Prove the contract for those that have no result yet, and write the table of all that have one."""
    place = about()
    project = bake(ROOT / "build" / "strangers")
    lay(project)
    make_venv(project, MORE)
    env = in_venv(project, venv=MORE)
    subprocess.run(["python", "-m", PACKAGE, "prepare"], cwd=project, env=env, check=True)
    looked = subprocess.run(["python", "-c", LOOK], cwd=project, env=env, check=True, text=True, stdout=subprocess.PIPE)
    found = json.loads(looked.stdout)
    OUT.mkdir(parents=True, exist_ok=True)
    for name in names or found:
        if not (OUT / f"{name}.txt").is_file():
            prove(name, project)
    lines = [row(name, *of) for name, of in found.items() if (OUT / f"{name}.txt").is_file()]
    table = "\n".join(["<!-- measured -->", place, "", HEAD, *lines, "<!-- end -->"])
    RESULT.write_text(re.sub(r"<!-- measured.*?<!-- end -->", lambda _: table, RESULT.read_text(), flags=re.DOTALL))
    print(table)


HEAD = """| network | parameters | largest gradient | sharded under `full` | weights | verdict |
|---|---|---|---|---|---|"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    main(parser.parse_args().names)
