"""params.yaml and --set: typed, checked at once, and refused in plain words."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from project.config import Config
from pydantic import ValidationError
from support import PROJECT

from samebits.config.params import load
from samebits.config.problems import FORMER
from samebits.config.settings import NEUTRAL, Section, Settings
from samebits.core.errors import UserError
from samebits.core.sampling import planned

PARAMS = (PROJECT / "params.yaml").read_text()
Edit = Callable[[str, str], Path]


def with_overrides(*overrides: str) -> dict[str, Any]:
    return load(Config, PROJECT / "params.yaml", overrides).flat()


def refusal_of(path: Path, *overrides: str, schema: type[Settings] = Config) -> list[str]:
    """The lines in which a file or an override is refused."""
    with pytest.raises(UserError) as refused:
        load(schema, path, overrides)
    return str(refused.value).splitlines()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a file of the test's own lies."""
    return tmp_path / "params.yaml"


@pytest.fixture
def edited(path: Path) -> Edit:
    """A function that writes params.yaml with the line of a key replaced, and returns its path."""

    def edit(key: str, line: str) -> Path:
        text, found = re.subn(rf"^{key}:.*$", lambda _: line, PARAMS, count=1, flags=re.MULTILINE)
        assert found
        path.write_text(text)
        return path

    return edit


# ---- --set, where it is right

TYPED = {
    "seed=7": 7,
    "train.learning_rate=1e-3": 0.001,
    "train.learning_rate=1": 1.0,
    "model.dropout=0": 0.0,
    "model.name=transformer": "transformer",
    "compute.compile=true": True,
    "determinism.relax=[nnpack, all]": ["nnpack", "all"],
    "determinism.relax=[]": [],
    "tracking.uri=http://127.0.0.1:5000": "http://127.0.0.1:5000",
    "tracking.uri=postgresql://host:5432/runs": "postgresql://host:5432/runs",
    "tracking.uri=": "",
    "tracking.experiment=2026": "2026",
    "tracking.experiment=null": "null",
    "tracking.experiment=a=b": "a=b",
    "data.raw=[odd": "[odd",
}


@pytest.mark.parametrize("override", TYPED)
def test_override_is_typed_by_the_config(override: str):
    value = with_overrides(override)[override.partition("=")[0]]
    assert (value, type(value)) == (TYPED[override], type(TYPED[override]))


def test_override_changes_its_key_only_and_the_last_one_wins(config: Config):
    assert with_overrides("model.depth=5") == config.flat() | {"model.depth": 5}
    assert with_overrides("seed=1", "model.depth=5", "seed=2")["seed"] == 2


# ---- --set, where it is wrong

