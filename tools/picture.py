"""Draw the picture of the README, docs/picture.svg, from what commands really print in a generated project.

python tools/picture.py
"""

import io
import os
import signal
import subprocess
import time
from pathlib import Path

from bake import PACKAGE, ROOT, VENV, in_venv
from harness import prepared, printed
from rich.console import Console
from rich.text import Text

RESULT = ROOT / "docs" / "picture.svg"
SETTINGS = ["--set", "train.epochs=1", "--set", "tracking.enabled=false", "--set", "checkpoint.every=5"]
TRAIN = "samebits", "train"
KILLED_AFTER = 12  # steps, of 23
EDIT = ("fused=True)", "fused=True, eps=1e-6)")
SHOWN = {"weights", "resumed", "DIFFERENT:", "EQUAL:", "code.train.py:"}  # lines that begin with these words
WIDTH = 124  # columns


def kill(command: list[str], out: Path, project: Path) -> None:
    """Start a training and kill it, ranks and all, once it has recorded enough steps."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=project, env=in_venv(project), stdout=quiet, stderr=quiet)
    rows = out / "metrics.jsonl"
    while process.poll() is None and not (rows.is_file() and rows.read_bytes().count(b"\n") > KILLED_AFTER):
        time.sleep(0.01)
    subprocess.run(["pkill", "-9", "-f", f"samebits train.*--out {out.name}"], check=False)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Run the commands and draw them with the lines that matter of their output."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())

    def show(command: str, *lines: str) -> None:
        console.print(Text(f"$ {command}", style="bold"))
        for line in lines:
            good = line.startswith(("weights", "EQUAL"))
            console.print(Text(line, style="green" if good else "red" if line.startswith("DIFFERENT") else ""))

    with prepared() as project:
        python = str(VENV / "bin" / "python")

        def run(*words: str) -> list[str]:
            lines = [line.strip() for line in printed(project, "-m", *words, ends=(0, 1)).splitlines()]
            return [line for line in lines if line.split(" ")[0] in SHOWN]

        four = ["torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=4", "-m", *TRAIN]
        kill([python, "-m", *four, *SETTINGS, "--out", "killed"], project / "killed", project)
        show("samebits train --ranks 4 --out killed &")
        show("pkill -9 -f samebits")
        show("samebits train --out killed", *run(*TRAIN, *SETTINGS, "--out", "killed"))
        show("samebits train --out whole", *run(*TRAIN, *SETTINGS, "--out", "whole"))
        show("samebits diff killed whole", *run("samebits", "diff", "killed", "whole"))
        code = project / "src" / PACKAGE / "train.py"
        code.write_text(code.read_text().replace(*EDIT))
        show(f"sed -i 's/{EDIT[0]}/{EDIT[1]}/' src/{PACKAGE}/train.py    # somebody's change, weeks ago")
        show("samebits train --out edited", *run(*TRAIN, *SETTINGS, "--out", "edited"))
        show("samebits diff whole edited", *run("samebits", "diff", "whole", "edited"))
    svg = console.export_svg(title="one epoch of handwritten digits", clear=False)
    # the fonts would be fetched from another site
    RESULT.write_text("".join(part.split("}", 1)[-1] for part in svg.split("@font-face")))


if __name__ == "__main__":
    main()
