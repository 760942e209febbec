"""The appendix of a bundle, in the shape that artifact evaluations ask for: claims, and how to check each of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...base.project import LIBRARY
from ...record.names import WEIGHTS
from ...record.receipt import Receipt
from ..groups import named
from ..rendering import render

TEMPLATE = LIBRARY / "analysis" / "bundle" / "APPENDIX.md.j2"


def text(about: Any, receipts: Sequence[Receipt], with_weights: bool) -> str:
    """The appendix of these runs; `about` is what the project says of itself."""
    stated = [receipt.stated for receipt in receipts]
    return render(
        TEMPLATE,
        about=about,
        name=named(about.name),
        hardware=sorted({_hardware(each["informational"], each["environment"]["preimage"]) for each in stated}),
        time=_duration(sum(map(_seconds, stated))),
        claims=[*map(_claim, receipts)],
        with_weights=with_weights,
        weights=WEIGHTS,
    )


def _claim(receipt: Receipt) -> dict[str, Any]:
    stated = receipt.stated
    size = stated["preimage"].get("world_size")
    rows = {
        f"SHA-256 of `{WEIGHTS}`": receipt.weights,
        "trace root, over every step": stated["trace"] or "not traced",
        "content address": stated["address"],
        **{f"metric {named(name)}": value for name, value in sorted(stated["metrics"].items())},
    }
    alone = f"{size} rank{'s' * (size > 1)}, for the sum of gradients depends on it" if size else ""
    return {
        "rows": rows,
        "time": _duration(_seconds(stated)),
        "ranks": alone or "any number of ranks",
        "patched": receipt.patch is not None,
        "place": stated["environment"]["class"],
    }


def _seconds(stated: Mapping[str, Any]) -> float:
    return float(stated["informational"].get("seconds", 0))


def _hardware(facts: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    cuda = environment.get("cuda") or {}
    gpu = f", GPU {named(str(cuda['gpu']))}" if cuda.get("gpu") else ", no GPU used"
    ranks = facts.get("world_size", 1)
    return f"{facts.get('cpu', 'unknown CPU')}, {facts.get('cores', '?')} cores{gpu}, {ranks} rank{'s' * (ranks != 1)}"


def _duration(seconds: float) -> str:
    return f"{math.ceil(seconds)} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"
