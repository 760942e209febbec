"""Failures that a user can cause: a line or two and an exit code, no traceback."""

import os
import sys


class Failure(Exception):
    """Ends the process with `exit_code` after printing its message on standard error.

    Most failures are met by all ranks of a host alike, so one rank speaks for all. A `local` one is a rank's own.
    """

    exit_code = 1

    def __init__(self, message: str, local: bool = False) -> None:
        super().__init__(message)
        self.local, self._told = local, False

    def tell(self) -> None:
        """Print the message on standard error, once; one rank of a host speaks for all unless it is local."""
        if self._told or not (self.local or os.environ.get("LOCAL_RANK", "0") == "0"):
            return
        self._told = True
        who = f"rank {os.environ.get('RANK', '0')}: " if self.local else ""
        print(f"{who}{self}", file=sys.stderr, flush=True)


class Refused(Failure):
    """The user's input is wrong: say the thing, the value seen, the value wanted and the next step."""

    exit_code = 2


class Disagreement(Failure):
    """Ranks that should be equal are not, or hardware gave two answers to one question."""

    exit_code = 4


class Preempted(Failure):
    """The run stopped early with its state saved: SIGTERM came, or the step of `trace.values` is done."""

    exit_code = 143


class NonFinite(Failure):
    """A gradient is infinite or not a number, or too large for the order-free sum."""

    exit_code = 3
