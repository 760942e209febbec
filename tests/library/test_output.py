"""Output that nobody reads ends the printing, not the training."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE, training
from project import PROJECT as OURS
from project.repro.analysis.verify_receipt import report
from warm import PROJECT

# How a shell leaves a command alone with its output. `$0` stands for the command, `head` reads one line.
ALONE = {
    "head": "{ $0; echo $? > code; } | head -1",
    "both": "{ $0; echo $? > code; } 2>&1 | true",
    "closed": "$0 >&- 2>&-; echo $? > code",
}
WITH_RANKS = "{ $0 --ranks 2; echo $? > code; } 2>&1 | true"


def ended(way: str, prepared: Path, out: Path) -> str:
    """Train with its output left alone, then evaluate likewise; their exit codes."""
    codes = []
    for module, arguments in (("train", training(out, prepared, "tracking.enabled=false")), ("evaluate", None)):
        given = arguments or ["--set", f"data.prepared={prepared}", "--out", str(out)]
        words = shlex.join([sys.executable, "-m", f"{PACKAGE}.{module}", *given])
        shell = (ALONE | {"ranks": WITH_RANKS if arguments else ALONE["both"]})[way].replace("$0", words)
        subprocess.run(["bash", "-c", shell.replace("> code", f"> {out}.code")], cwd=PROJECT, check=False)
        codes.append(Path(f"{out}.code").read_text().strip())
    return " ".join(codes)


@pytest.mark.parametrize(
    "way", ["head", *(pytest.param(way, marks=pytest.mark.long) for way in ("both", "closed", "ranks"))]
)
def test_closed_output_ends_the_printing_and_not_the_training(way: str, prepared: Path, tmp_path: Path):
    assert ended(way, prepared, tmp_path / "run") == "0 0"
    report(OURS, tmp_path / "run", None)
    assert (tmp_path / "run" / "evaluation.json").is_file()
