"""How a process of the lab becomes a training of the owner's, which it watches from inside."""

import runpy
import sys
from pathlib import Path

from ..base.project import LIBRARY

LAB = LIBRARY / "lab"


def train(package: str, *arguments: str) -> None:
    """Run the owner's training in this process, as `python -m <package>.train` does.

    A run is refused whose content address lacks a module that it loaded, and the lab is no part of it: so its modules
    are forgotten first.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")  # a lazy module would load what it stands for
        if name != "__main__" and file and LAB in Path(file).parents:
            del sys.modules[name]
    sys.argv = ["train", *arguments]
    runpy.run_module(f"{package}.train", run_name="__main__", alter_sys=True)
