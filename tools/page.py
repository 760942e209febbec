"""Take the README's picture of a report, docs/report.png: parts of the page that two real runs give, in Chromium.

python tools/page.py
"""

import re
import subprocess

from bake import ROOT
from chromium import ARGUMENTS
from harness import prepared, printed

RESULT = ROOT / "docs" / "report.png"
RUNS = {
    "runs/a": {},
    "runs/b": {"loader.workers": "2", "checkpoint.every": "20", "determinism.relax": "[MKL_CBWR, nnpack]"},
}
COMMON = {"train.epochs": "10", "train.evaluate_every": "1", "tracking.enabled": "false", "trace.level": "tensor"}
PARTS = ("What was asked", "Loss and metrics over steps", "Where the runs part")
SIZE = "1000,2200"  # pixels


def shortened(page: str) -> str:
    """The page with some of its sections only."""
    sections = re.findall(r"<section>\n<h2>.*?</section>", page, re.DOTALL)
    for section in sections:
        if re.match(r"<section>\n<h2>(.*?)</h2>", section)[1] not in PARTS:  # type: ignore[index]
            page = page.replace(section, "")
    return page


def main() -> None:
    """Train, report, look."""
    with prepared() as project:
        for out, settings in RUNS.items():
            requested = [word for key, value in (COMMON | settings).items() for word in ("--set", f"{key}={value}")]
            printed(project, "-m", "samebits", "train", *requested, "--out", out)
        printed(project, "-m", "samebits", "report", *RUNS)
        page = project / "build" / "report.html"
        page.write_text(shortened(page.read_text()))
        looking = [f"--user-data-dir={project}/profile", f"--window-size={SIZE}", f"--screenshot={RESULT}"]
        subprocess.run(["chromium", *ARGUMENTS, *looking, page.as_uri()], check=True, capture_output=True)
    print(f"{RESULT.relative_to(ROOT)}: {RESULT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
