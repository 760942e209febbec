"""What enters the content address makes DVC train again, and until then `samebits check` says STALE."""

import gzip
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import released
from bake import PACKAGE, VENV, in_venv
from baked import Bake, BakedProject, Environment, run, weights

pytestmark = pytest.mark.long  # a pipeline is trained
CODE, RAW = f"src/{PACKAGE}", "data/raw/digits.csv.gz"
LIBRARY, ARITHMETIC = "vendor/samebits", "core/ARITHMETIC"
NOT_COMPILED = {"PYTHONDONTWRITEBYTECODE": "1"}  # Python tells two edits within a second by their size alone


@dataclass(frozen=True)
class Pipeline:
    """A generated project that an owner has made theirs, trained through DVC and committed."""

    path: Path
    env: Environment
    refusals: tuple[str, ...]  # what `dvc repro` said before dvc.yaml listed all that its stages use
    requested: (
        "subprocess.Popen[str]"  # a process that has loaded DVC and answers each line with the stages that changed
    )

    def dvc(self, *arguments: str) -> str:
        return run("dvc", *arguments, cwd=self.path, env=self.env).stdout

    def changed(self) -> list[str]:
        """The stages that DVC would run again, without the evaluation."""
        assert self.requested.stdin and self.requested.stdout
        print(file=self.requested.stdin, flush=True)
        return [name for name in json.loads(self.requested.stdout.readline()) if name in ("prepare", "train")]

    def check(self) -> tuple[int, str]:
        """The exit code of `samebits check`, and what it says."""
        done = run("python", "-m", "samebits", "check", cwd=self.path, env=self.env, check=False)
        return done.returncode, done.stdout

    def edit(self, name: str, old: str, new: str) -> None:
        edit(self.path / name, old, new)

    def write(self, name: str, text: str = "# a remark\n") -> None:
        """Append to a file, or make it."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        with (self.path / name).open("a") as file:
            file.write(text)

    def commit(self, message: str) -> None:
        run("git", "add", "--all", cwd=self.path, env=self.env)
        run("git", "commit", "--quiet", "--message", message, cwd=self.path, env=self.env)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put the project's files back afterwards."""
        raw = (self.path / RAW).read_bytes()
        yield
        (self.path / RAW).write_bytes(raw)
        run("git", "checkout", "--quiet", ".", cwd=self.path, env=self.env)
        run("git", "clean", "-fdxq", "src", "vendor", "requirements", cwd=self.path, env=self.env)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} holds no {old!r}"
    path.write_text(text.replace(old, new, 1))


def repro(baked: BakedProject, env: Environment, check: bool) -> str:
    """Train through DVC; the evaluation has nothing to do with it."""
    return run("dvc", "repro", "train", cwd=baked.path, env=env, check=check).stdout


ANSWERING = """
import json, sys
from dvc.repo import Repo
for _ in sys.stdin:
    with Repo(".") as repo:
        print(json.dumps(sorted(repo.status())), flush=True)
"""


