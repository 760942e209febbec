"""The proof of a run, driven by hand: what it tries, compares, leaves out and refuses."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clone import project_in
from project.config import Config
from safetensors.torch import load_file, save_file

from samebits.base.files import read_json
from samebits.checkpoint import checkpoint
from samebits.config.params import load
from samebits.core.errors import Disagreement, Preempted, RunError
from samebits.core.flags import stated_variables
from samebits.guards import agreement
from samebits.prove import again, choice, elsewhere, fresh, proof, setting, trainer
from samebits.prove.cause import FRESH
from samebits.prove.segments import Segment
from samebits.record import names
from samebits.record.receipt import read


def other_bias(out: Path) -> None:
    """Change a number of the weights."""
    weights = load_file(out / names.WEIGHTS)
    weights["head.bias"][3] += 1
    save_file(weights, out / names.WEIGHTS)


def other_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change what the newest checkpoint holds."""

    def changed(out: Path) -> None:
        path = checkpoint.found(out / names.CHECKPOINTS)[-1] / "state.json"
        state = read_json(path) | {"content": "0" * 64}
        change(state)
        path.write_text(json.dumps(state))

    return changed


@pytest.mark.parametrize(
    ("change", "phase", "tensor"),
    [
        (lambda out: None, None, None),
        (other_bias, again.END, "weights head.bias"),
        (lambda out: (out / names.WEIGHTS).write_bytes(b"no tensors"), again.END, ""),
        (lambda out: (out / names.METRICS).unlink(), again.END, ""),
        (lambda out: shutil.rmtree(out / names.CHECKPOINTS), again.STATE, ""),
        (
            other_state(lambda state: state["digests"]["model"].update({"head.bias": "0" * 16})),
            again.STATE,
            "weights head.bias",
        ),
        (
            other_state(lambda state: state.update(state={"dict": [["bank", {"dict": [["calls", 3]]}]]})),
            again.STATE,
            "state['bank']",
        ),
    ],
    ids=["equal", "other weights", "unreadable", "not finished", "no state", "other state", "another object"],
)
def test_end_of_a_run_is_compared_with_its_weights(
    change: Callable[[Path], object], phase: str | None, tensor: str | None, proved: tuple[Path, str], tmp_path: Path
):
    out, steps = tmp_path / "again", read_json(proved[0] / names.METRICS)["steps"]
    shutil.copytree(proved[0], out)
    change(out)
    found = again.difference(proved[0], out, Segment(steps - 3, steps), {}, ends=True)
    assert (found and found.phase) == phase and (found and found.tensor) == tensor


OWN, OTHER = choice.Choice(1, 0, "none"), choice.Choice(3, 1, "full")
HERE = {"output a": 1, "output b": 2, "loss": 3}
CHANGED = HERE | {"output b": 4, "loss": 5}


