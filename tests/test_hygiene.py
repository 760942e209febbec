"""The template's own files: what must stand in them, and what must not."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from bake import ROOT
from baked import PROJECT, Bake, run, tracked

# In parts, so that this file does not hold what it forbids.
HOSTS = [".".join(name) for name in [("pypi", "org"), ("pythonhosted", "org"), ("debian", "org"), ("npmjs", "org")]]
MACHINES = [sys.prefix, *("/".join(["", folder, ""]) for folder in ("home", "Users", ".pyenv"))]
WHEELS = ".".join(["download", "pytorch", "org"])
CACHES = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}

LOCK_LINE = r"[a-z0-9._-]+==\S+ (; .+ )?\\|    --hash=sha256:[0-9a-f]{64}( \\)?"
ACTION = r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+"


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Return the text of each tracked file that is text."""
    files = {name: (ROOT / name).read_bytes() for name in tracked()}
    return {name: data.decode() for name, data in files.items() if b"\0" not in data}


def test_one_directory_at_the_top_is_templated() -> None:
    """cookiecutter takes the first it finds."""
    assert {top for top in (name.split("/")[0] for name in tracked()) if "{" in top} == {PROJECT}


def test_git_holds_every_file_of_the_template() -> None:
    """The project's .gitignore works here too, so its dataset must have been added by force."""
    left_out = run("git", "ls-files", "--others", "--ignored", "--exclude-standard", PROJECT, cwd=ROOT).stdout
    assert not [name for name in left_out.splitlines() if not CACHES & set(Path(name).parts)]


def test_version_is_the_newest_of_the_changelog(bake: Bake) -> None:
    """And a generated project says which version it is from."""
    version = json.loads((ROOT / "cookiecutter.json").read_text())["__template_version"]
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
    assert tomllib.loads(bake().text("pyproject.toml"))["tool"]["samebits"]["template"] == version


def test_list_of_the_library_is_current(texts: dict[str, str]) -> None:
    """It says what was released; after a change of the library: python tools/released.py --list."""
    folder = "samebits/"
    files = {name.removeprefix(folder): text for name, text in texts.items() if name.startswith(folder)}
    listed = files.pop("library.sha256").splitlines()
    assert listed == [f"{hashlib.sha256(text.encode()).hexdigest()}  {name}" for name, text in sorted(files.items())]


def test_library_of_a_project_is_the_released_one(bake: Bake) -> None:
    """Whatever it is called; `sha256sum --check` says so, too."""
    project = bake(project="tide-tables", package="tides")
    printed = run("sha256sum", "--check", "--strict", "library.sha256", cwd=project.path / "vendor/samebits").stdout
    assert printed and all(line.endswith(": OK") for line in printed.splitlines())


def test_python_files_hold_no_jinja(texts: dict[str, str]) -> None:
    """They are copied as they are, and linters and editors read them in place."""
    python = {name: text for name, text in texts.items() if name.startswith(PROJECT) and name.endswith(".py")}
    assert python
    assert not [name for name, text in python.items() if re.search(r"cookiecutter|\{%|\{#", text)]


def test_nothing_is_rendered_from_time_or_chance(texts: dict[str, str]) -> None:
    """cookiecutter's extensions would make each generation another one."""
    chance = re.compile(r"\{%-? *now\b|random_ascii_string|uuid4")
    rendered = [name for name in texts if name.startswith((PROJECT, "cookiecutter.json"))]
    assert not [name for name in rendered if chance.search(texts[name]) and not name.endswith(".py")]


@pytest.mark.parametrize("fragment", [*HOSTS, *MACHINES])
def test_no_registry_and_no_machine_is_named(texts: dict[str, str], fragment: str) -> None:
    """Where packages come from is the business of pip's own settings."""
    assert not [name for name, text in texts.items() if fragment in text]


def test_the_index_of_cpu_wheels_stands_where_it_is_used_only(texts: dict[str, str]) -> None:
    """It is the one download host, for torch's CPU build is nowhere else."""
    named = {name: text.count(WHEELS) for name, text in texts.items() if WHEELS in text}
    assert named.keys() <= {f"{PROJECT}/Makefile", f"{PROJECT}/Dockerfile"}
    assert set(named.values()) == {1}


def test_no_file_of_the_template_is_executable() -> None:
    """cookiecutter drops that mark when the template comes as a zip, and the project would be another one."""
    names = [name for name in tracked() if name.startswith(PROJECT)]
    assert not [name for name in names if os.access(ROOT / name, os.X_OK)]


@pytest.mark.parametrize("name", ["README.md", f"{PROJECT}/README.md"])
def test_readme_is_short(name: str, bake: Bake) -> None:
    """What it holds beyond that is a page's: of the library where a user needs it, else of docs."""
    text = bake().text("README.md") if name.startswith(PROJECT) else (ROOT / name).read_text()
    assert 2000 < len(text.encode()) <= 8192