@pytest.fixture(scope="module")
def pipeline(bake: Bake) -> Iterator[Pipeline]:
    """One with a module that data.py imports, a key and a section of the owner's; a training takes a few seconds."""
    baked = bake()
    identity = {f"GIT_{who}_{what}": "tester" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {**in_venv(baked.path, baked.env), **NOT_COMPILED, **identity}
    del env["GIT_AUTHOR_DATE"], env["GIT_COMMITTER_DATE"]  # in a form that DVC does not read
    (baked.path / CODE / "scale.py").write_text("SCALE = 16\n")
    imported, epochs = "from .config import Config\n", "    epochs: PositiveInt\n"
    edit(baked.path / CODE / "data.py", imported, imported + "from .scale import SCALE\n")
    edit(baked.path / CODE / "config.py", epochs, epochs + "    patience: PositiveInt\n")
    section = 'class Owner(sb.Section):\n    """Own."""\n\n    level: PositiveInt\n\n\nclass Config(sb.Settings):'
    edit(baked.path / CODE / "config.py", "class Config(sb.Settings):", section)
    edit(baked.path / CODE / "config.py", "    model: Model\n", "    model: Model\n    owner: Owner\n")
    edit(baked.path / "params.yaml", "\n  epochs: 30 ", "\n  patience: 1\n  epochs: 1 ")
    edit(baked.path / "params.yaml", "\nparallel:", "\nowner:\n  level: 1\n\nparallel:")
    edit(baked.path / "params.yaml", "  enabled: true", "  enabled: false")
    edit(baked.path / "params.yaml", "  width: 32", "  width: 8")
    prepare = repro(baked, env, check=False)
    edit(baked.path / "dvc.yaml", f"      - {CODE}/data.py\n", f"      - {CODE}/data.py\n      - {CODE}/scale.py\n")
    train = repro(baked, env, check=False)
    edit(baked.path / "dvc.yaml", "keys: &keys [seed,", "keys: &keys [owner, seed,")
    run("dvc", "repro", cwd=baked.path, env=env)  # the evaluation, too, or that of the shipped weights would be left
    command, pipe = [VENV / "bin" / "python", "-c", ANSWERING], subprocess.PIPE
    with subprocess.Popen(command, cwd=baked.path, env=env, stdin=pipe, stdout=pipe, text=True) as requested:
        pipeline = Pipeline(baked.path, env, (prepare, train), requested)
        pipeline.commit("trained")
        yield pipeline


def test_stage_that_uses_what_dvc_yaml_lacks_is_refused_by_name(pipeline: Pipeline) -> None:
    prepare, train = pipeline.refusals
    assert f"dvc.yaml: deps of stage prepare lack {CODE}/scale.py: a change there would not run it again." in prepare
    assert "dvc.yaml: params of stage train lack owner: a change there would not run it again." in train
    assert "Traceback" not in prepare.partition("torchrun")[0]


# ---- what makes DVC train again, and a run stale


def another_sympy(pipeline: Pipeline) -> None:
    """For both devices: torch needs it."""
    for device in ("cpu", "cuda"):
        pipeline.edit(f"requirements/train-{device}.txt", "\nsympy==1.14", "\nsympy==1.15")


def another_dataset(pipeline: Pipeline) -> None:
    """One sample less, and params.yaml says so."""
    raw = pipeline.path / RAW
    before, content = raw.read_bytes(), gzip.decompress(raw.read_bytes())
    raw.write_bytes(gzip.compress(content[: content.rindex(b"\n", 0, -1) + 1], mtime=0))
    old, new = (hashlib.sha256(data).hexdigest() for data in (before, raw.read_bytes()))
    pipeline.edit("params.yaml", old, new)


def another_arithmetic(pipeline: Pipeline) -> None:
    """A release with another integer."""
    (pipeline.path / LIBRARY / ARITHMETIC).write_text("2\n")
    released.list_library(pipeline.path / LIBRARY)


Change = Callable[[Pipeline], None]
BOTH, TRAIN = ["prepare", "train"], ["train"]

# field that `samebits check` names -> the change, and which stages run again before the evaluation
CHANGES: dict[str, tuple[Change, list[str]]] = {
    "code.losses.py": (lambda p: p.write(f"{CODE}/losses.py"), TRAIN),
    "code.blocks/wide.py": (lambda p: p.write(f"{CODE}/blocks/wide.py"), TRAIN),
    "code.constants.json": (lambda p: p.write(f"{CODE}/constants.json", "{}\n"), TRAIN),
    "code.gone.pyc": (lambda p: p.write(f"{CODE}/gone.pyc"), TRAIN),
    "code.scale.py": (lambda p: p.write(f"{CODE}/scale.py"), BOTH),
    "core": (another_arithmetic, BOTH),
    "config.train.patience": (lambda p: p.edit("params.yaml", "patience: 1", "patience: 2"), TRAIN),
    "config.owner.level": (lambda p: p.edit("params.yaml", "level: 1", "level: 2"), TRAIN),
    "config.data.test_percent": (lambda p: p.edit("params.yaml", "percent: 20", "percent: 30"), BOTH),
    "config.train.shift": (lambda p: p.edit("params.yaml", "shift: 1", "shift: 2"), TRAIN),
    "config.data.sha256": (another_dataset, BOTH),
    "determinism.cpu": (lambda p: p.edit("params.yaml", "cpu: portable", "cpu: native"), BOTH),
    "seed": (lambda p: p.edit("params.yaml", "seed: 0", "seed: 1"), TRAIN),
    "lock.sympy": (another_sympy, TRAIN),
}


@pytest.mark.parametrize("field", CHANGES)
def test_change_makes_dvc_train_again_and_the_run_stale(pipeline: Pipeline, field: str) -> None:
    change, stages = CHANGES[field]
    with pipeline.undone():
        change(pipeline)
        code, said = pipeline.check()
        assert code == 1 and said.startswith("STALE: artifacts is not a run of the project as it stands now")
        assert f"({field}: " in said and said.count(" then, ") == 1
        assert pipeline.changed() == stages


def test_edited_core_is_stale_and_dvc_runs_its_stages_again(pipeline: Pipeline, tmp_path: Path) -> None:
    """DVC sees the edit once dvc.yaml lists the folder; until then no stage runs."""
    remedy = f"in dvc.yaml, replace {LIBRARY}/{ARITHMETIC} with {LIBRARY}/core"
    artifacts = pipeline.path / "artifacts"
    shutil.copytree(artifacts, tmp_path / "artifacts")
    with pipeline.undone():
        pipeline.write(f"{LIBRARY}/core/step.py")
        code, printed = pipeline.check()
        assert code == 1 and printed.startswith("STALE: ") and "(core.step.py: " in printed and remedy in printed
        assert pipeline.changed() == []
        make = run("python", "-m", "samebits", "pipeline", cwd=pipeline.path, env=pipeline.env, check=False)
        assert (make.returncode, make.stdout) == (
            2,
            f"{LIBRARY}/core is edited, and DVC does not see it: {remedy}\n",
        )
        forced = run(
            *("dvc", "repro", "--force", "--single-item", "train"), cwd=pipeline.path, env=pipeline.env, check=False
        )
        assert f"dvc.yaml: deps of stage train lack {LIBRARY}/core: a change there" in forced.stdout
        text = (pipeline.path / "dvc.yaml").read_text()
        (pipeline.path / "dvc.yaml").write_text(text.replace(f"{LIBRARY}/{ARITHMETIC}", f"{LIBRARY}/core"))
        assert pipeline.changed() == BOTH
        code, printed = pipeline.check()
        assert code == 1 and "DVC does not see it" not in printed
        pipeline.dvc("repro", "train")
        assert pipeline.changed() == []
        code, printed = pipeline.check()
        assert "STALE: artifacts is not" not in printed
    shutil.rmtree(artifacts)
    shutil.copytree(tmp_path / "artifacts", artifacts)


def test_changed_wording_of_core_leaves_the_run_valid(pipeline: Pipeline) -> None:
    """A comment, a message and a docstring, as a release brings them."""
    with pipeline.undone():
        pipeline.write(f"{LIBRARY}/core/step.py")
        pipeline.edit(f"{LIBRARY}/core/errors.py", "free some space", "free some disk space")
        pipeline.edit(f"{LIBRARY}/core/tree.py", '"""', '"""Changed. ')
        released.list_library(pipeline.path / LIBRARY)
        assert pipeline.changed() == [] and pipeline.check()[0] == 0
        done = run("dvc", "status", cwd=pipeline.path, env=pipeline.env)
        assert done.stdout == "Data and pipelines are up to date.\n"


AROUND_CORE = "run.py", "cli.py", "record/opening.py", "trace/trace.py", "new.py"
AROUND_CORE += "analysis/results.py", "analysis/new.py"


def test_what_changes_no_run_is_no_change(pipeline: Pipeline) -> None:
    with pipeline.undone():
        pipeline.edit("params.yaml", "every: 50", "every: 7")
        pipeline.edit("params.yaml", "experiment: ", "experiment: another-")
        for name in ("__pycache__/gone.cpython-311.pyc", "model.py~", ".model.py.swp"):
            pipeline.write(f"{CODE}/{name}")
        for name in ("README.md", "requirements/notes.md", "requirements/another.txt", "src/notes.md"):
            pipeline.write(name)
        for name in AROUND_CORE:
            pipeline.write(f"vendor/samebits/{name}")
        for lock, name in (("dev", "ruff"), ("dev", "pytest"), ("run", "dvc"), ("run", "mlflow-skinny")):
            pipeline.edit(f"requirements/{lock}.txt", f"\n{name}==", f"\n{name}==99.")
        (pipeline.path / CODE / ".#model.py").symlink_to("an.editors.lock")
        assert pipeline.changed() == []
        code, said = pipeline.check()
        assert code == 0 and "STALE" not in said


# ---- DVC and git bring back single files of a run


def test_weights_without_the_record_of_their_run_are_never_passed_off(pipeline: Pipeline) -> None:
    """Another run, then the way back to the first: the same code and keys, but the record is the other run's."""
    first = weights(pipeline.path / "artifacts")
    pipeline.edit("params.yaml", "learning_rate: 0.004", "learning_rate: 0.003")
    pipeline.dvc("repro")
    other = weights(pipeline.path / "artifacts")
    code, said = pipeline.check()
    assert other != first and "STALE" not in said and "FOREIGN" not in said

    run("git", "checkout", "--quiet", ".", cwd=pipeline.path, env=pipeline.env)
    said = pipeline.dvc("repro", "--dry")
    assert "Running stage 'train'" in said and "Stage 'train' is cached" not in said  # though DVC has those weights
    code, said = pipeline.check()
    assert code == 1 and "FOREIGN: metrics.json in artifacts" in said
    assert "STALE" in said and "(config.train.learning_rate: 0.003 then, 0.004 now)" in said

    pipeline.dvc("checkout")
    assert weights(pipeline.path / "artifacts") == first and pipeline.changed() == []
    code, said = pipeline.check()
    assert code == 1 and "FOREIGN: model.safetensors, metrics.json in artifacts" in said and "dvc repro --force" in said

    pipeline.dvc("repro", "--force", "--single-item", "train")
    assert weights(pipeline.path / "artifacts") == first and pipeline.check()[0] == 0
    assert run("git", "status", "--porcelain", cwd=pipeline.path, env=pipeline.env).stdout == ""


def test_word_of_dvc_is_not_taken(pipeline: Pipeline) -> None:
    """`dvc commit` says that the outputs are of whatever lies there."""
    with pipeline.undone():
        pipeline.write(f"{CODE}/model.py")
        pipeline.dvc("commit", "--force")
        assert pipeline.changed() == []
        code, said = pipeline.check()
        assert code == 1 and said.startswith("STALE") and "(code.model.py: " in said


# ---- the address and DVC agree on which files count

COUNTED = {
    f"{CODE}/{name}": counted
    for name, counted in {
        "losses.py": True,
        "blocks/deep/wide.py": True,
        "words.json": True,
        "kernel.so": True,
        "gone.pyc": True,
        "README.md": True,
        "core": True,
        "a b.py": True,
        "é.py": True,
        "#a.py#": True,
        "a~b.py": True,
        "analysis": True,
        "notes.egg-info/PKG-INFO": True,
        "__pycache__.py": True,
        "blocks/samebits/analysis/a.py": True,
        "blocks/vendor/samebits/cli.py": True,
        "model.py~": False,
        "blocks/~": False,
        ".model.py.swp": False,
        ".hidden/a.py": False,
        "blocks/.ipynb_checkpoints/a.py": False,
        "__pycache__/gone.cpython-311.pyc": False,
        "blocks/__pycache__/gone.cpython-311.pyc": False,
    }.items()
} | {
    "vendor/samebits/core/new.py": True,
    "vendor/samebits/core/deep/words.json": True,
    "vendor/samebits/core/gone.py~": False,
    "vendor/samebits/core/.gone.py.swp": False,
    "vendor/samebits/core/__pycache__/gone.cpython-311.pyc": False,
    "vendor/samebits/new.py": False,
    "vendor/samebits/cli.pyx": False,
    "vendor/samebits/library.sha256.bak": False,
    "vendor/samebits/analysis/deep/words.json": False,
    "requirements/another.txt": False,
    "requirements/notes.md": False,
    "requirements/deep/another.txt": False,
}

SEEN = f"""
import json
from dvc.repo import Repo
from dvc_data.hashfile.build import build
from pathlib import Path
from samebits.address.address import code, locks
from samebits.base.project import Project

project = Project.at(Path.cwd())
(stage,) = [stage for stage in Repo(".").index.stages if stage.addressing == "train"]
dvc = set()
for dep in stage.deps:
    if dep.def_path.startswith("requirements/"):
        dvc.add(dep.def_path)
    elif dep.def_path in ("{CODE}", "vendor/samebits/core"):
        tree = build(dep.cache, dep.fs_path, dep.fs, dep.hash_name, ignore=dep.dvcignore, dry_run=True)[2]
        dvc |= {{"/".join((dep.def_path, *parts)) for parts, _, _ in tree}}
ours = {{project.shown(name) for name in code(project)}} | {{f"requirements/{{name}}" for name in locks(project)}}
print(json.dumps([sorted(dvc), sorted(ours)]))
"""


def test_file_enters_the_address_if_and_only_if_dvc_hashes_it(pipeline: Pipeline) -> None:
    """Core counts as a whole once it is edited."""
    with pipeline.undone():
        text = (pipeline.path / "dvc.yaml").read_text()
        (pipeline.path / "dvc.yaml").write_text(text.replace(f"{LIBRARY}/{ARITHMETIC}", f"{LIBRARY}/core"))
        for name in COUNTED:
            pipeline.write(name)
        target = shutil.copy(pipeline.path / "README.md", pipeline.path / "artifacts" / "linked.py")
        (pipeline.path / CODE / "linked.py").symlink_to(target)
        dvc, ours = json.loads(run("python", "-c", SEEN, cwd=pipeline.path, env=pipeline.env).stdout)
        assert dvc == ours
        assert {name: name in ours for name in COUNTED} == COUNTED
        known = {f"{CODE}/linked.py", f"{CODE}/train.py", "vendor/samebits/core/step.py", "requirements/train-cuda.txt"}
        assert known < set(ours)
        assert not {f"{LIBRARY}/{name}" for name in ("library.sha256", "core_releases.txt", "run.py")} & {*ours}
