"""The pace of a training that is measured: it makes steps when it is told to, and tells how long they took.

Each line that comes in on standard input is a number of steps. The answer is a line of JSON on standard output: the
seconds of each of them, and the memory in bytes that was held at most, beyond that of `import torch`.
"""

import json
import os
import resource
import sys
import time


class Pace:
    """Made before all else is imported, once the environment is set; `begins` is called at the beginning of each step.

    `slower` is the share of its own time that each step sleeps in addition: a planted fault.
    """

    def __init__(self, slower: float = 0.0) -> None:
        import torch  # noqa: F401

        self._slower, self._left, self._base = slower, 0, _memory()
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # whatever a library prints goes elsewhere
        self._seconds: list[float] = []
        self._began: float | None = None

    def begins(self) -> None:
        """A step begins, and the one before ends. Wait for the next order where no step is left; end without one."""
        if self._began is not None:
            if self._slower:
                time.sleep(self._slower * (time.perf_counter() - self._began))
            self._seconds.append(time.perf_counter() - self._began)
        if not self._left:
            self._out.write(json.dumps({"seconds": self._seconds, "memory": _memory() - self._base}) + "\n")
            order = sys.stdin.readline()
            if not order:
                os._exit(0)  # in the middle of a training
            self._left, self._seconds = int(order), []
        self._left -= 1
        self._began = time.perf_counter()


def _memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
