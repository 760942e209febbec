"""The modules of this library and of the owner's package are compiled from their sources, without bytecode.

So the code that runs is that of a source whose SHA-256 is known, whatever lies in __pycache__. A stage `pin`s the
sources when it begins: a module that is imported later is that of then. Other packages load as ever.

The library is covered when it is imported, the owner's package when the command begins, and in processes that it
starts, such as loader workers, before the package is imported.
"""

import hashlib
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from importlib.util import decode_source, spec_from_file_location
from types import CodeType, FrameType, ModuleType

NAME = __name__.partition(".")[0]  # of the library
VARIABLE = "SAMEBITS_PACKAGE"  # names the owner's package to processes that this one starts
_compiled: dict[tuple[str, str], CodeType] = {}  # by path and SHA-256: a fork that imports all anew compiles nothing


class Source(SourceFileLoader):
    """Loads one module.

    Attributes:
        sha256: of the source that was compiled, in hex; empty before.
    """

    sha256 = ""

    def __init__(self, fullname: str, path: str, source: bytes | None = None) -> None:
        """Without `source`, that is what the file holds when it is first asked for."""
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source."""
        source = self.get_data(self.path)
        self.sha256 = hashlib.sha256(source).hexdigest()
        if (code := _compiled.get((self.path, self.sha256))) is None:
            code = _compiled[self.path, self.sha256] = self.source_to_code(source, self.path)
        # for tracebacks, and for compilers that read the source of a function: without a date it counts as up to date
        linecache.cache[self.path] = len(source), None, decode_source(source).splitlines(True), self.path
        return code

    def get_data(self, path: str) -> bytes:
        """The bytes of a file; of the module's own always the same ones."""
        if path != self.path:
            return super().get_data(path)
        if self._source is None:
            self._source = super().get_data(path)
        return self._source


class Finder:
    """Finds the modules of a package where others do, or among the sources that are pinned."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.pinned: Mapping[str, bytes] | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Have a module of the package loaded by `Source`; one that is compiled from C stays Python's own.

        Raises:
            UserError: the module appeared after the sources were pinned.
            ImportError: its source is gone, and only its bytecode is there.
        """
        if name.partition(".")[0] != self.package:
            return None
        others = (each for each in sys.meta_path if not isinstance(each, Finder))  # an editable install has its own
        found = next((spec for each in others if (spec := each.find_spec(name, path, target))), None)
        loader, file = (found.loader, found.origin or "") if found else (None, "")
        if self.pinned is not None and path and not isinstance(loader, ExtensionFileLoader):
            stem = name.replace(".", "/").removeprefix(f"{self.package}/")
            root = sys.modules[self.package].__path__[0]
            for at in (f"{stem}/__init__.py", f"{stem}.py"):
                if at in self.pinned:
                    return _spec(name, f"{root}/{at}", self.pinned[at])
            if type(loader) is SourceFileLoader and file.startswith(f"{root}/"):
                from .core.errors import UserError

                raise UserError(
                    f"{file.removeprefix(f'{root}/')}: appeared after the stage had begun, so the content address "
                    f"lacks it. Start the stage again"
                )
        if isinstance(loader, SourcelessFileLoader):
            raise ImportError(f"{file}: bytecode whose source is gone is not loaded; restore the source", name=name)
        return _spec(name, file) if type(loader) is SourceFileLoader else found


def pin(package: str, sources: Mapping[str, bytes]) -> None:
    """From now on, load modules of a package from these sources alone; each is named by its path from the package."""
    for finder in sys.meta_path:
        if isinstance(finder, Finder) and finder.package == package:
            finder.pinned = sources


def _spec(name: str, file: str, source: bytes | None = None) -> ModuleSpec | None:
    folder, _, leaf = file.rpartition("/")
    inside = [folder] if leaf == "__init__.py" else None
    return spec_from_file_location(name, file, loader=Source(name, file, source), submodule_search_locations=inside)


def cover(package: str) -> None:
    """Load all modules of a package from here on, and anew those that Python may have had from older bytecode.

    The file that calls this and the packages above it are running: of these the code can be looked at.
    """
    if package != NAME:
        os.environ[VARIABLE] = package
    sys.meta_path[:] = [each for each in sys.meta_path if getattr(each, "package", None) != package]
    before = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
    sys.meta_path.insert(before, Finder(package))
    running: dict[str, CodeType] = {}
    frame: FrameType | None = sys._getframe()
    while frame:
        if frame.f_code.co_name == "<module>":
            running[frame.f_globals.get("__name__", "")] = frame.f_code
        frame = frame.f_back
    ours = {name: each for name, each in sys.modules.items() if name.partition(".")[0] == package}
    stale = False
    for name, module in ours.items():
        if module.__spec__ and type(loader := module.__spec__.loader) is SourceFileLoader:
            module.__spec__.loader = module.__loader__ = mine = Source(name, loader.path)
            stale = stale or running.get(name) != mine.get_code(name)
    if stale:
        for name in ours:
            del sys.modules[name]
        import_module(__name__ if package == NAME else package)


cover(NAME)
if (package := os.environ.get(VARIABLE)) and package not in sys.modules:
    cover(package)
