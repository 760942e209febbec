"""What ranks do in the tests of their launcher: as a module one rank, as a script the process that launches them."""

import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn


def wait(number: int | None = None, code: int = 0) -> NoReturn:
    """Wait for a signal, then exit with this code; as a training does, which saves first."""

    def end(number: int, frame: FrameType | None) -> None:
        (FOLDER / f"{RANK}-saved").touch()
        sys.exit(code)

    if number:
        signal.signal(number, end)
    (FOLDER / f"{RANK}-waits").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)


def after(rank: int) -> None:
    """Return once that rank waits."""
    while not (FOLDER / f"{rank}-waits").exists():
        time.sleep(0.01)


def impatient() -> NoReturn:
    """Answer the first SIGTERM by another one to the launcher, and take time before the end."""

    def again(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.3)
        (FOLDER / f"{RANK}-saved").touch()
        sys.exit(143)

    signal.signal(signal.SIGTERM, again)
    wait()


def refuse(message: str) -> NoReturn:
    """End by a failure that all ranks are to meet."""
    errors = import_module("samebits.core.errors")
    errors.PATIENCE = 0.0  # seconds; rank 0 does not come
    errors.UserError(message).report()
    sys.exit(2)


def fail() -> NoReturn:
    """End by an error that nobody foresaw."""
    raise ValueError("unforeseen")


if __name__ == "__main__" and "RANK" in os.environ:
    RANK, FOLDER = os.environ["RANK"], Path(sys.argv[1])
    (FOLDER / f"{RANK}-arguments").write_text("\n".join(sys.argv[2:]))
    exec(sys.argv[2:][int(RANK)])
elif __name__ == "__main__":
    if sys.argv[1] == "ranks":
        os.environ.pop("OMP_NUM_THREADS")  # at which torchrun would print its banner
        agent = import_module("torch.distributed.elastic.agent.server.local_elastic_agent").LocalElasticAgent
        watch = agent._monitor_workers

        def watched(*given: object) -> object:
            """Say that the launcher watches the ranks; while it starts them, it hands no signal on."""
            Path(sys.argv[2], "watched").touch()
            return watch(*given)

        agent._monitor_workers = watched
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    torchrun = import_module("samebits.start.ranks").torchrun
    sys.exit(torchrun(sys.argv[1], sys.argv[2:], 2, {"PYTHONPATH": path}))
