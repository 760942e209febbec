"""`repro verify`: every way to train gives the same bits, and one that does not is named."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from clone import command
from conftest import PACKAGE
from project import PROJECT as OURS
from project.config import Config
from project.repro.analysis import verify as verify_module
from project.repro.analysis.verify import ONCE, VARIED, WAYS, Row, Way, chosen, train_in_all_ways
from project.repro.core.errors import Refused
from project.repro.start import trainings
from warm import Warm

Verify = Callable[..., dict[str, Row]]
OWNED, FULL = "optimizer sharded on 2 ranks", "weights sharded on 2 ranks"


@pytest.fixture
def verified(config: Config, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verify]:
    """A function that verifies with warm trainings, one rank of which may be at fault; the rows by name."""
    fault: list[str] = []

    def start(way: Way, settings: Mapping[str, Any]) -> Warm:
        script = Path(__file__).with_name("faulty.py") if fault else None
        before = [*fault, str(tmp_path), PACKAGE] if fault else []
        arguments = ["--out", str(way.folder), *trainings.overrides(settings)]
        ranks = way.ranks if way.ranks > 1 else None
        return Warm(*before, *arguments, out=way.log, err=way.log, ranks=ranks, script=script)

    monkeypatch.setattr(verify_module, "FOLDER", tmp_path / "verify")

    def verified(
        *at_fault: str,
        places: int = 4,
        settings: Config = config,
        ways: Sequence[str] = (),
        vary: Mapping[str, Any] = verify_module.NOTHING,
        **keys: Any,
    ) -> dict[str, Row]:
        fault[:] = at_fault
        asked = {"train.epochs": 1, "data.prepared": str(prepared)} | keys
        rows = train_in_all_ways(OURS, settings, places, start, asked, lambda text: None, chosen(ways), vary)
        return {row.name: row for row in rows}

    yield verified


@pytest.mark.long
def test_every_way_gives_the_same_bits(verified: Verify):
    rows = verified(vary={"checkpoint.keep": 1})
    assert list(rows) == [ONCE.name, *(way.name for way in WAYS)]
    assert {name: row.verdict for name, row in rows.items()} == dict.fromkeys(rows, "EQUAL")
    assert len({row.weights for row in rows.values()}) == 1
    assert {name for name, row in rows.items() if not row.trace} == {"no trace"}


@pytest.mark.long
def test_rank_that_computes_otherwise_is_seen_in_its_rows_alone(verified: Verify):
    rows = verified("gradient", "1", ways=("once more", "2 ranks", "1 loader worker"))
    assert {name: row.verdict for name, row in rows.items()} == {
        "one process": "EQUAL",
        "once more": "EQUAL",
        "1 loader worker": "EQUAL",
        "2 ranks": "DIFFERS",
    }


@pytest.mark.long
def test_shard_that_is_computed_otherwise_is_seen_in_its_rows_alone(verified: Verify):
    rows = verified("shard", "1", ways=("2 ranks", OWNED, FULL))
    verdicts = {name: row.verdict for name, row in rows.items()}
    assert verdicts == {"one process": "EQUAL", "2 ranks": "EQUAL", OWNED: "DIFFERS", FULL: "DIFFERS"}


@pytest.mark.long
def test_optimizer_that_cannot_be_sharded_is_no_failure(project: Path, tmp_path: Path):
    """Its row says why it was not tried; the others count."""
    here = tmp_path / "clone"
    shutil.copytree(project, here, ignore=shutil.ignore_patterns("__pycache__", "build"))
    train = here / "src" / PACKAGE / "train.py"
    before, after = "AdamW(parameter_groups(model, settings.weight_decay), fused=True)", "Adafactor(model.parameters())"
    assert train.read_text().count(before) == 1
    train.write_text(train.read_text().replace(before, after))
    only = [word for way in (OWNED, "once more") for word in ("--only", way)]
    done = command(here, PACKAGE, "verify", *only, "--set", "train.epochs=1")
    rows = {line[:30].rstrip(): line[68:] for line in done.stdout.splitlines()[:-1]}
    assert list(rows) == ["one process", "once more", OWNED], done
    assert rows["one process"] == rows["once more"] == "EQUAL"
    refused = "not tried: parallel.shard: Adafactor does not update each element by itself ("
    assert rows[OWNED].startswith(refused) and rows[OWNED].endswith("or parallel.shard=none"), rows
    assert done.stdout.splitlines()[-1] == "EQUAL: 2 of 2 trainings" and done.returncode == 0, done


@pytest.mark.parametrize(("fault", "verdict"), [((), "EQUAL"), (("evaluation", "0"), "DIFFERS")])
def test_evaluation_midway_that_changes_the_model_is_seen(fault: tuple[str, ...], verdict: str, verified: Verify):
    midway = {"train.evaluate_every": 1}
    rows = verified(*fault, ways=(VARIED.name,), vary=midway, **{"train.epochs": 2})
    assert rows[VARIED.name].verdict == verdict


def test_state_that_the_second_epoch_begins_with_is_seen_where_a_late_kill_loses_it(verified: Verify):
    rows = verified("second_epoch", "0", ways=("once more", "killed and resumed"), **{"train.epochs": 2})
    *equal, killed = (row.verdict for row in rows.values())
    # where the kill comes late, on a busy machine, the resumed run meets a step that is recorded already
    assert equal == ["EQUAL", "EQUAL"] and killed != "EQUAL", rows
    assert killed == "DIFFERS" or killed.endswith("now: the resumed run is not the same run"), rows


def test_no_key_to_vary_is_said(verified: Verify):
    rows = verified(ways=(VARIED.name,))
    assert rows[VARIED.name].verdict == "not tried: verify.vary in params.yaml names no key"


def test_training_that_fails_is_told(verified: Verify):
    (row,) = verified(**{"train.learning_rate": 1e30, "train.warmup": 0.0, "model.name": "transformer"}).values()
    assert row.verdict.startswith("FAILED: ") and "the gradient is not finite" in row.verdict


def test_more_ranks_than_places_are_not_tried_and_said_so(verified: Verify):
    rows = verified(places=2, ways=("2 ranks", "4 ranks"))
    assert rows["2 ranks"].verdict == "EQUAL" and rows["4 ranks"].verdict.startswith("not tried: 2 places")


def test_world_sizes_are_not_compared_where_they_decide_bits(verified: Verify, config: Config):
    stock = config.model_copy(update={"parallel": config.parallel.model_copy(update={"reduce": "ddp"})})
    rows = verified(settings=stock, ways=("2 ranks",), **{"parallel.reduce": "ddp"})
    assert rows["2 ranks"].verdict.startswith("not tried: with parallel.reduce=ddp")


def test_unknown_way_is_refused_with_those_that_are_known():
    with pytest.raises(Refused, match="--only '5 ranks': no such way to train; known: once more; 1 loader worker; "):
        chosen(["2 ranks", "5 ranks"])
    assert [way.name for way in chosen(["2 ranks"])] == ["2 ranks"] and list(chosen([])) == list(WAYS)
