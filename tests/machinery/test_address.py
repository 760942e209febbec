"""The content address: every ingredient that asks for other numbers changes it, and nothing else does."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE, PROJECT, python
from project import PROJECT as OURS
from project.config import Config
from project.repro.address import address, manifest
from project.repro.address.address import ContentAddress, code, content_address, digest, locks
from project.repro.base.project import Project
from project.repro.config.params import load
from project.repro.core.errors import Refused

# Legal values for every key of params.yaml, as --set takes them: the first that is not the key's own stands
# for a change. A new key needs a row here: in the first table if a change of it may change bits, in the
# second if it is marked NEUTRAL or ENVIRONMENT.
ADDRESSED = {
    "seed": ("1", "2"),
    "model.name": ("transformer", "convnet"),
    "model.width": ("64", "8"),
    "model.depth": ("2", "4"),
    "model.dropout": ("0.2", "0.3"),
    "data.sha256": ("0" * 64,),
    "data.test_percent": ("30", "10"),
    "train.epochs": ("31", "32"),
    "train.shift": ("2", "3"),
    "train.learning_rate": ("0.005", "0.006"),
    "train.weight_decay": ("0.02", "0.03"),
    "train.warmup": ("0.1", "0.2"),
    "train.decay": ("0.5", "0.4"),
    "train.clip_norm": ("2.0", "3.0"),
    "train.nonfinite": ("skip", "stop"),
    "train.evaluate_batch": ("128", "64"),
    "parallel.global_batch": ("1280", "2560"),
    "parallel.micro_batches": ("1", "2"),
    "parallel.reduce": ("ddp", "tree"),
    "compute.precision": ("bfloat16", "float32"),
    "compute.compile": ("true", "false"),
    "unhashed.modules": ("[one]", "[another]"),
    "unhashed.files": ("[one]", "[another]"),
}
OUTSIDE = {
    "device": ("cpu", "cuda"),
    "data.raw": ("elsewhere.csv.gz",),
    "data.check": ("every_byte",),
    "data.prepared": ("elsewhere",),
    "train.evaluate_every": ("7", "8"),
    "determinism.cpu": ("native", "portable"),
    "determinism.relax": ("[all]", "[]"),
    "checkpoint.every": ("7", "8"),
    "checkpoint.keep": ("7", "8"),
    "checkpoint.on_error": ("continue", "stop"),
    "integrity.compare_every": ("7", "8"),
    "integrity.recompute_every": ("7", "8"),
    "parallel.shard": ("full", "optimizer"),
    "parallel.replicas": ("2", "4"),
    "parallel.timeout_seconds": ("7", "8"),
    "trace.level": ("tensor", "off"),
    "trace.values": ("7", "8"),
    "record.finished": ("refuse", "replace"),
    "receipt.key": ("~/.ssh/id_ed25519",),
    "loader.workers": ("2", "3"),
    "tracking.enabled": ("false", "true"),
    "tracking.uri": ("http://127.0.0.1:5000", ""),
    "tracking.experiment": ("another",),
    "tracking.model": ("false", "true"),
    "tracking.system_seconds": ("10", "0"),
    "tracking.wait_seconds": ("1", "2"),
    "verify.shorten": ("[train.epochs=3]", "[]"),
    "verify.vary": ("[checkpoint.every=7]", "[]"),
}


def address_of(*overrides: str, world_size: int = 1, data: dict[str, Any] | None = None) -> ContentAddress:
    config = load(Config, PROJECT / "params.yaml", overrides)
    return content_address(OURS, config, data or {"files": []}, world_size)


def changed(key: str) -> str:
    """An override that gives the key another value."""
    now = load(Config, PROJECT / "params.yaml").flat()
    for value in (ADDRESSED | OUTSIDE)[key]:
        if load(Config, PROJECT / "params.yaml", [f"{key}={value}"]).flat()[key] != now[key]:
            return f"{key}={value}"
    raise AssertionError(f"{key}: no other value in its row")


def test_every_key_has_a_row_in_one_table(config: Config):
    assert sorted([*ADDRESSED, *OUTSIDE]) == sorted(config.flat())


def test_an_override_changes_its_key_only(config: Config):
    for key in ADDRESSED | OUTSIDE:
        other = load(Config, PROJECT / "params.yaml", [changed(key)])
        assert [name for name, now in other.flat().items() if now != config.flat()[name]] == [key]


@pytest.mark.parametrize("key", ADDRESSED)
def test_key_that_asks_for_other_numbers_changes_the_address(key: str):
    before, after = address_of(), address_of(changed(key))
    part = "seed" if key == "seed" else "config"
    assert after.digest != before.digest
    assert {name for name in before.parts if before.parts[name] != after.parts[name]} == {part}


@pytest.mark.parametrize("key", OUTSIDE)
def test_neutral_or_environment_key_does_not_change_the_address(key: str):
    assert address_of(changed(key)) == address_of()


def test_params_yaml_marks_the_keys_that_stay_outside():
    marked, section = set(), ""
    for line in (PROJECT / "params.yaml").read_text().splitlines():
        key, colon, _ = line.partition(":")
        if not colon or key.startswith("#"):
            continue
        if not key.startswith(" "):
            section, whole = key, False
        name = key if key == section else f"{section}.{key.strip()}"
        if "# [neutral]" in line or "# [environment]" in line:
            whole = key == section
            marked.add(name)
        elif whole:
            marked.add(name)
    sections = {key.partition(".")[0] for key in OUTSIDE if "." in key}
    assert marked - sections == set(OUTSIDE)


# ---- world size


def test_world_size_enters_with_stock_ddp_only():
    assert address_of(world_size=1) == address_of(world_size=4)
    stock = [address_of("parallel.reduce=ddp", world_size=size) for size in (1, 2, 4)]
    assert len({each.digest for each in stock}) == 3
    assert "world_size" in stock[0].parts and "world_size" not in address_of().parts


# ---- data


def test_data_changes_its_own_part_only():
    entry = {"path": "a.npy", "size": 1, "sha256": "0" * 64}
    before, after = address_of(data={"files": [entry]}), address_of(data={"files": [entry | {"size": 2}]})
    assert {name for name in before.parts if before.parts[name] != after.parts[name]} == {"data"}


# ---- code


@pytest.fixture
def renamed(tmp_path: Path) -> Project:
    """A copy of the package under another name, in a project of its own."""
    source = PROJECT / "src" / PACKAGE
    ignored = shutil.ignore_patterns("__pycache__")
    return Project(Path(shutil.copytree(source, tmp_path / "src" / "renamed", ignore=ignored)))


def test_name_of_the_package_does_not_change_the_code(renamed: Project):
    assert code(renamed) == code(OURS)


@pytest.mark.parametrize("name", ["train.py", "model.py", "data.py", "repro/core/accumulate.py", "repro/core/step.py"])
def test_a_comment_in_the_code_of_a_run_changes_the_address(renamed: Project, name: str):
    with (renamed.package / name).open("a") as file:
        file.write("# a remark\n")
    before, after = code(OURS), code(renamed)
    assert {each for each in before if before[each] != after[each]} == {name}
    assert digest(before) != digest(after)


NEW = "losses.py", "losses.pyc", "repro/cli.pyc", "words.txt", "table.csv", "kernels/sum.cu", "repro/new.py"


@pytest.mark.parametrize("name", NEW)
def test_a_new_file_of_any_kind_changes_the_code(renamed: Project, name: str):
    (renamed.package / name).parent.mkdir(exist_ok=True)
    (renamed.package / name).write_text("")
    assert set(code(renamed)) - set(code(OURS)) == {name}


@pytest.mark.parametrize(
    "name", ["repro/analysis/results.py", "repro/cli.py", "repro/analysis/new.py", "repro/machinery.sha256"]
)
def test_what_no_run_imports_does_not_change_the_code(renamed: Project, name: str):
    with (renamed.package / name).open("a") as file:
        file.write("# a remark\n")
    assert code(renamed) == code(OURS)


@pytest.mark.parametrize("name", ["model.py~", ".model.py.swp", ".hidden/model.py", "__pycache__/gone.pyc"])
def test_what_editors_and_python_leave_behind_does_not_change_the_code(renamed: Project, name: str):
    (renamed.package / name).parent.mkdir(exist_ok=True)
    (renamed.package / name).write_text("# a remark\n")
    assert code(renamed) == code(OURS)


def test_folder_that_is_a_link_is_refused(renamed: Project, tmp_path: Path):
    """Python imports from it, and DVC does not look inside."""
    (tmp_path / "shared").mkdir()
    (renamed.package / "shared").symlink_to(tmp_path / "shared")
    with pytest.raises(Refused, match="shared: a link to a folder, whose changes DVC would not see"):
        code(renamed)


def test_file_that_is_a_link_counts_with_its_content(renamed: Project, tmp_path: Path):
    (tmp_path / "losses.py").write_text("one")
    (renamed.package / "losses.py").symlink_to(tmp_path / "losses.py")
    before = code(renamed)
    (tmp_path / "losses.py").write_text("two")
    assert code(renamed)["losses.py"] != before["losses.py"]


def test_no_run_imports_what_is_left_out():
    loaded = f"import sys, {PACKAGE}.train; print(*sorted(sys.modules))"
    names = python("-c", loaded).stdout.split()
    inside = {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")}
    assert {"train", "data", "model", "repro.run", "repro.core.accumulate"} <= inside
    outside = [entry.removesuffix(".py").rstrip("/").replace("/", ".") for entry in address.OUTSIDE_THE_RUN]
    assert not [name for name in inside if name.startswith(tuple(outside))]


# ---- locks


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A copy of a lock in a project of its own, `locked`."""
    (tmp_path / "requirements").mkdir()
    return Path(shutil.copy(PROJECT / "requirements" / "cpu.txt", tmp_path / "requirements"))


