"""An index of 10^8 samples is mapped into memory: no worker holds a copy, and the check of opened files lets it be."""

import ctypes
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from project.config import Config
from small import Case, module, small

from samebits.core import sampling
from samebits.core.errors import UserError
from samebits.core.ranks import World
from samebits.guards import opened

SAMPLES = 10**8
MEBIBYTES = SAMPLES * 8 / 2**20  # of the index
DATASET = """
import re
from pathlib import Path
import numpy as np

class Samples:
    '''An item is where it lies, and the memory in MiB that its worker holds for itself.'''

    def __init__(self, path, mode):
        self.path, self.mode, self.index, self.length = path, mode, None, len(np.load(path, mmap_mode="r"))

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        if self.index is None:  # in each worker
            self.index = np.load(self.path, mmap_mode=self.mode)
        held = re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
        return int(self.index[number]), int(held) / 1024
"""


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A small project whose opened files are watched, once `items` are asked for."""
    yield small(tmp_path, monkeypatch)
    opened._watches.clear()


def index(case: Case, folder: str, samples: int) -> Path:
    """An index of which the disk holds a few pages: what was never written is zero."""
    path = case.project.root / folder / "index.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=(samples,))
    written[-1] = 7
    return path


def items(case: Case, config: Config, path: Path, mode: str | None) -> list[Any]:
    """The first batches, by two workers."""
    opened.watch(case.project, [case.project.package, case.project.root / "data" / "prepared"])
    dataset = module("of_data", case.project.package / "data.py", DATASET).Samples(path, mode)
    helped = config.model_copy(update={"loader": config.loader.model_copy(update={"workers": 2})})
    loading = sampling.Loading(helped.options, World(0, 1, torch.device("cpu")), check=opened.require_known)
    # as an evaluation has them: a training makes the first ones twice, and memory grows meanwhile
    spread = range(0, len(dataset) // 8, len(dataset) // 640)
    return list(islice(loading.loader(dataset, sampling.Slices(len(dataset), 8, spread)), 80))


def held() -> float:
    """The MiB that this process holds for itself; those that it forks begin with them."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def test_index_of_many_samples_costs_no_worker_memory(case: Case, config: Config):
    path, before = index(case, "data/prepared", SAMPLES), held()
    batches = items(case, config, path, "r")
    assert len(batches) == 80 and held() - before < MEBIBYTES / 20
    assert max(float(memory.max()) for _, memory in batches) - before < MEBIBYTES / 20
    # the control: read instead of mapped, once the heap has given back what it kept of earlier tests
    few = index(case, "data/prepared", SAMPLES // 2)
    ctypes.CDLL(None).malloc_trim(0)
    before = held()
    assert max(float(memory.max()) for _, memory in items(case, config, few, None)) - before > MEBIBYTES / 10


def test_index_that_no_hash_covers_is_refused_in_the_worker(case: Case, config: Config):
    said = r"UserError: tables/index.npy \(by data.py:\d+\): opened, but not in the content"
    with pytest.raises(UserError, match=said):
        items(case, config, index(case, "tables", 1000), "r")
