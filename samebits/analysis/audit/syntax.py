"""A file of the owner's as a syntax tree, with names resolved: nothing of it is imported or run."""

import ast
import builtins
import io
import tokenize
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ...core.errors import UserError

DEPTH = 20  # names that lead to names; more are no person's code
PATH = "pathlib.Path"
OWN = "(the file's own)"
# Methods and attributes of a path that give a path.
PATHS = {"absolute", "expanduser", "joinpath", "parent", "resolve", "with_name", "with_stem", "with_suffix"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass
class Bound:
    """All that a name is bound to in a scope."""

    imported: list[str] = field(default_factory=list)  # dotted names
    values: list[ast.expr] = field(default_factory=list)
    annotations: list[ast.expr] = field(default_factory=list)
    classes: list[ast.ClassDef] = field(default_factory=list)
    others: int = 0  # loops, arguments, functions: what they are is not known


class Source:
    """A file's tree.

    Attributes:
        name: the file, for display.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Read and parse.

        Raises:
            UserError: Python could not read it either.
        """
        self.name, self._bytes = name, path.read_bytes()
        try:
            with warnings.catch_warnings(action="ignore"):  # they are Python's to tell, when it runs the file
                self.tree = ast.parse(self._bytes, str(path))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            said = error.msg if isinstance(error, SyntaxError) else str(error)
            raise UserError(f"{name}{line}: no Python that can be read: {said}. Mend it and audit again") from None
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        bodies = [node.body for node in self.parents if isinstance(node, FUNCTIONS | ast.ClassDef)]
        self._bodies = {each for body in bodies for each in (body if isinstance(body, list) else [body])}
        self._stars: list[str] = []
        self._scopes: dict[ast.AST, dict[str, Bound]] = {}
        self._attributes: dict[str, Bound] = {}  # of any object
        for node in ast.walk(self.tree):
            self._bind(node)

    @cached_property
    def comments(self) -> dict[int, str]:
        """Comments by line."""
        found: dict[int, str] = {}
        with suppress(tokenize.TokenError, SyntaxError):  # what Python reads may still end in the midst of a token
            for token in tokenize.tokenize(io.BytesIO(self._bytes).readline):
                found |= {token.start[0]: token.string} if token.type == tokenize.COMMENT else {}
        return found

    def code(self, node: ast.AST) -> str:
        """A node as Python writes it, in one line."""
        return " ".join(ast.unparse(node).split())

    def calls(self) -> Iterator[ast.Call]:
        """All calls, in the order of lines."""
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        yield from sorted(calls, key=lambda node: (node.lineno, node.col_offset))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around one, from the inside."""
        while parent := self.parents.get(node):
            yield parent
            node = parent

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, the class or the file whose names a node sees first."""
        child = node
        for parent in self.above(node):
            inside = child in self._bodies  # not in defaults, decorators or bases, which are computed outside
            if isinstance(parent, FUNCTIONS) and (inside or isinstance(node, ast.arg)):
                return parent
            if isinstance(parent, ast.ClassDef) and inside:
                return parent
            child = parent
        return self.tree

    def at_import(self, node: ast.AST) -> bool:
        """Whether a node is computed when the file is imported."""
        scope = self.scope(node)
        while isinstance(scope, ast.ClassDef):
            scope = self.scope(scope)
        return scope is self.tree

    def dotted(self, node: ast.AST | None, depth: int = DEPTH) -> str:
        """The full name of a thing that was imported, or is built in, such as `os.listdir`; else empty."""
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value, depth)
            return f"{owner}.{node.attr}" if owner else ""
        if not isinstance(node, ast.Name) or not depth:
            return ""
        bound = self.bound(node)
        if not bound:
            return f"builtins.{node.id}" if hasattr(builtins, node.id) else self._of_star(node.id)
        if bound.imported:
            return bound.imported[0]
        alone = len(bound.values) == 1 and not (bound.others or bound.classes)
        return self.dotted(bound.values[0], depth - 1) if alone else ""

    def kind(self, node: ast.AST | None, depth: int = DEPTH) -> str:
        """The full name of the class that a thing is of, as far as this file tells; else empty."""
        if not depth or node is None:
            return ""
        if isinstance(node, ast.Call):
            if name := self.dotted(node.func):
                return PATH if name.startswith("pathlib.") else name
            if isinstance(node.func, ast.Attribute) and node.func.attr in PATHS:
                return self.kind(node.func.value, depth - 1)
            bound = self.bound(node.func) if isinstance(node.func, ast.Name) else None
            return self._class(bound.classes[0]) if bound and bound.classes else ""
        if isinstance(node, ast.Attribute) and node.attr in PATHS:
            return self.kind(node.value, depth - 1)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return PATH if PATH in (self.kind(node.left, depth - 1), self.kind(node.right, depth - 1)) else ""
        if isinstance(node, ast.Attribute):
            return self._of_all(self.attribute(node) or Bound(), depth)
        if not isinstance(node, ast.Name) or not (bound := self.bound(node)):
            return ""
        return self._of_all(bound, depth) or self._owner(node)

    def _of_all(self, bound: Bound, depth: int) -> str:
        """The class of all that is bound, if it is one."""
        kinds = {self._annotated(each) for each in bound.annotations}
        kinds |= {self.kind(value, depth - 1) for value in bound.values if not bound.annotations}
        known = len(kinds) == 1 and (bound.annotations or not bound.others)
        return kinds.pop() if known else ""

    def bound(self, node: ast.AST) -> Bound | None:
        """What the name in a node is bound to, in the nearest scope that binds it."""
        scope, name = self.scope(node), getattr(node, "id", "")
        while True:
            if found := self._scopes.get(scope, {}).get(name):
                return found
            if scope is self.tree:
                return None
            scope = self.scope(scope)
            while isinstance(scope, ast.ClassDef):  # a method does not see the names of its class
                scope = self.scope(scope)

    def attribute(self, node: ast.AST) -> Bound | None:
        """What the attribute in a node is bound to, whatever object has it."""
        return self._attributes.get(node.attr) if isinstance(node, ast.Attribute) else None

    def loads(self, node: ast.Name) -> list[ast.Name]:
        """Where the name that is bound at a node is read, in that scope and those in it."""
        bound = self.bound(node)
        named = [each for each in ast.walk(self.scope(node)) if isinstance(each, ast.Name) and each.id == node.id]
        return [each for each in named if isinstance(each.ctx, ast.Load) and self.bound(each) is bound]

    def _annotated(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return PATH if node.value.strip() in ("Path", PATH) else OWN
        if isinstance(node, ast.BinOp):  # Path | None
            return self._annotated(node.left)
        name = self.dotted(node)
        return PATH if name.startswith("pathlib.") else name or OWN

    def _owner(self, node: ast.Name) -> str:
        """The class of `self`."""
        for parent in self.above(node):
            if isinstance(parent, ast.ClassDef):
                return self._class(parent) if node.id == "self" else ""
        return ""

    def _class(self, node: ast.ClassDef) -> str:
        return PATH if any(self.dotted(base).startswith("pathlib.") for base in node.bases) else OWN

    def _of_star(self, name: str) -> str:
        return f"{self._stars[-1]}.{name}" if self._stars else ""

    def _of(self, node: ast.AST, name: str) -> Bound:
        return self._scopes.setdefault(self.scope(node), {}).setdefault(name, Bound())

    def _bind(self, node: ast.AST) -> None:
        """Note the names that a node binds."""
        if isinstance(node, ast.Import):
            for each in node.names:
                whole = each.name if each.asname else each.name.partition(".")[0]
                self._of(node, each.asname or whole).imported.append(whole)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for each in node.names:
                if each.name == "*":
                    self._stars.append(module)
                else:
                    self._of(node, each.asname or each.name).imported.append(f"{module}.{each.name}")
        elif isinstance(node, ast.ClassDef):
            self._of(node, node.name).classes.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._of(node, node.name).others += 1
        elif isinstance(node, ast.arg):
            bound = self._of(node, node.arg)
            bound.others += 1
            bound.annotations += [node.annotation] if node.annotation else []
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            _assign(node, self.parents[node], self._of(node, node.id))
            if isinstance(self.scope(node), ast.ClassDef):
                _assign(node, self.parents[node], self._attributes.setdefault(node.id, Bound()))
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            _assign(node, self.parents[node], self._attributes.setdefault(node.attr, Bound()))


def _assign(node: ast.expr, parent: ast.AST, bound: Bound) -> None:
    """Note what a name or an attribute gets."""
    if isinstance(parent, ast.Assign) and node in parent.targets:
        bound.values.append(parent.value)
    elif isinstance(parent, ast.AnnAssign) and node is parent.target:
        bound.values += [parent.value] if parent.value else []
        bound.annotations.append(parent.annotation)
    elif isinstance(parent, ast.NamedExpr):
        bound.values.append(parent.value)
    elif isinstance(parent, ast.withitem):
        bound.values.append(parent.context_expr)
    elif not isinstance(parent, ast.AugAssign):  # which leaves a thing of its class
        bound.others += 1
