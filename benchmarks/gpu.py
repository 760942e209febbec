"""What repeats bit for bit on a GPU, and what strictness costs there: a table in benchmarks/gpu.md.

    python benchmarks/gpu.py [--python PYTHON] [--device cuda] [--epochs 2]

One card is enough: ranks share it. Strict and relaxed runs take turns, so that whatever else the machine
does hits both alike. PYTHON has the project's packages; without it, the environment is made from the locks.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "gpu"
PROJECT, PACKAGE = FOLDER / "repro-project", "repro_project"
VENV = ROOT / "build" / "venv-cuda"
RESULT = Path(__file__).with_suffix(".md")
CASES = tuple(product(("convnet", "transformer"), ("float32", "bfloat16"), ("eager", "compiled")))
# What must not change a bit: (ranks, loader workers); the first is what the others are compared with.
VARIANTS = {"once": (1, 0), "again": (1, 0), "2 ranks": (2, 0), "4 ranks": (4, 0), "4 workers": (1, 4)}
PAIRS = 3  # strict and relaxed runs, in turns
WARM_UP = 5  # steps of each run that are not timed
ABOUT = "import torch as t; print(t.cuda.get_device_name() if t.cuda.is_available() else 'CPU', t.__version__)"
RELAXED = "determinism.relax=[all]"
CHECKS = "two runs, world sizes 1, 2 and 4, and workers 0 and 4 equal; strict against relaxed: step time, peak memory"


@dataclass(frozen=True)
class Trainer:
    """Starts trainings."""

    python: str
    device: str
    epochs: int

    def train(self, name: str, ranks: int, *settings: str) -> Path:
        """Train into a new run directory, and return it."""
        out = FOLDER / "runs" / name
        shutil.rmtree(out, ignore_errors=True)
        common = (f"device={self.device}", f"train.epochs={self.epochs}", "tracking.enabled=false")
        chosen = [word for setting in (*common, *settings) for word in ("--set", setting)]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        program = [str(Path(__file__).with_name("sharing.py")), PACKAGE]
        command = [self.python, *launcher, *program, *chosen, "--out", str(out)]
        subprocess.run(command, cwd=PROJECT, env=environ(), check=True, stdout=subprocess.DEVNULL)
        return out


def environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(PROJECT / "src"), "GIT_CEILING_DIRECTORIES": str(FOLDER)}


def weights(out: Path) -> str:
    """SHA-256 of a run's weights."""
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def milliseconds(out: Path) -> float:
    """The median time from one step's end to the next one's."""
    ends = [json.loads(line)["monotonic"] for line in (out / "trace" / "rank0000.jsonl").read_text().splitlines()]
    return statistics.median(1000 * (b - a) for a, b in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False))


def mebibytes(out: Path) -> float:
    """The peak of allocated GPU memory; NaN on a CPU."""
    path = out / "peak.json"
    return json.loads(path.read_text()) / 2**20 if path.is_file() else float("nan")


def rows(trainer: Trainer) -> Iterator[tuple[bool, str]]:
    """A line of the table for each case, and whether all its variants are equal."""
    for model, precision, mode in CASES:
        case = f"{model}-{precision}-{mode}"
        settings = f"model.name={model}", f"compute.precision={precision}", f"compute.compile={mode == 'compiled'}"
        digests = {
            variant: weights(trainer.train(f"{case}-{variant}", ranks, *settings, f"loader.workers={workers}"))
            for variant, (ranks, workers) in VARIANTS.items()
        }
        verdicts = ["EQUAL" if digest == digests["once"] else "DIFFERS" for digest in digests.values()][1:]
        strict, relaxed = [], []
        for number in range(PAIRS):
            strict.append(trainer.train(f"{case}-strict{number}", 1, *settings))
            relaxed.append(trainer.train(f"{case}-relaxed{number}", 1, *settings, RELAXED))
        times = [statistics.median(map(milliseconds, outs)) for outs in (strict, relaxed)]
        memory = [max(map(mebibytes, outs)) for outs in (strict, relaxed)]
        cells = [
            model, precision, mode, *verdicts,
            f"{times[0]:.2f} / {times[1]:.2f} = {times[0] / times[1]:.2f}", f"{memory[0]:.0f} / {memory[1]:.0f}",
        ]  # fmt: skip
        line = f"| {' | '.join(cells)} |"
        print(line, flush=True)
        yield set(verdicts) == {"EQUAL"}, line


def prepare(python: str | None) -> str:
    """Generate the project and its data; return the interpreter to use."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run(["cookiecutter", "--no-input", str(ROOT), "-o", str(FOLDER)], check=True)
    if not python:
        python = str(VENV / "bin" / "python")
        command = ["make", "--no-print-directory", "environment", f"VENV={VENV}", "DEVICE=cuda"]
        subprocess.run(command, cwd=PROJECT, env=environ(), check=True)
    subprocess.run([python, "-m", f"{PACKAGE}.prepare"], cwd=PROJECT, env=environ(), check=True)
    return python


def main() -> int:
    """Exit code 0 if all is equal, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries this program out")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    if given.device == "cuda" and not shutil.which("nvidia-smi"):
        cases = ", ".join(" ".join(case) for case in CASES)
        print(f"no GPU seen (no nvidia-smi), one wanted. Not checked: for each of {cases}: {CHECKS}", file=sys.stderr)
        return 2
    python = prepare(given.python)
    machine = subprocess.check_output([python, "-c", ABOUT], text=True).strip()
    lines = list(rows(Trainer(python, given.device, given.epochs)))
    text = DOCUMENT.format(machine=machine, epochs=given.epochs, rows="\n".join(line for _, line in lines))
    if given.device == "cuda":
        RESULT.write_text(text)
    print(text)
    return 0 if all(equal for equal, _ in lines) else 1


DOCUMENT = """# On a GPU

Written by `make gpu`, on: {machine}; {epochs} epochs a run. Weights are compared by their SHA-256 with those of one
rank without loader workers; ranks share the one card through gloo. Step times (median, ms) and peak memory (MiB) are of
one rank, strict / relaxed: runs with all switches off, which took turns with the strict ones.

| model | precision | mode | again | 2 ranks | 4 ranks | 4 workers | step time | peak memory |
|---|---|---|---|---|---|---|---|---|
{rows}
"""


if __name__ == "__main__":
    sys.exit(main())
