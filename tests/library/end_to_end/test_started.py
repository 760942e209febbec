"""A run that starts from another one: with its weights, or with its complete state, and never with others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rfc8785
import torch
from attempt import STEPS
from clone import command
from project.config import Config
from project.model import build
from safetensors.torch import load_file, save_file
from support import OURS, trained, training
from torch import nn
from victim import Start
from warm import Warm

from samebits import front
from samebits.address.manifest import sha256_file
from samebits.analysis import replay, verify_receipt
from samebits.base.files import read_json, write_json
from samebits.checkpoint import checkpoint, final
from samebits.config.params import load
from samebits.config.settings import Start as Keys
from samebits.core.errors import RunError, UserError
from samebits.core.ranks import ALONE
from samebits.core.weights import save
from samebits.record import chains, names, started
from samebits.record.chain import STEP
from samebits.record.receipt import read
from samebits.record.removal import VALUES
from samebits.record.view import RunView

# A rate that does not depend on how many steps there are, so that a run of one epoch begins as one of two does.
LEVEL = "tracking.enabled=false", "train.warmup=0", "train.decay=0"
TWO = (*LEVEL, "train.epochs=2")


def from_run(source: Path, out: Path, state: bool = False) -> list[str]:
    """The overrides that --from stands for."""
    return [f"{key}={json.dumps(value)}" for key, value in started.requested(source, state, out).items()]


def bits(out: Path) -> tuple[str, str | None, list[Any]]:
    """The weights, the trace root, and what each step logged."""
    receipt = read(out)
    rows = [json.loads(line) for line in (out / names.METRIC_ROWS).read_text().splitlines()]
    return receipt.weights, receipt.stated["trace"], [(row["step"], row["metrics"]) for row in rows]


@pytest.fixture(scope="module")
def first(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch."""
    ended = trained(tmp_path_factory.mktemp("first") / "run", prepared, *LEVEL)
    assert ended.done.returncode == 0, ended.done.stderr
    return ended.out