def dead(folder: Path) -> list[str]:
    """The links of Markdown files below a folder that lead nowhere."""
    pages = [path for path in folder.rglob("*.md") if not {"build", ".venv"} & {*path.relative_to(folder).parts}]
    links = [(path, link) for path in pages for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text())]
    inside = [(path, link) for path, link in links if not re.match("https?://|#", link)]
    return [f"{path}: {link}" for path, link in inside if not (path.parent / link.partition("#")[0]).exists()]


def test_links_lead_somewhere(bake: Bake, tmp_path: Path) -> None:
    """In the template, and in a generated project, whose pages travel with the library."""
    assert dead(ROOT) == [] and dead(bake().path) == []
    (tmp_path / "page.md").write_text("[here](page.md#a), [there](https://a.example), [planted](pages.md)")
    assert dead(tmp_path) == [f"{tmp_path}/page.md: pages.md"]


def test_line_ends_are_unix_ones(texts: dict[str, str]) -> None:
    """Every text ends in one, too."""
    assert not [name for name, text in texts.items() if "\r" in text or text[-1:] not in ("", "\n")]


def test_actions_are_pinned_by_commit(texts: dict[str, str]) -> None:
    """A tag can be moved; it stands in a comment."""
    workflows = [text for name, text in texts.items() if "/workflows/" in name]
    used = [action for text in workflows for action in re.findall("uses: (.*)", text)]
    assert used
    assert not [action for action in used if not re.fullmatch(ACTION, action)]


def test_locks_pin_everything_by_hash(texts: dict[str, str]) -> None:
    """No lock says where to download from, not in its header either."""
    locks = {name: text for name, text in texts.items() if re.search(r"(requirements|pins)/.*\.txt", name)}
    locks = {name: text for name, text in locks.items() if not re.fullmatch(r"({% .* -%}\n)+", text)}
    assert Counter(re.search(r"[\w-]+\.txt", name)[0] for name in locks) == {
        **dict.fromkeys(("test.txt", "beside.txt", "boards.txt"), 1),
        **dict.fromkeys(("train-cpu.txt", "torch-cpu.txt", "train-cuda.txt", "dev.txt", "server.txt"), 1),
        **dict.fromkeys(("run.txt", "s3.txt", "ssh.txt"), 1),  # the plugins of DVC
        **dict.fromkeys(("transformers.txt", "pillow.txt"), 1),  # that starters add
    }
    for name, text in locks.items():
        comments = [line for line in text.splitlines() if re.match(" *#", line)]
        pins = [line for line in text.splitlines() if line and line not in comments and not line.startswith("{% ")]
        assert not [line for line in comments if "--" in line or "://" in line], name
        assert not [line for line in pins if not re.fullmatch(LOCK_LINE, line)], name


def test_template_and_project_are_linted_by_the_same_ruff(texts: dict[str, str]) -> None:
    """Or a project could be clean here and not where it is used."""
    locks = texts["requirements/test.txt"], texts[f"{PROJECT}/requirements/dev.txt"]
    here, there = (re.findall("^ruff==(.*) ", lock, re.MULTILINE) for lock in locks)
    assert here and here == there


def collected(*words: str) -> set[str]:
    """The files of tests/hosts whose tests pytest finds; without their conftest.py, which wants root."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}/tests:{ROOT}/tests/template:{ROOT}/build/beside"}
    others = "--ignore=tests/library", "--ignore=tests/template"
    pytest_words = [sys.executable, "-m", "pytest", "--noconftest", "--collect-only", "-q", *others]
    printed = run(*pytest_words, *words, cwd=ROOT, env=env).stdout
    return set(re.findall(r"^tests/hosts/\w+\.py", printed, re.MULTILINE))


@pytest.mark.long
def test_ci_runs_the_tests_of_hosts() -> None:
    """They lie in tests, and pytest drops an argument that lies in another one."""
    lines = run("make", "--dry-run", "test-all", cwd=ROOT).stdout.splitlines()
    (words,) = [line.partition("--no-loadscope-reorder")[2].split() for line in lines if "-m pytest" in line]
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "hosts").glob("test_*.py")}
    assert len(files) > 5 and collected(*words) == files
    assert not collected(*(word for word in words if word != "--keep-duplicates"))  # the planted fault


HANGING = "import time\ndef test_hangs(): time.sleep(2)"


def test_hanging_test_shows_where_it_waits(tmp_path: Path) -> None:
    """After two minutes: here, and in the tests of a generated project."""
    for settings in (ROOT / "pyproject.toml", ROOT / PROJECT / "pyproject.toml"):
        assert re.search("^faulthandler_timeout = 120\\b", settings.read_text(), re.MULTILINE), settings
    (tmp_path / "test_hanging.py").write_text(HANGING)
    words = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-o", "faulthandler_timeout=0.5"]
    done = run(*words, f"--rootdir={tmp_path}", tmp_path, cwd=tmp_path, stderr=subprocess.PIPE)
    assert done.stderr.startswith("Timeout") and 'test_hanging.py", line 2 in test_hangs' in done.stderr
