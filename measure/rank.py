"""One process of a training that is measured, started by rounds.py in the folder of a generated project.

python measure/rank.py WAY SLOWER OUT KEY=VALUE...

It makes steps when it is told to, and tells how long they took: each line on standard input is a number of steps. The
answer is a line of JSON on standard output: the seconds of each of them, and the memory in bytes that was held at most,
beyond that of `import torch`.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import peers


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


def peer(name: str, settings: list[str], slower: float) -> None:
    """Train until the pace ends it."""
    from repro_project.config import Config

    from samebits.config.params import load

    if name == peers.ONE_BATCH:  # each process makes its part of a global batch at once
        settings = [*settings, f"parallel.micro_batches={peers.world()[1]}"]
    config = load(Config, Path("params.yaml"), settings)
    if name == "pinned":
        from samebits.core.flags import set_environment

        set_environment(config.determinism)  # before torch is imported
    pace = Pace(slower)
    from repro_project import train as project

    peers.train_by(peers.PEERS[name](config), config, pace, project)


def ours(slower: float) -> None:
    """The project's own training, from its command line on; only the beginning of each step is seen."""
    from samebits import front

    project, given = front.Ours().project, front.train.make_context("train", sys.argv[1:]).params
    config = front.begin(project, given["overrides"], given["out"], trains=True)  # before torch is imported
    pace = Pace(slower)
    from repro_project.train import train

    from samebits.core.observer import Observer
    from samebits.run import ADDED, Added

    class Paced(Observer):
        """Has each step wait for the pace."""

        name = "pace"

        def begin_step(self, view):
            pace.begins()

    ADDED.set(Added([Paced()]))
    front.call(project, front.STAGES["train"](project, train), config, given["out"])


def main() -> None:
    """Train as the first word says."""
    way, slower, out, *settings = sys.argv[1:]
    if way in peers.PEERS:
        peer(way, settings, float(slower))
    else:
        sys.argv[1:] = [*(word for setting in settings for word in ("--set", setting)), "--out", out]
        ours(float(slower))


if __name__ == "__main__":
    main()