SUMMED = "gone: gradients are always added in the tree. Remove it"
WRONG = {
    "seed=one": "--set seed: 'one' given, a whole number wanted",
    "seed=1.5": "--set seed: 1.5 given, a whole number wanted",
    "seed=1.0": "--set seed: 1.0 given, a whole number wanted",
    "seed='1'": "--set seed: '1' given, a whole number wanted",
    "seed=true": "--set seed: True given, a whole number wanted",
    "seed=2026-13-45": "--set seed: '2026-13-45' given, a whole number wanted",
    "seed={1: 2}": "--set seed: '{1: 2}' given, a whole number wanted",
    f"seed={'9' * 5000}": "--set seed: '99999999999999999999",
    f"seed={'[' * 600}": "--set seed: '[[[[[[[[[[[[[[[[[[[[",
    "train.learning_rate=true": "--set train.learning_rate: True given, a number wanted",
    "train.learning_rate='1'": "--set train.learning_rate: '1' given, a number wanted",
    "compute.compile=1": "--set compute.compile: 1 given, true or false wanted",
    "determinism.relax=[1]": "--set determinism.relax.0: 1 given, text wanted",
    "environment.variables=[A B]": "--set environment.variables.0: 'A B' given, text of the form ",
    **{
        f"environment.variables=[ONE, {name}]": f"--set environment.variables: {name} is of {kind}, on which no bit"
        for name, kind in {
            "RANK": "a rank",
            "LOCAL_WORLD_SIZE": "a rank",
            "MASTER_PORT": "a rank",
            "SLURM_JOB_ID": "a job",
            "CUDA_VISIBLE_DEVICES": "a job",
            "AWS_REGION": "credentials or an account",
            "HF_TOKEN": "credentials or an account",
            "client_secret": "credentials or an account",
            "PGPASSWORD": "credentials or an account",
            "API_KEY": "credentials or an account",
            "WANDB_MODE": "how a run is recorded",
            "PYTHONPATH": "where the code lies",
        }.items()
    },
    "seed=": "--set seed: '' given, a whole number wanted",
    "seed=null": "--set seed: None given, a whole number wanted",
    "seed=-1": "--set seed: -1 given, 0 or more wanted",
    f"seed={2**53}": f"--set seed: {2**53} given, a number less than {2**53} wanted",
    "seed": "--set seed: wanted KEY=VALUE, for example --set seed=1",
    "=1": "--set : unknown key; known keys: seed, device, model.name",
    "sede=1": "--set sede: unknown key; did you mean seed?",
    "model.nmae=convnet": "--set model.nmae: unknown key; did you mean model.name?",
    "learning_rate=1": "--set learning_rate: unknown key; did you mean train.learning_rate?",
    "model=convnet": "--set model: unknown key; did you mean model.name?",
    "model.name.x=1": "--set model.name.x: unknown key; did you mean model.name?",
    "model.name=resnet": "--set model.name: 'resnet' given, 'convnet' or 'transformer' wanted",
    "model.width=12": "--set model.width: 12 given, a multiple of 8 wanted",
    "model.width=[8]": "--set model.width: [8] given, a whole number wanted",
    "model.width={a: 8}": "--set model.width: a whole number wanted",
    "model.dropout=1": "--set model.dropout: 1 given, a number less than 1.0 wanted",
    "train.learning_rate=fast": "--set train.learning_rate: 'fast' given, a number wanted",
    "train.learning_rate=.nan": "--set train.learning_rate: nan given, a finite number wanted",
    "train.clip_norm=.inf": "--set train.clip_norm: inf given, a finite number wanted",
    "train.warmup=1.1": "--set train.warmup: 1.1 given, 1.0 or less wanted",
    "data.source=https://me:secret@host/x": "source holds a user, a password or a query, and receipts state it; wanted",
    "data.sha256=abc": "--set data.sha256: 'abc' given, text of the form ^[0-9a-f]{64}$ wanted",
    "parallel.global_batch=65 parallel.micro_batches=8": "65 does not divide into micro_batches=8 equal parts",
    "parallel.shard=some": "--set parallel.shard: 'some' given, 'none', 'optimizer' or 'full' wanted",
    "parallel.shards=4": "--set parallel.shards: renamed parallel.micro_batches",
    "parallel.reduce=ddp": f"--set parallel.reduce: {SUMMED}",
    "compute.precision=float16": "--set compute.precision=float16: it needs a scaler, whose factor follows overflows;",
    "parallel.replicas=0": "--set parallel.replicas: 0 given, a number greater than 0 wanted",
    "parallel.shard=full compute.compile=true": "compute.compile=true works with parallel.shard=none or optimizer",
    "compute.compile=maybe": "--set compute.compile: 'maybe' given, true or false wanted",
    "determinism.relax=all": "--set determinism.relax: 'all' given, a list wanted",
    "determinism.cpu=fast": "--set determinism.cpu: 'fast' given, 'portable' or 'native' wanted",
    "loader.workers=-1": "--set loader.workers: -1 given, 0 or more wanted",
}


@pytest.mark.parametrize("override", WRONG)
def test_wrong_override_is_refused_in_a_line(override: str):
    several = override.split() if override.count("=") > 1 else [override]
    (line,) = refusal_of(PROJECT / "params.yaml", *several)
    assert WRONG[override] in line


def test_all_problems_are_told_at_once():
    lines = refusal_of(PROJECT / "params.yaml", "sede=1", "model.nmae=x", "model.width=3", "train.epochs=0")
    assert len(lines) == 4
    for line, key in zip(lines, ("sede", "model.nmae", "model.width", "train.epochs"), strict=True):
        assert f"{key}: " in line