@pytest.mark.parametrize(
    ("cause", "once_more", "sides", "ways", "tensor"),
    [
        ("3 ranks", None, (HERE, CHANGED), [OWN, OTHER], "output b"),
        (FRESH, "another", (HERE, CHANGED), [OWN, OWN], "output b"),  # as by a clock
        (FRESH, "here", (HERE, CHANGED), [], ""),  # it has forgotten something
        ("3 ranks", None, (HERE, {}), [OWN, OTHER], ""),  # one could not be trained
    ],
)
def test_tensor_is_that_which_differs_between_two_ways_to_train_a_part(
    cause: str,
    once_more: str | None,
    sides: Sequence[dict[str, int]],
    ways: list[choice.Choice],
    tensor: str,
    clean: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    part, seen, held = Segment(0, 3), list[choice.Choice](), iter(sides)
    made = proof.Proof(project_in(clean), load(Config, clean / "params.yaml"), tmp_path, 1, [part], lambda: False)
    monkeypatch.setattr(made, "_differs", lambda segment, way, rows, values: seen.append(way))
    monkeypatch.setattr(proof.tensor, "digests", lambda out, phase, steps: next(held))
    found = part, OTHER, setting.ROWS, again.Difference(1, "loss", "there", "here")
    made.found = (part, OWN, (), again.Difference(1, "loss", "there", once_more)) if once_more else None
    assert made._tensor(found, cause) == tensor and seen == ways


@pytest.mark.parametrize(("states", "possible"), [({}, 0), ({"3": "0" * 64}, 1)])
def test_segment_that_nothing_is_compared_with_is_not_tried(
    states: dict[str, str], possible: int, proved: tuple[Path, str], clean: Path, tmp_path: Path
):
    """A run without a trace has its states alone, and these stand in its record."""
    (tmp_path / names.RUN).write_text(json.dumps(read_json(proved[0] / names.RUN) | {"states": states}))
    config = load(Config, clean / "params.yaml", ["trace.level=off"])
    made = proof.Proof(project_in(clean), config, tmp_path, 1, [Segment(0, 3)], lambda: False)
    made._recorded = 9
    assert len(made._possible(9)) == possible and len(made._not_tried) == 1 - possible


@pytest.mark.parametrize(("another", "ended"), [(True, True), (False, True), (True, False)])
def test_part_that_cannot_be_trained_again_contradicts_the_run_where_another_one_can(
    another: bool, ended: bool, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where none can, a lack of memory or space may be why; so it may beside the run, which frees memory at its end."""
    config, parts = load(Config, clean / "params.yaml"), [Segment(0, 3), Segment(5, 8)]
    made = proof.Proof(project_in(clean), config, tmp_path, 1, parts, lambda: False)

    def tried(segment: Segment, ways: list[choice.Choice], rows: object) -> Iterator[None]:
        yield
        if segment == parts[1] or not another:
            raise RunError("FileNotFoundError: hard.npy")
        made._done[segment] = ways[0]

    monkeypatch.setattr(made, "_tried", tried)
    monkeypatch.setattr(made, "_kept", lambda: {0, 5})
    made._recorded, made._ended = 8, ended
    for _ in made._trained([*enumerate(parts)]):
        pass
    if not ended:
        assert not made.found and made._attempts == proof._attempts()
        return
    if not another:
        assert not made.found and made.make(8)["segments"] == []
        return
    with pytest.raises(proof.Contradiction, match="step 5: training: done in the run, FileNotFoundError"):
        made.require()


@pytest.mark.parametrize("needed", proof.OFTEN)
def test_circumstance_that_a_part_cannot_do_without_is_left_alone_and_named_and_all_others_are_changed(
    needed: str, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such as HOME, of weights in ~/.cache."""
    part, changed = Segment(0, 3), list[str]()
    made = proof.Proof(project_in(clean), load(Config, clean / "params.yaml"), tmp_path, 1, [part], lambda: False)

    def start(rows: Sequence[setting.Row]) -> Iterator[None]:
        changed[:] = [row.name for row in rows]
        yield

    def compared(*given: object) -> Iterator[None]:
        yield
        return "no such weights" if needed in changed else "", None

    monkeypatch.setattr(made._trainer, "start", start)
    monkeypatch.setattr(made._trainer, "compared", compared)
    monkeypatch.setattr(made, "_possible", lambda steps: [(0, part)])
    monkeypatch.setattr(made, "_kept", lambda: {0})
    stated, others = made.make(3), {row.name for row in setting.ROWS} - {needed}
    assert stated["not_tried"][needed] == "no such weights" and {*stated["changed"]} == {fresh.ELSEWHERE, *others}


@pytest.mark.parametrize(
    "error", [OSError(ENOSPC, os.strerror(ENOSPC)), RunError(f"[Errno {ENOSPC}] No space: free some")]
)
def test_full_disk_leaves_the_proof_to_the_next_command(
    error: Exception, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run beside which it is full goes on; at its end there is no receipt without a proof for that reason."""
    made = proof.Proof(
        project_in(clean), load(Config, clean / "params.yaml"), tmp_path, 1, [Segment(0, 3)], lambda: False
    )

    def tried(*given: object) -> Iterator[None]:
        yield
        raise error

    monkeypatch.setattr(made, "_tried", tried)
    monkeypatch.setattr(made, "_possible", lambda steps: [(0, Segment(0, 3))])
    assert [made.look(3) for _ in range(9)] == [False] * 9
    with pytest.raises(type(error), match="No space"):
        made.make(3)


def test_part_that_the_system_has_killed_had_no_room(clean: Path, proved: tuple[Path, str]):
    made = trainer.Trainer(project_in(clean), load(Config, clean / "params.yaml"), proved[0])
    made._process = SimpleNamespace(
        start=lambda *given: SimpleNamespace(poll=lambda: -signal.SIGKILL), without_place=str
    )
    with pytest.raises(StopIteration) as ended:
        next(made.compared(Segment(0, 3), OWN, 9))
    made.close()
    said, difference = ended.value.value
    assert proof.NO_ROOM.search(said) and not difference


@pytest.mark.parametrize(("code", "refused"), [(1, "KeyError: 'TOKEN'"), (143, "")])
def test_part_in_which_what_follows_the_loop_fails_cannot_be_trained(
    code: int, refused: str, proved: tuple[Path, str], clean: Path, tmp_path: Path
):
    """So it is trained with less changed. One that does not end where the run did differs."""
    run, steps = Path(shutil.copytree(proved[0], tmp_path / "run")), read_json(proved[0] / names.METRICS)["steps"]
    made = trainer.Trainer(project_in(clean), load(Config, clean / "params.yaml"), run)

    def start(module: str, words: list[str], log: Path, ranks: int) -> SimpleNamespace:
        again_in = Path(shutil.copytree(proved[0], words[2], dirs_exist_ok=True))
        (again_in / names.METRICS).unlink()
        log.write_text("Traceback ...\nKeyError: 'TOKEN'\n")
        return SimpleNamespace(poll=lambda: code)

    made._process = SimpleNamespace(start=start, without_place=str)
    work = made.compared(Segment(steps - 3, steps), OWN, 9, ends=True)
    with pytest.raises(StopIteration) as ended:
        next(work)
    said, difference = ended.value.value
    assert said == refused and (difference and difference.phase) == (None if refused else again.END)


class Unequal:
    """Two ranks, of which the other one has other values."""

    size, rank, place = 2, 0, "host"

    def sum(self, totals: torch.Tensor) -> None:
        """The other one gives 0."""

    def gather(self, own: Any) -> list[Any]:
        """What both have."""
        return [own, ""] if isinstance(own, str) else [own, (own[0], dict.fromkeys(own[1], ""))]


def test_ranks_whose_weights_differ_contradict_the_run():
    """Not where they differ before a step, as two kinds of GPU do: then the part cannot be trained on them."""
    weights = {"weight": torch.ones(1)}
    for check, found in [
        (lambda: agreement.require_same_weights(weights, 3, Unequal()), "the ranks' weights differ"),
        (lambda: agreement.require_agreement({"gpu": "A"}, Unequal(), "the ranks disagree before step 0:"), None),
    ]:
        with pytest.raises(Disagreement) as said:
            check()
        difference = again.disagreement(Segment(2, 5), f"step 2/9\n{said.value}\n")
        assert (difference and difference.here) == found


def test_sigterm_is_heeded_while_the_cause_is_looked_for(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = load(Config, clean / "params.yaml")
    made = proof.Proof(project_in(clean), config, tmp_path, 1, [Segment(0, 2)], lambda: True)
    monkeypatch.setattr(made, "_tried", lambda *given: iter([None]))
    with pytest.raises(Preempted):
        made._differs(Segment(0, 2), made._own, setting.ROWS)


@pytest.mark.parametrize(
    ("when", "cores", "ranks", "beside"), [("end", 2, 1, 3), ("end", 1, 1, 0), ("end", 2, 2, 0), ("early", 1, 1, 2)]
)
def test_segments_beside_the_run_keep_their_numbers(
    when: str, cores: int, ranks: int, beside: int, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So those that are left are trained in other ways. None begins before the run has recorded it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(choice, "places", lambda device: 4)
    config = load(Config, clean / "params.yaml", [f"prove.when={when}"])
    segments = [Segment(0, 3), Segment(5, 8), Segment(9, 12)]
    seen: list[tuple[Segment, int]] = []
    recorded: list[int] = []
    made = proof.Proof(project_in(clean), config, tmp_path, ranks, segments, lambda: False)

    def tried(segment: Segment, ways: list[choice.Choice], rows: object) -> Iterator[None]:
        seen.append((segment, ways[0].ranks))
        assert segment.stop <= recorded[-1]
        made._done[segment] = ways[0]
        yield

    monkeypatch.setattr(made, "_tried", tried)
    monkeypatch.setattr(made, "_possible", lambda steps: [*enumerate(segments)])
    monkeypatch.setattr(made, "_kept", lambda: [segment.first for segment in segments])
    for steps in range(13):
        recorded.append(steps)
        made.look(steps)
    made.look(steps)
    assert seen == [*zip(segments, (1, 3, 2), strict=True)][:beside]
    stated = made.make(12)["segments"]
    assert [each["ranks"] for each in stated] == [1, 3, 2] and len(seen) == 3


@pytest.mark.parametrize(("ranks", "missed"), [(1, {proof.RANKS: "there is room for no other"}), (2, {})])
def test_number_of_ranks_that_is_not_changed_is_named(
    ranks: int, missed: dict[str, str], clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    segment, config = Segment(0, 2), load(Config, clean / "params.yaml")
    made = proof.Proof(project_in(clean), config, tmp_path, 1, [segment], lambda: False)
    monkeypatch.setattr(made, "_possible", lambda steps: [])
    made._done[segment] = choice.Choice(ranks, 0, "none")
    assert made.make(2)["not_tried"] == missed


@pytest.mark.parametrize(("takes", "timeout", "tried"), [(proof.PATIENCE + 9, 600, 3), (5, 5, 3), (1, 600, 6)])
def test_ranks_that_wait_for_each_other_in_vain_are_tried_once(
    takes: int,
    timeout: int,
    tried: int,
    clean: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """As where rank 0 alone evaluates; ranks that are refused at once are tried in each way."""
    config = load(Config, clean / "params.yaml", [f"parallel.timeout_seconds={timeout}"])
    parts = [Segment(0, 3), Segment(5, 8), Segment(9, 12)]
    clock, seen = [0.0], list[int]()
    monkeypatch.setattr(proof.time, "monotonic", lambda: clock[0])
    made = proof.Proof(project_in(clean), config, tmp_path, 1, parts, lambda: False)

    def compared(segment: Segment, way: choice.Choice, patience: int, *given: object) -> Iterator[None]:
        yield
        assert timeout >= patience >= min(timeout, proof.PATIENCE)
        seen.append(way.ranks)
        clock[0] += takes if way.ranks > 1 else 1
        return "no answer" if way.ranks > 1 else "", None

    monkeypatch.setattr(choice, "places", lambda device: 4)
    monkeypatch.setattr(made._trainer, "compared", compared)
    monkeypatch.setattr(made._trainer, "start", lambda rows: iter(()))
    monkeypatch.setattr(made, "_possible", lambda steps: [*enumerate(parts)])
    monkeypatch.setattr(made, "_kept", lambda: {part.first for part in parts})
    assert [each["ranks"] for each in made.make(12)["segments"]] == [1, 1, 1]
    assert len(seen) == 1 + tried and seen[:2] == [1, 3]
    assert made._not_tried[proof.RANKS] == "on others no segment could be trained"
    assert ("proof: steps 9 to 11 on 1 rank, " in capsys.readouterr().err) == (takes > proof.SOON)  # who waits sees it


def test_fresh_process_has_all_that_a_training_wants(clean: Path, tmp_path: Path):
    """Else each of its forks would start itself again, as a process that has to load torch."""
    config = load(Config, clean / "params.yaml")
    made = fresh.Fresh(project_in(clean), config, {}, tmp_path / "copy")
    assert made._environ | stated_variables(config.options.determinism, made._environ) == made._environ


def test_copy_of_a_project_links_nothing_outside_of_itself(clean: Path, tmp_path: Path):
    """Data that lie outside the project are the same for both."""
    config = load(Config, clean / "params.yaml")
    outside = tmp_path / "outside" / "data.csv"
    outside.parent.mkdir()
    outside.write_text("1")
    data = config.data.model_copy(update={"raw": os.path.relpath(outside, clean), "prepared": "data/prepared"})
    before = {*tmp_path.rglob("*")}
    elsewhere.copied(project_in(clean), config.model_copy(update={"data": data}), {}, tmp_path / "a" / "b" / "copy")
    made = {path for path in {*tmp_path.rglob("*")} - before if not path.is_relative_to(tmp_path / "a" / "b" / "copy")}
    assert made == {tmp_path / "a", tmp_path / "a" / "b"}
    copy = tmp_path / "a" / "b" / "copy"
    assert (copy / "data/prepared").resolve() == (clean / "data/prepared").resolve()
    assert {each.name for each in copy.iterdir() if each.is_file()} == {"params.yaml", "pyproject.toml", "dvc.yaml"}


def test_run_that_contradicts_itself_is_refused_by_that_with_a_receipt_and_without(
    proved: tuple[Path, str], tmp_path: Path
):
    run = Path(shutil.copytree(proved[0], tmp_path / "run"))
    (run / names.CONTRADICTION).write_text("{}")
    for named in run, run / names.RECEIPT:
        with pytest.raises(RunError, match="the run contradicts itself"):
            read(named)
        (run / names.RECEIPT).unlink(missing_ok=True)


def test_variables_with_circumstances_of_their_own_are_named_by_these(tmp_path: Path):
    """Else what depends on HOME would be said to depend on environment variables."""
    own = dict.fromkeys([row.name for row in setting.ROWS if row.name.isupper()], "as it is")
    assert len(own) == 4 and setting.ROWS[0].variables(own | {"PLANTED": "by hand"}, tmp_path) == own
