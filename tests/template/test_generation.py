"""A project is generated whole, whatever the answers."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable
from configparser import RawConfigParser
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from bake import ROOT, STARTERS, TOOLS
from baked import PROJECT, Answers, Bake, BakedProject, run, tracked
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml

# title of the text -> answer
LICENSES = {
    "MIT": "MIT License",
    "Apache-2.0": "Apache License",
    "BSD-3-Clause": "BSD 3-Clause License",
    "none": "",
}
CI = {"github": ".github/workflows/ci.yml", "gitlab": ".gitlab-ci.yml", "none": ""}

# What must arrive as it is, wherever it lands; "touch executed" shows whether anything runs it.
AWKWARD = [
    "# hash: \\north\\u0041 #1 \\",
    "- dash -- it's: 'quoted'",
    "--exec=touch executed",
    "* star **strong** _soft_ ~~struck~~ a*b*c",
    "%(url)s %s %d of 100 % <b>",
    "@at, $HOME ${HOME} $$(HOME) $(touch executed) $(shell touch executed) `touch executed`",
    "''' \"\"\" '; touch executed; \"; touch executed && tee executed | touch executed > executed; \\ #",
    "{a} {} }} %} #} {'b': {'c'}}",
    "<script>alert('executed')</script> <!-- <?php ]]>",
    "![a](https://a.b/c) [d](javascript:e) [^1] <https://f.g> www.a.b/_c_ https://d.e/_f_ g@h_i.j",
    "[a]: https://b.c/d_e_f?g=*h*&i=~j~",
    '> quote of R&D "north"',
    "+ plus = 3.",
    "1. item of O'Brien",
    "42",
    "~~~ tilde &lt;b&gt; &amp; &#35; &",
    "!!python/object/apply:os.system [touch executed]",
    "null",
    "Zażółć 大崎 伸弥 🦀 👩‍🔬 می‌خواهم\u00a0\ue000",
]


def everywhere(text: str) -> Answers:
    """Return answers that hold a text wherever they may, and elsewhere as much of it as they may."""
    server = re.sub(r"[^A-Za-z0-9._~:/!&()*+,;=\[\]-]", "", text)
    folder = re.sub('["%]', "", text).strip()
    return {
        "description": text,
        "author": text,
        "dvc_remote": f"/mnt/{folder}",
        "mlflow_tracking_uri": f"https://mlflow.example.org/{server}%20",
    }


SUPPORTED: dict[str, Answers] = {
    "defaults": {},
    **{f"license {x}, ci {y}": {"license": x, "ci": y} for x, y in zip(LICENSES, ("none", *CI), strict=True)},
    "shortest names": {"project": "x", "package": "y"},
    "longest names": {"project": "a" * 50, "package": "b" * 50},
    "digits and hyphens": {"project": "tide-tables-2"},
    "package of another name": {"project": "tide-tables", "package": "tides"},
    "punctuation": {
        "description": "Yes: 100% (the same), again. Why not?",
        "author": "D’Arcy Müller-Łuk, Jr.",
    },
    "other scripts": {"description": "Распознавание цифр", "author": "大崎 伸弥"},
    "no description": {"description": ""},
    "remote folder": {"dvc_remote": "/mnt/shared/dvc"},
    "remote bucket": {"dvc_remote": "s3://bucket/path_1"},
    "remote host": {"dvc_remote": "ssh://user@host:22/path"},
    "remote on the web": {"dvc_remote": "https://host.example:8080/path"},
    "tracking server": {"mlflow_tracking_uri": "https://mlflow.example.org:5000/base"},
    "tracking database": {"mlflow_tracking_uri": "sqlite:////mnt/mlflow.db"},
    **{text: everywhere(text) for text in AWKWARD},
}

# author -> the address that setuptools takes, and who makes the first commit: git keeps < and > out of names, and other
# marks from their ends
PEOPLE = {
    "Grace O'Brien <grace@example.org>": ("grace@example.org", "Grace O'Brien <grace@example.org>"),
    '"G", \\ @ Zoë 🦀 <g.o+x@e-x.org>': ("g.o+x@e-x.org", 'G", \\ @ Zoë 🦀 <g.o+x@e-x.org>'),
    "<ada@example.org>": ("", "ada@example.org <noreply@example.invalid>"),
    "Ada <ada>": ("", "Ada ada <noreply@example.invalid>"),
    "Ada <ada@localhost>": ("", "Ada <ada@localhost>"),
    "Ada <a@d@example.org>": ("", "Ada a@d@example.org <noreply@example.invalid>"),
    "Ada <a..a@example.org>": ("", "Ada <a..a@example.org>"),
    "Ada <zoë@example.org>": ("", "Ada zoë@example.org <noreply@example.invalid>"),
    "Ada <a@b.org>, Bob <b@b.org>": ("", "Ada a@b.org, Bob b@b.org <noreply@example.invalid>"),
    "...": ("", "repro-template 0.2.0 <noreply@example.invalid>"),
}

PARSERS: dict[str, Callable[[str], object]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    **dict.fromkeys((".yaml", ".yml", ".dvc", ".lock"), lambda text: list(yaml.safe_load_all(text))),
}


def tiers(values: Iterable[Any]) -> list[Any]:
    """Return parameters of which every third is tried in any case, and the others are long."""
    return [pytest.param(each, marks=pytest.mark.long if place % 3 else ()) for place, each in enumerate(values)]


@pytest.fixture(scope="module", params=tiers(SUPPORTED.values()), ids=list(SUPPORTED))
def answers(request: pytest.FixtureRequest) -> Answers:
    """Return each supported combination of answers."""
    chosen: Answers = request.param
    return chosen


@pytest.fixture(scope="module")
def with_ci(bake: Bake) -> Callable[..., BakedProject]:
    """Return a function that generates a project with a pipeline, once of the same answers."""
    return cache(lambda ci, remote="": bake(ci=ci, dvc_remote=remote))


@pytest.fixture(scope="module")
def baked(bake: Bake, answers: Answers) -> BakedProject:
    """Return the project generated from these answers."""
    return bake(**answers)


def test_generation_prints_nothing(baked: BakedProject) -> None:
    assert baked.log == ""


def test_nothing_is_left_unrendered(baked: BakedProject) -> None:
    jinja = re.compile(r"(?<!\$)\{\{(?!\.)|\{%|\{#|cookiecutter")  # but ${{ }} is GitHub's, {{.Id}} is docker's
    texts = {name: text for name, text in baked.texts().items() if not name.endswith((".py", ".j2"))}
    assert not [name for name in baked.files() if jinja.search(name)]
    assert not [name for name, text in texts.items() if jinja.search(text)]


def test_development_container_is_a_stage_of_the_dockerfile(bake: Bake) -> None:
    """And runs as its user."""
    baked = bake()
    container = json.loads(baked.text(".devcontainer/devcontainer.json"))
    assert f" AS {container['build']['target']}\n" in baked.text("Dockerfile")
    assert f" {container['remoteUser']} \\\n" in baked.text("Dockerfile")
    assert container["workspaceFolder"] == re.search(r"^WORKDIR (.*)$", baked.text("Dockerfile"), re.MULTILINE)[1]


def test_settings_parse(baked: BakedProject) -> None:
    settings = {name: text for name, text in baked.texts().items() if Path(name).suffix in PARSERS}
    assert {"pyproject.toml", "params.yaml", "dvc.yaml", "dvc.lock"} <= settings.keys()
    for name, text in settings.items():
        PARSERS[Path(name).suffix](text)


def test_answers_arrive(baked: BakedProject, answers: Answers) -> None:
    project = answers.get("project", "repro-project")
    package = answers.get("package", project.replace("-", "_"))
    settings = tomllib.loads(baked.text("pyproject.toml"))["project"]
    assert settings["name"] == project
    assert settings["description"] == answers.get("description", settings["description"])
    assert settings["scripts"] == {"samebits": "samebits.__main__:main"}
    assert baked.has_file(f"src/{package}/train.py")
    dvc = RawConfigParser()
    dvc.read_string(baked.text(".dvc/config"))
    assert dvc["'remote \"storage\"'"]["url"] == f'"{answers.get("dvc_remote", "../data/remote")}"'
    uri = answers.get("mlflow_tracking_uri", "")
    assert yaml.safe_load(baked.text("params.yaml"))["tracking"]["uri"] == uri
    variables = yaml.safe_load(baked.text("deploy/kubernetes/trainjob.yaml"))["spec"]["trainer"]["env"]
    assert not uri.startswith("http") or {"name": "MLFLOW_TRACKING_URI", "value": uri} in variables
    if "author" in answers:
        assert settings["authors"] == [{"name": answers["author"]}]
        assert f"Copyright (c) {answers['author']}\n" in baked.text("LICENSE")


def test_readme_shows_the_description_as_it_was_typed(baked: BakedProject, answers: Answers) -> None:
    """One paragraph, in which nothing is a tag, a link or any other mark."""
    page = MarkdownIt("commonmark").render(baked.text("README.md"))
    description = answers.get("description", "A PyTorch training project whose runs repeat bit for bit")
    end = "" if description.endswith((".", "!", "?")) else "."
    paragraph = f"<p>{escapeHtml(description + end)}</p>\n" if description else ""
    assert f"</h1>\n{paragraph}<p>Training here " in page


def test_scripts_are_well_formed(baked: BakedProject) -> None:
    """The Makefile and the labels of the image too."""
    scripts = [name for name in baked.files() if name.endswith((".sh", ".sbatch"))]
    assert len(scripts) == 3
    baked.run("bash", "-n", *scripts)
    assert "awk" in baked.run("make", "--dry-run", "help", "setup", "repro", "ui", "image")
    (labels,) = re.findall("^LABEL (.*)$", baked.text("Dockerfile").replace("\\\n", ""), re.MULTILINE)
    assert all(re.fullmatch(r"org\.opencontainers\.image\.[a-z.]+=.+", label) for label in shlex.split(labels))


def test_no_answer_was_executed(baked: BakedProject) -> None:
    assert not [*baked.path.parent.rglob("executed*"), *Path().glob("executed*")]


@pytest.mark.parametrize("author", tiers(PEOPLE))
def test_author_with_an_address(bake: Bake, tmp_path: Path, author: str) -> None:
    """The two come apart for the package and the first commit, and setuptools takes what comes out."""
    address, signature = PEOPLE[author]
    person = {"name": author.removesuffix(f" <{address}>"), "email": address} if address else {"name": author}
    baked = bake(author=author)
    assert tomllib.loads(baked.text("pyproject.toml"))["project"]["authors"] == [person]
    assert f"Copyright (c) {author}\n" in baked.text("LICENSE")
    assert baked.run("git", "log", "--format=%an <%ae>") == f"{signature}\n"
    metadata = "import setuptools.build_meta as build; build.prepare_metadata_for_build_wheel('.')"
    shutil.copytree(baked.path, tmp_path / "copy")
    run(TOOLS / "python", "-c", metadata, cwd=tmp_path / "copy")


def test_spaces_around_answers_are_dropped(bake: Bake) -> None:
    baked = bake(description="  Tides \n", author=" Ada ", dvc_remote=" /mnt/dvc ", mlflow_tracking_uri=" https://a.b ")
    settings = tomllib.loads(baked.text("pyproject.toml"))["project"]
    assert settings["description"] == "Tides"
    assert settings["authors"] == [{"name": "Ada"}]
    assert 'url = "/mnt/dvc"\n' in baked.text(".dvc/config")
    assert yaml.safe_load(baked.text("params.yaml"))["tracking"]["uri"] == "https://a.b"


def test_license_and_ci_are_the_chosen_ones(baked: BakedProject, answers: Answers) -> None:
    title, workflow = LICENSES[answers.get("license", "MIT")], CI[answers.get("ci", "github")]
    assert {name for name in CI.values() if name and baked.has_file(name)} == {workflow} - {""}
    assert baked.has_file("LICENSE") == bool(title)
    assert not title or baked.text("LICENSE").splitlines()[0].strip() == title


def test_ruff_is_clean(baked: BakedProject) -> None:
    baked.run(TOOLS / "ruff", "check", "--no-cache")
    baked.run(TOOLS / "ruff", "format", "--no-cache", "--check")


def test_texts_end_in_one_newline(baked: BakedProject) -> None:
    assert not [name for name, text in baked.texts().items() if not re.search(r"(\A|[^\n]\n)\Z", text)]
    assert not [name for name, text in baked.texts().items() if "\r" in text]


def test_git_holds_one_clean_commit(baked: BakedProject) -> None:
    log = baked.run("git", "log", "--format=%s, %D")
    assert re.fullmatch(r"Generate with repro-template [\d.]+, HEAD -> main\n", log)
    assert baked.run("git", "status", "--porcelain") == ""
    assert baked.run("git", "ls-files", "--cached", "--ignored", "--exclude-standard") == ""


def test_no_folder_is_empty(baked: BakedProject) -> None:
    folders = [path for path in baked.path.rglob("*") if path.is_dir() and ".git" not in path.parts]
    assert not [folder for folder in folders if not any(folder.iterdir())]


def commands(ci: str, text: str) -> dict[str, list[str]]:
    """Return what each job of a pipeline runs."""
    pipeline = yaml.safe_load(text)
    if ci == "github":
        return {name: [step.get("run", "") for step in job["steps"]] for name, job in pipeline["jobs"].items()}
    return {name: job.get("script", []) for name, job in pipeline.items()}


@pytest.mark.parametrize("remote", ["", "s3://bucket/path"])
@pytest.mark.parametrize("ci", ["github", "gitlab"])
def test_pipeline_runs_the_checks_on_the_oldest_python_and_that_of_the_image(
    with_ci: Callable[..., BakedProject], ci: str, remote: str
) -> None:
    """What git runs before a commit is among them. Where git does not hold the data, each job brings them first."""
    baked = with_ci(ci, remote)
    jobs = commands(ci, baked.text(CI[ci]))
    pipeline = yaml.safe_load(baked.text(CI[ci]))
    if ci == "github":
        assert pipeline["jobs"]["reproduce"]["strategy"]["matrix"] == {"python": ["3.11", "3.12"]}
    else:
        images = re.findall(r"image: python:(3\.\d+)\.\S+@sha256:[0-9a-f]{64}\n", baked.text(CI[ci]))
        assert images == ["3.11", "3.12"] and pipeline["reproduce-3.12"]["extends"] == "reproduce"
    (hooks,) = yaml.safe_load(baked.text(".pre-commit-config.yaml"))["repos"]
    entries = {hook["entry"] for hook in hooks["hooks"]}
    assert entries == {"make lint", "make lock-check"} <= set(jobs["reproduce"])
    bringing = {name: any("dvc pull" in line for line in lines) for name, lines in jobs.items() if lines}
    assert set(bringing.values()) == {bool(remote)}


@pytest.mark.parametrize("remote", ["", "s3://bucket/path"])
def test_either_pipeline_builds_the_image_and_trains_in_it(with_ci: Callable[..., BakedProject], remote: str) -> None:
    """By the same commands; Docker is named by a digest, twice the same."""
    texts = {ci: with_ci(ci, remote).text(CI[ci]) for ci in ("github", "gitlab")}
    made = {ci: [line for line in commands(ci, text)["image"] if line] for ci, text in texts.items()}
    assert made["gitlab"] == made["github"] and len(made["gitlab"]) == (3 if remote else 2)
    assert made["gitlab"][0].startswith("make image DEVICE=cpu ") and made["gitlab"][-1].endswith(" samebits smoke")
    job = yaml.safe_load(texts["gitlab"])["image"]
    (service,) = job["services"]
    assert service == {"name": job["image"], "alias": "docker"}
    assert re.fullmatch(r"docker:[0-9.]+-dind@sha256:[0-9a-f]{64}", job["image"])


@pytest.mark.parametrize("ci", ["github", "gitlab"])
def test_change_of_a_default_is_tried_where_it_is_asked_for(
    with_ci: Callable[..., BakedProject], tmp_path: Path, ci: str
) -> None:
    """What somebody types into the pipeline's input is words for `samebits trial`, and no command."""
    job = yaml.safe_load(with_ci(ci).text(CI[ci]))
    steps = (
        job["jobs"]["reproduce"]["steps"] if ci == "github" else [{"run": line} for line in job["reproduce"]["script"]]
    )
    (step,) = (step for step in steps if "samebits trial" in step.get("run", ""))
    command = tmp_path / ".venv" / "bin" / "samebits"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\nprintf "%s|" "$@"; exit 1\n')
    command.chmod(0o755)

    def tried(change: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-e", "-c", step["run"]],
            cwd=tmp_path,
            env=os.environ | {"TRIAL": change},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout

    assert tried("train.shift=2 seed=1") == (1, "trial|train.shift=2|seed=1|")
    assert tried("a=$(touch x);touch y") == (1, "trial|a=$(touch|x);touch|y|") and not (tmp_path / "y").exists()
    if ci == "github":
        assert step["if"] == "inputs.trial" and step["env"] == {"TRIAL": "${{ inputs.trial }}"}
    else:
        assert tried("") == (0, "")


PUBLIC = "samebits", "samebits.testing"  # the modules of the library that a project may import


def public() -> set[str]:
    """Those modules, with the names that each has."""
    trees = {name: ast.parse((ROOT / "samebits" / f"{name}.py").read_text()).body for name in ("__init__", "testing")}
    assigned = {ast.unparse(node.targets[0]): node.value for node in trees["__init__"] if isinstance(node, ast.Assign)}
    defined = [node.name for node in trees["testing"] if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    names = {name for listed in ast.literal_eval(assigned["PUBLIC"]).values() for name in listed}
    names |= {f"testing.{name}" for name in defined if not name.startswith("_")}
    return {*PUBLIC, *(f"samebits.{name}" for name in names)}


def used(source: str) -> set[str]:
    """What a file takes of the library, by its full name."""
    found, tree = set[str](), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sb":
            found.add(f"samebits.{node.attr}")
    return {name for name in found if name.split(".")[0] == "samebits"}


def test_owners_files_and_tests_import_the_public_names_of_the_library_alone() -> None:
    """So that a change inside the library does not reach them."""
    folders = ROOT / PROJECT / "src", ROOT / PROJECT / "tests", STARTERS, ROOT / "tests/template/yours"
    files = [file for folder in folders for file in folder.rglob("*.py")]
    found = set[str]().union(*(used(file.read_text()) for file in files))
    assert {"samebits.Run", "samebits.Stage", "samebits.main", "samebits.testing.Tested"} <= found <= public()


@pytest.mark.parametrize(
    "planted",
    (
        *("import samebits.run", "from samebits.core import seeds", "from samebits.testing import _seed"),
        *("import samebits as sb\nsb.flags", "from samebits import finish"),
    ),
)
def test_private_name_of_the_library_is_found(planted: str) -> None:
    assert used(planted) - public()
    assert not used("import samebits as sb\nsb.UserError\nfrom samebits.testing import Tested\nimport torch") - public()


ROOMS = {path.stem for path in (ROOT / "samebits").iterdir() if path.suffix in ("", ".py")} - {"__main__", "testing"}
ROOM = re.compile(rf"\bsamebits\.({'|'.join(ROOMS)})\b")


def test_no_file_of_a_project_names_a_room_of_the_library() -> None:
    """Nor do its settings and commands, which `make upgrade` leaves alone: a release with other rooms fits them."""
    files = [ROOT / name for name in tracked() if name.startswith(PROJECT) and (ROOT / name).is_file()]
    texts = {path: path.read_bytes().decode(errors="replace") for path in files}
    found = [f"{path}: {named[0]}" for path, text in texts.items() if (named := ROOM.search(text))]
    assert len(texts) > 100 and found == []
    assert ROOM.search("python -m samebits.analysis.pipeline") and not ROOM.search("samebits.testing, samebits.runs")
    assert not re.search(r"(?m)^(layers|containers|exhaustive)\b", texts[ROOT / PROJECT / "pyproject.toml"])


def test_clean_removes_caches_of_a_project_without_a_copy_of_the_library(bake: Bake) -> None:
    baked = bake()
    shutil.rmtree(baked.path / "vendor")
    caches = [baked.path / name / "__pycache__" for name in ("src", "tests", "requirements")]
    for each in caches:
        each.mkdir()
    baked.run("make", "clean")
    assert not any(each.exists() for each in caches)


def test_released_files_of_the_owner_are_short() -> None:
    """And prepare, train and evaluate begin with their imports."""
    source = STARTERS / "digits" / "src" / "{{cookiecutter.package}}"
    for name, most in {"train": 60, "evaluate": 40, "prepare": 25}.items():
        text = (source / f"{name}.py").read_text()
        assert len(text.splitlines()) <= most, name
        first = next(node for node in ast.parse(text).body[1:] if not isinstance(node, ast.Import | ast.ImportFrom))
        assert not isinstance(first, ast.If), name
