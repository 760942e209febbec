"""The appendix of a bundle, in the shape that artifact evaluations ask for: claims, and how to check each of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...record.names import WEIGHTS
from ...record.receipt import Receipt
from ..groups import named

TEXT = """# Artifact appendix: {name} {version}

{description}

## Checklist

- **Program**: this project at commit `{commit}`
- **Data**: described in `runs/*/croissant.json`, with the SHA-256 of each file
- **Environment**: the locks in `requirements/`, with the SHA-256 of each package; `Dockerfile` at the commit
- **Hardware**: {hardware}
- **Licence**: {license}
- **Time**: {time} to make {runs} again on that hardware, and the time to install the locks
- **Authors**: {authors}

## Installation

    git clone REPOSITORY project && cd project && git checkout {commit}
    make setup
    sha256sum --check SHA256SUMS       # in this archive

## Claims

{claims}
## What is in the archive

| file | holds |
|---|---|
| `runs/N/receipt.json` | what was asked for, on what, and what came out, under one SHA-256 |
| `runs/N/receipt.json.sig` | its signature, where it is signed |
| `runs/N/code.patch` | what the code had beyond the commit, where it had something |
| `runs/N/trace/steps.bin` | a row of digests for each step: `repro diff` finds the first one that differs |
| `runs/N/croissant.json` | the data, for tools that read Croissant 1.0 |
| `report.html` | the runs on one page; it loads nothing and runs no script |
| `requirements/` | the locks |
| `CITATION.cff` | how to cite this |
| `SHA256SUMS` | the SHA-256 of every other file |
"""
CLAIM = """### Claim {number}: one run, bit for bit

| claim | value |
|---|---|
{rows}
Check it, within {seconds} of training, on {ranks}:

    repro replay ARCHIVE{suffix}{trust}

It trains the run again and ends with `REPRODUCED` and exit code 0. The bits are promised for one class of numeric
environments, `{place}`{portable}. In another one it compares the metrics, within the tolerance that
`results.lock` sets.
{weights}
"""
PORTABLE = ", which is every x86-64 CPU with AVX2"


def text(about: Any, receipts: Sequence[Receipt], with_weights: bool) -> str:
    """The appendix of these runs; `about` is what the project says of itself."""
    stated = [receipt.stated for receipt in receipts]
    hardware = sorted({_hardware(each["informational"], each["environment"]["preimage"]) for each in stated})
    seconds = sum(float(each["informational"].get("seconds", 0)) for each in stated)
    return TEXT.format(
        name=named(about.name),
        version=about.version,
        description=about.description,
        commit=about.commit,
        hardware="; ".join(hardware),
        license=about.license or "none is given",
        time=_duration(seconds),
        runs="the run" if len(receipts) == 1 else f"the {len(receipts)} runs",
        authors=", ".join(about.authors) or "not named",
        claims="\n".join(
            _claim(number, receipt, len(receipts), with_weights) for number, receipt in enumerate(receipts, 1)
        ),
    )


def _claim(number: int, receipt: Receipt, of: int, with_weights: bool) -> str:
    stated = receipt.stated
    place, size = stated["environment"]["class"], stated["preimage"].get("world_size")
    rows = {
        f"SHA-256 of `{WEIGHTS}`": receipt.weights,
        "trace root, over every step": stated["trace"] or "not traced",
        "content address": stated["address"],
        **{f"metric {named(name)}": str(value) for name, value in sorted(stated["metrics"].items())},
    }
    return CLAIM.format(
        number=number,
        rows="".join(f"| {name} | `{value}` |\n" for name, value in rows.items()),
        seconds=_duration(float(stated["informational"].get("seconds", 0))),
        suffix=f":{number}" if of > 1 else "",
        trust=" --run-patch       # it has uncommitted code: read runs/N/code.patch first" if receipt.patch else "",
        place=place,
        ranks=f"{size} rank{'s' * (size > 1)}, for the sum of gradients depends on it"
        if size
        else "any number of ranks",
        portable=PORTABLE if place.startswith("cpu-portable") else "",
        weights=f"\nThe weights lie in `runs/{number}/{WEIGHTS}`: `sha256sum` tells the same.\n"
        if with_weights
        else "",
    )


def _hardware(facts: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    cuda = environment.get("cuda") or {}
    gpu = f", GPU {named(str(cuda['gpu']))}" if cuda.get("gpu") else ", no GPU used"
    ranks = facts.get("world_size", 1)
    return f"{facts.get('cpu', 'unknown CPU')}, {facts.get('cores', '?')} cores{gpu}, {ranks} rank{'s' * (ranks != 1)}"


def _duration(seconds: float) -> str:
    return f"{math.ceil(seconds)} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"
