"""The pins of what a training loads: packages that decide bits, each with its version, the same for CPU and CUDA.

They are what core and the owner's package import and what pyproject.toml asks for, with all that this needs, as the
installed packages say. What only torch's CUDA build brings is no part of it, nor are the tools, DVC and MLflow.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ..base.files import read_text
from ..base.project import NAME
from ..base.text import some
from ..core.errors import UserError
from .locks import DEVICES, LOCKS, files_of, normal, packages, pins_of

TRAIN = tuple(name for names in DEVICES.values() for name in names)  # the locks of what a training loads
# What the library asks for around its core; such a package counts only where the code imports it.
AROUND_CORE = {"click", "cloudpickle", "rich", "rfc8785", "ruamel_yaml"}
REQUESTED = re.compile(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?([^;]*)(?:;(.*))?")  # name, extras, versions, marker
EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


def pins(root: Path, sources: Mapping[str, bytes], unhashed: Sequence[str] = ()) -> dict[str, str]:
    """The pinned version of each package that decides bits in the project at `root`, by its name.

    `sources` are the Python files that enter the content address, by name; `unhashed` top-level modules may come from
    anywhere.

    Raises:
        UserError: no lock is there, or the locks of two devices have other versions; the code imports a package that
            only another lock has; or a package that is locked is not installed, so that nobody knows what it needs.
    """
    locked = _locked(root)
    wanted = _requested(root)
    for name, by in _imported(sources, unhashed).items():
        if name in locked:
            wanted.setdefault(name, set())
        elif others := [path.name for path in sorted((root / LOCKS).glob("*.txt")) if name in pins_of(path)]:
            raise UserError(
                f"{name}: imported by {some(by)}, but pinned in {LOCKS}/{others[0]} only, which is not what a training "
                f"loads. Add it to dependencies in pyproject.toml and run make lock"
            )
    return {name: locked[name] for name in sorted(_closed(wanted, locked, "all" in unhashed))}


def _locked(root: Path) -> dict[str, str]:
    """The packages that the locks of all devices have, each with its version, of torch without its build."""
    paths = {device: [root / LOCKS / name for name in names] for device, names in DEVICES.items()}
    here = {device: [path for path in those if path.is_file()] for device, those in paths.items()}
    sets = {device: _pinned(those) for device, those in here.items() if those}
    if not sets:
        raise UserError(
            f"{root / LOCKS}: no lock seen, {', '.join(TRAIN)} wanted. Restore them from git, or: make lock"
        )
    if gone := [path for device in sets for path in paths[device] if path not in here[device]]:
        raise UserError(
            f"{gone[0]}: missing, and the other lock of this device is there. Restore it from git, or: make lock"
        )
    first, *others = sets.values()
    common = {name: version for name, version in first.items() if all(name in other for other in others)}
    if apart := [name for name, version in common.items() if any(other[name] != version for other in others)]:
        seen = ", ".join(f"{held[apart[0]]} for {device}" for device, held in sets.items())
        raise UserError(f"{apart[0]}: {seen} in {LOCKS}/train-*.txt, one version wanted: make lock")
    return common


def _pinned(paths: Iterable[Path]) -> dict[str, str]:
    held = {name: version for path in paths for name, version in pins_of(path).items()}
    return held | {"torch": held["torch"].partition("+")[0]} if "torch" in held else held


def _requested(root: Path) -> dict[str, set[str]]:
    """What pyproject.toml asks for of a training: packages, each with its extras."""
    path = root / "pyproject.toml"
    try:
        lines = tomllib.loads(read_text(path))["project"]["dependencies"] if path.is_file() else []
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        raise UserError(f"{path}: no list project.dependencies seen. Mend it, or restore it from git") from None
    requested = dict(_needed(lines, set()))
    return {name: extras for name, extras in requested.items() if name not in {*AROUND_CORE, NAME}}


def _imported(sources: Mapping[str, bytes], unhashed: Sequence[str]) -> dict[str, list[str]]:
    """The installed packages that Python files import, each with the names of these files."""
    modules: dict[str, list[str]] = {}
    for file, source in sources.items():
        for module in sorted(imports(source)):
            if module.partition(".")[0] not in {*sys.stdlib_module_names, *unhashed, NAME}:  # its core is hashed
                modules.setdefault(module, []).append(file)
    found: dict[str, dict[str, None]] = {}
    here = packages()
    for module, files in modules.items():
        for package in _owners(module, here):
            found.setdefault(package, {}).update(dict.fromkeys(files))
    return {package: [*files] for package, files in found.items()}


@cache
def imports(source: bytes) -> frozenset[str]:
    """The modules that a Python file imports, wherever in it, by their whole names; none of a broken one.

    Also those that it has importlib import by a name that stands there.
    """
    calls = b"import_module" in source or b"__import__" in source
    try:
        nodes = list((ast.walk if calls else _statements)(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):  # Python says so when it loads it
        return frozenset()
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    below = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    requested = [node.args[0] for node in nodes if isinstance(node, ast.Call) and node.args and _imports(node.func)]
    named = {each.value for each in requested if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return frozenset(plain | named | {f"{node.module}.{alias.name}" for node in below for alias in node.names})


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """What ast.walk gives, without expressions, which are most of it."""
    yield node
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for each in getattr(node, name, ()):
            yield from _statements(each)


def _imports(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def _owners(module: str, here: Collection[str]) -> set[str]:
    """The packages, of those here, that a module is of; of a folder that several share, those with most of its name."""
    parts = module.split(".")
    if (top := normal(parts[0])) in here:  # most have the name of their module
        return {top}
    held = _held()
    names = ["/".join(parts[:depth]) for depth in range(min(len(parts), 3), 0, -1)]
    return set(next((held[name] for name in names if name in held), ()))


@cache  # per process, which does not change its environment
def _held() -> dict[str, set[str]]:
    """The packages that have files in a folder, or as a module, of up to three parts."""
    held: dict[str, set[str]] = {}
    for package, (_, info) in packages().items():
        for file in files_of(info):
            parts = file.split("/")[:3]
            parts[-1] = parts[-1].partition(".")[0]
            for depth in range(1, len(parts) + 1):
                held.setdefault("/".join(parts[:depth]), set()).add(package)
    return held


def _closed(wanted: Mapping[str, set[str]], locked: Mapping[str, str], partly: bool) -> set[str]:
    """Packages and all that these need, with their extras, as far as it is locked.

    Whatever a marker says of Python or the system: of one lock, all environments have one closure.
    """
    done: dict[str, set[str]] = {}
    left = [(name, extras) for name, extras in wanted.items() if name in locked]
    while left:
        name, extras = left.pop()
        if name in done and extras <= done[name]:
            continue
        extras = done[name] = done.get(name, set()) | extras
        try:
            lines = _requires(name)
        except PackageNotFoundError:
            if not partly:
                raise UserError(f"{name}: locked in {LOCKS}, but not installed here: make setup") from None
            continue
        left += [(need, requested) for need, requested in _needed(lines, extras) if need in locked]
    return set(done)


@cache
def _requires(name: str) -> tuple[str, ...]:
    return tuple(distribution(name).requires or ())


def _needed(lines: Iterable[str], extras: set[str]) -> Iterator[tuple[str, set[str]]]:
    """The packages that requirements name, each with its extras; what an extra brings, where that is among ours."""
    for line in lines:
        if not (match := REQUESTED.match(line)):
            continue
        name, theirs, _, marker = match.groups()
        bringing = {normal(each) for each in EXTRA.findall(marker or "")}
        if not bringing or bringing & extras:
            yield normal(name), {normal(each) for each in (theirs or "").split(",") if each.strip()}