def locked(lock: Path) -> Project:
    """The project of a lock."""
    return Project(lock.parents[1] / "src" / "package")


def changes_the_lock(lock: Path, old: str, new: str) -> bool:
    text, before = lock.read_text(), locks(locked(lock))
    assert old in text
    lock.write_text(text.replace(old, new))
    return locks(locked(lock)) != before


def test_comments_in_a_lock_change_nothing(lock: Path):
    assert not changes_the_lock(lock, "# via", "# via another-name\n    # via")
    lock.write_text("# a heading\n\n" + lock.read_text())
    assert locks(locked(lock))["cpu.txt"] == locks(OURS)["cpu.txt"]
    lock.write_text("rich==1\n")
    assert not changes_the_lock(lock, "rich==1", "rich==1  # via another-name")


@pytest.mark.parametrize(("old", "new"), [("numpy==2", "numpy==1"), ("--hash=sha256:", "--hash=sha256:0")])
def test_a_pin_or_a_hash_changes_the_lock(lock: Path, old: str, new: str):
    assert changes_the_lock(lock, old, new)


def test_project_without_locks_is_refused(tmp_path: Path):
    with pytest.raises(Refused, match="no lock seen, requirements/"):
        locks(Project(tmp_path / "src" / "package"))


# ---- the digest


