"""What the library's tests share: the project that they run on, Python in it, and trainings."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from warm import PACKAGE, PATIENCE, PROJECT, Warm

TESTS = Path(__file__).parent
# This project is what is tested, installed or not, by this process and by those it starts.
HERE = [str(PROJECT / "src"), str(PROJECT / "vendor")]
sys.path[:0] = [*HERE, str(PROJECT / "requirements")]
OURS = import_module("samebits.base.project").Project(PROJECT / "src" / PACKAGE)
import_module("samebits.loader").cover(PACKAGE)  # as the command does
del os.environ["SAMEBITS_PACKAGE"]  # processes that the tests start do it themselves


LIBRARY = OURS.library
CORE = [f"core.{path.stem}" for path in sorted((LIBRARY / "core").rglob("*.py"))]


def source(module: str) -> Path:
    """The file of a module of the library, as `core.step`."""
    return LIBRARY.joinpath(*module.split(".")).with_suffix(".py")


def python(
    *arguments: str | Path, cwd: Path = PROJECT, env: Mapping[str, str | None] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run python to its end; variables of `env` are set, or unset where the value is None."""
    merged = {name: value for name, value in (os.environ | (env or {})).items() if value is not None}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=merged, capture_output=True, text=True, **options
    )


def prepare_here(config: Any) -> None:
    """Prepare the data in this process, as the stage does: `config` is the section `data`."""
    from project import prepare

    from samebits.front import STAGES

    STAGES["prepare"](OURS, prepare.prepare)(config, Path())


def train_here(config: Any, out: Path) -> None:
    """Train in this process, as the stage does."""
    from project import train

    from samebits.front import STAGES

    STAGES["train"](OURS, train.train)(config, out)


@dataclass(frozen=True)
class Trained:
    """A training that ended: its run directory and what it printed."""

    out: Path
    done: subprocess.CompletedProcess[str]

    @property
    def weights(self) -> str:
        """The SHA-256 of its weights."""
        return hashlib.sha256((self.out / "model.safetensors").read_bytes()).hexdigest()


def training(out: Path, prepared: Path, *overrides: str) -> list[str]:
    """The arguments of a training for one epoch into `out`."""
    settings = ["train.epochs=1", f"tracking.wait_seconds={PATIENCE}", f"data.prepared={prepared}", *overrides]
    return [*(text for setting in settings for text in ("--set", setting)), "--out", str(out)]


def trained(
    out: Path,
    prepared: Path,
    *overrides: str,
    ranks: int | None = None,
    meanwhile: Callable[[Warm], None] = lambda process: None,
    **env: str,
) -> Trained:
    """Train for one epoch into `out`, warm and to the end; `meanwhile` is called as soon as it has started."""
    arguments, logs = training(out, prepared, *overrides), (out.with_suffix(".out"), out.with_suffix(".err"))
    process = Warm(*arguments, out=logs[0], err=logs[1], ranks=ranks, env=env)
    meanwhile(process)
    return Trained(out, subprocess.CompletedProcess(arguments, process.wait(), *(log.read_text() for log in logs)))


# Parts of these must never leave the environment; all hold the same word, so that one search finds any.
WORD = "pa55word"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "pa55word-of-aws",
    "NCCL_FAKE_TOKEN": "pa55word-of-nccl",
    "TORCH_URL": "https://user:pa55word@with-at@host/x?key=pa55word",
    "MLFLOW_TRACKING_URI": "http://user:pa55word@127.0.0.1:1",  # a server that is down
}


def as_earlier_release(address: dict[str, Any]) -> dict[str, Any]:
    """Return an address record as releases before core's arithmetic had a version wrote it: core by its files."""
    digest = import_module("samebits.address.address").digest
    files = {name: sha256 for name, sha256 in address["core_files"].items() if name != "ARITHMETIC"}
    config = address["preimage"]["config"]
    parallel = {"parallel": config.get("parallel", {}) | {"reduce": "tree"}}
    preimage = address["preimage"] | {"core": files, "config": config | parallel}
    parts = {name: digest(part) for name, part in preimage.items()}
    return {"address": digest(preimage), "parts": parts, "preimage": preimage}
