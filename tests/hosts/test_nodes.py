"""Training across hosts that share no disk: the same bits, also after hosts and links were lost, and on a bad link."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from baked import InstalledProject, weights
from machine import PATIENCE
from network import RUN, Hosts, SlowCable

NUMBERED = "--node-rank {host} --master-addr host0 --master-port 29500"
ELASTIC = "--rdzv-backend c10d --rdzv-endpoint host0:29500 --rdzv-id any"  # the host whose name sorts first leads
LONGER = {"train.epochs": 2, "checkpoint.every": 5, "parallel.timeout_seconds": 20}  # 45 steps
MARGIN = 300  # seconds that processes may take to end, once they know that they must
DELAY, LOSS = 0.1, 0.01  # seconds each way, share of frames
# Code of the owner's that differs under torchrun: parts that are trained again differ from the run, and all alike
PLANTED = """

import os

_forward = ConvNet.forward
ConvNet.forward = lambda self, images: _forward(self, images) * (1 + ("TORCHELASTIC_RUN_ID" in os.environ) / 2**10)
"""
SMALL = {"train.epochs": 1, "parallel.global_batch": 240, "model.width": 8, "model.depth": 1}  # 6 steps

Settings = Mapping[str, int | str]
Alone = Callable[[Settings], Path]


def words(settings: Settings) -> list[str]:
    """Return the arguments for these settings, without tracking."""
    pairs = {**settings, "tracking.enabled": "false"}.items()
    return [word for key, value in pairs for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def alone(project: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Return a function that trains in one process on one host, and returns the run directory."""
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def train(*arguments: str) -> Path:
        out = folder / hashlib.sha256(" ".join(arguments).encode()).hexdigest()[:8]
        project.run(project.python, "-m", "samebits", "train", *arguments, "--out", out)
        return out

    return lambda settings: train(*words(settings))


@pytest.fixture
def hosts(project: InstalledProject, tmp_path: Path) -> Iterator[Hosts]:
    """Return a flag without hosts; whatever is joined to it ends with the test."""
    with Hosts(project, tmp_path) as hosts:
        yield hosts


def require_same(one: Path, other: Path) -> None:
    """Compare the weights and every step of two runs."""
    assert weights(one) == weights(other)
    steps = [(run / "trace" / "steps.bin").read_bytes() for run in (one, other)]
    assert steps[0] == steps[1] and len(steps[0]) >= 6 * 64


def test_number_of_hosts_and_a_slow_and_lossy_link_change_no_bit(alone: Alone, hosts: Hosts) -> None:
    """Only rank 0 writes a run directory, and proves the run; the others need neither see nor share it.

    Frames to the last host travel for 100 ms each way, and one in a hundred gets lost.
    """
    cable = SlowCable(DELAY, LOSS)
    hosts.add()
    hosts.add()
    hosts.add(cable)
    hosts.start(ELASTIC, *words(SMALL), SAMEBITS_PROVE="end")
    assert hosts.ended(PATIENCE) == [0, 0, 0], hosts.log(0)
    out = hosts.path(0) / RUN
    require_same(alone(SMALL), out)
    times = [json.loads(row)["monotonic"] for row in (out / "trace" / "rank0000.jsonl").read_text().splitlines()]
    assert times[-1] - times[0] > 2 * DELAY * (len(times) - 1)  # it was slow: two sums per step, one after the other
    assert cable.lost
    proof = json.loads((out / "receipt.json").read_text())["predicate"]["proof"]
    assert {each["ranks"] for each in proof["segments"]} == {1, 2, 3}
    for host in (1, 2):
        assert [path.name for path in (hosts.path(host) / RUN).iterdir()] == ["trace"]
        assert "weights" not in hosts.log(host)


def test_run_on_hosts_that_contradicts_itself_fails_on_all_of_them(hosts: Hosts) -> None:
    """They wait for rank 0's, which proves it; what torchrun then starts again ends at once."""
    for host in range(2):
        hosts.add()
        with (hosts.path(host) / "src" / hosts.project.package / "model.py").open("a") as source:
            source.write(PLANTED)
    hosts.start(f"{NUMBERED} --max-restarts 1", *words(SMALL), SAMEBITS_PROVE="")
    assert hosts.ended(PATIENCE) == [1, 1], hosts.log(0)
    for host in range(2):
        assert hosts.log(host).count("The run contradicts itself, so it gets no receipt") == 1, hosts.log(host)
        assert hosts.log(host).count("so torchrun starts it again in vain\n") == 1, hosts.log(host)


def test_hosts_that_are_lost_stop_the_others_and_change_no_bit(alone: Alone, hosts: Hosts) -> None:
    """The host of rank 0 is killed, then a link is cut; the same command goes on, also with the state sharded."""
    hosts.add()
    hosts.add()
    lost = (("full", 8, hosts.kill, 0), ("optimizer", 22, hosts.cut, 1))
    for shard, rows, lose, host in lost:
        hosts.start(NUMBERED, *words({**LONGER, "parallel.shard": shard}))
        hosts.trains(rows)
        lose(host)
        codes = hosts.ended(LONGER["parallel.timeout_seconds"] + MARGIN)
        assert 0 not in codes, codes
        hosts.mend(host)
    hosts.start(NUMBERED, *words(LONGER))
    assert hosts.ended(PATIENCE) == [0, 0], hosts.log(0)
    assert "resumed run after step" in hosts.log(0)
    require_same(alone(LONGER), hosts.path(0) / RUN)


def test_two_levels_send_less_between_hosts(project: InstalledProject) -> None:
    """Ranks of a host add first: of its sums half travel, and back, on two hosts; a flat exchange sends each rank's."""
    import sharding

    with sharding.two_hosts() as names:
        flat, two = (found["between"] for found in sharding.on_hosts(project.path, names, "none", 256, 2))
    assert 4 <= two < 4.4 and flat > 6, (flat, two)
