"""Refuse bad answers before anything is generated: all of them at once, each with what is allowed.

cookiecutter renders this file with Jinja and runs the result. The answers enter it as JSON in a raw string:
`tojson` escapes the single quote, so no answer can end that string.
"""

import json
import keyword
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import Any, NamedTuple

ANSWERS: dict[str, str] = json.loads(r'''{{ cookiecutter | tojson }}''')  # fmt: skip
# The answers as typed, before cookiecutter rendered them as Jinja themselves. cruft does not pass them on.
TYPED: dict[str, Any] = json.loads(r'''{{ _cookiecutter | default({}) | tojson }}''')  # fmt: skip

# What the locks install, by distribution and by import name, and the project's own folders.
TAKEN = """
    aiobotocore aiohappyeyeballs aiohttp aiohttp_retry aioitertools aiosignal alembic amqp annotated_doc
    annotated_types antlr4 antlr4_python3_runtime anyio appdirs ast_serialize asyncssh atpublic attr attrs bcrypt
    billiard blinker botocore build cachetools celery certifi cffi charset_normalizer click click_didyoumean
    click_plugins click_repl cloudpickle colorama configobj conftest contourpy cryptography cuda cuda_bindings
    cycler data databricks databricks_sdk dateutil dictdiffer diskcache distro docker dotenv dpath dulwich dvc
    dvc_data dvc_http dvc_objects dvc_render dvc_s3 dvc_ssh dvc_studio_client dvc_task entrypoints fastapi filelock
    flask flask_cors flatten_dict flufl flufl_lock fonttools frozenlist fsspec functorch funcy git gitdb gitpython
    google google_auth grandalf graphene graphql graphql_core graphql_relay grimp gto gunicorn h11 hf_xet httpcore2
    httpx2 huey huggingface_hub hydra hydra_core idna import_linter importlib_metadata importlinter iniconfig isympy
    iterative_telemetry itsdangerous jinja2 jmespath joblib kiwisolver kombu librt mako markdown_it markdown_it_py
    markupsafe matplotlib mdurl mlflow mlflow_skinny mlflow_tracing mpl_toolkits mpmath multidict mypy
    mypy_extensions mypyc narwhals networkx numpy nvidia omegaconf opentelemetry opentelemetry_api
    opentelemetry_proto opentelemetry_sdk opentelemetry_semantic_conventions orjson packaging pandas pathspec pil
    pillow pip pip_tools piptools platformdirs pluggy prettytable prompt_toolkit propcache protobuf psutil psycopg2
    psycopg2_binary public py pyarrow pyasn1 pyasn1_modules pycparser pydantic pydantic_core pydantic_settings
    pydevd_plugins pydot pygit2 pygments pygtrie pylab pyparsing pyproject_hooks pytest python_dateutil
    python_dotenv pyyaml regex repro requests rfc8785 rich ruamel ruamel_yaml ruff s3fs safetensors samebits
    scikit_learn scipy scmrepo semver setuptools shellingham shortuuid shtab six sklearn skops smmap sqlalchemy
    sqlparse sqltrie src sshfs starlette sympy tabulate test tests threadpoolctl tokenizers tomlkit torch torchgen
    tqdm transformers triton truststore typer typing_extensions typing_inspection tzlocal urllib3 uvicorn validate
    vendor vine voluptuous wcwidth werkzeug wheel wrapt yaml yarl zc zc_lockfile zipp
""".split()  # noqa: SIM905 (a list of two hundred quoted lines is no clearer)

STARTERS = ["digits", "images", "language", "series", "finetuning", "tabular", "blank"]  # the folders in starters/

LETTERS = "lower-case letters, digits"
SHORT = "50 characters at most"
FREE = "a name that no package in the project's environment has"

LINE = "one line, without invisible characters, and no { right before a {, % or #: cookiecutter runs such text as code"
INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # line ends and other controls, halves of characters
JOINERS = "\u200c\u200d"  # Persian is spelled with them, and many an emoji
LONG = "200 characters at most"

PATH = '/[^"%]*'  # neither can be written into DVC's config: it escapes nothing, and %(name)s stands for a setting
URL = r"://([A-Za-z0-9._~:/@!&()*+,;=\[\]-]|%[0-9A-Fa-f]{2})+"
URL_TEXT = "of letters, digits, . _ ~ : / @ ! & ( ) * + , ; = [ ] - and %20 or the like, starting with"
# Schemes that are tested. What DVC and MLflow need for them is in the locks.
REMOTES = "s3 ssh http https"
LATER = "samebits/docs/data.md says how to add another one later"
TRACKERS = "http https sqlite postgresql+psycopg2"


