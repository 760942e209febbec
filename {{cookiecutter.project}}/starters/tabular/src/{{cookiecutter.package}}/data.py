"""A table with columns of numbers and of categories, where values may be missing."""

import csv
import json
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .config import Config

NUMBERS = "Culmen Length (mm)", "Culmen Depth (mm)", "Flipper Length (mm)", "Delta 15 N (o/oo)", "Delta 13 C (o/oo)"
CATEGORIES = "Species", "Island", "Clutch Completion", "Sex"
TARGET = "Body Mass (g)"
MISSING = "NA"

Row = dict[str, str]
Item = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]


class Columns(NamedTuple):
    """What the training rows say: mean and deviation of the target and of NUMBERS, the words of CATEGORIES."""

    target: tuple[float, float]
    numbers: list[tuple[float, float]]
    words: list[list[str]]


def read(raw: Path) -> list[Row]:
    """The rows whose target is known."""
    with raw.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row[TARGET] != MISSING]


def learn(rows: list[Row]) -> Columns:
    """The scales and words of these rows; `statistics` rounds once, in the end, so every CPU gets the same."""

    def scale(name: str) -> tuple[float, float]:
        values = [float(row[name]) for row in rows if row[name] != MISSING]
        return fmean(values), pstdev(values) or 1.0

    words = [sorted({row[name] for row in rows} - {MISSING}) for name in CATEGORIES]
    return Columns(scale(TARGET), [scale(name) for name in NUMBERS], words)


def encode(row: Row, columns: Columns) -> tuple[list[float], list[int], float]:
    """Numbers and target in deviations from the mean, NaN where missing; words from 1 on, 0 where missing or new."""

    def scaled(name: str, mean: float, deviation: float) -> float:
        return (float(row[name]) - mean) / deviation if row[name] != MISSING else float("nan")

    numbers = [scaled(name, *scale) for name, scale in zip(NUMBERS, columns.numbers, strict=True)]
    known = zip(CATEGORIES, columns.words, strict=True)
    categories = [words.index(row[name]) + 1 if row[name] in words else 0 for name, words in known]
    return numbers, categories, scaled(TARGET, *columns.target)


class Table(torch.utils.data.Dataset[Item]):
    """Rows: numbers, (len(NUMBERS),) of float32; categories, (len(CATEGORIES),) of int64; the target, () of float32."""

    def __init__(self, folder: Path, name: str) -> None:
        parts = (np.load(folder / f"{name}-{part}.npy") for part in ("numbers", "categories", "targets"))
        self.numbers, self.categories, self.targets = parts

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Item:
        return self.numbers[index], self.categories[index], self.targets[index]


def columns(config: Config) -> Columns:
    """What `samebits prepare` has learned."""
    return Columns(**json.loads((Path(config.data.prepared) / "columns.json").read_text()))


def split(config: Config, name: str) -> Table:
    """One of the prepared sets: train, validation or test."""
    return Table(Path(config.data.prepared), name)


def load(config: Config) -> tuple[Table, Table]:
    """The training set and the test set."""
    return split(config, "train"), split(config, "test")