URIS = [
    "https://me:pa55@host/x",
    "https://t0ken-pa55@host",
    "postgresql://me:p@pa55@host/database",
    "postgresql://me:sla/sh-pa55@host/database",
    "postgresql://host/database?user=me&password=pa55",
    "me:pa55@host",
]


@pytest.mark.parametrize("uri", URIS)
def test_credentials_in_the_tracking_uri_are_refused_without_showing_them(uri: str, edited: Edit):
    remedy = "Set the environment variable MLFLOW_TRACKING_URI instead"
    for key, wanted in (("uri", remedy), ("url", "did you mean tracking.uri?")):
        (line,) = refusal_of(PROJECT / "params.yaml", f"tracking.{key}={uri}")
        assert wanted in line and "pa55" not in line
    (line,) = refusal_of(edited("  uri", f'  uri: "{uri}"'))
    assert "wanted a URI without @ and ?" in line and "pa55" not in line


# ---- the file, where it is wrong

# key, what stands in place of its line, what is told
EDITS = {
    "missing key": ("  width", "", "model.width: missing; add the key"),
    "unknown key": ("seed", "seed: 0\nsede: 1", "sede: unknown key; did you mean seed?"),
    "unknown nested key": ("  depth", "  depth: 1\n  dept: 1", "model.dept: unknown key; did you mean model.depth"),
    "wrong type": ("seed", "seed: [0]", "seed: [0] given, a whole number wanted"),
    "section without keys": ("  workers", "", "loader: None given, a group of keys wanted"),
    "duplicate key": ("seed", "seed: 0\nseed: 1", 'not YAML: while constructing a mapping in "<unicode'),
    "truth for a number": ("  epochs", "  epochs: true", "train.epochs: True given, a whole number wanted"),
    "text for a number": ("seed", 'seed: "1"', "seed: '1' given, a whole number wanted"),
    "key that is a number": ("seed", "seed: 0\n1: 0", "1: a key that is text wanted; put it in quotes"),
    "nested key that is nothing": ("  width", "  null: 8", "model.None: a key that is text wanted"),
    "key that is a list": ("seed", "? [seed]\n: 0", "('seed',): a key that is text wanted"),
    "date that is none": ("seed", "seed: 2026-13-45", "not YAML: month must be in 1..12"),
    "endless number": ("seed", f"seed: {'9' * 5000}", "not YAML: Exceeds the limit"),
    "endless number in base 16": ("seed", f"seed: 0x{'9' * 5000}", "it holds a whole number of more than 4000 bits"),
    "half a character": ("seed", 'seed: "\\ud800"', "it holds half a character"),
    "set": ("seed", "seed: !!set {a}", "seed: {'a'} given, a number, text, a truth or a list wanted"),
    "60 levels": ("seed", f"seed: {'[' * 60}{']' * 60}", "it is nested more than 50 levels deep"),
    "600 levels": ("seed", f"seed: {'[' * 600}{']' * 600}", "not YAML that can be read: it is nested too deep"),
    "list in itself": ("seed", "seed: &a [*a]", "it is nested more than 50 levels deep"),
    "mapping in itself": ("seed", "seed: &a {b: *a}", "it is nested more than 50 levels deep"),
    "tab": ("seed", "\tseed: 0", "not YAML: while scanning for the next token found character"),
    "open bracket": ("seed", "seed: [0", "not YAML: "),
    "two documents": ("seed", "seed: 0\n---\n", "not YAML: expected a single document"),
    "python object": ("seed", "seed: !!python/object:os.system {}", "not YAML: could not determine"),
    "date": (
        "seed",
        "seed: 2026-01-01",
        "seed: datetime.date(2026, 1, 1) given, a number, text, a truth or a list wanted",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_wrong_file_is_refused_with_its_name(edited: Edit, edit: str):
    key, line, wanted = EDITS[edit]
    path = edited(key, line)
    (message,) = refusal_of(path)
    assert message.startswith(f"{path}: ") and wanted in message
    assert refusal_of(path, "model.dropout=0")[0].startswith(f"{path}: ")


@pytest.mark.parametrize("key", sorted(key for key in FORMER if "=" not in key))
def test_key_of_former_times_is_told_in_a_line_of_its_own(path: Path, key: str):
    class Parallel(Section):
        micro_batches: int

    class Train(Section):
        epochs: int

    class Now(Settings):
        parallel: Parallel
        train: Train

    section, _, name = key.partition(".")
    sections = {"parallel": "  micro_batches: 8\n", "train": "  epochs: 8\n"}
    sections[section] += f"  {name}: 8\n"
    path.write_text("sede: 0\n" + "".join(f"{title}:\n{lines}" for title, lines in sections.items()))
    assert f"{path}: {key}: {FORMER[key]} (samebits docs upgrade)" in refusal_of(path, schema=Now)


def test_file_of_former_times_is_refused_in_a_line_for_each_key(path: Path):
    path.write_text(PARAMS.replace("  micro_batches:", "  shards:").replace("  shard:", "  lsb: 8\n  shard:"))
    wanted = [f"{path}: {key}: {FORMER[key]} (samebits docs upgrade)" for key in ("parallel.shards", "parallel.lsb")]
    assert refusal_of(path) == refusal_of(path, "parallel.micro_batches=4") == wanted


@pytest.fixture
def with_reduce(edited: Edit) -> Callable[[str], Path]:
    """A function that writes params.yaml with the key `parallel.reduce` of earlier releases, and returns its path."""
    (shard,) = re.findall(r"^  shard: .*$", PARAMS, re.MULTILINE)
    return lambda value: edited("  shard", f"  reduce: {value}\n{shard}")


def test_reduce_tree_of_an_earlier_release_changes_nothing(with_reduce: Callable[[str], Path], config: Config):
    earlier, now = load(Config, with_reduce("tree")), load(Config, PROJECT / "params.yaml")
    assert earlier == now and (earlier.flat(), earlier.addressed()) == (now.flat(), now.addressed())
    assert earlier.options == now.options and not hasattr(earlier.parallel, "reduce")
    for path in (with_reduce("tree"), PROJECT / "params.yaml"):
        for value in ("tree", '"tree"'):  # a bisect quotes it
            assert load(Config, path, [f"parallel.reduce={value}"]) == now
    assert load(Config, with_reduce("ddp"), ["parallel.reduce=tree"]) == now  # an override replaces the line


@pytest.mark.parametrize("value", ["ddp", "order_free", "[tree]", "true", ""])
def test_another_reduce_of_an_earlier_release_is_an_error(value: str, with_reduce: Callable[[str], Path]):
    path = with_reduce(value)
    assert refusal_of(path) == [f"{path}: parallel.reduce: {SUMMED} (samebits docs upgrade)"]
    line = f"--set parallel.reduce: {SUMMED}"
    assert refusal_of(PROJECT / "params.yaml", f"parallel.reduce={value}") == [line]
    assert refusal_of(with_reduce("tree"), f"parallel.reduce={value}") == [f"{line} (samebits docs upgrade)"]


@pytest.mark.parametrize(("key", "older"), [("read", True), ("test_percent", False)])
def test_missing_key_that_the_library_reads_leads_to_the_page_of_upgrades(edited: Edit, key: str, older: bool):
    (message,) = refusal_of(edited(f"  {key}", ""))
    assert f"data.{key}: missing; add the key (samebits docs config" in message
    assert ("wants: samebits docs upgrade)" in message) is older


def test_list_that_doubles_at_each_line_is_refused(edited: Edit):
    lines = [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    (message,) = refusal_of(edited("seed", "\n".join(["seed: 0", "a0: &a0 [0, 0]", *lines])))
    assert "it has more than 1000000 values" in message


def test_key_that_the_file_lacks_is_told_once_where_an_override_names_it(path: Path):
    path.write_text(PARAMS.replace("  clip_norm:", "  clip_nrom:"))
    missing, unknown = refusal_of(path, "train.clip_norm=2.0")
    assert missing.startswith(f"{path}: train.clip_norm: missing; add the key")
    remedy = "A key of your own needs a line in config.py"
    assert unknown == f"{path}: train.clip_nrom: unknown key; did you mean train.clip_norm? {remedy}"


def test_missing_keys_share_a_line_whatever_is_set_in_them(path: Path):
    path.write_text("seed: 0\n")
    (message,) = refusal_of(path)
    assert message.startswith(f"{path}: device, data, parallel, compute, unhashed and 3 more: missing; add the keys")
    path.write_text("seed: 0\ndevice: auto\n")
    (message,) = refusal_of(path, "train.epochs=2", "model.name=transformer")
    assert ": missing; add the keys" in message


@pytest.mark.parametrize(
    ("section", "typo", "missing"),
    [
        ("compute", "comptue", ["compute: missing"]),
        ("compute", "Compute", ["compute: missing"]),
        ("loader", "lodaer", []),  # all its keys have defaults
        ("loader", "Loader", []),
    ],
)
def test_misspelt_name_is_matched_with_the_right_one(edited: Edit, section: str, typo: str, missing: list[str]):
    wanted = [*missing, f"{typo}: unknown key; did you mean {section}?"]
    for line, message in zip(refusal_of(edited(section, f"{typo}:")), wanted, strict=True):
        assert message in line


CONTENTS = {
    b"": "None seen, a mapping wanted. Mend it, or restore it: git checkout params.yaml",
    b"- 1\n": "[1] seen, a mapping wanted",
    b"text\n": "'text' seen, a mapping wanted",
    b"seed: 0  # caf\xe9\n": "not text in UTF-8: 'utf-8' codec can't decode byte 0xe9",
    b"seed: \0\n": "not YAML: unacceptable character",
}


@pytest.mark.parametrize("content", CONTENTS)
def test_what_is_no_mapping_is_refused(path: Path, content: bytes):
    path.write_bytes(content)
    (line,) = refusal_of(path)
    assert line.startswith(f"{path}: {CONTENTS[content]}")


@pytest.mark.parametrize("ending", ["\r\n", "\n\n"])
def test_line_endings_do_not_matter(path: Path, config: Config, ending: str):
    path.write_bytes(PARAMS.replace("\n", ending).encode())
    assert load(Config, path) == config


def test_missing_file_is_refused(path: Path):
    assert refusal_of(path) == [f"{path}: missing. Run from the project's root, where params.yaml lies."]


# ---- as a user meets it: exit code 2, a line or two per problem, no traceback


# ---- numbers that no receipt could hold


def test_every_number_has_bounds_that_a_receipt_can_hold(config: Config):
    numbers = [key for key, value in config.flat().items() if type(value) in (int, float)]
    assert len(numbers) > 25
    for key in numbers:
        whole = type(config.flat()[key]) is int
        for value in [".inf", ".nan", "1e400", *([str(10**30), str(-(10**30)), str(2**53)] if whole else [])]:
            (line,) = refusal_of(PROJECT / "params.yaml", f"{key}={value}")
            assert line.startswith(f"--set {key}: ") and line.endswith(" wanted"), line


def test_bounds_hold_for_an_owners_keys_however_they_nest():
    class Own(Section):
        """Keys with no bound of their own."""

        counts: tuple[int, ...]
        table: Annotated[dict[str, dict[str, float | int]], NEUTRAL]
        anything: Any

    fine = {"counts": [2**53 - 1], "table": {"a": {"b": -(2**53) + 1}}, "anything": {"x": [1e300]}}
    Own.model_validate(fine)
    for key, value in [
        ("counts", [1, 2**53]),
        ("table", {"a": {"b": -(2**53)}}),
        ("anything", {"x": [1, 2**60]}),
        ("anything", {"x": float("inf")}),
    ]:
        with pytest.raises(ValidationError) as refused:
            Own.model_validate(fine | {key: value})
        assert [error["loc"] for error in refused.value.errors()] == [(key,)]


def test_training_of_more_steps_than_a_checkpoint_can_name_is_refused(config: Config):
    for steps, epochs in ((10**9, None), (None, 2**53 - 1)):
        with pytest.raises(UserError, match=r"run.steps\(\): \d+ steps, at most 999999999 wanted"):
            planned(range(100), config, epochs, steps)
    assert planned(range(100), config, None, 10**9 - 1)[1] == 10**9 - 1
