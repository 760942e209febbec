"""The failure of a resumed run of which a step comes out otherwise than it did before the interruption."""

from ..core.errors import RunError


def contradiction(step: int, what: str, before: float | None = None, now: float | None = None) -> RunError:
    """The failure; `what` is the first thing that is another one: a number, or what only digests are known of."""
    seen = "has other bits than" if before is None else f"is {now!r} and was {before!r}"
    return RunError(
        f"step {step}, made again: {what} {seen} before the interruption: the resumed run is not the same run. Some "
        f"state is in no checkpoint, or something outside the run has changed. How to find it: samebits docs resume"
    )