@pytest.fixture(scope="module")
def second(first: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch that starts from it, as a user asks for it."""
    out = tmp_path_factory.mktemp("second") / "run"
    logs = out.with_suffix(".out"), out.with_suffix(".err")
    words = [*training(out, prepared, *LEVEL), "--from", str(first / names.RECEIPT)]
    assert Warm(*words, out=logs[0], err=logs[1]).wait() == 0, logs[1].read_text()
    assert f"started from {first}: weights {read(first).weights}\n" in logs[0].read_text()
    return out


@pytest.fixture
def copied(first: Path, tmp_path: Path) -> Path:
    """A copy of the first run, to be spoiled."""
    return Path(shutil.copytree(first, tmp_path / "copy"))


# ---- what a run is that starts from another one


def test_address_has_the_weights_and_the_receipt_states_whose_they_are(first: Path, second: Path):
    one, other = read(first), read(second)
    preimage = dict(other.stated["preimage"])
    assert preimage.pop("start") == {"weights": one.weights} and preimage == one.stated["preimage"]
    assert one.stated["address"] != other.stated["address"]
    assert other.stated["config"]["start.receipt"] == one.name
    said = RunView(second).started_from
    assert said == f"{first}: weights {one.weights} of receipt {one.name}" and not RunView(first).started_from
    assert f"started from {said}: check that receipt, too" in verify_receipt.report(OURS, second, None)
    assert other.weights != one.weights


def test_model_has_the_bits_of_the_file(first: Path, config: Config):
    model, wanted = build(config), load_file(first / names.WEIGHTS)
    assert not all(torch.equal(held, wanted[name]) for name, held in model.state_dict().items())  # the control
    final.start_from(model, Keys(run=str(first), weights=read(first).weights))
    assert all(torch.equal(held, wanted[name]) for name, held in model.state_dict().items())


def test_killed_and_resumed_on_two_ranks_that_hold_shards_it_has_the_same_bits(
    first: Path, second: Path, start: Start, tmp_path: Path
):
    begun = [*LEVEL, "checkpoint.every=3", *from_run(first, tmp_path / "run")]
    victim = start(*begun)
    assert victim.until(lambda: victim.rows() >= 5 and len(victim.checkpoints()) > 0), victim.log.read_text()
    victim.kill()
    assert 0 < victim.rows() < STEPS, "killed too late to prove anything"
    resumed = start(*begun, "parallel.shard=full", ranks=2)
    assert resumed.end() == 0, resumed.log.read_text()
    assert bits(resumed.out) == bits(second) and "resumed " in resumed.log.read_text()
    # its state has one digest, however many ranks hold it
    one, other = (started.requested(out, True, tmp_path / "new") for out in (second, resumed.out))
    assert one["start.state"] == other["start.state"] and one["start.run"] != other["start.run"]


def test_with_its_state_a_run_goes_on_as_if_it_had_never_ended(
    first: Path, prepared: Path, start: Start, tmp_path: Path
):
    """Also where it is killed, and goes on with sharded weights on two ranks."""
    long = trained(tmp_path / "long", prepared, *TWO)
    begun = [*TWO, "checkpoint.every=3", *from_run(first, tmp_path / "run", state=True)]
    victim = start(*begun)
    assert victim.until(lambda: victim.rows() >= 5), victim.log.read_text()
    victim.kill()
    assert 0 < victim.rows() < STEPS, "killed too late to prove anything"
    resumed = start(*begun, "parallel.shard=full", ranks=2)
    assert resumed.end() == 0, resumed.log.read_text()
    assert f"started from {first}: its state after step {STEPS}\n" in resumed.log.read_text()
    weights, _, rows = bits(long.out)
    assert bits(resumed.out)[0] == weights
    assert bits(resumed.out)[2] == [row for row in rows if row[0] >= STEPS]
    here, there = (chains.rows(out / names.STEP_ROWS, STEP) for out in (resumed.out, long.out))
    fields = [name for name in STEP.names or () if name not in ("weights", "flags")]  # now and then, and of the last
    assert all((here[name] == there[name][STEPS:]).all() for name in fields) and len(here) == len(there) - STEPS
    # weights alone are another run
    assert read(resumed.out).stated["preimage"]["start"].keys() == {"weights", "state"}


def test_more_steps_than_the_state_has_are_wanted(first: Path, prepared: Path, tmp_path: Path):
    ended = trained(tmp_path / "run", prepared, *LEVEL, *from_run(first, tmp_path / "run", state=True))
    assert ended.done.returncode == 2
    said = f"--state: {STEPS} steps are done in {first}, and this run is to have {STEPS}: ask for more"
    assert ended.done.stderr.splitlines() == [said]


# ---- what is refused


def test_unfinished_run_goes_on_only_with_its_own_start(first: Path, second: Path, prepared: Path, tmp_path: Path):
    run = Path(shutil.copytree(second, tmp_path / "run"))
    write_json(run / names.RUN, read_json(run / names.RUN) | {"status": "KILLED"})
    for other in ([], from_run(second, run)):
        run.with_suffix(".err").unlink(missing_ok=True)
        ended = trained(run, prepared, *LEVEL, *other)
        assert ended.done.returncode == 2 and len(ended.done.stderr.splitlines()) == 1
        assert f"start.weights: {read(first).weights[:16]}" in ended.done.stderr
        assert f"repeat the command with --from {first}." in ended.done.stderr
    begun = Path(shutil.copytree(first, tmp_path / "begun"))
    write_json(begun / names.RUN, read_json(begun / names.RUN) | {"status": "KILLED"})
    ended = trained(begun, prepared, *LEVEL, *from_run(first, begun))
    assert ended.done.returncode == 2 and "repeat the command with no --from." in ended.done.stderr


def edited(path: Path, change: Callable[[Any], None]) -> None:
    statement = json.loads(path.read_bytes())
    change(statement)
    path.write_bytes(rfc8785.dumps(statement))


def forge(run: Path) -> None:
    """A receipt that states other weights, consistent in itself."""
    edited(run / names.RECEIPT, lambda held: held["subject"][0]["digest"].update(sha256="0" * 64))


def change_weights(run: Path) -> None:
    with (run / names.WEIGHTS).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")


SPOILED = {
    "forged": (forge, f"SHA-256 .* seen, {'0' * 64} wanted"),
    "changed": (change_weights, "SHA-256 .* seen, .* wanted: it is truncated or altered"),
    "missing": (lambda run: (run / names.WEIGHTS).unlink(), "missing; wanted SHA-256"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_other_weights_than_the_receipt_states_are_refused(name: str, copied: Path, tmp_path: Path):
    spoil, message = SPOILED[name]
    keys = started.requested(copied, False, tmp_path / "new")
    started.require(Keys(**{key.removeprefix("start."): value for key, value in keys.items()}))  # the control
    spoil(copied)
    keys = started.requested(copied, False, tmp_path / "new")
    with pytest.raises(UserError, match=f"^{copied / names.WEIGHTS}: {message}") as refused:
        started.require(Keys(**{key.removeprefix("start."): value for key, value in keys.items()}))
    assert "\n" not in str(refused.value)


def test_altered_weights_end_a_run_before_anything_is_written(copied: Path, prepared: Path, tmp_path: Path):
    change_weights(copied)
    ended = trained(tmp_path / "run", prepared, *LEVEL, *from_run(copied, tmp_path / "run"))
    assert ended.done.returncode == 2 and len(ended.done.stderr.splitlines()) == 1
    assert f"{copied / names.WEIGHTS}: SHA-256 " in ended.done.stderr and not (tmp_path / "run").exists()


def test_model_that_does_not_fit_is_refused_and_leaves_no_folder(first: Path, prepared: Path, tmp_path: Path):
    new = tmp_path / "run"
    ended = trained(new, prepared, *LEVEL, "model.width=24", *from_run(first, new), ranks=2)
    assert ended.done.returncode, ended.done.stderr
    assert f"{first / names.WEIGHTS}: " in ended.done.stderr and " wanted by this model: " in ended.done.stderr
    assert not new.exists()


def test_run_that_was_there_stays_as_it_is_where_the_next_one_does_not_fit(copied: Path, first: Path, prepared: Path):
    """Also where it would begin in its place, having its very content address."""
    for unfit in ([*TWO, *from_run(first, copied, state=True), "train.epochs=1"], ["trace.profile=20:24"]):
        before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
        ended = trained(copied, prepared, *LEVEL, *unfit)
        assert ended.done.returncode == 2 and "this run " in ended.done.stderr.splitlines()[-1], ended.done.stderr
        assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    (copied / "notes.txt").write_text("the owner's")
    ended = trained(copied, prepared, *LEVEL)  # the control
    assert ended.done.returncode == 0 and bits(copied) == bits(first)


def test_run_does_not_start_from_its_own_folder_by_whatever_name(copied: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(copied)
    for source in (copied, copied / names.RECEIPT, tmp_path / "link"):
        for out in (copied, tmp_path / "link"):
            with pytest.raises(UserError, match=r"it lies in --out .* itself; choose another run"):
                started.requested(source, False, out)
    with pytest.raises(UserError, match="missing; the receipt of a finished run is wanted"):
        started.requested(tmp_path, False, copied)


def test_state_that_is_not_the_last_one_of_the_receipt_is_refused(copied: Path, tmp_path: Path):
    (last,) = checkpoint.found(copied / names.CHECKPOINTS)
    assert started.requested(copied, True, tmp_path / "new")["start.state"]  # the control
    for key, value in (("address", "0" * 64), ("environment", "0" * 64), ("step", 7)):
        before = (last / VALUES).read_text()
        write_json(last / VALUES, json.loads(before) | {key: value})
        with pytest.raises(UserError, match=f"^{last}: {key} {value} seen, .* wanted, as the receipt states"):
            started.requested(copied, True, tmp_path / "new")
        (last / VALUES).write_text(before)
    shutil.rmtree(copied / names.CHECKPOINTS)
    with pytest.raises(UserError, match=r"no checkpoint seen, .*; without --state its weights alone are taken$"):
        started.requested(copied, True, tmp_path / "new")


def test_byte_of_a_state_that_was_changed_is_refused(copied: Path, tmp_path: Path):
    folder = copied / names.CHECKPOINTS
    (last,) = checkpoint.found(folder)
    content = started.requested(copied, True, tmp_path / "new")["start.state"]
    assert checkpoint.start_of(folder, content, ALONE).step == STEPS  # the control
    with pytest.raises(UserError, match=f"^{folder}: no state {'1' * 16} seen"):
        checkpoint.start_of(folder, "1" * 64, ALONE)
    with (last / "optimizer.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(UserError, match=f"^{last}: damaged: .*optimizer.safetensors"):
        checkpoint.start_of(folder, content, ALONE)
    assert last.is_dir()  # another run's folder stays as it is


def test_weights_that_do_not_fit_are_named_with_both_shapes(tmp_path: Path):
    save_file({"weight": torch.zeros(3, 2), "bias": torch.zeros(3, dtype=torch.float64)}, tmp_path / names.WEIGHTS)
    for model, said in (
        (nn.Linear(2, 4), r"weight: float32 \(3, 2\) seen, float32 \(4, 2\) wanted by this model"),
        (nn.Linear(2, 3), r"bias: float64 \(3,\) seen, float32 \(3,\) wanted by this model"),
        (nn.Linear(2, 3, bias=False).double(), r"weight: float32 \(3, 2\) seen, float64 \(3, 2\) wanted"),
        (nn.Sequential(nn.Linear(2, 3)), r"0\.weight: none seen, float32 \(3, 2\) wanted"),
    ):
        before = {name: held.clone() for name, held in model.state_dict().items()}
        with pytest.raises(UserError, match=f"{names.WEIGHTS}: {said}") as refused:
            final.start_from(model, Keys(run=str(tmp_path)))
        assert "\n" not in str(refused.value)
        assert all(torch.equal(held, before[name]) for name, held in model.state_dict().items())


def test_tied_weights_have_two_names(tmp_path: Path):
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    one, other = tied(), tied()
    save(one, tmp_path / names.WEIGHTS)
    final.start_from(other, Keys(run=str(tmp_path)))
    assert all(torch.equal(held, one.state_dict()[name]) for name, held in other.state_dict().items())


def test_half_a_start_is_refused():
    for keys in ({"run": "runs/a"}, {"weights": "0" * 64}, {"run": "runs/a", "state": "0" * 64}):
        with pytest.raises(UserError, match="wanted together: let --from RECEIPT fill in both"):
            started.require(Keys(**keys))
    started.require(Keys())


def test_state_alone_is_refused(tmp_path: Path):
    err = tmp_path / "err"
    assert Warm("--state", out=err, err=err).wait() == 2
    assert err.read_text() == "--state given without --from RECEIPT, which says whose\n"


def test_receipt_that_contradicts_itself_is_refused(second: Path, tmp_path: Path):
    run = Path(shutil.copytree(second, tmp_path / "run"))
    edited(run / names.RECEIPT, lambda held: held["predicate"]["config"].update({"start.weights": "0" * 64}))
    with pytest.raises(RunError, match=r"altered: its config states another start\.weights than its preimage"):
        read(run)
    edited(run / names.RECEIPT, lambda held: held["predicate"]["config"].update({"start.weights": ""}))
    with pytest.raises(RunError, match=r"altered: its config states another start\.weights"):
        read(run)


# ---- replay


def test_replay_asks_for_the_weights_where_the_run_had_them_or_names_them(second: Path, first: Path):
    stated = read(second).stated
    keys = replay.start_of(OURS, stated)
    assert keys["start.run"] == str(first) and keys["start.weights"] == read(first).weights
    gone = stated | {"config": stated["config"] | {"start.run": "runs/gone"}}
    with pytest.raises(UserError, match=f"^{OURS.root}/runs/gone/{names.WEIGHTS}: missing; wanted SHA-256"):
        replay.start_of(OURS, gone)
    assert replay.start_of(OURS, read(first).stated) == {}


@pytest.mark.long
def test_run_that_starts_from_another_one_is_replayed(project: Path, tmp_path: Path):
    clone = Path(shutil.copytree(project, tmp_path / "clone"))
    settings = "train.epochs=1", "tracking.enabled=false"
    sets = [word for text in settings for word in ("--set", text)]
    done = command(clone, "train", *sets, "--from", "artifacts", "--out", "runs/next")
    assert done.returncode == 0, done.stderr
    assert read(clone / "runs" / "next").stated["config"]["start.run"] == "artifacts"
    done = command(clone, "replay", "runs/next/receipt.json")
    assert done.returncode == 0, done.stderr + done.stdout
    weights = sha256_file(clone / "runs" / "next" / names.WEIGHTS)
    assert done.stdout.splitlines()[-1].startswith(f"REPRODUCED: weights {weights}, trace root ")
    shutil.rmtree(clone / "artifacts")
    done = command(clone, "replay", "runs/next/receipt.json", "--out", "again")
    assert done.returncode == 2 and f"artifacts/{names.WEIGHTS}: missing; wanted SHA-256" in done.stderr


def test_section_that_need_not_stand_in_params_yaml_is_to_be_listed_in_the_pipeline_where_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So that a change of it trains again; what a command line asks for stands in no file."""
    begun = load(Config, OURS.root / "params.yaml", [f"start.weights={'0' * 64}", "start.run=runs/a"])
    plain, text = load(Config, OURS.root / "params.yaml"), (OURS.root / "params.yaml").read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(text)
    always = front._sections(plain)
    assert {"seed", "train", "determinism"} < {*always} and front._sections(begun) == always
    (tmp_path / "params.yaml").write_text(text + "start: {run: runs/a}\nenvironment: {variables: [A]}\n")
    assert {*front._sections(plain)} - {*always} == {"environment"}
    assert {*front._sections(begun)} - {*always} == {"environment", "start"}
