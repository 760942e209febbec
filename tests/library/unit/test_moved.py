"""A run that contradicts itself names what its code holds and has changed, and nothing that a checkpoint holds."""

import itertools
import random
import re
import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from samebits.core.state import State
from samebits.guards.moved import Moved

CALLS = {"forward": 0}


class Jitter:
    """A transform that counts, as an owner writes it."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, dict[int, int]()

    def __call__(self, value: float) -> float:
        self.calls += 1
        return value


def cycle(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def test_what_changes_is_named_and_what_is_saved_or_the_same_is_not():
    model, average = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jitter, teacher, head, rng, numbers = (
        Jitter(),
        nn.Linear(2, 2),
        model[0],
        np.random.default_rng(3),
        random.Random(3),
    )
    draw, buffer, factors, table = random.Random(4).random, deque[Any](maxlen=9), {"a": 1.0}, np.zeros(3)
    transforms, seeded, still, nothing = (
        [partial(jitter, 1.0)],
        np.random.default_rng(4),
        np.random.default_rng(5),
        None,
    )
    noise, follower, meta = torch.Generator(), nn.Linear(2, 2), torch.empty(3, device="meta")
    batches = cycle(DataLoader(list(range(8)), batch_size=2))
    moved = Moved([sys._getframe()], State.of(model, optimizer, {"average": average}), [seeded])
    assert moved.names() == []
    for each in (rng, seeded):
        each.random()
    numbers.random()
    torch.rand(3, generator=noise)
    draw()
    next(batches)
    jitter(1.0)
    CALLS["forward"] += 1
    buffer.append(table)
    factors["a"] *= 2
    table[0] = 1
    optimizer.param_groups[0]["lr"] = 1.0
    with torch.no_grad():
        for parameter in itertools.chain(teacher.parameters(), model.parameters(), average.parameters()):
            parameter.add_(1)
    follower.weight.data.mul_(0.5)  # which leaves the version as it was
    found = moved.names()
    named = {re.split(r"[.\[]", name)[0] for name in found}
    assert named == {
        "jitter",
        "teacher",
        "follower",
        "rng",
        "noise",
        "numbers",
        "draw",
        "buffer",
        "factors",
        "table",
        "batches",
        "CALLS",
    }
    assert {"batches", "jitter.calls", "factors['a']", "CALLS['forward']"} <= {*found}
    assert head is model[0] and transforms and still and nothing is None and meta.is_meta