def test_digest_is_that_of_canonical_json():
    value = {"b": [1.0, 1e-7, -0.0, 1e21], "a": {"ü": None, "€": True}, "": "\u2028\n"}
    text = '{"":"\u2028\\n","a":{"ü":null,"€":true},"b":[1,1e-7,0,1e+21]}'
    assert digest(value) == hashlib.sha256(text.encode()).hexdigest()
    assert digest(value) == digest(dict(reversed(value.items())))


def test_value_that_json_cannot_hold_exactly_is_refused():
    """No config reaches this: its numbers have bounds."""
    with pytest.raises(Refused, match="canonical JSON cannot hold a value exactly"):
        digest({"value": 2**60})


def test_address_json_proves_itself():
    record = address_of().record()
    again = json.loads(json.dumps(record))
    assert digest(again["preimage"]) == record["address"]
    assert {name: digest(part) for name, part in again["preimage"].items()} == record["parts"]
    assert set(record["parts"]) == {"config", "code", "data", "lock", "seed"}


def test_renamed_project_has_the_same_address(renamed: Project, prepared: Path, config: Config):
    elsewhere = renamed.root
    shutil.copytree(PROJECT / "requirements", elsewhere / "requirements")
    params = (PROJECT / "params.yaml").read_text()
    (elsewhere / "params.yaml").write_text(
        params.replace(f'"{config.tracking.experiment}"', '"another"').replace("# ", "# remark: ")
    )
    done = python(
        *("-m", renamed.name, "address", "--set", f"data.prepared={prepared}"),
        cwd=elsewhere,
        env={"PYTHONPATH": str(renamed.root / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == content_address(OURS, config, manifest.read(prepared), 1).record()
