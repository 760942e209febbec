"""A process becomes its command again: as it was started, and without what it held."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import HERE, OURS

PROGRAM = """
import json, os, sys
from pathlib import Path
from samebits.base.project import Project
from samebits.start import anew

anew.remember(Project(Path(sys.argv[1])))
files = sorted(each.name for each in Path("/proc/self/fd").iterdir())
cores, count = len(os.sched_getaffinity(0)), os.environ.get(anew.COUNT)
seen = os.getpid(), os.getcwd(), os.environ.get("OWN"), cores, count, files, dict(anew.handed())
print(json.dumps(seen), flush=True)
if not anew.handed():
    held = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(held, True)  # as a library in C opens files
    os.environ["OWN"] = "changed"
    os.chdir("/")
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    anew.become(anew.Anew("", {"steps": 3}))
print("end", anew.VARIABLE in os.environ)
"""


@pytest.mark.parametrize(
    ("place", "count"), [({"SAMEBITS_ANEW": ""}, None), ({"RANK": "1"}, "-1"), ({"RANK": "0", "COUNT": "2"}, "-3")]
)
def test_process_that_becomes_its_command_again_is_as_it_was_started(
    place: dict[str, str], count: str | None, tmp_path: Path
):
    """A file that whoever started it has left open for it stays open; ranks meet apart from those of before."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "TORCHELASTIC_RESTART_COUNT")}
    before = {"TORCHELASTIC_RESTART_COUNT": place["COUNT"]} if "COUNT" in place else {}
    env |= {name: value for name, value in place.items() if name != "COUNT"} | before
    env |= {"PYTHONPATH": os.pathsep.join(HERE), "OWN": "given"}
    read, write = os.pipe()
    words = [sys.executable, "-c", PROGRAM, str(OURS.package)]
    done = subprocess.run(words, cwd=tmp_path, env=env, pass_fds=[write], capture_output=True, text=True)
    os.close(read)
    os.close(write)
    first, second, end = done.stdout.splitlines()
    one, other = json.loads(first), json.loads(second)
    assert one[:4] == other[:4] and one[2] == "given" and end == "end False", done.stderr
    assert one[5] == other[5] and str(write) in other[5] and (one[6], other[6]) == ({}, {"steps": 3})
    assert other[4] == count
