"""Where code takes an order from a thing that has none: a listing of files, or a set."""

import ast
from collections.abc import Iterator

from .syntax import Source

LISTINGS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "glob.glob", "glob.iglob", "glob.glob0", "glob.glob1"}
METHODS = {"iterdir", "glob", "rglob", "walk"}  # of a path
COMMON = {"walk"}  # a method of many other things, too
SETS = {"builtins.set", "builtins.frozenset"}
OF_SETS = {"union", "intersection", "difference", "symmetric_difference", "copy"}
# Their result does not depend on the order of what they are given.
ORDERLESS = {f"builtins.{name}" for name in ("sorted", "set", "frozenset", "len", "any", "all", "min", "max")}
ORDERLESS |= {"numpy.sort", "numpy.unique", "natsort.natsorted", "collections.Counter"}
# Their result has the order of what they are given.
KEEPING = {f"builtins.{name}" for name in ("list", "tuple", "map", "filter", "iter")}
KEEPING |= {"itertools.chain", "itertools.chain.from_iterable"}
# They take what they are given in its order.
TAKING = KEEPING | {f"builtins.{name}" for name in ("enumerate", "next", "zip", "dict", "reversed")}
TAKING |= {"torch.tensor", "torch.as_tensor", "torch.stack", "torch.cat", "numpy.array", "numpy.asarray"}
TAKING |= {"numpy.fromiter", "torch.LongTensor", "torch.FloatTensor", "random.choice", "random.sample"}
DEPTH = 20


def listings(source: Source) -> Iterator[ast.expr]:
    """Listings of folders that are used in the order in which they come."""
    for call in source.calls():
        if _lists(source, call) and not _settled(source, call):
            yield call


def _lists(source: Source, call: ast.Call) -> bool:
    if name := source.dotted(call.func):
        return name in LISTINGS or (name.startswith("pathlib.") and name.rpartition(".")[2] in METHODS)
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in METHODS:
        return False
    kind = source.kind(call.func.value)
    return kind.startswith("pathlib.") or (not kind and call.func.attr not in COMMON)


def sets(source: Source) -> Iterator[ast.expr]:
    """Sets that are gone through."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.expr) and _is_set(source, node) and _is_ordered(source, node):
            yield node


def _is_set(source: Source, node: ast.AST | None, depth: int = DEPTH) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        method = isinstance(node.func, ast.Attribute) and node.func.attr in OF_SETS
        of_set = method and _is_set(source, getattr(node.func, "value", None), depth)
        return of_set or source.dotted(node.func) in SETS
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
        return _is_set(source, node.left, depth) or _is_set(source, node.right, depth)
    if not depth or not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return False
    bound = source.bound(node) if isinstance(node, ast.Name) else source.attribute(node)
    if bound and bound.annotations:
        kinds = (each.value if isinstance(each, ast.Subscript) else each for each in bound.annotations)
        return all(source.dotted(kind) in SETS for kind in kinds)
    if not bound or bound.others or not bound.values:
        return False
    return all(_is_set(source, value, depth - 1) for value in bound.values)


def _is_ordered(source: Source, node: ast.expr) -> bool:
    """Whether a set is taken in the order that it happens to have."""
    parent = source.parents[node]
    if isinstance(parent, ast.For | ast.AsyncFor):
        return node is parent.iter
    if isinstance(parent, ast.comprehension):
        return not _settled(source, node)
    if isinstance(parent, ast.Starred):
        return not isinstance(source.parents[parent], ast.Set) and not _settled(source, parent)
    if isinstance(parent, ast.Attribute):
        above = source.parents[parent]
        return parent.attr == "pop" and isinstance(above, ast.Call) and not above.args
    if isinstance(parent, ast.Call) and node in parent.args:
        joins = isinstance(parent.func, ast.Attribute) and parent.func.attr == "join"
        taken = joins or source.dotted(parent.func) in TAKING
        return taken and not _settled(source, node)
    return False


def _settled(source: Source, node: ast.AST, depth: int = DEPTH) -> bool:
    """Whether what comes out does not depend on the order of `node`: it is sorted, counted, or made a set."""
    parent = source.parents[node]
    if isinstance(parent, ast.Expr):
        return True  # nobody uses it
    if isinstance(parent, ast.Call) and node is not parent.func:
        name = source.dotted(parent.func)
        return name in ORDERLESS or (name in KEEPING and _settled(source, parent, depth))
    if isinstance(parent, ast.comprehension):
        made = source.parents[parent]
        counted = isinstance(made, ast.GeneratorExp) and isinstance(made.elt, ast.Constant)
        return counted or isinstance(made, ast.SetComp) or (node is parent.iter and _settled(source, made, depth))
    if isinstance(parent, ast.Compare):
        return node in parent.comparators and all(isinstance(each, ast.In | ast.NotIn) for each in parent.ops)
    if isinstance(parent, ast.Starred | ast.List | ast.Tuple | ast.IfExp | ast.BoolOp | ast.NamedExpr):
        if isinstance(parent, ast.NamedExpr) and not _uses_settled(source, parent.target, depth):
            return False
        return _settled(source, parent, depth)
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, ast.Add) and _settled(source, parent, depth)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        return _uses_settled(source, parent.targets[0], depth)
    if isinstance(parent, ast.AnnAssign):
        return _uses_settled(source, parent.target, depth)
    if isinstance(parent, ast.withitem) and parent.optional_vars:
        return _uses_settled(source, parent.optional_vars, depth)
    if isinstance(parent, ast.For) and node is parent.iter and isinstance(parent.target, ast.Tuple):
        return _walk_sorted(source, node, parent)
    return False


def _uses_settled(source: Source, target: ast.expr, depth: int) -> bool:
    """Whether a name is sorted in place, or each of its uses is settled."""
    if not isinstance(target, ast.Name) or not depth:
        return False
    uses = source.loads(target)
    if any(_is_sorting(source, use) for use in uses):
        return True
    return bool(uses) and all(_settled(source, use, depth - 1) for use in uses)


def _is_sorting(source: Source, use: ast.Name) -> bool:
    parent = source.parents[use]
    return isinstance(parent, ast.Attribute) and parent.attr == "sort" and isinstance(source.parents[parent], ast.Call)


def _walk_sorted(source: Source, call: ast.AST, loop: ast.For) -> bool:
    """Whether a loop over os.walk sorts the folders, so that it enters them in order, and the files."""
    assert isinstance(loop.target, ast.Tuple)
    names = [each for each in loop.target.elts if isinstance(each, ast.Name)]
    if not isinstance(call, ast.Call) or source.dotted(call.func) not in ("os.walk", "os.fwalk") or len(names) < 3:
        return False
    folders, files = names[1:3]
    entered = any(_is_sorting(source, use) for use in source.loads(folders))
    uses = source.loads(files)
    return entered and (any(_is_sorting(source, use) for use in uses) or all(_settled(source, use) for use in uses))
