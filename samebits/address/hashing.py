"""The SHA-256 of many files: read in parallel, and remembered, so that a file that did not change is not read again.

A file counts as unchanged while its size, its inode and the dates of both (mtime and ctime) are the same. A program may
set mtime back, but not ctime. What changes no date goes unseen: a failing disk, a file that is written through a
mapping while it is read, a file system without ctime. `data.check: every_byte` sees all of it.
"""

import hashlib
import json
import os
import stat
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from ..base import project
from ..base.files import durable
from ..core.errors import UserError

MEMORY = Path("build", "hashes")  # in the project; it may be removed at any time
STEP = 10 * 10**9  # ns: the dates of some file systems are 2 s apart (FAT), and a server's clock may be behind
NEVER = 0  # stands for ctime where a file may have changed since, and be read again
WHOLE = ""  # the name of a file in itself


class Entry(NamedTuple):
    """A file as it was read: bytes, mtime (ns), ctime (ns), inode, and its SHA-256 in hex."""

    size: int
    changed: int
    inode_changed: int
    inode: int
    sha256: str


Identity = tuple[int, int, int, int]  # the first four
Entries = Mapping[str, Entry]  # by name from the folder


def entries(root: Path, known: Entries | None = None, but: str | None = None) -> dict[str, Entry]:
    """Every file under a folder `but` for one (or the file itself, named ""), by its name; none where nothing is.

    Of `known` files, those that did not change are not read. None: nothing is known, nor will it be remembered.

    Raises:
        UserError: there is a link to a folder, or something that is neither a file nor a folder.
    """
    found = {name: each for name, each in identities(root) if name != but}
    old = known or {}
    kept = {name: old[name] for name, now in found.items() if name in old and old[name][:4] == now}
    unread = sorted(found.keys() - kept.keys(), key=lambda name: (-found[name][0], name))  # the largest first
    paths = [(name, f"{root}/{name}" if name else str(root), found[name]) for name in unread]
    if known is None:
        return {name: _read(path, before, 0) for name, path, before in paths}
    return kept | _read_all(paths) if paths else kept


def distrusted(entry: Entry) -> Entry:
    """The entry of a file that is to be read again."""
    return entry._replace(inode_changed=NEVER)


def _identity(found: os.stat_result) -> Identity:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def identities(root: Path) -> Iterator[tuple[str, Identity]]:
    """Every file under a folder (or the file itself, named ""), by its name, with what changes when it does.

    Raises:
        UserError: as `entries`.
    """
    if root.exists() and not root.is_dir():
        yield WHOLE, _regular(str(root), root.stat())
    folders = [""] if root.is_dir() else []
    while folders:
        at = folders.pop()
        with os.scandir(f"{root}/{at}") as listed:
            for each in listed:
                if each.is_dir(follow_symlinks=False):
                    folders.append(f"{at}{each.name}/")
                else:
                    yield f"{at}{each.name}", _regular(each.path, each.stat())


def _regular(path: str, found: os.stat_result) -> Identity:
    if stat.S_ISDIR(found.st_mode):
        raise UserError(f"{printable(path)}: a link to a folder seen, files wanted: copy them there")
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{printable(path)}: neither a file nor a folder: remove it")
    return _identity(found)


def _read_all(paths: list[tuple[str, str, Identity]]) -> dict[str, Entry]:
    """Read files in a few threads, which all take the next one from one list: hashing lets others run."""
    now, turns = clock(), iter(paths)

    def work() -> dict[str, Entry]:
        return {name: _read(path, before, now) for name, path, before in turns}

    workers = min(len(paths), 2 * len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        try:
            parts = [pool.submit(work) for _ in range(workers)]
            wait(parts, return_when="FIRST_EXCEPTION")
        finally:
            deque(turns, maxlen=0)  # after a failure, or Ctrl-C, none is begun
    return {name: entry for part in parts for name, entry in part.result().items()}


def _read(path: str, before: Identity, now: int) -> Entry:
    with FileIO(path) as file:
        small = before[0] < 2**20
        sha256 = hashlib.sha256(file.read()) if small else hashlib.file_digest(file, "sha256")
        size, changed, inode_changed, inode = after = _identity(os.fstat(file.fileno()))
    # A change within one step of the clock leaves the dates as they are, so a file must have rested longer than that.
    rested = before == after and inode_changed < now - STEP
    return Entry(size, changed, inode_changed if rested else NEVER, inode, sha256.hexdigest())


def clock() -> int:
    """The time in ns by the clock of the project's file system; 0, long ago, where nothing can be remembered."""
    try:
        with tempfile.TemporaryFile(dir=_memory()) as file:
            return os.fstat(file.fileno()).st_ctime_ns
    except OSError:
        return 0


def recall(root: Path) -> dict[str, Entry]:
    """What is remembered of a folder or file; nothing where the memory is damaged or another's."""
    try:
        descriptor = os.open(_place(root), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with FileIO(descriptor) as file:
            seal, _, text = file.read().partition(b"\n")
        if seal != _seal(root, text):
            return {}
        names, *columns = json.loads(text)
        return dict(zip(names, map(Entry, *columns), strict=True))
    except (OSError, ValueError, TypeError):
        return {}


def remember(root: Path, held: Entries) -> None:
    """Have the next `recall` of a folder or file return this. Where nothing can be written, nothing is remembered."""
    text = json.dumps([list(held), *zip(*held.values(), strict=True)]).encode()  # by columns, which are read fast
    with suppress(OSError):
        _memory()
        with durable(_place(root), f".{os.getpid()}") as beside:  # another process may remember it, too
            beside.write_bytes(_seal(root, text) + b"\n" + text)


def _seal(root: Path, text: bytes) -> bytes:
    """The first line of a memory: it holds for one path, and for all of the text."""
    return hashlib.sha256(os.fsencode(root.absolute()) + b"\0" + text).hexdigest().encode()


def _memory() -> Path:
    folder = project.root() / MEMORY
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _place(root: Path) -> Path:
    return project.root() / MEMORY / hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:32]


def printable(name: str) -> str:
    """A name in one line, whatever marks it holds."""
    return name if name.isprintable() else repr(name)
