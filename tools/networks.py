"""Prove the contract for networks of other people: the table of docs/networks.md.

    python tools/networks.py [--only NAME]

Each network of tests/library/others.py is trained by `samebits verify` in a generated project. What it prints is in
build/networks; a network whose result lies there already is not trained again.
"""

import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import harness
from bake import PACKAGE, ROOT, bake, venv_of
from harness import printed, within

RESULT = ROOT / "docs" / "networks.md"
OUT = ROOT / "build" / "networks"
STARTER = "language"  # whose environment has transformers
MODEL = ROOT / "tests" / "library" / "others.py"
NAMES = re.findall(r'^    "([a-z0-9-]+)": ', MODEL.read_text(), re.MULTILINE)
WAYS = (
    "2 ranks", "3 ranks, 1 worker", "4 ranks", "optimizer sharded on 2 ranks", "weights sharded on 2 ranks",
    "weights sharded on 3 ranks", "killed and resumed on 2 ranks",
)  # fmt: skip
SHARDED = "parallel.shard=full: "  # begins the line that says how much of the weights is sharded
SHORT = "test_percent: 85"  # 270 samples to train on, so that an epoch has four steps


def looked() -> dict[str, tuple[int, float]]:
    """The number of parameters of each network in a project, and its largest gradient."""
    import torch
    from repro_project.model import NETWORKS

    found = {}
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        network, images = make(), torch.randint(17, (8, 1, 8, 8)) / 16
        torch.nn.functional.cross_entropy(network(images), torch.arange(8)).backward()
        parameters = [*network.parameters()]
        found[name] = sum(p.numel() for p in parameters), max(p.grad.abs().max().item() for p in parameters)
    return found


def lay(project: Path) -> None:
    """Have a project of that starter train any of the networks, named by `model.name`, on few digits."""
    with TemporaryDirectory() as folder:
        digits = bake(Path(folder))
        for part in ("src", "data"):
            shutil.rmtree(project / part)
            shutil.copytree(digits / part, project / part)
        shutil.copy(digits / "params.yaml", project)
    package = project / "src" / PACKAGE
    shutil.copy(MODEL, package / "model.py")
    for path, pattern, new in (
        (package / "config.py", r"name: Literal\[.*\]", "name: str"),
        (project / "params.yaml", r"name: convnet  ", "name: resnet  "),
        (project / "params.yaml", r"test_percent: \d+", SHORT),
    ):
        text, count = re.subn(pattern, new, path.read_text())
        assert count == 1, f"{path}: {pattern!r} stands there {count} times"
        path.write_text(text)


def prove(name: str, project: Path) -> None:
    """Run `samebits verify` on a network; keep what it prints, and how much of it was sharded."""
    only = [word for way in WAYS for word in ("--only", way)]
    words = "-m", "samebits", "verify", *only, "--set", f"model.name={name}"
    message = printed(project, *words, ends=range(256), venv=venv_of(STARTER))
    log = project / "build" / "verify" / "weights-sharded-on-2-ranks.log"
    share = [line for line in log.read_text().splitlines() if line.startswith(SHARDED)] if log.is_file() else []
    (OUT / f"{name}.txt").write_text("\n".join([message.rstrip(), *share[:1], ""]))


def rows(project: Path, requested: Namespace) -> Iterator[list[str]]:
    """Prove the contract for those that have no result yet; the lines of the table on all that have one."""
    OUT.mkdir(parents=True, exist_ok=True)
    for name, (parameters, largest) in within(project, looked, venv=venv_of(STARTER)).items():
        file = OUT / f"{name}.txt"
        if name in requested.only and not file.is_file():
            prove(name, project)
        if not file.is_file():
            continue
        weights, verdict, share = (
            re.findall(pattern, file.read_text(), re.MULTILINE)
            for pattern in (
                r"^one process +([0-9a-f]{16})", r"^([A-Z ]+: \d+ of \d+) trainings$", rf"^{SHARDED}([\d.]+%)"
            )
        )  # fmt: skip
        yield [name, f"{parameters:,}", f"{largest:.2g}", *(share or ["refused"]), f"`{weights[0]}`", verdict[0]]


HEAD = "network | parameters | largest gradient | sharded under `full` | weights | verdict"


if __name__ == "__main__":
    harness.measure(__doc__, RESULT, (HEAD, rows), starter=STARTER, change=lay, parts=NAMES)
