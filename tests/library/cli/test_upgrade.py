"""Another release of the library is taken where it proves itself on the owner's model, and put back where not."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import released
from click.testing import Result
from clone import command, commit, copied, edit, git, project_in, verb
from support import OURS, PACKAGE

from samebits.address.release import files
from samebits.analysis import upgrade as upgrade_module
from samebits.analysis.upgrade import CHECKOUT, Release
from samebits.core import ARITHMETIC
from samebits.core.errors import RunError

MAKEFILE = "lock:\n\t@echo '# locked' >> requirements/run.txt\nenvironment:\n\t@echo environment\n"
ONLY = "--only", "once more"
WITHOUT = shutil.ignore_patterns("__pycache__")


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a model of its own, everything committed, and a finished run of it."""
    names = "params.yaml", "results.lock", "dvc.yaml", "dvc.lock", "pyproject.toml", ".gitignore"
    folder = tmp_path_factory.mktemp("owner") / "project"
    copied(folder, ("src", "vendor", "requirements", ".dvc", "data/raw"), names)
    edit(folder / "src" / PACKAGE / "model.py", ("nn.ReLU()", "nn.GELU()"))
    (folder / "Makefile").write_text(MAKEFILE)
    commit(folder)
    for words in (("prepare",), ("train", "--set", "train.epochs=1", "--set", "tracking.enabled=false")):
        done = command(folder, *words)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def project(owner: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(owner, tmp_path / "project", symlinks=True, ignore=WITHOUT))


