"""Your data: prepared to the same bytes each time, and read to the same samples by any number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tested

from samebits.testing import manifest_of, same_bits, tensors


def test_preparing_twice_gives_the_same_bytes(config: Any, tmp_path: Path):
    again = manifest_of(tested.prepared(tmp_path / "again"))
    assert again == manifest_of(config) and again["files"]


def test_altered_raw_data_are_refused(tmp_path: Path):
    (tmp_path / "raw").write_bytes(b"other data")
    with pytest.raises(SystemExit) as ended:
        tested.prepared(tmp_path / "prepared", raw=tmp_path / "raw")
    assert ended.value.code == 2


def test_both_sets_hold_samples(config: Any):
    train_set, test_set = tested.ours("data").load(config)
    assert len(train_set) and len(test_set)


def test_each_tensor_of_a_batch_has_a_row_per_sample(config: Any, world: Any):
    samples = config.parallel.global_batch // config.parallel.micro_batches
    found = [tensor for batch in tested.micro_batches(config, world) for tensor in tensors(batch)]
    assert {len(tensor) for tensor in found} == {samples}


def test_workers_change_no_sample(config: Any, world: Any):
    alone, helped = (tested.micro_batches(config, world, steps=3, workers=workers) for workers in (0, 2))
    assert [place for place, pair in enumerate(zip(alone, helped, strict=True)) if not same_bits(*pair)] == []


def test_item_depends_on_seed_epoch_and_index_alone(config: Any):
    items = tested.items(config)
    first = torch.utils.data.default_collate([items[3, 0]])
    for index in range(min(5, len(items.dataset))):
        items[0, index]
    assert same_bits(first, torch.utils.data.default_collate([items[3, 0]]))
