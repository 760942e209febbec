"""Checks of `samebits doctor`: code, data, environment, random numbers and services.

Each looks at one thing and says what it saw, and how to mend it.
"""

import os
import random
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from ...address import address, manifest
from ...address.locks import LOCKS
from ...address.release import library
from ...base.redact import without_credentials
from ...base.text import some
from ...core.errors import RunError
from ...record.code_state import changes, code_state
from ...record.signature import require_key
from ...start import trainings
from ...tracking.tracking import address_of
from .found import FAULT, OK, UNKNOWN, WARNING, Context, Found

SECONDS = 5  # that a server may take to answer
CONTAINER = Path("/.dockerenv"), Path("/run/.containerenv")  # what Docker and Podman put into theirs


# ---- code


def git(context: Context) -> Found:
    """Whether a receipt of this code names a commit, and nothing beside it."""
    state, patch = code_state(context.project)
    if not state["commit"]:
        if shutil.which("git") is None:
            return Found(WARNING, "git is not installed", "install it: a receipt then names the code")
        return Found(WARNING, "no git commit", "git init && git add . && git commit: a receipt then names the code")
    commit = state["commit"][:12]
    if state["dirty"]:
        named = some([change.name for change in changes(patch)]) or "files were removed"
        return Found(WARNING, f"{commit} and uncommitted changes: {named}", "commit them, or a receipt carries them")
    return Found(OK, f"{commit}, nothing uncommitted")


def library_as_released(context: Context) -> Found:
    """Whether the library is as it was released."""
    here = library(context.project)
    if here.modified:
        fix = "its promises are tested as released only: restore these files, or install it again"
        return Found(WARNING, f"modified: {some(here.modified)}", fix)
    return Found(OK, f"as released by template {here.template} ({here.digest[:16]})")


def code_of_the_address(context: Context) -> Found:
    """Whether all code can be hashed."""
    return Found(OK, f"{len(address.code(context.project))} files enter the content address")


def locks(context: Context) -> Found:
    """Whether the locks fit pyproject.toml, each other and the Dockerfile."""
    script = context.project.root / LOCKS / "check_locks.py"
    if not script.is_file():
        return Found(UNKNOWN, f"{script.relative_to(context.project.root)} is missing", "restore it from git")
    try:
        trainings.run(context.project, [sys.executable, str(script)])
    except trainings.Ended as ended:
        said = (*ended.said, "no word")[0]
        return Found(FAULT, said, "make lock-check tells all of it; make lock writes the locks anew")
    return Found(OK, "they fit pyproject.toml, each other and the Dockerfile")


# ---- data


def dataset(context: Context) -> Found:
    """Whether the dataset is the one that params.yaml names."""
    manifest.require_raw(context.settings.data)
    return Found(OK, f"{context.settings.data.raw}: SHA-256 {context.settings.data.sha256[:16]}, as in params.yaml")


def prepared(context: Context) -> Found:
    """Whether the prepared data are whole, and prepared as params.yaml asks."""
    if not Path(context.settings.data.prepared).exists():
        return Found(WARNING, f"{context.settings.data.prepared}: not prepared yet", "make repro prepares them")
    found = manifest.require_prepared(context.settings.data)
    return Found(OK, f"{context.settings.data.prepared}: {len(found['files'])} entries of its manifest hold")


# ---- environment and random numbers


def flags_effective(context: Context) -> Found:
    """Whether every flag has its strict value, as read back."""
    from ...core import flags

    flags.missing_variables(context.settings.options.determinism)  # refuses what contradicts them
    flags.apply(context.settings.options.determinism)
    rows = flags.applicable(context.settings.options.determinism)
    if relaxed := context.settings.determinism.relax:
        return Found(WARNING, f"relaxed: {some(relaxed)}", "determinism.relax: [] keeps the bits")
    return Found(OK, f"{len(rows)} flags are effective")


