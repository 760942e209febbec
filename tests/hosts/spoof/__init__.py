"""Runs programs as if on another CPU: builds the library in this folder and selects a CPU for it to play."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden")
LIBRARY = ("cpuspoof.c", "cpuid.c", "profiles.c", "signals.c", "cpuinfo.c")


def compile_c(output: Path, *arguments: str) -> Path:
    """Compile C files of this folder with the system's compiler into `output`, and return that."""
    command = [os.environ.get("CC", "cc"), *FLAGS, *arguments, "-o", str(output)]
    subprocess.run(command, cwd=SOURCES, check=True)
    return output


@cache
def library() -> Path:
    """Compile the library, once, and return its path."""
    folder = Path(tempfile.mkdtemp(prefix="spoof-"))
    atexit.register(shutil.rmtree, folder)
    return compile_c(folder / "cpuspoof.so", "-shared", "-Wl,-z,initfirst", *LIBRARY)


def environment(library: Path, profile: str) -> dict[str, str]:
    """Return the variables that make a program see `profile`'s CPU, to be merged into its environment.

    Raises:
        FileNotFoundError: no library; the loader would skip it, and the program would run unspoofed.

    """
    if not library.is_file():
        raise FileNotFoundError(library)
    others = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library} {others}" if others else str(library), "CPUSPOOF": profile}


def why_unsupported(library: Path, profile: str) -> str:
    """Return "" where this machine can play `profile`, else the library's own words."""
    spoofed = os.environ | environment(library, profile)
    done = subprocess.run([sys.executable, "-S", "-c", ""], env=spoofed, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
