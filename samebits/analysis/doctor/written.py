"""What the files of a package spell out: the files that they may write, the keys that they may read."""

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from ...address.address import files
from ...base.project import Project
from ..audit.syntax import Source

WHOLE = {"model_dump", "model_dump_json", "flat", "addressed", "asdict"}  # calls that read all keys of a section
OF_ANY = {"dict", "getattr", "vars", "attrgetter"}  # those that read any, unless they name it
ADDED = {"", ".npy", ".npz", ".png"}  # suffixes that who saves a file need not give


class Written:
    """What the files of a package spell out."""

    def __init__(self, project: Project) -> None:
        """Read and parse them.

        Raises:
            UserError: one is no Python.
        """
        self._config = project.package / "config.py"
        self._nodes = {
            project.package / name: list(ast.walk(Source(project.package / name, project.shown(name)).tree))
            for name in files(project.package)
            if name.endswith(".py")
        }

    @property
    def _all(self) -> Iterator[ast.AST]:
        return (node for nodes in self._nodes.values() for node in nodes)

    @cached_property
    def texts(self) -> list[re.Pattern[str]]:
        """The texts, but for docstrings; a part that is put in may be anything."""
        silent = {node.value for node in self._all if isinstance(node, ast.Expr)}
        parts = {part for node in self._all if isinstance(node, ast.JoinedStr) for part in node.values}
        found = [re.escape(text) for node in self._all if node not in silent | parts and (text := _text(node))]
        for node in self._all:
            if isinstance(node, ast.JoinedStr) and any(re.search(r"\w", _text(part)) for part in node.values):
                found.append("".join(re.escape(_text(part)) or ".+" for part in node.values))
        return [re.compile(text, re.DOTALL) for text in found]

    def says(self, text: str) -> bool:
        """Whether it is one of the texts."""
        return any(each.fullmatch(text) for each in self.texts)

    def names_file(self, path: Path) -> bool:
        """Whether a text is a file's name or path, or one its stem and another its suffix, as savefig puts together."""
        ends = [Path(*path.parts[start:]).as_posix() for start in range(len(path.parts))]
        stem, suffix = self.says(path.stem), path.suffix in ADDED or self.says(path.suffix)
        return any(map(self.says, ends)) or (stem and suffix)

    def names_column(self, column: str) -> bool:
        """Whether a text has it among its words."""
        word = re.compile(rf"(?<!\w){re.escape(column)}(?!\w)")
        return self.says(column) or any(word.search(re.sub(r"\\(.)", r"\1", each.pattern)) for each in self.texts)

    @cached_property
    def logged(self) -> set[str | None]:
        """The names of the numbers that steps log; None is among them where some are put in."""
        calls = [node for node in self._all if isinstance(node, ast.Call) and _last(node.func) == "log"]
        return {keyword.arg for call in calls for keyword in call.keywords}

    def reads_whole(self, sections: set[str]) -> bool:
        """Whether keys of these sections may be read without their names."""
        calls = [node for node in self._all if isinstance(node, ast.Call)]
        assigned = [node for node in self._all if isinstance(node, ast.Assign) and _last(node.value) in sections]
        known = sections | {_last(target) for node in assigned for target in node.targets}
        loops = [node for node in self._all if isinstance(node, ast.For | ast.comprehension)]
        return (
            any(_last(call.func) in WHOLE or (_last(call.func) in OF_ANY and not _is_named(call)) for call in calls)
            or any(_last(loop.iter) in known for loop in loops)
            or any(_last(node) == "__dict__" for node in self._all)
        )

    @cached_property
    def read(self) -> set[str]:
        """The names of attributes; those of `self` are a module's own, but for those of the config's types."""
        found = {
            node.attr
            for path, nodes in self._nodes.items()
            for node in nodes
            if isinstance(node, ast.Attribute) and (_last(node.value) != "self" or path == self._config)
        }
        return found.union(*(node.kwd_attrs for node in self._all if isinstance(node, ast.MatchClass)))


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _last(node: ast.AST) -> str:
    """The name of a name or of an attribute."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_named(call: ast.Call) -> bool:
    """Whether a call such as getattr(x, "name") or dict(name=1) says which name it means."""
    return not call.args or (len(call.args) > 1 and isinstance(call.args[1], ast.Constant))
