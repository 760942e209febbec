"""Archives that are the same bytes wherever they are made: tar, with names in order, and nobody's clock or name."""

import io
import tarfile
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import UserError

RUNS = "runs"  # the folder in an archive that holds a folder for each run


def packed(root: str, files: Mapping[str, bytes | Path]) -> bytes:
    """A tar archive (ustar or pax) with the files below a folder named `root`."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            content = files[name]
            content = content.read_bytes() if isinstance(content, Path) else content
            member = tarfile.TarInfo(f"{root}/{name}")
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return held.getvalue()


def is_archive(path: Path) -> bool:
    """Whether a path is a tar archive."""
    return path.is_file() and path.suffix == ".tar" and tarfile.is_tarfile(path)


def runs_in(path: Path) -> list[str]:
    """The names of the runs that an archive holds."""
    with _opened(path) as archive:
        parts = [Path(name).parts for name in archive.getnames()]
    return sorted({part[2] for part in parts if len(part) > 3 and part[1] == RUNS})


def unpack(path: Path, run: str, folder: Path, kept: Set[str]) -> None:
    """Write the record of one run in an archive into `folder`: plain files of known names, and no other path.

    Raises:
        UserError: the archive is damaged.
    """
    with _opened(path) as archive:
        for member in archive:
            parts = Path(member.name).parts
            inner = parts[3:]
            if parts[1:3] != (RUNS, run) or len(inner) not in (1, 2) or inner[0] not in kept or ".." in inner:
                continue
            if held := archive.extractfile(member) if member.isreg() else None:
                target = folder.joinpath(*inner)
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(held.read())


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path) as archive:
            yield archive
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{path}: a damaged archive: {error}; get it again from where it came") from None
