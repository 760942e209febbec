"""Every file that is read, mutated a thousand times: it is accepted, or refused in a line or two. Never a traceback."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import rfc8785
from click.testing import CliRunner
from clone import copied as cloned
from clone import ours, project_in
from project.config import Config
from ruamel.yaml import YAML
from support import PROJECT, Trained

from samebits.address import manifest
from samebits.address.address import ContentAddress, content_address, digest
from samebits.analysis import results
from samebits.analysis.compare import compare as compare_metrics
from samebits.analysis.compare import lines
from samebits.analysis.groups import read_group
from samebits.base.files import read_json
from samebits.base.project import Project
from samebits.cli import main
from samebits.config.params import load
from samebits.core.errors import RunError
from samebits.guards import stages
from samebits.record import names, proved
from samebits.record.opening import opener
from samebits.record.reading import metric_rows
from samebits.record.statement import statement, write
from samebits.tracking import tracking

COUNT = 1000
DEEP, MARK = 1200, "<deep>"
VALUES = None, True, -1, 10**18, 1.5, float("nan"), "", "x", [], [None], {}, {"x": 1}, MARK

Mutation = Callable[[random.Random, bytes], bytes]
Read = Callable[["Place"], object]


# ---- mutations


def flip(rng: random.Random, content: bytes) -> bytes:
    """Change a bit."""
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, content: bytes) -> bytes:
    """Cut the end off, or everything."""
    return content[: rng.choice([0, rng.randrange(len(content))])]


def drop_line(rng: random.Random, content: bytes) -> bytes:
    """Leave a line out."""
    lines = content.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or mapping with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def in_tree(rng: random.Random, tree: Any) -> None:
    """Replace a value by one of another type, delete or rename a key, or nest a value without end."""
    inside, key = rng.choice([*places(tree)])
    kind = rng.choice(["replace", "replace", "delete", "rename"])
    if kind == "replace":
        inside[key] = rng.choice([value for value in VALUES if type(value) is not type(inside[key])])
    elif kind == "delete" or isinstance(inside, list):
        del inside[key]
    else:
        inside[f"{key}\u00e9"] = inside.pop(key)


def written(tree: Any) -> bytes:
    """The tree as JSON, which is YAML, too."""
    return json.dumps(tree, indent=1).replace(f'"{MARK}"', "[" * DEEP + "]" * DEEP).encode() + b"\n"


def change_json(rng: random.Random, content: bytes) -> bytes:
    """Change the tree of a JSON file."""
    tree = json.loads(content)
    in_tree(rng, tree)
    return written(tree)


def change_row(rng: random.Random, content: bytes) -> bytes:
    """Change one line of a file of JSON lines."""
    lines = content.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    lines[number] = change_json(rng, lines[number]).replace(b"\n", b"") + b"\n"
    return b"".join(lines)


def change_yaml(rng: random.Random, content: bytes) -> bytes:
    """Change the tree of a YAML file."""
    tree = YAML(typ="safe").load(content)
    in_tree(rng, tree)
    return written(tree)


def hash_anew(rng: random.Random, content: bytes) -> bytes:
    """Change the tree of a receipt, as one does who knows how its hashes are made."""
    statement = json.loads(content)
    stated = statement["predicate"]
    in_tree(rng, stated)
    with suppress(Exception):
        stated["environment"]["environment"] = digest(stated["environment"]["preimage"])
        stated["parts"] = {name: digest(part) for name, part in stated["preimage"].items()}
        stated["address"] = digest(stated["preimage"])
    try:
        return rfc8785.dumps(statement).replace(f'"{MARK}"'.encode(), b"[" * DEEP + b"]" * DEEP)
    except ValueError:  # it cannot hold the value
        return written(statement)


# ---- readers


class Place(NamedTuple):
    """A project, its config, and a finished run beside it; what is mutated is one of their files."""

    project: Project
    config: Config
    run: Path

    @property
    def data(self) -> Path:
        """What was prepared."""
        return Path(self.config.data.prepared)

    def verb(self, *words: str | Path) -> int:
        """Call `samebits` in this process; its exit code."""
        done = CliRunner().invoke(main, [*map(str, words)], obj=ours(self.project))
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code in (0, 1, 2), done.stderr
        assert done.exit_code != 2 or done.stderr, "refused without a word"
        require_short(done.stderr)
        return done.exit_code

    def opened(self, status: str) -> None:
        """Train into the run directory, as far as to its first step."""
        facts = self.run / names.RUN
        facts.write_bytes(facts.read_bytes().replace(b'"FINISHED"', f'"{status}"'.encode()))
        address = ContentAddress(json.loads((CLEAN[0] / names.ADDRESS).read_text())["preimage"])
        environment = json.loads((CLEAN[0] / names.ENVIRONMENT).read_text())
        here = environment["preimage"]
        calling, silent = lambda non_portable: here, lambda line: None
        opener(self.project, self.config, self.run, address, environment, calling, silent)().end("FINISHED", {})


CLEAN: list[Path] = []


def check(place: Place) -> int:
    """The verb would read params.yaml, which takes long."""
    return 0 if all(verdict.holds for verdict in results.check(place.project, place.config, place.run)) else 1


def compare_groups(place: Place) -> None:
    (ran,), (other,) = (read_group([str(place.run)], str) for _ in range(2))
    vars(other)["_found"] = replace(other.required, name="another")
    lines(compare_metrics([ran], [other], [], 0))


def upload_state(place: Place) -> None:
    assert isinstance(tracking.read_state(place.run), dict)


def stage_outputs(place: Place) -> None:
    stages.outputs(place.project)
    stages._running(place.project)


SET = "train.epochs=2", "model.name=transformer"
READERS: dict[str, Read] = {
    "ask_params": lambda place: load(Config, place.project.root / "params.yaml"),
    "set_params": lambda place: load(Config, place.project.root / "params.yaml", SET),
    "resume": lambda place: place.opened("RUNNING"),
    "begin_anew": lambda place: place.opened("FINISHED"),
    "check": check,
    "address": lambda place: content_address(place.project, place.config, manifest.read(place.data)),
    "accept": lambda place: place.verb("accept", place.run, "--source", "a test"),
    "compare": lambda place: place.verb("diff", place.run, CLEAN[0]),
    "compare_receipts": lambda place: place.verb("diff", place.run / names.RECEIPT, CLEAN[0] / names.RECEIPT),
    "compare_groups": compare_groups,
    "verify_receipt": lambda place: place.verb("verify-receipt", place.run),
    "state_again": lambda place: write(
        place.run, statement(place.project, place.run, "0" * 64, None, proved.none("again"))
    ),
    "rows": lambda place: list(tracking._batches(metric_rows(place.run), 0)),
    "upload_state": upload_state,
    "whole_data": lambda place: manifest.require_prepared(place.config.data),
    "stage_outputs": stage_outputs,
}
WRITERS = "resume", "begin_anew", "accept", "state_again"
TEXT = flip, truncate, drop_line
JSON = *TEXT, change_json, change_json, change_json
# Where the file lies, its name -> the mutations, and who reads it.
RUN, ROOT, DATA = "run", "root", "data"
OWNERS = "params.yaml", "results.lock", "dvc.yaml", "dvc.lock"
FILES: dict[tuple[str, str], tuple[tuple[Mutation, ...], str]] = {
    (ROOT, "params.yaml"): ((*TEXT, change_yaml, change_yaml, change_yaml), "ask_params set_params"),
    (ROOT, "dvc.yaml"): ((*TEXT, change_yaml), "stage_outputs"),
    (ROOT, "results.lock"): ((*TEXT, change_yaml, change_yaml), "check accept"),
    (ROOT, "dvc.lock"): ((*TEXT, change_yaml), "check"),
    (DATA, manifest.NAME): (JSON, "address whole_data"),
    (RUN, names.RUN): (JSON, "resume begin_anew compare state_again"),
    (RUN, names.ADDRESS): (JSON, "resume check compare state_again"),
    (RUN, names.ENVIRONMENT): (JSON, "resume compare state_again"),
    (RUN, names.METRICS): (JSON, "check compare_groups state_again"),
    (RUN, names.METRIC_ROWS): ((*TEXT, change_row, change_row, change_row), "resume rows"),
    (RUN, names.RECEIPT): ((*JSON, *[hash_anew] * 6), "verify_receipt check compare_receipts compare_groups accept"),
    (RUN, names.TENSOR_COLUMNS): (JSON, "compare"),
    (RUN, names.STEP_ROWS): (TEXT[:2], "compare"),
    (RUN, names.UPLOAD): (JSON, "upload_state"),
}  # fmt: skip


def require_short(message: str) -> None:
    """A line or two."""
    assert "Traceback" not in message and len(message.strip().splitlines()) <= 2, message


def fault(read: Read, place: Place) -> str:
    """What is wrong with how a file is met: nothing where it is accepted, or refused in a line or two."""
    try:
        read(place)
    except RunError as failure:
        try:
            require_short(str(failure))
        except AssertionError as long:
            return f"long: {long}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


@pytest.fixture(scope="module")
def clean(config: Config, prepared: Path, untracked: Trained, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A project without git, and a run of it at the level `tensor`, whose files are whole."""
    root = tmp_path_factory.mktemp("mutated") / "project"
    cloned(root, ("src", "vendor", "requirements"), (*OWNERS, "pyproject.toml"))
    run, data = root.parent / "run", root.parent / "data"
    shutil.copytree(untracked.out, run, ignore=shutil.ignore_patterns(names.CHECKPOINTS))
    shutil.copytree(prepared, data)
    (run / names.UPLOAD).write_text(json.dumps({"id": "1", "uri": "x", "rows": 3, "complete": True, "where": "x"}))
    steps = (run / names.STEP_ROWS).stat().st_size // (40 + 24)
    (run / names.TENSOR_COLUMNS).write_text(json.dumps(["output a", "gradient b", "weights b"]))
    (run / names.TENSOR_ROWS).write_bytes(bytes(steps * (3 * 8 + 24)))
    CLEAN[:] = [run]
    short = config.train.model_copy(update={"epochs": 1})
    return Place(project_in(root), config.model_copy(update={"train": short, "data": at(config, data)}), run)


