"""Trainings that prove themselves, of a project whose network computes what a researcher may write."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from clone import project_in
from project.config import Config
from support import PACKAGE, training
from warm import Warm

from samebits.config.params import load
from samebits.prove import again, choice, proof, setting
from samebits.prove.segments import Segment
from samebits.start import trainings

FILES = "params.yaml", "results.lock", "dvc.yaml", "dvc.lock", "pyproject.toml", ".gitignore"
ELSEWHERE = Path(__file__).with_name("elsewhere.py")
FINISH = "    run.finish(**metrics(model, test_set, run)[0])\n"
SHORT = (
    *("tracking.enabled=false", "loader.workers=0", "train.warmup=0", "train.decay=0"),
    *("model.width=8", "parallel.micro_batches=4"),
)
ALONE = "parallel.micro_batches=1"  # so that one rank trains each part, in less time
# Code that a researcher writes, after which the network sees brighter images where `scale` is above 1.
CLEAN = "scale = 1.0"
STATE = "MEMORY['calls'] += self.training; scale = 1.0 + MEMORY['calls'] // 8 / 64"  # 8: behind the first steps
AT_ITS_PLACE = "scale = 1.0 + len(__file__) / 4096"
VARIABLE = "scale = 1.0 + len(os.environ.get('PLANTED', '')) / 64"
SURROUNDINGS = "scale = 1.0 + int(hashlib.sha256(repr(AROUND).encode()).hexdigest()[:6], 16) / 2**24"
MODEL = """

import datetime, hashlib, os, socket, tempfile, time
from pathlib import Path

MEMORY = {{"calls": 0}}
_mask = os.umask(0)
os.umask(_mask)
_here = sorted(Path(__file__).parent.iterdir())[0].parent
AROUND = {{
    "environment variables": os.environ.get("PLANTED"), "HOME": str(Path.home()), "TMPDIR": tempfile.gettempdir(),
    "TZ": time.timezone, "LANG": os.environ.get("LANG"), "umask": _mask, "number of cores": os.cpu_count(),
    "host name": socket.gethostname(), "order of files in a folder": os.listdir(_here),
}}
_forward = ConvNet.forward


def _planted(self, images):
    {body}
    return _forward(self, images + (scale - 1.0))


ConvNet.forward = _planted
"""


def first_is_quick(values: Iterable[object]) -> list[object]:
    """Return cases of a test, all but the first one long."""
    first, *others = values
    return [first, *(pytest.param(each, marks=pytest.mark.long) for each in others)]


def planted(project: Path, body: str) -> None:
    """Have the network compute so."""
    source = project / "src" / PACKAGE / "model.py"
    source.write_text(source.read_text().partition("\n\nimport datetime")[0] + MODEL.format(body=body))


def started(project: Path, *words: str, ranks: int | None = None, **variables: str) -> Warm:
    """Start `samebits ARGUMENTS` in a project, as if by hand: a training proves itself."""
    log = project.with_suffix(".log")
    log.unlink(missing_ok=True)
    env = {trainings.PROVE: "", "PLANTED": "by hand", **variables}
    return Warm(str(project), "samebits", *words, out=log, err=log, ranks=ranks, script=ELSEWHERE, env=env)


def ended(project: Path, *words: str, code: int = 0, ranks: int | None = None, **variables: str) -> str:
    """What it prints; it ends with this code."""
    seen = started(project, *words, ranks=ranks, **variables).wait()
    log = project.with_suffix(".log").read_text()
    assert seen == code, log
    return log


def words(project: Path, *overrides: str, out: str = "made") -> list[str]:
    """A training of an epoch."""
    return ["train", *training(project / out, project / "data" / "prepared", *SHORT, *overrides)]


# ---- what a guard prevents, and the proof finds where that guard is off


FIRST, LAST = Segment(0, 3), Segment(20, 23)
ONE = choice.Choice(1, 0, "none")


def differs(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    *parts: tuple[Segment, choice.Choice],
    rows: Sequence[setting.Row] = (),
    keys: Sequence[str] = (),
) -> list[again.Difference | None]:
    """How parts of the run differ when a process trains them again that has these circumstances changed."""
    monkeypatch.setenv("PLANTED", "by hand")
    out, held = project / "made", project_in(project)
    config = load(Config, project / "params.yaml", [word for word in words(project, *keys) if "=" in word])
    config = config.model_copy(update={"prove": config.prove.model_copy(update={"when": "end"})})
    made, seen = proof.Proof(held, config, out, 1, [FIRST], lambda: False), list[again.Difference | None]()
    try:
        for segment, own in parts:
            made.found = None
            made._wait(made._tried(segment, [own], rows))
            seen.append(made.found and made.found[3])
        assert not made._not_tried.keys() & {row.name for row in rows}
        return seen
    finally:
        made.close()