class Rule(NamedTuple):
    """One thing that must hold for one answer."""

    answer: str
    holds: Callable[[str], bool]
    wanted: str


def form(pattern: str) -> Callable[[str], bool]:
    """Return a check: the pattern, in ASCII, matches the whole answer."""
    return lambda value: re.fullmatch(pattern, value, re.ASCII) is not None


def any_of(words: str) -> str:
    """Return a pattern that matches each of the words."""
    return f"({'|'.join(map(re.escape, words.split()))})"


def is_short(name: str) -> bool:
    """Say whether the name fits wherever a name is shown."""
    return len(name) <= 50


def is_free(name: str) -> bool:
    """Say whether nothing else in the project's environment has this name."""
    return name.replace("-", "_") not in TAKEN


def has_jinja(value: str) -> bool:
    """Say whether cookiecutter runs a part of the answer, now or when cruft updates the project."""
    return re.search("{[%#{]", value) is not None


def is_line(value: str) -> bool:
    """Say whether the answer is one line that shows all it holds; where it lands, it is escaped."""
    seen = (character for character in value if character not in JOINERS)
    return not has_jinja(value) and all(unicodedata.category(character) not in INVISIBLE for character in seen)


def is_not_long(value: str) -> bool:
    """Say whether the answer is a line that one reads."""
    return len(value) <= 200


RULES = [
    Rule("project", form("[a-z][a-z0-9]*(-[a-z0-9]+)*"), f"{LETTERS} and single hyphens, a letter first"),
    Rule("project", is_short, SHORT),
    Rule("project", is_free, FREE),
    Rule("package", form("[a-z][a-z0-9_]*"), f"{LETTERS} and underscores, a letter first"),
    Rule("package", is_short, SHORT),
    Rule("package", lambda name: not keyword.iskeyword(name), "a name that is no Python keyword"),
    Rule("package", lambda name: name not in sys.stdlib_module_names, "a name that no Python module has"),
    Rule("package", is_free, FREE),
    Rule("starter", form("|".join(STARTERS)), f"one of: {', '.join(STARTERS)}"),
    Rule("description", is_line, LINE),
    Rule("description", is_not_long, LONG),
    Rule("author", is_line, LINE),
    Rule("author", is_not_long, LONG),
    Rule("license", form("MIT|Apache-2[.]0|BSD-3-Clause|none"), "MIT, Apache-2.0, BSD-3-Clause or none"),
    Rule(
        "dvc_remote",
        form(f"|{PATH}|{any_of(REMOTES)}{URL}"),
        f'nothing, an absolute path without " and %, or a URL {URL_TEXT} one of: {REMOTES} ({LATER})',
    ),
    Rule("dvc_remote", is_line, LINE),
    Rule(
        "dvc_remote",
        lambda url: re.search("://[^/@]*:[^/]*@", url) is None,
        "no password in it, for it would be committed: `dvc remote modify --local` keeps one out of git",
    ),
    Rule(
        "mlflow_tracking_uri",
        form(f"|{any_of(TRACKERS)}{URL}"),
        f"nothing, or a URL {URL_TEXT} one of: {TRACKERS}",
    ),
    Rule(
        "mlflow_tracking_uri",
        lambda url: "@" not in url,
        "no user or password in it, for it would be committed: "
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where you train",
    ),
    Rule("ci", form("github|gitlab|none"), "github, gitlab or none"),
]


def given(answer: str) -> str:
    """Return the answer as it was given, before cookiecutter rendered or changed it."""
    typed = TYPED.get(answer)
    if isinstance(typed, str) and has_jinja(typed) and answer != "package":  # its own default is Jinja
        return typed
    # The project's folder is made before this runs, so cookiecutter.json puts a look-alike for each slash.
    return ANSWERS[answer].replace("∕", "/")


def main() -> int:
    """Print each rule that does not hold; return 2 if there is one."""
    broken = [rule for rule in RULES if not rule.holds(given(rule.answer))]
    for rule in broken:
        shown = re.sub("://.*@", "://***@", given(rule.answer))
        print(f"{rule.answer}: {shown!r} refused; wanted: {rule.wanted}", file=sys.stderr)
    return 2 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
