"""Bad answers are refused before anything is written, each with what was given and what is allowed."""

import ast
import json
import re
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import pytest
from bake import ROOT, TOOLS
from baked import PROJECT, Answers, Environment, cookiecutter, run

PRE_GEN = ROOT / "hooks" / "pre_gen_project.py"
POST_GEN = ROOT / "hooks" / "post_gen_project.py"

# A text with each of these contexts, as cookiecutter does it.
RENDER = """
import json, pathlib, sys
from cookiecutter.utils import create_env_with_context
source, contexts = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"), json.loads(sys.argv[2])
print(json.dumps([create_env_with_context(each).from_string(source).render(**each) for each in contexts]))
"""
FREE = "a name that no package in the project's environment has"
LINE = "one line, without invisible characters, and no { right before a {, % or #: cookiecutter runs such text as code"
LONG = "200 characters at most"
URL = "a URL of letters, digits, . _ ~ : / @ ! & ( ) * + , ; = [ ] - and %20 or the like, starting with one of:"
REMOTES = "s3 ssh http https (samebits/docs/data.md says how to add another one later)"
TRACKERS = "http https sqlite postgresql+psycopg2"

# fmt: off
# answer, what is wanted, values that are refused
REFUSED = [
    ("project", "lower-case letters, digits and single hyphens, a letter first", [
        "My-Project", "my project", "my_project", "1st", "-rf", "a-", "a--b", "é", "a\n", "a\\b", "a/b", "/a",
        "../../a", "{{ 6 * 7 }}", "$(id)",
    ]),
    ("project", "50 characters at most", ["a" * 51]),
    ("project", FREE, ["torch", "scikit-learn"]),
    ("package", "lower-case letters, digits and underscores, a letter first", [
        "", "Tides", "a b", "a-b", "a.b", "1a", "_a", "é", "a\n", "../a", "a\\b", "$(id)", "a'",
    ]),
    ("package", "50 characters at most", ["a" * 51]),
    ("package", "a name that is no Python keyword", ["class", "async"]),
    ("package", "a name that no Python module has", ["random", "json"]),
    ("package", FREE, [
        "torch", "numpy", "mlflow", "dvc", "pydantic", "safetensors", "click", "rich", "rfc8785", "ruamel",
        "yaml", "pip", "setuptools", "repro", "samebits", "vendor", "data", "src", "tests",
    ]),
    ("description", LINE, [
        "a\nb", "a\vb", "a\tb", "a\u2028b", "a\ab", "a\x7fb", "a\x85b", "a\u202eb", "a\u200bb", "a\udc80b",
        "{{ 6 * 7 }}", "{% if 1 %}a{% endif %}", "a{# b #}", "{% raw %}{{{% endraw %}", "{% raw %}",
    ]),
    ("description", LONG, ["a" * 201]),
    ("author", LINE, ["Ada\nLovelace", "{{ cookiecutter.project }}"]),
    ("author", LONG, ["a" * 201]),
    ("dvc_remote", f'nothing, an absolute path without " and %, or {URL} {REMOTES}', [
        "storage", "../storage", "ftp://a/b", "s3://", "s3://a b", "s3://a\nb = c", 's3://a"', "s3://a'", "s3://a?b",
        "s3://a#b", "s3://a%(url)s", "s3://a\\b", '/a"b', "/%(url)s",
        "file:///a", "gs://a/b", "azure://a/b", "webdav://a/b",
    ]),
    ("dvc_remote", LINE, ["/a\nb = c", "/a\u202eb", "/{{ 6 * 7 }}"]),
    ("mlflow_tracking_uri", f"nothing, or {URL} {TRACKERS}", [
        "/mnt/runs", "file:///runs", "https://", "https://a?b", "https://a b", 'https://a"', "https://a\\", "https://a%",
        "https://$(id)", "https://a/{{ 6 * 7 }}", "example.org", "databricks", "databricks://profile", "mysql://a/b",
        "mssql://a/b", "postgresql://a/b", "postgresqlxpsycopg2://a/b",
    ]),
]
# fmt: on
ROWS = [(answer, value, wanted) for answer, wanted, values in REFUSED for value in values]
OF_EACH = [[row for row in ROWS if row[0] == answer] for answer in dict.fromkeys(answer for answer, *_ in ROWS)]
ROUNDS = [list(filter(None, rows)) for rows in zip_longest(*OF_EACH)]  # one of each answer, refused together

Refuse = Callable[[Answers], str]


@pytest.fixture
def refuse(template: Path, tmp_path: Path, env: Environment) -> Refuse:
    """Return a function that gives answers, checks that nothing lies on the disk, and returns the message."""

    def refuse(answers: Answers) -> str:
        out = tmp_path / "inner" / "out"
        out.mkdir(parents=True)
        done = cookiecutter(template, out, answers, cwd=tmp_path, env=env)
        assert done.returncode == 1
        assert set(tmp_path.rglob("*")) == {out, out.parent}
        return done.stdout

    return refuse


