"""What a table says of the place and the code that it was measured at."""

import os
import platform
import re
import subprocess
from pathlib import Path

from bake import ROOT, VENV


def about() -> str:
    """A line on the machine, torch and the commit. Call it before what is measured makes the machine busy."""
    models = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    asked = [VENV / "bin" / "python", "-c", "import torch; print(torch.__version__)"]
    torch = subprocess.run(asked, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    cpu, busy = models[0] if models else platform.machine(), os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {cpu}; torch {torch}; commit {commit()}; load before it began: {busy:.1f}."


def commit() -> str:
    """The commit of this work tree, and whether something other than docs/ was changed since."""
    asked = ["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", ":!docs"]
    done = [subprocess.run(["git", *words], cwd=ROOT, text=True, capture_output=True) for words in asked]
    known, changed = (each.stdout.strip() for each in done)
    return f"{known}{'-dirty' * bool(changed)}" if known else "unknown"