def at(config: Config, prepared: Path) -> Any:
    """The config's data, prepared elsewhere."""
    return config.data.model_copy(update={"prepared": str(prepared)})


def copy(source: str, target: str) -> None:
    """Copy a file that may be changed; the others are large."""
    (os.link if source.endswith((".npy", names.WEIGHTS)) else shutil.copyfile)(source, target)


def copied(clean: Place, folder: Path) -> Place:
    """The files anew, but for those that nobody changes."""
    root, run, data = clean.project.root, folder / "run", folder / "data"
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(data, ignore_errors=True)
    shutil.copytree(clean.run, run, copy_function=copy)
    shutil.copytree(clean.config.data.prepared, data, copy_function=copy)
    for name in OWNERS:
        shutil.copyfile(PROJECT / name, root / name)
    return Place(clean.project, clean.config.model_copy(update={"data": at(clean.config, data)}), run)


@pytest.fixture
def place(clean: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Place]:
    """A function that restores all files."""
    monkeypatch.chdir(clean.project.root)
    monkeypatch.setenv("DVC_STAGE", "train")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power failure is played here
    return lambda: copied(clean, tmp_path)


def path_of(place: Place, where: str, name: str) -> Path:
    """One of the files."""
    return {RUN: place.run, ROOT: place.project.root, DATA: place.data}[where] / name