@pytest.mark.parametrize("rows", ROUNDS)
def test_refused(refuse: Refuse, rows: list[tuple[str, str, str]]) -> None:
    message = refuse({answer: value for answer, value, _ in rows})
    for answer, value, wanted in rows:
        assert f"{answer}: {value!r} refused; wanted: {wanted}\n" in message


@pytest.mark.parametrize("project", ["", ".", "..", "a" * 300])
def test_project_that_can_be_no_folder(refuse: Refuse, project: str) -> None:
    """cookiecutter makes the folder before any hook runs: such a name is first made harmless."""
    assert re.search("^project: .* refused", refuse({"project": project}))


@pytest.mark.parametrize(
    ("answer", "url", "wanted"),
    [
        ("dvc_remote", "ssh://me:secret@host/a", "no password in it, for it would be committed"),
        (
            "mlflow_tracking_uri",
            "https://me:secret@host",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASS",
        ),
        ("mlflow_tracking_uri", "postgresql+psycopg2://secret@host/runs", "no user or password in it"),
    ],
)
def test_credentials_are_refused_and_not_shown(refuse: Refuse, answer: str, url: str, wanted: str) -> None:
    message = refuse({answer: url})
    assert f"{answer}: '{re.sub('://.*@', '://***@', url)}' refused" in message
    assert wanted in message
    assert "secret" not in message


def test_all_answers_are_judged_at_once(refuse: Refuse) -> None:
    questions = ["project", "package", "description", "author", "dvc_remote", "mlflow_tracking_uri"]
    refused = [line.split(":")[0] for line in refuse(dict.fromkeys(questions, "?\a")).splitlines()]
    assert [answer for answer in dict.fromkeys(refused) if answer in questions] == questions


def test_jinja_typed_at_a_question_is_refused(template: Path, tmp_path: Path, env: Environment) -> None:
    """cookiecutter takes it as it is there, but `cruft update` would run it."""
    typed = {"description": "{{ 6 * 7 }}"}
    questions = json.loads((template / "cookiecutter.json").read_text(encoding="utf-8"))["__prompts__"]
    command = (TOOLS / "cookiecutter", "--output-dir", tmp_path, template)
    lines = "".join(f"{typed.get(question, '')}\n" for question in questions)
    done = run(*command, check=False, input=lines, env={**env, "COLUMNS": "500"})
    assert f"description: '{{{{ 6 * 7 }}}}' refused; wanted: {LINE}\n" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("answer", "value", "error"),
    [
        ("license", "GPL", "GPL provided for choice variable license, but the choices are"),
        ("starter", "digit", "digit provided for choice variable starter, but the choices are"),
        ("ci", "jenkins", "jenkins provided for choice variable ci, but the choices are"),
        ("description", "{{ 1/0 }}", "ZeroDivisionError"),
        ("description", "{% if %}", "TemplateSyntaxError"),
    ],
)
def test_refused_by_cookiecutter_itself(refuse: Refuse, answer: str, value: str, error: str) -> None:
    """It checks choices and renders answers as Jinja before any hook runs."""
    assert error in refuse({answer: value})


@pytest.mark.parametrize("hook", [PRE_GEN, POST_GEN], ids=lambda path: path.stem)
def test_no_answer_ends_the_string_that_holds_it(hook: Path) -> None:
    """The rendered hook is the same program but for the strings that hold the answers."""
    texts = "'''", '"""', "\\", "'''\\", "\\'''); exit() #", "\\u0027" * 3, "\n\r\0\u2028", "}}", "{{ 6 * 7 }}"
    given = [{"author": text, "__template_version": text} for text in texts]
    contexts = [{"cookiecutter": answers, "_cookiecutter": answers} for answers in given]
    source = hook.read_text(encoding="utf-8")
    rendered = json.loads(run(TOOLS / "python", "-c", RENDER, hook, json.dumps(contexts)).stdout)
    for answers, text in zip(given, rendered, strict=True):
        pairs = list(zip(strings(source), strings(text), strict=True))
        assert [json.loads(new) for old, new in pairs if "{{" in old] == [answers] * source.count("{{")
        assert all(old == new for old, new in pairs if "{{" not in old)


def strings(source: str) -> list[str]:
    """Return the string literals of a program, in order."""
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def test_names_of_all_locked_packages_are_refused() -> None:
    """A new package in a lock becomes a name that the project must not have."""
    folder = ROOT / PROJECT / "requirements"
    locks = [path for path in folder.glob("*.txt") if path.name != "train-cuda.txt"]  # which has what is CUDA's, too
    locks += (ROOT / PROJECT / "starters" / "pins").glob("*.txt")
    pins = re.findall(r"^([A-Za-z0-9._-]+)==", "".join(lock.read_text() for lock in locks), re.MULTILINE)
    block = re.search(r'^TAKEN = """(.*?)"""', PRE_GEN.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert pins and block
    missing = {re.sub("[-_.]+", "_", pin).lower() for pin in pins} - set(block[1].split())
    assert not missing, f"add to TAKEN in {PRE_GEN.name}: {' '.join(sorted(missing))}"
