"""Whether runs have equal bits, as far as what they left can tell."""

from collections import Counter
from collections.abc import Sequence

from ...base.text import differences, some
from ...record.classes import promises
from ...record.view import RunView
from .. import diff
from ..diff import DIFFERENT, EQUAL, SO_FAR, UNKNOWN, Verdict

WORDS = EQUAL, SO_FAR, DIFFERENT, UNKNOWN  # in the order in which they are counted
GOOD = {EQUAL, SO_FAR}
ALTERED = "a record is not as its receipt states"


def judge(runs: Sequence[RunView]) -> tuple[str, bool, list[str]]:
    """The verdict on all runs, whether it is a good one, and a sentence for each pair that was compared.

    The runs of one content address are compared with the first of them. The verdict is a word, or where several are
    due, how many runs each is due to. It is empty where no run has a second.
    """
    groups: dict[str, list[RunView]] = {}
    for run in runs:
        groups.setdefault(run.address.get("address") or f"unknown, of {run.name}", []).append(run)
    compared_in = [[compared(first, other) for other in others] for first, *others in groups.values()]
    found = [verdict for group in compared_in for verdict in group]
    sentences = [verdict.said for verdict in found]
    if len(runs) == 1:
        sentences.append("There is no second run to compare its bits with.")
    elif len(groups) > 1:
        alone = [group[0].name for group in groups.values() if len(group) == 1]
        sentences.append(f"They have {len(groups)} content addresses; bits of different addresses are not comparable.")
        if alone and found:
            sentences.append(f"Alone with its content address: {some(alone)}.")
    words = Counter(verdict.word for verdict in found)
    if len(words) == 1:
        return next(iter(words)), words.keys() <= GOOD, sentences
    words[EQUAL] += sum(any(verdict.word == EQUAL for verdict in group) for group in compared_in)  # the first ones
    return ", ".join(f"{words[word]} {word}" for word in WORDS if words[word]), words.keys() <= GOOD, sentences


def compared(one: RunView, other: RunView) -> Verdict:
    """The verdict of `samebits diff` on two runs of one content address, with names and what the contract says."""
    both = f"{one.name} and {other.name}"
    if one.doubts or other.doubts or not (one.is_comparable and other.is_comparable):
        why = ALTERED if one.doubts or other.doubts else "a trace or a receipt of both is wanted"
        return Verdict(UNKNOWN, f"{both} cannot be compared: {why}.")
    found = diff.verdict(one, other)
    why = f" {_why(one, other)}" if found.word == DIFFERENT else ""
    return Verdict(found.word, f"{both} {found.said}.{why}")


def _why(one: RunView, other: RunView) -> str:
    """What the contract says of such a difference."""
    environments = [run.environment.get("environment") for run in (one, other)]
    if None in environments:
        return "The numeric environment of one is unknown."
    if not promises(str(one.environment.get("class"))):
        return "Flags were left off, or environments mixed, so no bits are promised."
    if environments[0] == environments[1]:
        return "Content address and numeric environment are the same, so this breaks the contract."
    preimages = [run.environment.get("preimage", {}) for run in (one, other)]
    found = some([each.field for each in differences(*preimages)])
    return f"They ran in different numeric environments ({found}), so their bits may differ."