@pytest.mark.parametrize("read", sorted({read for _, readers in FILES.values() for read in readers.split()}))
def test_whole_files_are_accepted(place: Callable[[], Place], read: str):
    files = place()
    done = READERS[read](files)
    assert not isinstance(done, int) or done == 0
    assert read_json(files.run / names.RUN)["status"] == "FINISHED"


def careless(files: Place) -> None:
    (files.run / names.RUN).write_text("")
    json.loads((files.run / names.RUN).read_text())


def talkative(files: Place) -> None:
    raise RunError("one\ntwo\nthree")


@pytest.mark.parametrize(("read", "message"), [(careless, "JSONDecodeError: "), (talkative, "long: one")])
def test_reader_that_takes_no_care_is_found(place: Callable[[], Place], read: Read, message: str):
    assert fault(read, place()).startswith(message)


@pytest.mark.long
def test_mutated_files_are_accepted_or_refused_in_a_line_or_two(place: Callable[[], Place]):
    rng, found, files = random.Random(0), [], place()
    often = [key for key in FILES for _ in range(1 if key[0] == ROOT else 3)]  # YAML takes long to read
    for number in range(COUNT):
        where, name = often[number % len(often)]
        mutations, readers = FILES[where, name]
        mutation, read = rng.choice(mutations), rng.choice(readers.split())
        path = path_of(files, where, name)
        whole = path.read_bytes()
        path.write_bytes(mutation(rng, whole))
        if message := fault(READERS[read], files):
            found.append(f"{number}: {name}, {mutation.__name__}, {read}: {message}")
        if read in WRITERS:
            files = place()
        else:
            path.write_bytes(whole)
    assert not found, "\n".join(found)


def test_every_key_of_params_yaml_is_held_to_its_type(tmp_path: Path):
    path, content = tmp_path / "params.yaml", (PROJECT / "params.yaml").read_bytes()
    tree = YAML(typ="safe").load(content)
    for inside, key in [*places(tree)]:
        there = inside[key]
        for value in (None, True, 1.0, "1", {"x": 1}):
            inside[key] = value
            path.write_bytes(written(tree))
            try:
                load(Config, path)
            except RunError as refused:
                require_short(str(refused))
            else:
                assert type(value) is type(there), (key, value)
        inside[key] = there
