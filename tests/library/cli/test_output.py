"""Output that nobody reads ends the printing, not the training."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import OURS, training
from warm import PROJECT

from samebits.analysis.verify_receipt import report

# How a shell leaves a command alone with its output. `$0` stands for the command, `head` reads one line.
ALONE = {
    "head": "{ $0; echo $? > code; } | head -1",
    "closed": "$0 >&- 2>&-; echo $? > code",
    "ranks": "{ $0 --ranks 2; echo $? > code; } 2>&1 | true",
}


def ended(way: str, out: Path, module: str, *arguments: str) -> str:
    """Run a module of the project with its output left alone; its exit code."""
    words = shlex.join([sys.executable, "-m", "samebits", module, *arguments])
    shell = ALONE[way].replace("$0", words).replace("> code", f"> {out}.code")
    subprocess.run(["bash", "-c", shell], cwd=PROJECT, check=False)
    return Path(f"{out}.code").read_text().strip()


@pytest.mark.long
@pytest.mark.parametrize("way", ALONE)
def test_closed_output_ends_the_printing_and_not_the_training(way: str, prepared: Path, tmp_path: Path):
    out = tmp_path / "run"
    assert ended(way, out, "train", *training(out, prepared, "tracking.enabled=false")) == "0"
    report(OURS, out, None)
    if way == "head":
        assert ended(way, out, "evaluate", "--set", f"data.prepared={prepared}", "--out", str(out)) == "0"
        assert (out / "evaluation.json").is_file()
