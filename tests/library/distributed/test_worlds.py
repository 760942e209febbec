"""One digest for a training, whatever the number of ranks, what they shard and on how many hosts they lie.

Many small trainings run one after another in groups of one set of ranks (worlds.py), some of them with a planted fault.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import gcd
from pathlib import Path

import pytest
from support import TESTS
from warm import PACKAGE, Warm

SCRIPT = TESTS / "worlds.py"
MODELS = "plain", "normed", "conditional", "bfloat16", "float64", "convnet", "transformer"
MICRO_BATCHES = 1, 4, 7, 8, 12
SHARDS = "none", "optimizer", "full"


@dataclass(frozen=True)
class Case:
    """A training; with a `fault` of worlds.py, a part of its sum is broken."""

    model: str
    micro_batches: int
    ranks: int
    shard: str = "none"
    replicas: int = 1
    ranks_per_host: int = 1
    fault: str = "nothing"

    def __str__(self) -> str:
        return ",".join(map(str, vars(self).values()))

    @property
    def fits(self) -> bool:
        """Whether there is such a training."""
        groups = self.ranks % self.replicas == 0 and self.ranks > self.replicas
        if self.replicas > 1 and (self.shard != "full" or not groups):
            return False
        hosts = self.ranks % self.ranks_per_host == 0 and (self.ranks_per_host == 1 or self.ranks > self.ranks_per_host)
        return hosts and self.ranks <= self.micro_batches and (self.ranks > 1 or self.shard == "none")

    @property
    def pairs(self) -> set[tuple[tuple[str, object], ...]]:
        """All pairs of a key and its value."""
        return set(combinations(vars(self).items(), 2))


def cases(ranks: Sequence[int], replicas: Sequence[int], ranks_per_host: Sequence[int]) -> list[Case]:
    """All that fit."""
    made = (Case(*each) for each in product(MODELS, MICRO_BATCHES, ranks, SHARDS, replicas, ranks_per_host))
    return [case for case in made if case.fits]


def covering(cases: Sequence[Case]) -> Iterator[Case]:
    """Some of them, in which each pair of two keys' values stands that stands in one of all."""
    left = set[tuple[tuple[str, object], ...]]().union(*(case.pairs for case in cases))
    while left:
        best = max(cases, key=lambda case: len(case.pairs & left))
        left -= best.pairs
        yield best


@dataclass
class Ended:
    """What rank 0 wrote: by case, a digest or a refusal, and the collectives."""

    digests: dict[str, str]
    collectives: dict[str, list[str]]

    def by_training(self) -> dict[tuple[str, int], dict[str, str]]:
        """Digest by case, of each model and number of micro-batches, of those without a fault."""
        found: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
        for text, digest in self.digests.items():
            model, micro_batches, *_, fault = text.split(",")
            if fault == "nothing":
                found[model, int(micro_batches)][text] = digest
        return found

    def clean(self, case: Case) -> str:
        """The digest without the fault."""
        (digest,) = set(self.by_training()[case.model, case.micro_batches].values())
        return digest


def run(folder: Path, ranks: int, cases: Sequence[Case]) -> Ended:
    """Run these cases in one set of ranks."""
    out, message = folder / "found.json", folder / "told"
    ended = Warm(
        PACKAGE, str(out), *map(str, cases), out=message, err=message, ranks=ranks, script=SCRIPT, grace=0
    ).wait()
    assert ended == 0, message.read_text()
    return Ended(**json.loads(out.read_text()))


def require_one_digest(ended: Ended) -> None:
    """One for each model and number of micro-batches, over all else."""
    for training, digests in ended.by_training().items():
        assert len(set(digests.values())) == 1, (training, digests)
        assert all(len(digest) == 16 for digest in digests.values()), digests  # and no refusal
    assert sum(len(digests) - 1 for digests in ended.by_training().values()) > 30  # that are compared


