"""What a user is told where ranks lose each other, in place of a backend's words."""

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from .errors import RunError

T = TypeVar("T")
P = ParamSpec("P")


def _reaching(otherwise: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Turn a backend's RuntimeError into a RunError of one line, which begins with `otherwise`."""

    def decorate(collective: Callable[P, T]) -> Callable[P, T]:
        @wraps(collective)
        def reach(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return collective(*args, **kwargs)
            except RuntimeError as error:
                said = re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0].split("\n")[0]
                raise RunError(f"{otherwise} ({said})", local=True) from error

        return reach

    return decorate


contacting = _reaching(
    "lost contact with another rank, or waited parallel.timeout_seconds for it; run the same command again to resume"
)
meeting = _reaching(
    "the ranks did not all meet within parallel.timeout_seconds; on several hosts GLOO_SOCKET_IFNAME, with GPUs "
    "NCCL_SOCKET_IFNAME, names the network interface that leads to the others"
)