def arithmetic(context: Context) -> Found:
    """Whether this CPU computes the bits that the template was released with."""
    from ...core.flags import can_be_portable
    from ...environment.canary import RELEASED, arithmetic_canary

    if not can_be_portable():
        return Found(WARNING, "no x86-64 CPU with AVX2", "bits repeat here, and differ from those of other CPUs")
    if context.settings.determinism.cpu != "portable":
        return Found(WARNING, f"determinism.cpu is {context.settings.determinism.cpu}", "bits follow the CPU")
    if (seen := arithmetic_canary()) != RELEASED:
        fix = "a library computes otherwise: make setup; elsewhere than in the locked environment this is expected"
        return Found(WARNING, f"canary {seen[:16]}, {RELEASED[:16]} released", fix)
    return Found(OK, f"canary {seen[:16]}, as released: cpu-portable")


def image(context: Context) -> Found:
    """Whether a record of a run tells the image that it ran in."""
    digest = os.environ.get("REPRO_IMAGE", "")
    if re.fullmatch(r"(.+@)?sha256:[0-9a-f]{64}", digest):
        return Found(OK, digest)
    if digest:
        return Found(FAULT, f"REPRO_IMAGE={digest[:80]!r}", "sha256:DIGEST is wanted, as `docker inspect` prints it")
    if any(mark.exists() for mark in CONTAINER):
        return Found(WARNING, "a container without REPRO_IMAGE", "start it with --env REPRO_IMAGE=sha256:DIGEST")
    return Found(OK, "no container: the libraries on this machine count")


def generators(context: Context) -> Found:
    """Whether one seed gives python's, numpy's and torch's generators one stream, and two seeds give two."""
    import numpy
    import torch

    from ...core.seeds import derive, seed_everything

    draws: dict[str, Callable[[], Any]] = {
        "python": random.random,
        "numpy": numpy.random.random,
        "torch": lambda: torch.rand(()).item(),
    }

    def drawn(seed: int) -> dict[str, Any]:
        seed_everything(derive(seed, "init"))
        return {name: draw() for name, draw in draws.items()}

    first, again, other = drawn(0), drawn(0), drawn(1)
    if bad := [name for name in draws if first[name] != again[name] or first[name] == other[name]]:
        return Found(
            FAULT, f"the seed does not decide the generators of {some(bad)}", "look for code that replaces them"
        )
    return Found(OK, "one seed decides those of python, numpy and torch")


# ---- services


def mlflow(context: Context) -> Found:
    """Whether MLflow can be reached where runs are to be tracked."""
    tracking = context.settings.tracking
    if not tracking.enabled:
        return Found(OK, "tracking is off")
    uri = address_of(tracking.uri)
    shown = without_credentials(uri)
    if not uri.startswith("http"):
        own = uri.startswith(("sqlite:", "file:", "/", "."))
        return Found(OK, f"{shown}: a store of its own") if own else Found(UNKNOWN, f"{shown}: not asked")
    try:
        with urllib.request.urlopen(f"{shown.rstrip('/')}/version", timeout=SECONDS) as answer:
            version = answer.read(40).decode(errors="replace")
    except HTTPError as error:
        if error.code in (401, 403):
            return Found(OK, f"{shown}: it asks who you are")
        return Found(WARNING, f"{shown}: HTTP {error.code}", "is it an MLflow server? tracking.uri names it")
    except (OSError, ValueError, HTTPException) as error:
        reason = without_credentials(" ".join(str(error).split()))
        return Found(WARNING, f"{shown}: {reason}", "runs go on without it: samebits sync uploads them later")
    if not re.match(r"[3-9]|\d\d", version):
        return Found(WARNING, f"{shown}: MLflow {version[:20]!r}", "a server of MLflow 3 keeps models, too")
    return Found(OK, f"{shown}: MLflow {version[:20]}")


def signing(context: Context) -> Found:
    """Whether receipts can be signed as params.yaml asks."""
    key = context.settings.receipt.key
    if not key:
        return Found(OK, "receipt.key is empty: receipts stay unsigned")
    require_key(key)
    if not shutil.which("ssh-keygen"):
        raise RunError("receipt.key: ssh-keygen is not installed; it is part of OpenSSH (apt install openssh-client)")
    return Found(OK, f"{key}, with ssh-keygen")