def fractions_added(collectives: Sequence[str]) -> list[str]:
    """The collectives that add numbers, but for whole ones, whose sum no order changes."""
    return [name for name in collectives if "torch." in name and not name.endswith(("torch.int64", "torch.uint8"))]


FAULTS = [
    Case("plain", 7, 1, fault="left"),
    Case("plain", 7, 4, fault="left"),
    Case("plain", 7, 1, fault="incomplete"),
    Case("plain", 8, 3, fault="incomplete"),
    Case("plain", 8, 1, fault="kept"),
    Case("plain", 8, 2, fault="kept"),
    Case("plain", 8, 4, fault="backend"),
    Case("plain", 7, 3, fault="backend"),
    Case("plain", 8, 4, fault="swapped"),
    Case("plain", 8, 4, "optimizer", fault="swapped"),
    Case("plain", 8, 4, "full", fault="swapped"),
    Case("plain", 7, 1, fault="twice"),
    Case("plain", 8, 2, "full", fault="twice"),
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """All pairs, on up to five ranks; all trainings on one rank; `full` on two hosts of two ranks; all faults."""
    pairs, hosts = covering(cases(range(1, 6), [1, 2], [1, 2])), cases([4], [1], [2])
    chosen = dict.fromkeys([*cases([1], [1], [1]), *pairs, *(case for case in hosts if case.shard == "full")])
    return run(tmp_path_factory.mktemp("quick"), 5, [*chosen, *FAULTS])


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """All ways to train a model on up to six ranks, also on hosts of two and of three; all pairs of the others.

    All for two numbers of micro-batches: one that no number of ranks divides, and one that most do.
    """
    fitting = cases(range(1, 7), [1, 2, 3], [1, 2, 3])
    chosen = [case for case in fitting if case.model == "conditional" and case.micro_batches in (7, 12)]
    chosen += [case for case in fitting if case.ranks == 1]
    return run(tmp_path_factory.mktemp("every"), 6, list(dict.fromkeys([*chosen, *covering(fitting)])))


def test_selection_has_all_pairs():
    everything = cases(range(1, 6), [1, 2], [1, 2])
    chosen = list(covering(everything))
    assert len(chosen) < len(everything) / 5
    assert set().union(*(case.pairs for case in chosen)) == set().union(*(case.pairs for case in everything))


def test_digest_is_one_over_worlds_shards_replicas_and_hosts(quick: Ended):
    require_one_digest(quick)


@pytest.mark.long
def test_digest_is_one_in_all_combinations(every: Ended):
    require_one_digest(every)


def test_trainings_differ_from_one_another(quick: Ended):
    assert len({quick.clean(case) for case in cases([1], [1], [1])}) == len(quick.by_training())


def test_no_collective_adds_fractions(quick: Ended):
    for text, collectives in quick.collectives.items():
        assert bool(fractions_added(collectives)) == text.endswith("backend"), (text, collectives)
    assert any("all_reduce torch.int64" in collectives for collectives in quick.collectives.values())


def test_full_gathers_weights_by_a_ring_where_several_hosts_have_several_ranks(quick: Ended):
    """Each rank's own sends would cross from host to host more often."""
    rings = set[bool]()
    for text, collectives in quick.collectives.items():
        model, _, ranks, shard, replicas, local, _ = text.split(",")
        within = int(ranks) // int(replicas)
        if (model, shard) == ("plain", "full") and quick.digests[text].isalnum():
            ring = 1 < gcd(int(local), within) < within
            assert ("all_gather_single" in collectives) == ring, (text, collectives)
            rings.add(ring)
    assert rings == {False, True}


@pytest.mark.long
def test_no_collective_adds_fractions_in_any_combination(every: Ended):
    assert not [text for text, collectives in every.collectives.items() if fractions_added(collectives)]


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_fault_gives_another_digest_or_is_refused(case: Case, quick: Ended):
    found = quick.digests[str(case)]
    assert found != quick.clean(case)
    assert ("its gradient came twice for one micro-batch" in found) == (case.fault == "twice")