@pytest.fixture
def refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What the verb says, in this process, where it refuses and changes nothing."""
    monkeypatch.chdir(project)

    def refused(*words: str | Path) -> str:
        before = contents(project)
        done: Result = verb("upgrade", *words, project=project_in(project))
        assert done.exit_code == 2 and contents(project) == before
        return done.output

    return refused


def release(folder: Path, **appended: str) -> Path:
    """A checkout of another release: lines are appended to these modules of the library, and its list is renewed."""
    library = Path(shutil.copytree(OURS.library, folder / "samebits", ignore=WITHOUT))
    edit(library / "__init__.py", ('__version__ = "', '__version__ = "9.'))
    for name, text in appended.items():
        with (library / f"{name.replace('__', '/')}.py").open("a") as module:
            module.write(text)
    released.list_library(library)
    return folder


def contents(project: Path) -> dict[str, bytes]:
    """All that upgrade may replace."""
    paths = [project / "pyproject.toml", *(project / "vendor").rglob("*"), *(project / "requirements").rglob("*")]
    return {str(path): path.read_bytes() for path in paths if path.is_file() and "__pycache__" not in path.parts}


def upgraded(project: Path, source: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return command(project, "upgrade", source, *words)


def stale(project: Path) -> bool:
    """Whether the project as it stands would make another run than the one in artifacts/."""
    words = "--set", "train.epochs=1", "--set", "tracking.enabled=false"
    done = command(project, "check", *words)
    assert "Traceback" not in done.stderr, done.stderr
    return "STALE" in done.stdout


@pytest.mark.long
def test_release_with_the_same_core_leaves_results_valid(project: Path, tmp_path: Path):
    new = release(tmp_path / "new", finish="# a remark\n", core__step="# a comment\n")
    assert not stale(project)
    done = upgraded(project, new, *ONLY)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"library: {OURS.template} -> 9.{OURS.template}"
    same = f"the content address stays the same (core: arithmetic {ARITHMETIC})"
    assert f"{same}: results stay valid, unfinished runs resume" in lines
    assert "EQUAL: 2 of 2 trainings" in lines and lines[-1].startswith("upgraded; commit it: git add ")
    assert files(project / "vendor" / "samebits") == files(new / "samebits")
    assert project_in(project).template == f"9.{OURS.template}" and not (project / "build" / "upgrade").exists()
    assert not stale(project)


@pytest.mark.long
def test_release_with_another_core_makes_results_stale(project: Path, tmp_path: Path):
    new = release(tmp_path / "new", core__step="# a remark\n")
    (new / "samebits" / "core" / "ARITHMETIC").write_text(f"{ARITHMETIC + 1}\n")
    released.list_library(new / "samebits")
    done = upgraded(project, new, *ONLY)
    assert done.returncode == 0, done.stdout + done.stderr
    change = f"core: arithmetic {ARITHMETIC} -> arithmetic {ARITHMETIC + 1}"
    assert (
        f"the content address changes ({change}). Earlier results" in done.stdout
        and "EQUAL: 2 of 2 trainings" in done.stdout
    )
    assert stale(project)


PLANTED = "\n\nimport os\n\n_derive = derive\n\n\ndef derive(*given):\n    return _derive(*given) ^ os.getpid()\n"


@pytest.mark.long
def test_release_whose_bits_differ_is_put_back(project: Path, tmp_path: Path):
    before = contents(project)
    done = upgraded(project, release(tmp_path / "new", core__seeds=PLANTED), *ONLY)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERS: 1 of 2 trainings" in done.stdout and "put back as before: vendor/samebits" in done.stdout
    assert done.stderr.splitlines()[-1] == "not upgraded: samebits verify ended with exit code 1"
    assert contents(project) == before and not (project / "build" / "upgrade").exists()


def test_release_that_does_not_start_is_put_back_with_its_locks(project: Path, tmp_path: Path):
    new = release(tmp_path / "new", front="import nowhere_at_all\n")
    (new / CHECKOUT).mkdir()
    stated = 'dependencies = ["torch>=2.12,<3"]\noptional-dependencies = {report = ["newcomer>=1"]}\n'
    (new / "pyproject.toml").write_text(f"[project]\n{stated}")
    before = contents(project)
    done = upgraded(project, new)
    assert done.returncode == 1 and contents(project) == before
    assert "pyproject.toml: torch>=2.11,<3 -> torch>=2.12,<3" in done.stdout
    assert "pyproject.toml: nothing -> newcomer>=1" in done.stdout
    assert "the environment: make setup" in done.stdout  # the locks were written anew, and are put back
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("not upgraded: ")
    assert "No module named 'nowhere_at_all'" in done.stderr
    assert command(project, "address").returncode == 0


def test_key_that_the_new_release_alone_knows_is_no_obstacle(project: Path, tmp_path: Path):
    """The owner has written it into params.yaml already, which the library of before refuses."""
    edit(project / "params.yaml", ("data:", "novel: 1\ndata:"))
    done = upgraded(project, release(tmp_path / "new", front="import nowhere_at_all\n"))
    assert "so only core is compared: params.yaml: novel: unknown key" in done.stdout, done.stdout + done.stderr
    assert done.stderr == "not upgraded: ModuleNotFoundError: No module named 'nowhere_at_all'\n"
    before, whole = {"preimage": {"core": {"arithmetic": 1}}}, {"config": {"a": 1}, "data": {"files": []}}
    after = {"preimage": {**whole, "core": {"arithmetic": 1}}}
    line = "core stays the same (arithmetic 1); samebits check says whether results stay valid"
    assert upgrade_module._compared(before, after) == line
    other = {"preimage": {**whole, "core": {"arithmetic": 2}}}
    line = "the content address changes (core: arithmetic 1 -> arithmetic 2). Earlier results and unfinished runs are"
    assert upgrade_module._compared(before, other).startswith(line)
    more = {"preimage": {**after["preimage"], "config": {"a": 1, "b": 2}}}
    assert upgrade_module._compared(after, more).startswith("the content address changes (config.b: absent -> 2). Ear")


def test_ranges_of_the_release_replace_those_of_before_and_the_owners_stay(project: Path):
    path, lines = project / "pyproject.toml", list[str]()
    edit(
        path,
        ('    "torch>=2.11,<3",', '    "timm>=1",\n    "torch>=2.11,<3",'),
        ('"pandas>=2,<4"', '"pandas[aws]>=2,<4"'),
    )
    ranges = (("dependencies", "torch>=2.12,<3"), ("dependencies", "new>=1"), ("run", "pandas>=3,<4"), ("run", "late"))
    assert upgrade_module._merged(project_in(project), Release(project, "9.0", ranges), lines.append)
    text = path.read_text()
    for line in ('"timm>=1",', '"torch>=2.12,<3",', '"new>=1",', '"pandas[aws]>=3,<4",', '"late",', 'template = "9.0"'):
        assert text.count(line) == 1, line
    assert "# mlflow.pyfunc" in text and len(lines[0].splitlines()) == 4
    # the control: nothing is left to do
    assert not upgrade_module._merged(project_in(project), Release(project, "9.0", ranges), lines.append)
    assert path.read_text() == text


def test_list_in_a_form_that_cannot_be_changed_is_named(project: Path):
    edit(project / "pyproject.toml", ('    "torch>=2.11,<3",', "    'torch>=2.11,<3',"))
    with pytest.raises(
        RunError, match=r"^pyproject\.toml: torch>=2\.11,<3 cannot be changed here; write torch>=3 there"
    ):
        upgrade_module._merged(project_in(project), Release(project, "9", (("dependencies", "torch>=3"),)), print)


def test_no_library_there_is_refused_in_a_line(refused: Callable[..., str], tmp_path: Path):
    assert refused(tmp_path / "nowhere").startswith(f"{tmp_path / 'nowhere'}: no samebits seen, a checkout of the ")


def test_commit_of_a_checkout_is_taken(refused: Callable[..., str], project: Path, tmp_path: Path):
    """By its tag, whatever has changed there since. One that is not there is named, as is one without a library."""
    new = release(tmp_path / "new", front="import nowhere_at_all\n")
    commit(new)
    git(new, "tag", "v9")
    shutil.rmtree(new / "samebits")
    (new / "later.txt").touch()
    commit(new, "without")
    assert upgraded(project, Path(f"{new}@v9")).stderr.startswith("not upgraded: ModuleNotFoundError: No module named")
    assert refused(f"{new}@v8").startswith(f"{new}@v8: git archive --format=tar --end-of-options v8^{{tree}}: fatal: ")
    assert refused(f"{new}@--output=there").startswith(f"{new}@--output=there: git archive ")
    assert refused(f"{new}@main").startswith(f"{new}@main: ")
    assert refused(f"{new}@HEAD").startswith(f"{new}@HEAD: no samebits seen, a checkout of the ")
    assert refused(f"{tmp_path}/none@v9").startswith(f"{tmp_path}/none@v9: no folder {tmp_path}/none; a commit or tag ")


def test_own_library_is_refused(refused: Callable[..., str]):
    assert refused(".").startswith(".: this project's own library, that of another release wanted: make upgrade FROM=")


def test_uncommitted_changes_are_refused(refused: Callable[..., str], project: Path, tmp_path: Path):
    (project / "requirements" / "own.txt").write_text("own\n")
    edit(project / "vendor" / "samebits" / "finish.py", ("\n", "\n\n"))
    said = refused(release(tmp_path / "new"))
    assert said.startswith("vendor/samebits/finish.py, requirements/own.txt: in no commit as it is now")


def test_modified_library_is_refused_unless_that_is_given_up(
    refused: Callable[..., str], project: Path, tmp_path: Path
):
    edit(project / "vendor" / "samebits" / "finish.py", ("\n", "\n\n"))
    commit(project, "modified")
    new = release(tmp_path / "new", front="import nowhere_at_all\n")
    assert refused(new).startswith("vendor/samebits: modified since its release: finish.py. To give that up")
    assert "put back as before" in upgraded(project, new, "--force").stdout


def test_same_library_is_nothing_to_do(project: Path, tmp_path: Path):
    shutil.copytree(project / "vendor" / "samebits", tmp_path / "same" / "samebits")
    done = upgraded(project, tmp_path / "same")
    assert done.returncode == 0 and done.stdout.endswith("already: nothing to do\n")


def test_interrupted_upgrade_is_put_back(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*given: object) -> int:
        raise KeyboardInterrupt

    new, before = release(tmp_path / "new"), contents(project)
    monkeypatch.setattr(upgrade_module, "_compared", interrupt)
    monkeypatch.chdir(project)
    done = verb("upgrade", new, project=project_in(project))
    assert done.exit_code == 130 and "put back as before" in done.output
    assert contents(project) == before
