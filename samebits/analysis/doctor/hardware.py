"""Checks of `samebits doctor`: GPU, memory, disk and clock, as far as this machine tells."""

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ...base.git import git_text
from ...base.text import some
from ...core.errors import RunError
from .found import FAULT, OK, UNKNOWN, WARNING, Context, Found

SPACE = 2**30  # bytes that a run should find free
APART = 2.0  # seconds between two clocks of one machine that no run minds
EDAC = Path("/sys/devices/system/edac/mc")
ECC = "driver_version,ecc.mode.current,ecc.errors.uncorrected.volatile.total"  # of nvidia-smi


def gpu(context: Context) -> Found:
    """Whether torch uses the GPUs that there are, their driver, and errors of their memory."""
    import torch

    there, wanted = bool(list(Path("/dev").glob("nvidia[0-9]*"))), context.settings.device
    if not torch.cuda.is_available():
        if wanted == "cuda":
            return Found(FAULT, "device is cuda, and torch finds no GPU", "make setup DEVICE=cuda, or device: auto")
        if there:
            return Found(WARNING, "a GPU that this torch cannot use", "make setup DEVICE=cuda")
        return Found(OK, "none")
    shown = ""
    with suppress(FileNotFoundError):  # it is not installed
        words = "nvidia-smi", f"--query-gpu={ECC}", "--format=csv,noheader"
        shown = subprocess.run(words, cwd=context.project.root, capture_output=True, text=True).stdout
    rows = [line.split(", ") for line in shown.splitlines() if line.count(", ") == 2]
    return _ecc(rows) if rows else Found(UNKNOWN, "nvidia-smi does not tell the driver")


def _ecc(rows: list[list[str]]) -> Found:
    """The verdict on (driver, ECC mode, uncorrected errors) of each GPU."""
    drivers = some(sorted({driver for driver, *_ in rows}))
    if broken := [number for number, (*_, errors) in enumerate(rows) if errors.isdecimal() and int(errors)]:
        seen = f"GPU {some(list(map(str, broken)))}: uncorrected memory errors since the start; driver {drivers}"
        return Found(FAULT, seen, "take it out of use: a wrong bit of its memory reaches the weights")
    if off := [number for number, (_, mode, _) in enumerate(rows) if mode == "Disabled"]:
        seen = f"driver {drivers}; ECC is off on GPU {some(list(map(str, off)))}"
        return Found(WARNING, seen, "nvidia-smi --ecc-config=1, or set integrity.recompute_every")
    return Found(OK, f"{len(rows)}, driver {drivers}")


def memory(context: Context) -> Found:
    """Errors of this machine's memory, as far as the kernel counts them."""
    counts = {kind: list(EDAC.glob(f"mc*/{kind}_count")) for kind in ("ue", "ce")}
    if not counts["ue"]:
        return Found(UNKNOWN, "the kernel counts no memory errors here (no EDAC)")
    wrong, mended = (sum(int(path.read_text()) for path in counts[kind]) for kind in ("ue", "ce"))
    if wrong:
        return Found(FAULT, f"{wrong} uncorrected errors since the start", "replace the module; runs may be wrong")
    if mended:
        return Found(WARNING, f"{mended} corrected errors since the start", "watch whether they grow")
    return Found(OK, "no errors since the start")


def disk(context: Context) -> Found:
    """Whether a run can write, and finds space."""
    root = context.project.root
    free = shutil.disk_usage(root).free
    if not os.access(root, os.W_OK):
        return Found(FAULT, f"{root}: not writable", "change its owner or mode, or name another place with --out")
    if free < SPACE:
        fix = "free some: checkpoints, weights and the trace are written here"
        return Found(FAULT, f"{free / 2**20:.0f} MiB free, {SPACE / 2**20:.0f} wanted", fix)
    return Found(OK, f"{free / 2**30:.0f} GiB free")


def clock(context: Context) -> Found:
    """Whether this clock is that of the file system, and later than the last commit: dates tell unchanged files."""
    now = time.time()
    with tempfile.TemporaryFile(dir=context.project.root) as file:
        ahead = os.fstat(file.fileno()).st_mtime - now
    if abs(ahead) > APART:
        seen = f"the clock of the file system is {ahead:+.0f} s from this machine's"
        return Found(WARNING, seen, "data.check: every_byte does not rely on dates; or set the clocks (NTP)")
    shown = ""
    with suppress(RunError):  # no repository, or no commit
        shown = git_text(context.project.root, "log", "-1", "--format=%ct")
    if shown.isdecimal() and int(shown) > now + 60:
        return Found(FAULT, f"the last commit is {int(shown) - now:.0f} s in the future", "set the clock (NTP)")
    return Found(OK, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)))
