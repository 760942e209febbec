"""The compiler of what torch.compile makes for a CPU, as far as it decides bits."""

import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ..base.redact import SECRET, without_credentials

VARIABLES = (
    "CXX", "CC", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH",
)  # fmt: skip
PREFIX = "TORCHDYNAMO_"


def compiler() -> dict[str, Any]:
    """Its first line on itself, the SHA-256 of its file, and the variables that it and torch.compile read.

    Credentials in these variables are hidden.
    """
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    path = shutil.which(words[0])
    said = ""
    if path:
        try:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.TimeoutExpired):
            said = "gives no version"
    return {
        "version": said.partition("\n")[0],
        "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None,
        "variables": {
            name: "(hidden)" if SECRET.search(name) else without_credentials(value)
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith(PREFIX)
        },
    }
