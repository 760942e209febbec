"""Standard streams that outlive their reader: once nobody reads them, as after `| head`, printing has no effect.

What a process prints must not decide whether it comes to its end.
"""

import errno
import io
import os
import sys
from typing import Any

GONE = (
    errno.EPIPE,
    errno.EIO,
    errno.ECONNRESET,
)  # a pipe without a reader, a closed terminal, a lost connection


class _Lenient(io.FileIO):
    """A standard stream's file. When it is gone, the null device takes its place, for child processes, too."""

    def write(self, data: Any, /) -> int:
        """Write, or lose what nobody would read."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            os.dup2(_null(), self.fileno())
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Have this process go on when whoever reads its standard output or error ends, or was never there."""
    for number in range(3):  # a file that is opened later must not get the number of a stream that was closed
        try:
            os.fstat(number)
        except OSError:
            os.dup2(_null(), number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - it is open as long as the process is
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            file = _Lenient(number, "w", closefd=False)
            buffer = file if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(file)
            lenient = io.TextIOWrapper(
                buffer,
                stream.encoding,
                stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, lenient)
            setattr(sys, f"__{name}__", lenient)


def _null() -> int:
    return os.open(os.devnull, os.O_RDWR)
