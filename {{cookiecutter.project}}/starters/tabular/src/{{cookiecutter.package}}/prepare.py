"""From the table to training, validation and test sets, as arrays."""

from pathlib import Path

import numpy as np

import samebits as sb

from . import data
from .config import Data


def prepare(config: Data, raw: Path, folder: Path) -> None:
    """Write the sets into `folder`, which is empty. The dataset `raw` has been checked against its SHA-256."""
    rows = data.read(raw)
    order = sb.Permutation(len(rows), 0)  # the same for all seeds
    shuffled = [rows[order[place]] for place in range(len(rows))]
    test, validation = (len(rows) * each // 100 for each in (config.test_percent, config.validation_percent))
    first = test + validation
    parts = {"test": shuffled[:test], "validation": shuffled[test:first], "train": shuffled[first:]}
    columns = data.learn(parts["train"])  # the other sets stay unseen
    for name, part in parts.items():
        numbers, categories, targets = zip(*(data.encode(row, columns) for row in part), strict=True)
        np.save(folder / f"{name}-numbers.npy", np.array(numbers, np.float32))
        np.save(folder / f"{name}-categories.npy", np.array(categories, np.int64))
        np.save(folder / f"{name}-targets.npy", np.array(targets, np.float32))
    sb.write_json(folder / "columns.json", columns._asdict())
    print(f"prepared {folder}: rows of " + ", ".join(f"{name} {len(part)}" for name, part in parts.items()))


if __name__ == "__main__":
    sb.main(prepare)
