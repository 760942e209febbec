"""The content address: every ingredient that asks for other numbers changes it, and nothing else does."""

import hashlib
import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import released
from project.config import Config
from ruamel.yaml import YAML
from support import OURS, PACKAGE, PROJECT, python

from samebits.address import address, manifest, pins
from samebits.address.address import ContentAddress, code, content_address, core_files, core_stated, digest, locks
from samebits.base.project import Project
from samebits.base.text import flatten
from samebits.config.params import load
from samebits.core import ARITHMETIC, arithmetic
from samebits.core.errors import UserError

# Legal values for every key of params.yaml, as --set takes them: the first that is not the key's own stands
# for a change. A new key needs a row here: in the first table if a change of it may change bits, in the
# second if it is marked NEUTRAL or ENVIRONMENT.
ADDRESSED = {
    "seed": ("1", "2"),
    "model.name": ("transformer", "convnet"),
    "model.width": ("64", "8"),
    "model.depth": ("2", "4"),
    "model.dropout": ("0.2", "0.3"),
    "data.read": ("both",),
    "data.sha256": ("0" * 64,),
    "data.test_percent": ("30", "10"),
    "train.epochs": ("31", "32"),
    "train.shift": ("2", "3"),
    "train.learning_rate": ("0.005", "0.006"),
    "train.weight_decay": ("0.02", "0.03"),
    "train.warmup": ("0.1", "0.2"),
    "train.decay": ("0.5", "0.4"),
    "train.clip_norm": ("2.0", "3.0"),
    "train.evaluate_batch": ("128", "64"),
    "parallel.global_batch": ("1280", "2560"),
    "parallel.micro_batches": ("1", "2"),
    "compute.precision": ("bfloat16", "float32"),
    "compute.compile": ("true", "false"),
    "compute.nonfinite": ("skip", "stop"),
    "unhashed.modules": ("[one]", "[another]"),
    "unhashed.files": ("[one]", "[another]"),
    "start.weights": ("0" * 64,),
    "start.state": ("0" * 64,),
}
OUTSIDE = {
    "device": ("cpu", "cuda"),
    "environment.variables": ("[ONE]", "[ANOTHER]"),
    "data.raw": ("elsewhere.csv.gz",),
    "data.check": ("every_byte",),
    "data.prepared": ("elsewhere",),
    "train.evaluate_every": ("7", "8"),
    "determinism.cpu": ("native", "portable"),
    "determinism.tf32": ("true", "false"),
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
    "trace.profile": ("7:8", "8:9"),
    "record.finished": ("refuse", "replace"),
    "record.progress": ("true", "false"),
    "data.license": ("CC BY 4.0", "CC0"),
    "data.source": ("here", "there"),
    "prove.when": ("early", "never"),
    "prove.segments": ("2", "4"),
    "prove.steps": ("7", "8"),
    "receipt.key": ("~/.ssh/id_ed25519",),
    "loader.workers": ("2", "3"),
    "tracking.enabled": ("false", "true"),
    "tracking.uri": ("http://127.0.0.1:5000", ""),
    "tracking.experiment": ("another",),
    "tracking.parent": ("0" * 32,),
    "tracking.model": ("false", "true"),
    "tracking.system_seconds": ("10", "0"),
    "tracking.wait_seconds": ("1", "2"),
    "start.run": ("runs/one",),
    "start.receipt": ("0" * 64,),
    "verify.shorten": ("[train.epochs=3]", "[]"),
    "verify.vary": ("[checkpoint.every=7]", "[]"),
}


def address_of(*overrides: str, data: dict[str, Any] | None = None) -> ContentAddress:
    config = load(Config, PROJECT / "params.yaml", overrides)
    return content_address(OURS, config, data or {"files": []})


