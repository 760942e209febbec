"""The checks that need a GPU, part by part; run.sh starts this with the packages that it needs."""

import argparse
import fnmatch
import json
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import table
from parts import PARTS, SECONDS, Part, Row
from trainings import HERE, Failed, OutOfTime, Trainer, kill_all

ABOUT = """import json, numpy, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps({"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "numpy": numpy.__version__}))"""


def main() -> int:
    """Exit code 0 if all is whole and EQUAL, 1 if not, 2 if nothing could be measured."""
    parser = argparse.ArgumentParser(prog="run.sh", description="Checks that need a GPU. Without PART: their list.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="a name, a pattern such as 'bits-*', all, or table")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only rehearses")
    parser.add_argument("--epochs", type=int, default=2, help="of each training; default: 2")
    parser.add_argument("--pairs", type=int, default=3, help="of runs that are compared in time; default: 3")
    parser.add_argument("--seconds", type=float, help="stop a part after so many; default: its own limit")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="default: results/ beside run.sh")
    given = parser.parse_args()
    if not given.parts:
        print("\n".join(f"{part.name:36}  {part.measured}" for part in PARTS))
        return 0
    if given.parts == ["table"]:
        return table.write(given.results, given.results / "table.md")
    patterns = ["*" if wanted == "all" else wanted for wanted in given.parts]
    if unknown := [pattern for pattern in patterns if not fnmatch.filter([part.name for part in PARTS], pattern)]:
        parser.error(f"{' '.join(unknown)} seen, a part's name wanted; without arguments they are listed")
    chosen = [part for part in PARTS if any(fnmatch.fnmatch(part.name, pattern) for pattern in patterns)]
    here = about()
    if given.device == "cuda" and not here["gpu"]:
        names = ", ".join(part.name for part in chosen)
        said = f"no GPU seen by torch {here['torch']}, one wanted (--device cpu rehearses). Not measured: {names}"
        print(said, file=sys.stderr)
        return 2
    given.results.mkdir(parents=True, exist_ok=True)
    good = True
    for part in chosen:
        header = {"part": part.name, "device": given.device, "epochs": given.epochs, **here}
        trainer = Trainer(HERE / "work", given.device, given.epochs, given.pairs)
        good &= run(part, trainer, header, given.results / f"{part.name}.jsonl", given.seconds or SECONDS)
        if trainer.stopped == "by a signal":
            break
    return 0 if good else 1


def about() -> Row:
    """The versions of what is measured: the machine's, and this bundle's."""
    requested = subprocess.run([sys.executable, "-c", ABOUT], capture_output=True, text=True)
    if requested.returncode:
        why = requested.stderr.strip().split("\n")[-1]
        print(f"{sys.executable}: {why}. PYTHON=… names a Python that has torch", file=sys.stderr)
        sys.exit(2)
    bundle = json.loads((HERE / "bundle.json").read_text())
    return {**json.loads(requested.stdout), "python": platform.python_version(), **bundle}


def run(part: Part, trainer: Trainer, header: Row, path: Path, seconds: float) -> bool:
    """Measure a part, writing each row as it comes; whether it came to its end and all is EQUAL."""
    begun, good = time.monotonic(), True
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, trainer.stop)
    timer = threading.Timer(seconds, trainer.stop)
    with path.open("w", buffering=1) as file:  # line by line: whatever happens next, these rows stay

        def write(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            print(f"{part.name}  {'  '.join(map(str, row.values()))}".split("\n")[0][:160], flush=True)

        file.write(json.dumps(header) + "\n")
        timer.start()
        try:
            trainer.prepare()
            for row in part.measure(part, trainer):
                write(row)
                good &= table.is_good(row)
            end = table.WHOLE
        except OutOfTime:
            end = f"stopped {trainer.stopped}"
        except Failed as failure:
            end = f"failed: {failure}"
        finally:
            timer.cancel()
            kill_all()
        write({"end": end, "seconds": round(time.monotonic() - begun, 1)})
    return good and end == table.WHOLE


if __name__ == "__main__":
    sys.exit(main())
