"""What a receipt states of the proof that a run has made of itself, and what that is in words. Loads without torch."""

from collections.abc import Mapping
from typing import Any


def none(reason: str) -> dict[str, Any]:
    """What is stated of a run that has made no proof."""
    return {"segments": [], "not_tried": {"proof": reason}}


def words(proof: Mapping[str, Any]) -> str:
    """A proof in a line."""
    if not (segments := proof["segments"]):
        return f"none: {next(iter(proof['not_tried'].values()), 'unknown')}"
    steps = ", ".join(f"{each['first']} to {each['stop'] - 1}" for each in segments)
    ranks = sorted({each["ranks"] for each in segments})
    on = f"{', '.join(map(str, ranks))} rank{'s' * (ranks != [1])}"
    changed = len(proof.get("changed", []))
    return f"EQUAL: steps {steps}, trained again on {on}, {changed} circumstance{'s' * (changed != 1)} changed"
