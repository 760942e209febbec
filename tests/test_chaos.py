"""Which system calls `make chaos` kills at, and the verdict in its table."""

from pathlib import Path

from chaos_calls import MISSED, Point, markdown, points

OUT = Path("/p/run")
LOG = """\
7 mkdir("/p/run", 0777) = 0
7 openat(AT_FDCWD</p>, "/p/run/run.json.part", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 4</p/run/run.json.part>
7 write(4</p/run/run.json.part>, "{\\"path\\": \\"/p/run/other\\"}", 9) = 9
7 openat(AT_FDCWD</p>, "/p/run/run.json.part", O_RDONLY) = 4</p/run/run.json.part>
7 rename("/p/run/run.json.part", "/p/run/run.json") = 0
7 write(1</p/log>, "step", 4) = 4
8 write(5</p/run/rows>, "1", 1) = 1
7 write(5</p/run/rows>, "2", 1) = 1
8 write(5</p/run/rows>, "3", 1) = 1
8 write(5</p/run/rows>, "4", 1 <unfinished ...>
8 <... write resumed>) = 1
8 write(6</p/run/c/.000000008.part/.tmpXy>, "5", 1) = 1
8 renameat(AT_FDCWD</p>, "/p/run/c/.000000008.part/.tmpXy", AT_FDCWD</p>, "/p/run/c/.000000008.part/m") = 0
7 openat(AT_FDCWD</p>, "/p/run/.seen-Xy", O_RDWR|O_CREAT|O_EXCL, 0600) = 9</p/run/.seen-Xy>
7 unlink("/p/run/.seen-Xy") = 0
8 unlinkat(9</p/run/checkpoints/000000002-0a>, "m", 0) = 0
9 mkdir("/p/run/.proof/project/src", 0777) = 0
9 mkdir("/p/run/.proof/project/vendor", 0777) = 0
9 mkdir("/p/run/.proof/project/vendor/samebits", 0777) = 0
9 mkdir("/p/run/.proof/project/data", 0777) = 0
"""


def test_calls_that_change_the_run_directory_are_found_with_their_place_in_the_thread() -> None:
    """Of rows that repeat, and of files that a proof makes in one place, the first two and the last; nothing that only
    reads, and nothing elsewhere.
    """
    assert points(LOG, OUT) == [
        Point("mkdir", "", 1),
        Point("openat", "run.json.part", 1),
        Point("write", "run.json.part", 1),
        Point("rename", "run.json.part", 1),
        Point("write", "rows", 1),
        Point("write", "rows", 3),
        Point("renameat", "c/.000000008.part/m", 1),
        Point("unlinkat", "checkpoints/000000002-0a", 1),
        Point("mkdir", ".proof/project/src", 1),
        Point("mkdir", ".proof/project/vendor", 1),
        Point("mkdir", ".proof/project/data", 1),
    ]


def test_calls_of_other_processes_are_left_out_of_those_for_a_proof() -> None:
    """Thread 7 is the run's first one."""
    assert {point.path for point in points(LOG, OUT, main=True)} == {"", "run.json.part", "rows"}


def test_table_tells_equal_from_different_and_missed() -> None:
    """One row per file, whatever the step."""
    kept, gone = Point("rename", "checkpoints/.000000008.part", 1), Point("rmdir", "checkpoints/000000008-0a", 1)
    assert Point("mkdir", ".proof/project/src", 1).file == ".proof/project/…"
    outcomes = [(kept, "EQUAL"), (kept, "DIFFERENT"), (gone, MISSED)]
    message = markdown(outcomes)
    assert "1 **DIFFERENT**, 1 **EQUAL**, 1 **not met**" in message
    assert (
        "| `checkpoints/.N.part` | `rename` | 2 | 1 |" in message and "| `checkpoints/N` | `rmdir` | 0 | 0 |" in message
    )
