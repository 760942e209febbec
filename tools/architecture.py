"""Draw the rooms of the library, the way of the model and of a batch through a training, and the files of the template.

    python tools/architecture.py              writes docs/architecture.md
    python tools/architecture.py LIBRARY      prints it for another copy of the library

It reads imports and calls, and runs nothing. A thing is handed on where a call of a function of another module names it
among its arguments.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bake import ROOT, STARTERS

DOCUMENT = ROOT / "docs" / "architecture.md"
LIBRARY = ROOT / "samebits"
TRAINING = "run", "front"  # the modules that a training imports, with all that these import
NAMED = {"the model": {"model", "_model", "module", "network"}, "a batch": {"batch"}}  # by these names code knows it

HEAD = """\
# Architecture

The library lies in `samebits/`, a room per folder; a file that lies there by itself is a room of its own. `make
architecture` makes this page from the code, and a test compares it. `make lint` holds the order.

## Rooms

A room imports rooms below it alone. **core** decides bits: it imports torch, numpy, safetensors and itself, and its
digest enters the content address. Whatever else looks at a training is an observer of core's loop. No run imports
analysis.
"""

OWNERS = """\
## The owner's files

A generated project has the files of one starter in `src/<package>/`; `finetuning` has those of `digits` that it does
not bring. They import each other and the public names of samebits, which lies in `vendor/samebits`. samebits loads
`config`, `prepare`, `train` and `evaluate` by name, and for an owner's tests `data` and `model`, too.
"""


@dataclass
class Module:
    """One file of the library: its dotted name below the library, and its text."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def code(self) -> int:
        """Lines that are neither blank, nor comments, nor docstrings."""
        strings = [
            range(node.lineno, (node.end_lineno or node.lineno) + 1)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]
        lines = [line.strip() for line in self.text.splitlines()]
        written = {number for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
        return len(written - {number for lines in strings for number in lines})


class Library:
    """All modules of a folder, and how they import one another.

    Attributes:
        modules: by name.
        purposes: of each room, the first line of its docstring.
    """

    def __init__(self, folder: Path) -> None:
        names = {path: ".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")}
        found = {name: Module(name, path.read_text()) for path, name in names.items()}
        self.modules = {name: found[name] for name in sorted(found) if not name.endswith("__init__")}
        rooms = {module.room for module in self.modules.values()}
        tops = {room: found.get(f"{room}.__init__") or found[room] for room in rooms}
        self.purposes = {
            room: (ast.get_docstring(module.tree) or "").partition("\n")[0] for room, module in tops.items()
        }
        self.imports = {module.name: dict(self._imports(module)) for module in self.modules.values()}

    def _imports(
        self, module: Module, nodes: Callable[[ast.AST], Iterable[ast.AST]] = ast.walk
    ) -> Iterator[tuple[str, str]]:
        """Each name that a module imports from the library in `nodes` of it, and the module that it is or is of."""
        for node in nodes(module.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                here = module.name.split(".")[: -node.level]
                source = ".".join([*here, *([node.module] if node.module else [])])
                for alias in node.names:
                    inner = f"{source}.{alias.name}".strip(".")
                    if found := next((name for name in (inner, source) if name in self.modules), None):
                        yield alias.asname or alias.name, found

    def arrows(self) -> dict[str, set[str]]:
        """Room -> the other rooms that it imports."""
        found: dict[str, set[str]] = {module.room: set() for module in self.modules.values()}
        for name, sources in self.imports.items():
            room = self.modules[name].room
            found[room] |= {self.modules[source].room for source in sources.values()} - {room}
        return found

    def order(self) -> list[str]:
        """The rooms, each above all that it imports.

        Raises:
            ValueError: some import each other; their names.
        """
        arrows, order = self.arrows(), list[str]()
        while left := sorted(arrows.keys() - {*order}):
            free = [room for room in left if arrows[room] <= {*order}]
            if not free:
                raise ValueError(f"rooms that import each other: {', '.join(left)}")
            order += free
        return order[::-1]

    def training(self) -> set[str]:
        """The modules that a training imports; not those that a function imports where it needs them."""
        seen, left = set[str](), [*TRAINING]
        while left:
            if (name := left.pop()) not in seen:
                seen.add(name)
                left += dict(self._imports(self.modules[name], ast.iter_child_nodes)).values()
        return seen

    def handed(self, names: set[str]) -> list[tuple[str, str, str]]:
        """Where a training hands on what has one of these names: the module, the other one, and what it calls there."""
        found = []
        for name in sorted(self.training()):
            for call in (node for node in ast.walk(self.modules[name].tree) if isinstance(node, ast.Call)):
                values = [*call.args, *(keyword.value for keyword in call.keywords)]
                called = ast.unparse(values.pop(0) if ast.unparse(call.func) == "partial" else call.func)
                given = {
                    ast.unparse(value).rpartition(".")[2]
                    for value in values
                    if isinstance(value, ast.Name | ast.Attribute)
                }
                source = self.imports[name].get(called.partition(".")[0], name)
                if given & names and source != name:
                    found.append((name, source, called))
        return found


def document(library: Library) -> str:
    """The text of docs/architecture.md."""
    order, arrows, training = library.order(), library.arrows(), library.training()
    rows = ["| room | purpose | modules | lines | of code | imports |", "|---|---|---|---|---|---|"]
    for room in order:
        modules = [module for module in library.modules.values() if module.room == room]
        lines, code = sum(len(module.text.splitlines()) for module in modules), sum(module.code for module in modules)
        below = ", ".join(sorted(arrows[room], key=order.index))
        rows.append(f"| {room} | {library.purposes[room]} | {len(modules)} | {lines:,} | {code:,} | {below} |")
    lines = sum(len(library.modules[name].text.splitlines()) for name in training)
    total = f"A training imports {len(training)} modules of {lines:,} lines.\n"
    parts = [HEAD, *rows, "", total]
    for what, names in NAMED.items():
        found = library.handed(names)
        modules = {name for one, other, _ in found for name in (one, other)}
        parts.append(f"## The way of {what}\n\nIt is handed on {len(found)} times, between {len(modules)} modules.\n")
        parts += ["| from | to | call |", "|---|---|---|", *(f"| {a} | {b} | `{call}` |" for a, b, call in found), ""]
    return "\n".join([*parts, OWNERS, *owners(), ""])


def owners(starters: Path = STARTERS) -> list[str]:
    """Rows of a table: each file of an owner's package, the others that it imports, and what it uses of the library."""
    rows = ["| starter | file | lines | imports | of samebits |", "|---|---|---|---|---|"]
    for path in sorted(starters.glob("*/src/*/*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        own = [node.module or alias.name for node in froms if node.level for alias in node.names]
        used = [node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sb"]
        inner = [f"{node.module}.{alias.name}" for node in froms if not node.level for alias in node.names]
        used += [name.removeprefix("samebits.") for name in inner if name.startswith("samebits.")]
        cells = path.relative_to(starters).parts[0], path.name, str(len(path.read_text().splitlines()))
        rows.append(f"| {' | '.join([*cells, *(', '.join(dict.fromkeys(sorted(names))) for names in (own, used))])} |")
    return rows


def main() -> None:
    """Command line; see the module's docstring."""
    if sys.argv[1:]:
        print(document(Library(Path(sys.argv[1]))), end="")
    else:
        DOCUMENT.write_text(document(Library(LIBRARY)))


if __name__ == "__main__":
    main()
