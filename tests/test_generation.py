"""A project is generated whole, whatever the answers."""

import json
import re
import tomllib
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import yaml
from conftest import TOOLS, Answers, Bake, BakedProject

# title of the text -> answer
LICENSES = {
    "MIT": "MIT License",
    "Apache-2.0": "Apache License",
    "BSD-3-Clause": "BSD 3-Clause License",
    "none": "",
}
CI = {"github": ".github/workflows/ci.yml", "gitlab": ".gitlab-ci.yml", "none": ""}

SUPPORTED: dict[str, Answers] = {
    "defaults": {},
    **{f"license {x}, ci {y}": {"license": x, "ci": y} for x, y in product(LICENSES, CI)},
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
    "tracking server": {"mlflow_tracking_uri": "https://mlflow.example.org:5000/base"},
    "tracking database": {"mlflow_tracking_uri": "sqlite:////mnt/mlflow.db"},
}

PARSERS: dict[str, Callable[[str], object]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    **dict.fromkeys((".yaml", ".yml", ".dvc", ".lock"), lambda text: list(yaml.safe_load_all(text))),
}


@pytest.fixture(scope="module", params=list(SUPPORTED.values()), ids=list(SUPPORTED))
def answers(request: pytest.FixtureRequest) -> Answers:
    """Return each supported combination of answers."""
    chosen: Answers = request.param
    return chosen


@pytest.fixture(scope="module")
def baked(bake: Bake, answers: Answers) -> BakedProject:
    """Return the project generated from these answers."""
    return bake(**answers)


def test_generation_prints_nothing(baked: BakedProject) -> None:
    assert baked.log == ""


def test_nothing_is_left_unrendered(baked: BakedProject) -> None:
    jinja = re.compile(r"(?<!\$)\{\{(?!\.)|\{%|\{#|cookiecutter")  # but ${{ }} is GitHub's, {{.Id}} is docker's
    texts = {name: text for name, text in baked.texts().items() if not name.endswith(".py")}
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
    assert settings["scripts"]["repro"].startswith(f"{package}.")
    assert baked.has_file(f"src/{package}/train.py")
    assert f"url = {answers.get('dvc_remote', 'remote')}\n" in baked.text(".dvc/config")
    tracking = yaml.safe_load(baked.text("params.yaml"))["tracking"]
    assert tracking["uri"] == answers.get("mlflow_tracking_uri", "")
    if "author" in answers:
        assert settings["authors"] == [{"name": answers["author"]}]
        assert f"Copyright (c) {answers['author']}\n" in baked.text("LICENSE")


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
