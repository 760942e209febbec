"""Your data: prepared to the same bytes each time, and read to the same samples by any number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import micro_batches, ours, prepare

from samebits.address import manifest
from samebits.core import batch as batches
from samebits.core import sampling
from samebits.core.digest import tensor_digest


def equal(one: Any, other: Any) -> bool:
    """Whether the tensors of two batches, or of two items, have the same bits: a NaN, too, equals itself."""
    pairs = zip(batches.tensors_in(one), batches.tensors_in(other), strict=True)
    return all(torch.equal(*map(tensor_digest, pair)) for pair in pairs)


def test_preparing_twice_gives_the_same_bytes(config: Any, tmp_path: Path):
    again = config.model_copy(update={"data": config.data.model_copy(update={"prepared": str(tmp_path / "again")})})
    prepare(again)
    assert manifest.read(tmp_path / "again") == manifest.require_prepared(config.data)
    assert manifest.read(tmp_path / "again")["files"]


def test_altered_raw_data_are_refused(config: Any, tmp_path: Path):
    (tmp_path / "raw").write_bytes(b"other data")
    places = {"raw": str(tmp_path / "raw"), "prepared": str(tmp_path / "prepared")}
    with pytest.raises(SystemExit) as ended:
        prepare(config.model_copy(update={"data": config.data.model_copy(update=places)}))
    assert ended.value.code == 2


def test_both_sets_hold_samples(config: Any):
    train_set, test_set = ours("data").load(config)
    assert len(train_set) and len(test_set)


def test_each_tensor_of_a_batch_has_a_row_per_sample(config: Any, world: Any):
    samples = config.parallel.global_batch // config.parallel.micro_batches
    assert {len(tensor) for batch in micro_batches(config, world) for tensor in batches.tensors_in(batch)} == {samples}


def test_workers_change_no_sample(config: Any, world: Any):
    alone, helped = (micro_batches(config, world, steps=3, workers=workers) for workers in (0, 2))
    assert [place for place, pair in enumerate(zip(alone, helped, strict=True)) if not equal(*pair)] == []


def test_item_depends_on_seed_epoch_and_index_alone(config: Any):
    train_set, _ = ours("data").load(config)
    seeded = sampling.Seeded(train_set, config.seed)
    first = torch.utils.data.default_collate([seeded[3, 0]])
    for index in range(min(5, len(train_set))):
        seeded[0, index]
    assert equal(first, torch.utils.data.default_collate([seeded[3, 0]]))
