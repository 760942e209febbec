"""The modules that decide bits form a closed core: they import torch, numpy, safetensors and each other, nothing else.

Whatever else the library does, no line of it can reach them, so none of it can change a bit.
"""

import ast
import sys
from collections.abc import Iterator

import pytest
from support import CORE, LIBRARY, PACKAGE, source

LIBRARIES = {"torch", "numpy", "safetensors"}


def imported(text: str, module: str) -> Iterator[str]:
    """What a module imports: modules of the library by their names in it, others by their first names."""
    package = ["samebits", *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            place = LIBRARY.joinpath(*base[1:])
            if not base or (base[0] == "samebits" and place.is_dir()):  # from a folder, its modules
                yield from (".".join([*base, alias.name]) for alias in node.names)
            else:
                yield ".".join(base)


def foreign(text: str, module: str) -> list[str]:
    """What a module of the core imports from outside of it."""
    known = {*LIBRARIES, *sys.stdlib_module_names, *(f"samebits.{name}" for name in CORE)}
    return sorted({name for name in imported(text, module) if name not in known})


@pytest.mark.parametrize("module", CORE)
def test_core_imports_nothing_else_of_the_library(module: str):
    assert foreign(source(module).read_text(), module) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from ..record import names", "samebits.record.names"),
        ("from ..config.settings import Settings", "samebits.config.settings"),
        ("from ..base import files", "samebits.base.files"),
        ("from ..trace import trace", "samebits.trace.trace"),
        ("from ... import data", "data"),
        (f"from {PACKAGE} import data", PACKAGE),
        ("import pydantic.fields", "pydantic"),
        ("def late():\n    from ..base.files import durable", "samebits.base.files"),
        ("if True:\n    import rich", "rich"),
    ],
)
def test_planted_import_is_caught(line: str, found: str):
    module = "core.tree"
    assert foreign(f"{source(module).read_text()}\n{line}\n", module) == [found]


@pytest.mark.parametrize("line", ["from . import errors", "from .shards import weights", "from ..core import flags"])
def test_import_of_the_core_itself_is_let_through(line: str):
    assert foreign(line, "core.tree") == []