def changed(key: str) -> str:
    """An override that gives the key another value."""
    now = load(Config, PROJECT / "params.yaml").flat()
    for value in (ADDRESSED | OUTSIDE)[key]:
        if load(Config, PROJECT / "params.yaml", [f"{key}={value}"]).flat()[key] != now[key]:
            return f"{key}={value}"
    raise AssertionError(f"{key}: no other value in its row")


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """The names of what was changed or added."""
    return {name for name in after if before.get(name) != after[name]}


def test_every_key_has_a_row_in_one_table(config: Config):
    assert sorted([*ADDRESSED, *OUTSIDE]) == sorted(config.flat())


@pytest.fixture(scope="module")
def before() -> ContentAddress:
    """The address of params.yaml as it stands."""
    return address_of()


@pytest.mark.parametrize("key", ADDRESSED | OUTSIDE)
def test_key_changes_the_address_where_it_asks_for_other_numbers(key: str, before: ContentAddress, config: Config):
    other = load(Config, PROJECT / "params.yaml", [changed(key)]).flat()
    assert differing(config.flat(), other) == {key}  # an override changes its key only
    after = address_of(changed(key))
    part = {"seed": "seed", "start.weights": "start", "start.state": "start"}.get(key, "config")
    assert differing(before.parts, after.parts) == ({part} if key in ADDRESSED else set())
    assert (after != before) == (after.digest != before.digest) == (key in ADDRESSED)


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
    assert marked - sections == set(OUTSIDE) & standing(yaml_of(PROJECT / "params.yaml"))


# ---- neutral keys of the library have defaults


def yaml_of(path: Path) -> dict[str, Any]:
    return dict(YAML(typ="safe").load(path.read_text()))


def standing(tree: dict[str, Any]) -> set[str]:
    """The keys that stand in a file."""
    return set(flatten(tree))


OWNERS = {"train.evaluate_every", "data.raw"}  # neutral keys without a default: the owner's, and where the data lie
MUST_STAND = {"device", "determinism.cpu", "determinism.relax", *OWNERS}
NEUTRALS = sorted(OUTSIDE.keys() - MUST_STAND)  # and a key of the environment


def without(tree: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A config without these keys, and without sections that hold nothing more."""
    kept: dict[str, Any] = {}
    for key, value in flatten(tree).items():
        if key not in keys:
            *sections, name = key.split(".")
            inner = kept
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
    return kept


def written(folder: Path, tree: dict[str, Any]) -> Path:
    (folder / "params.yaml").write_text(json.dumps(tree))  # JSON is YAML
    return folder / "params.yaml"


def test_params_without_any_neutral_key_has_the_same_address(tmp_path: Path):
    """So that a release with a new one breaks no project."""
    config = load(Config, written(tmp_path, without(yaml_of(PROJECT / "params.yaml"), NEUTRALS)))
    assert content_address(OURS, config, {"files": []}) == address_of()
    assert config.data.prepared == "data/prepared" and config.verify.shorten == ()


@pytest.mark.parametrize(
    "key", sorted({"seed", "device", "data.sha256", "parallel.micro_batches", "compute.compile", *OWNERS})
)
def test_key_without_a_default_must_stand_in_the_file(key: str, tmp_path: Path):
    path = written(tmp_path, without(yaml_of(PROJECT / "params.yaml"), {key}))
    with pytest.raises(UserError, match=f"{key}: missing; add the key"):
        load(Config, path)


@pytest.mark.parametrize("key", NEUTRALS)
def test_neutral_key_that_the_file_lacks_is_overridden_all_the_same(key: str, tmp_path: Path):
    path, value = written(tmp_path, without(yaml_of(PROJECT / "params.yaml"), NEUTRALS)), changed(key)
    assert load(Config, path, [value]).flat()[key] == load(Config, PROJECT / "params.yaml", [value]).flat()[key]


def test_page_has_the_keys_that_the_file_lacks_with_their_defaults(config: Config):
    rows = re.findall(r"(?m)^\| `([a-z_]+\.[a-z0-9_]+)` \| `(.*?)` \| ", (OURS.library / "docs/config.md").read_text())
    lacking = config.flat().keys() - standing(yaml_of(PROJECT / "params.yaml"))
    message = {key: YAML(typ="safe").load(default) for key, default in rows if key in config.flat()}
    assert lacking and message == {key: config.flat()[key] for key in lacking}


# ---- data


def test_data_changes_its_own_part_only():
    entry = {"path": "a.npy", "size": 1, "sha256": "0" * 64}
    before, after = address_of(data={"files": [entry]}), address_of(data={"files": [entry | {"size": 2}]})
    assert differing(before.parts, after.parts) == {"data"}


# ---- code


def copy_to(folder: Path) -> Project:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(OURS.library, folder / "vendor" / "samebits", ignore=ignored)
    return Project(Path(shutil.copytree(PROJECT / "src" / PACKAGE, folder / "src" / "renamed", ignore=ignored)))


@pytest.fixture
def renamed(tmp_path: Path) -> Project:
    """A copy of the package under another name, in a project of its own."""
    return copy_to(tmp_path)


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Such a copy, in which each test undoes its edit."""
    return copy_to(tmp_path_factory.mktemp("edited"))


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    """The digests of the package as it stands."""
    return code(OURS)


LIBRARY = sorted(path.relative_to(OURS.library).as_posix() for path in OURS.library.rglob("*.py"))
CORE = [name for name in LIBRARY if address.in_core(name)]
OWN = "train.py", "model.py", "data.py"
NEW = "losses.py", "losses.pyc", "words.txt", "table.csv", "kernels/sum.cu"
NEW += "samebits/core/new.py", "samebits/core/a.cu"
LEFT_OUT = (
    # What no run imports.
    *("samebits/analysis/new.py", "samebits/docs/resume.md", "samebits/library.sha256", "samebits/core_releases.txt"),
    *("model.py~", ".model.py.swp", ".hidden/model.py", "__pycache__/gone.pyc"),  # what editors and python leave behind
)


def test_core_is_what_decides_bits():
    """And no more than half of the library; an edit of each module on its own side is told."""
    assert {"core/step.py", "core/accumulate.py", "core/seeds.py", "core/flags.py"} <= set(CORE)
    assert not {"run.py", "tracking/tracking.py", "address/address.py", "checkpoint/checkpoint.py"} & set(CORE)
    assert 20 < len(CORE) < len(LIBRARY) / 2


@pytest.mark.parametrize("name", [*OWN, *NEW, *LEFT_OUT, *(f"samebits/{name}" for name in LIBRARY)])
def test_line_in_a_file_changes_the_code_where_the_file_decides_bits(edited: Project, ours: dict[str, str], name: str):
    """A file of any kind, new ones too; of the library those in core alone. The package's own name changes nothing."""
    path = edited.file(name)
    path.parent.mkdir(exist_ok=True)
    was = path.read_bytes() if path.is_file() else None
    path.write_bytes((was or b"") + b"# a remark\n")
    after = code(edited)
    path.unlink() if was is None else path.write_bytes(was)
    decides = {name} if name in (*OWN, *NEW) or name.removeprefix("samebits/") in CORE else set()
    assert differing(ours, after) == decides and (digest(ours) != digest(after)) == bool(decides)
    in_core = {f"samebits/core/{each}" for each in differing(core_files(ours), core_files(after))}
    assert in_core == {each for each in decides if each.startswith("samebits/")}


def test_files_of_core_are_named_from_its_folder(renamed: Project):
    """So the library may be moved."""
    assert {f"core/{name}" for name in core_files(code(renamed))} == {*CORE, "core/ARITHMETIC"}


# ---- core: its arithmetic, not its wording


def stated(project: Project) -> dict[str, Any]:
    """What the address states of core."""
    return core_stated(project, code(project))


def test_released_core_is_stated_by_its_arithmetic(before: ContentAddress):
    assert before.preimage["core"] == stated(OURS) == {"arithmetic": ARITHMETIC}
    assert before.record()["core_files"] == core_files(before.code)


def test_changed_wording_of_a_released_core_changes_no_address(renamed: Project):
    """Only once the release command has listed the new digest."""
    path = renamed.library / "core" / "errors.py"
    path.write_text(path.read_text().replace("free some space", "free some disk space") + "# a comment\n")
    assert stated(renamed) == core_files(code(renamed))
    released.list_library(renamed.library)
    assert stated(renamed) == {"arithmetic": ARITHMETIC}


def test_another_integer_is_another_address(renamed: Project):
    (renamed.library / "core" / "ARITHMETIC").write_text("2\n")
    assert stated(renamed) == core_files(code(renamed))
    released.list_library(renamed.library)
    assert stated(renamed) == {"arithmetic": 2}


UNREADABLE = "{digest}\n", "{digest}  one\n", "{digest}  1  1\n"


@pytest.mark.parametrize("line", ["", "no list\n", f"{'0' * 64}  1\n", *UNREADABLE])
def test_core_that_no_row_lists_is_stated_by_its_files(renamed: Project, line: str):
    files = core_files(code(renamed))
    path = renamed.library / "core_releases.txt"
    path.write_text(line.replace("{digest}", arithmetic.digest(files)))
    assert stated(renamed) == files
    path.unlink()
    assert stated(renamed) == files


def preimage(core: dict[str, Any], **config: Any) -> dict[str, Any]:
    """An address record that states this core."""
    return {"preimage": {"config": config, "code": {}, "core": core, "data": {"files": []}, "lock": {}, "seed": 0}}


RELEASED = preimage({"arithmetic": 1}) | {"core_files": {"ARITHMETIC": "a", "step.py": "b", "tree.py": "c"}}
UNLISTED = preimage(RELEASED["core_files"])
EDITED = preimage({"ARITHMETIC": "a", "step.py": "b", "tree.py": "d"})
TREE = {"parallel": {"reduce": "tree"}}
EARLIER = preimage({"step.py": "b", "tree.py": "c"}, **TREE)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (RELEASED, RELEASED | {"core_files": {"ARITHMETIC": "a", "step.py": "wording"}}, {}),
        (RELEASED, preimage({"arithmetic": 2}), {"core": ("arithmetic 1", "arithmetic 2")}),
        (RELEASED, EDITED, {"core.tree.py": ("c", "d")}),
        (EDITED, preimage({"ARITHMETIC": "a", "step.py": "b"}), {"core.tree.py": ("d", None)}),
        (RELEASED, UNLISTED, {"core": ("arithmetic 1", arithmetic.description(UNLISTED["preimage"]["core"]))}),
        (EARLIER, preimage({"step.py": "x", "tree.py": "c"}, **TREE), {"core.step.py": ("b", "x")}),
        (EARLIER, RELEASED, {"core": (arithmetic.description(EARLIER["preimage"]["core"]), "arithmetic 1")}),
    ],
)  # fmt: skip
def test_differing_cores_are_named(one: dict[str, Any], other: dict[str, Any], expected: dict[str, tuple[str, str]]):
    found = address.address_differences(one, other)
    assert {each.field: (each.one, each.other) for each in found} == expected


def test_difference_that_no_named_field_has_is_found():
    """Two manifests of the same files."""
    other = {"preimage": RELEASED["preimage"] | {"data": {"files": [], "requested": {"shift": 1}}}}
    assert [each.field for each in address.address_differences(RELEASED, other)] == ["data.requested.shift"]


def test_gradients_of_an_earlier_release_that_were_added_otherwise_are_named():
    stock = preimage({"step.py": "b"}, parallel={"reduce": "ddp"})
    stock["preimage"]["world_size"] = 2
    names = [each.field for each in address.address_differences(stock, RELEASED)]
    assert names == ["config.parallel.reduce", "core", "world_size"]


# ---- files of the package and of core


def test_folder_that_is_a_link_is_refused(renamed: Project, tmp_path: Path):
    """Python imports from it, and DVC does not look inside."""
    (tmp_path / "shared").mkdir()
    (renamed.package / "shared").symlink_to(tmp_path / "shared")
    with pytest.raises(UserError, match="shared: a link to a folder, whose changes DVC would not see"):
        code(renamed)


@pytest.mark.parametrize("name", ["vendor/samebits", "vendor/samebits/core", "vendor", "src/renamed", "src"])
def test_package_or_library_behind_a_link_is_refused(renamed: Project, tmp_path: Path, name: str):
    place, inside = renamed.root / name, {"vendor": "vendor/samebits", "src": "src/renamed"}
    shutil.move(place, tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{inside.get(name, name)}: a link to a folder"):
        code(renamed)


def test_folder_of_the_package_that_is_called_as_the_library_is_refused(renamed: Project):
    """Its files would have the names of the library's."""
    (renamed.package / "samebits").mkdir()
    (renamed.package / "samebits" / "a.py").touch()
    with pytest.raises(UserError, match=r"renamed/samebits/a\.py: samebits/ is the library's name"):
        code(renamed)


def test_link_that_leads_nowhere_or_in_a_circle_is_no_file(renamed: Project):
    before = code(renamed)
    (renamed.package / "nowhere.py").symlink_to("gone.py")
    (renamed.package / "circle.py").symlink_to("circle.py")
    assert code(renamed) == before


def test_file_that_is_a_link_counts_with_its_content(renamed: Project, tmp_path: Path):
    (tmp_path / "losses.py").write_text("one")
    (renamed.package / "losses.py").symlink_to(tmp_path / "losses.py")
    before = code(renamed)
    (tmp_path / "losses.py").write_text("two")
    assert code(renamed)["losses.py"] != before["losses.py"]


@pytest.mark.long
def test_no_run_imports_what_is_left_out():
    loaded = f"import sys, samebits.front, {PACKAGE}.train; print(*sorted(sys.modules))"
    names = python("-c", loaded).stdout.split()
    inside = {name.removeprefix("samebits.") for name in names if name.startswith("samebits.")}
    assert {"run", "core.accumulate"} <= inside
    outside = [entry.removesuffix(".py").rstrip("/").replace("/", ".") for entry in address.OUTSIDE_THE_RUN]
    assert not [name for name in inside if name.startswith(tuple(outside))]


# ---- locks


@pytest.fixture
def locked(tmp_path: Path) -> Project:
    """A project with copies of the locks."""
    shutil.copytree(PROJECT / "requirements", tmp_path / "requirements")
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    return Project(tmp_path / "src" / "package")


SOURCES = {name: OURS.file(name).read_bytes() for name in address.addressed(OURS) if name.endswith(".py")}


def pinned(project: Project, **added: str) -> dict[str, str]:
    """The pins of a project with this code, and with more files."""
    return pins.pins(project.root, SOURCES | {f"{name}.py": text.encode() for name, text in added.items()})


def bump(project: Project, package: str, *locks: str) -> None:
    """Pin the next version of a package in these locks, or in all that have it."""
    paths = [project.root / "requirements" / f"{name}.txt" for name in locks]
    found = 0
    for path in paths or (project.root / "requirements").glob("*.txt"):
        text, count = re.subn(rf"(?m)^({package}==[^ +]*)", r"\1.1", path.read_text())
        path.write_text(text)
        found += count
    assert found


def test_pins_are_those_of_what_the_code_imports_and_all_that_this_needs():
    held = pinned(OURS)
    assert {"torch", "numpy", "safetensors", "pydantic", "pydantic_core", "sympy", "mpmath"} <= held.keys()
    assert not {"rich", "click", "ruff", "dvc", "mlflow_skinny", "pytest", "scipy", "triton"} & held.keys()
    assert not [name for name in held if name.startswith("nvidia")] and "+" not in held["torch"]


DECISIVE = "torch", "numpy", "sympy", "pydantic-core"
IDLE = "ruff", "pytest", "dvc", "mlflow", "mlflow-skinny", "mypy", "rich", "nvidia-nccl-cu13"


@pytest.mark.parametrize("package", [*DECISIVE, *IDLE])
def test_bump_changes_the_pin_of_what_decides_bits_and_nothing_else(locked: Project, package: str):
    before = pinned(locked)
    bump(locked, package)
    assert differing(before, pinned(locked)) == ({package.replace("-", "_")} if package in DECISIVE else set())


def test_locks_of_cpu_and_cuda_give_one_address(locked: Project):
    """Each alone has more than both; what only torch's CUDA build brings is no part."""
    before, folder = pinned(locked), locked.root / "requirements"
    of_cuda = (folder / "train-cuda.txt").read_text()
    (folder / "train-cuda.txt").unlink()
    assert pinned(locked) == before
    (folder / "train-cuda.txt").write_text(of_cuda)
    for name in ("train-cpu.txt", "torch-cpu.txt"):
        (folder / name).unlink()
    assert pinned(locked).items() >= before.items()


@pytest.mark.parametrize("name", ["train-cpu.txt", "torch-cpu.txt"])
def test_device_with_half_of_its_locks_is_refused(locked: Project, name: str):
    (locked.root / "requirements" / name).unlink()
    with pytest.raises(UserError, match=f"requirements/{name}: missing, and the other lock of this device is there"):
        pinned(locked)


def test_locks_with_two_versions_of_what_decides_bits_are_refused(locked: Project):
    bump(locked, "numpy", "train-cuda")
    two = r"numpy: 2\.4\.6 for cpu, 2\.4\.6\.1 for cuda in requirements/train-.*make lock"
    with pytest.raises(UserError, match=two):
        pinned(locked)


@pytest.mark.parametrize(
    "line",
    [
        "import scipy.stats, scipy.special",
        "from scipy import stats",
        "def f():\n    import scipy",
        "try:\n    with x: pass\nexcept X:\n    match x:\n        case 1:\n            import scipy",
        "try:\n    pass\nfinally:\n    while x: pass\n    else:\n        import scipy",
        "importlib.import_module('scipy.stats')",
    ],
)
def test_package_that_another_lock_has_is_no_part_of_a_training(locked: Project, line: str):
    """Else a bump of what reports need could change bits."""
    with pytest.raises(UserError) as refused:
        pinned(locked, losses=line)
    said = "scipy: imported by losses.py, but pinned in requirements/run.txt only, which is not what a training loads. "
    assert str(refused.value) == said + "Add it to dependencies in pyproject.toml and run make lock"
    assert pins.pins(locked.root, SOURCES | {"losses.py": line.encode()}, ("scipy",)) == pinned(locked)


def test_package_that_the_code_imports_enters_with_what_it_needs(locked: Project):
    added = pinned(locked, losses="from rich import print").keys() - pinned(locked).keys()
    assert added == {"rich", "markdown_it_py", "mdurl", "pygments"}
    assert pinned(locked, losses="from ruamel.yaml import YAML").keys() - pinned(locked).keys() == {"ruamel_yaml"}


def test_package_that_pyproject_asks_for_enters_though_nobody_imports_it(locked: Project):
    """It may be loaded by name, or by another package that works in another way where it is there."""
    before = pinned(locked)
    path = locked.root / "pyproject.toml"
    path.write_text(path.read_text().replace('"torch>', '"Mdurl", "torch>'))
    assert pinned(locked).keys() - before.keys() == {"mdurl"}


@pytest.mark.parametrize("line", ["import nobody.has_this", "from . import model", "import json, os.path", "broken ("])
def test_import_of_no_package_changes_nothing(locked: Project, line: str):
    assert pinned(locked, losses=line) == pinned(locked)


def test_extras_bring_what_they_ask_for():
    lines = ["a[x,y]>=1; python_version < '3'", "b ; extra == 'Fast'", "c; (sys_platform == 'x') and extra == 'slow'"]
    assert dict(pins._needed(lines, {"fast"})) == {"a": {"x", "y"}, "b": set()}


def test_locked_package_that_is_not_installed_is_refused(locked: Project):
    for name in ("train-cpu.txt", "train-cuda.txt"):
        with (locked.root / "requirements" / name).open("a") as lock:
            lock.write("not-here==1.0\n")
    path = locked.root / "pyproject.toml"
    path.write_text(path.read_text().replace('"torch>', '"not-here", "torch>'))
    with pytest.raises(UserError, match="not_here: locked in requirements, but not installed here: make setup"):
        pinned(locked)
    assert pins.pins(locked.root, SOURCES, ("all",))["not_here"] == "1.0"


def test_comments_in_a_lock_change_nothing(locked: Project):
    before = locks(locked)
    for name in before:
        path = locked.root / "requirements" / name
        path.write_text("# a heading\n\n" + path.read_text().replace("# via", "# via another-name\n    # via"))
    assert locks(locked) == before == locks(OURS)


@pytest.mark.parametrize(("old", "new"), [("numpy==2", "numpy==1"), ("--hash=sha256:", "--hash=sha256:0")])
def test_a_pin_or_a_hash_changes_what_a_stage_depends_on(locked: Project, old: str, new: str):
    was, path = locks(locked), locked.root / "requirements" / "train-cpu.txt"
    path.write_text(path.read_text().replace(old, new))
    assert locks(locked) != was


def test_project_without_locks_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no lock seen, torch-cpu"):
        pins.pins(tmp_path, {})


# ---- the digest


def test_digest_is_that_of_canonical_json():
    value = {"b": [1.0, 1e-7, -0.0, 1e21], "a": {"ü": None, "€": True}, "": "\u2028\n"}
    text = '{"":"\u2028\\n","a":{"ü":null,"€":true},"b":[1,1e-7,0,1e+21]}'
    assert digest(value) == hashlib.sha256(text.encode()).hexdigest()
    assert digest(value) == digest(dict(reversed(value.items())))


def test_value_that_json_cannot_hold_exactly_is_refused():
    """No config reaches this: its numbers have bounds."""
    with pytest.raises(UserError, match="canonical JSON cannot hold a value exactly"):
        digest({"value": 2**60})


def test_address_json_proves_itself():
    record = json.loads(json.dumps(address_of().record()))
    assert digest(record["preimage"]) == record["address"]
    assert {name: digest(part) for name, part in record["preimage"].items()} == record["parts"]
    assert set(record["parts"]) == {"config", "code", "core", "data", "lock", "seed"}


def test_renamed_project_has_the_same_address(renamed: Project, prepared: Path, config: Config):
    elsewhere = renamed.root
    shutil.copytree(PROJECT / "requirements", elsewhere / "requirements")
    params = (PROJECT / "params.yaml").read_text()
    (elsewhere / "params.yaml").write_text(
        params.replace(f'"{config.tracking.experiment}"', '"another"').replace("# ", "# remark: ")
    )
    settings = (PROJECT / "pyproject.toml").read_text().replace(f'package = "{PACKAGE}"', 'package = "renamed"')
    (elsewhere / "pyproject.toml").write_text(settings)
    words = "-m", "samebits", "address", "--set", f"data.prepared={prepared}"
    done = python(*words, cwd=elsewhere, env={"PYTHONPATH": f"{elsewhere}/src:{elsewhere}/vendor"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == content_address(OURS, config, manifest.read(prepared)).record()
