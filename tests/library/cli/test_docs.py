"""The pages of the library: each is listed and found, and whatever they show exists."""

import ast
import os
import pty
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from clone import commit, copied, edit
from support import PACKAGE, PROJECT, python

from samebits.base.project import LIBRARY
from samebits.cli import EXAMPLES, main
from samebits.config.settings import ENVIRONMENT, NEUTRAL, Section, Settings
from samebits.core.errors import RunError
from samebits.record import names

PAGES = {path.stem: path.read_text() for path in sorted((LIBRARY / "docs").glob("*.md"))}
# The project's README, as a page would have it.
README = (PROJECT / "README.md").read_text().replace(PACKAGE, "<package>").replace("vendor/samebits/docs/", "")
(COMMAND,) = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
MAKE = set(re.findall(r"(?m)^([a-z-]+):", (PROJECT / "Makefile").read_text()))
CONTEXT = click.Context(main)
VERBS = {name: command for name in main.list_commands(CONTEXT) if (command := main.get_command(CONTEXT, name))}
STAGES = "prepare", "train", "evaluate"
# Options that pages name of other programs: torchrun, DVC.
OTHERS = {"--node-rank", "--rdzv-backend", "--max-restarts", "--temp", "--queue", "--pull"}


def docs(*words: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "samebits", "docs", *words)


# ---- the verb


def test_all_pages_are_listed_with_their_titles():
    lines = [line.split(maxsplit=1) for line in docs().stdout.splitlines()]
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in PAGES.items()}
    assert len(lines) == len(PAGES) - 1 > 20  # the index is what it lists
    assert dict(lines) == {name: titles[name] for name in PAGES.keys() - {"index"}}


@pytest.mark.parametrize("name", ["resume", "index"])
def test_page_is_shown_by_its_name(name: str):
    assert docs(name).stdout.strip() == PAGES[name].strip()


def test_pages_that_have_a_word_are_named_with_their_sections():
    done = docs("SLURM")
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert found.keys() == {name for name, text in PAGES.items() if "slurm" in text.lower()} - {"index"}
    assert "; Slurm" in found["clusters"] and done.returncode == 0


def test_the_only_page_that_has_a_word_is_shown():
    assert [name for name, text in PAGES.items() if "Croissant" in text] == ["receipts"]
    assert docs("croissant").stdout.strip() == PAGES["receipts"].strip()


@pytest.mark.parametrize("word", ["zebra", "../README", "/etc/passwd", "\n\x1b[31m"])
def test_unknown_word_ends_with_a_line(word: str):
    done = docs(word)
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1
    assert "no page has this word" in done.stderr and "\x1b" not in done.stderr


def test_page_comes_in_a_pager_where_output_is_a_terminal():
    """`PAGER` names it, here one that marks each line."""
    ours, theirs = pty.openpty()
    env = os.environ | {"PAGER": "sed s/^/paged:/", "TERM": "xterm"}
    words = sys.executable, "-m", "samebits", "docs", "gpu"
    done = subprocess.run(words, cwd=PROJECT, env=env, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    seen = os.read(ours, 4096).decode()
    os.close(ours)
    assert done.returncode == 0 and seen.startswith("paged:# Train on GPUs")


# ---- what the pages show


def commands(text: str) -> list[str]:
    """The words after the command's name, where a page shows it: in a span of code, or at the begin of a line of it."""
    spans = re.findall(rf"(?<!`)`{COMMAND}\s+([^`]+)`(?!`)", text)
    lines = re.findall(rf"(?m)^(?:\$ )?{COMMAND} (.+)$", text)
    return [" ".join(found.split(" #")[0].split()) for found in spans + lines]


@cache
def options(verb: str) -> set[str]:
    if verb in STAGES:
        return set(re.findall(r"--[a-z-]+", python("-m", "samebits", verb, "--help").stdout))
    return {option for parameter in VERBS[verb].params for option in parameter.opts} | {"--help"}


def wrong(text: str) -> Iterator[str]:
    """What a page shows that does not exist: verbs, their options, targets of make, keys, modules, other pages."""
    for found in commands(text):
        verb, *words = found.split()
        if verb not in VERBS:
            yield from [found] * (verb not in {"VERB", "--help", *(name for each in main.params for name in each.opts)})
            continue
        yield from (f"{verb} {word}" for word in words if word[:2] == "--" and word not in {"--", *options(verb)})
    for module, rest in re.findall(r"(?m)\bpython -m <package>(?:\.(\w+))?(.*)$", text.replace("`", "\n")):
        if module:
            known = options(module) if module in STAGES else set[str]()
            yield from (f"{module} {word}" for word in re.findall(r"(?<!\S)--[a-z][\w-]*", rest) if word not in known)
            yield from [module] * (module not in STAGES)
    every = set().union(*map(options, VERBS))
    yield from (word for word in re.findall(r"`(--[a-z-]+)", text) if word not in every | OTHERS)
    yield from (name for name in re.findall(r"(?m)(?:^|`|&& )make ([a-z-]+)", text) if name not in MAKE)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    yield from (link for link in links if link not in {f"{name}.md" for name in PAGES})


@pytest.mark.parametrize("name", [*PAGES, "README"])
def test_page_shows_what_exists(name: str):
    assert [*wrong(PAGES.get(name, README))] == []


def test_help_of_each_verb_has_an_example_that_it_takes():
    assert EXAMPLES.keys() == VERBS.keys()
    for verb, command in VERBS.items():
        context = click.Context(command, info_name=verb)
        values, rest, _ = command.make_parser(context).parse_args(shlex.split(EXAMPLES[verb]))
        assert not rest and all(values.get(str(each.name)) for each in command.params if each.required), verb
        assert f"Example: {COMMAND} {verb}" in command.get_help(context)


def test_verbs_and_options_are_completed():
    (variable,) = re.findall(r"\$\((\w+)=bash_source", PAGES["commands"])
    for words, wanted in (("verif", {"verify", "verify-receipt"}), ("train --fr", {"--fresh", "--from"})):
        typed = {"COMP_WORDS": f"{COMMAND} {words}", "COMP_CWORD": str(len(words.split()))}
        call = f"from samebits.cli import main; main(prog_name={COMMAND!r})"
        done = python("-c", call, env={variable: "bash_complete", **typed})
        assert {line.partition(",")[2] for line in done.stdout.splitlines()} == wanted


def test_readme_shows_lines_of_the_page_on_verify():
    rows = re.findall(r"(?m)^.* EQUAL$|^EQUAL: .*$", README)
    assert len(rows) > 4 and {*rows} <= {*PAGES["verify"].splitlines()}


@pytest.mark.parametrize(
    "planted",
    (
        *(f"`{COMMAND} verfy`", f"$ {COMMAND} diff a b --value", f"{COMMAND} noise\n{COMMAND} nose"),
        f"`{COMMAND}\ndif`",
        *("python -m <package>.trains", "`python -m <package>.train --rank 4`", "`--onyl NAME`"),
        *("`make verfy`", "make setup && make tests", "[here](resumes.md)", "[there](../README.md)"),
    ),
)
def test_what_does_not_exist_is_found(planted: str):
    assert len([*wrong(f"a\n{planted}\nb")]) == 1


def test_each_verb_has_a_page_that_shows_it():
    shown = {name: {found.split()[0] for found in commands(text)} for name, text in PAGES.items()}
    assert [verb for verb in VERBS if verb not in shown["commands"]] == []
    tasks = set[str]().union(*(verbs for name, verbs in shown.items() if name != "commands"))
    assert [verb for verb in VERBS if verb not in tasks] == []


def test_pages_name_no_project():
    """And they are copied as they are, so nothing in them waits to be filled in."""
    for text in PAGES.values():
        assert "repro_project" not in text and "repro-project" not in text and "cookiecutter" not in text


# ---- the reference is complete


def keys(schema: type[Section], before: str = "", kind: str = "addressed") -> Iterator[tuple[str, str]]:
    """Each key of the library, with its kind."""
    for name, field in schema.model_fields.items():
        marks = {NEUTRAL: "neutral", ENVIRONMENT: "environment"}
        own = next((marks[mark] for mark in field.metadata if mark in marks), kind)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from keys(field.annotation, f"{before}{name}.", own)
        else:
            yield before + name, own


def test_page_has_each_key_of_the_library_with_its_kind():
    rows = dict(re.findall(r"(?m)^\| `([a-z0-9_.]+)` \| (\S+) \| ", PAGES["config"]))
    known = dict(keys(Settings))
    assert rows.keys() == known.keys()
    assert {key: kind for key, kind in rows.items() if not kind.startswith("`")}.items() <= known.items()
    others = {key: known[key] for key, kind in rows.items() if kind.startswith("`") and known[key] != "neutral"}
    environment = dict.fromkeys(("determinism.tf32", "environment.variables"), "environment")
    assert others == environment  # of those with defaults


def test_pages_name_keys_that_exist():
    """Those of the example beside the library's."""
    from project.config import Config

    known = dict(keys(Config)).keys()
    sections = {key.partition(".")[0] for key in known if "." in key}
    for name, text in PAGES.items():
        named = re.findall(r"`([a-z_]+\.[a-z_]+)(?:: [^`]*|=[^`]*)?`", text) + re.findall(r"--set ([a-z_.]+)=", text)
        named = [key for key in named if "." not in key or key.partition(".")[0] in sections]
        files = {*names.FILES} | {f"{each}.py" for each in ("train", "model", "data", "config")} | FORMER
        assert [key for key in named if key not in known | files] == [], name


# Keys of earlier releases that upgrade.md names.
FORMER = {"parallel.shards", "parallel.lsb", "parallel.gather", "parallel.reduce"}


def test_page_has_each_file_of_a_run_directory():
    held = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    assert len(held) > 20 and [name for name in held - {names.REPLACED} if f"`{name}" not in PAGES["files"]] == []


def test_page_has_each_exit_code_of_a_training():
    codes = {kind.exit_code for kind in (RunError, *RunError.__subclasses__())}
    assert len(codes) > 4 and {*re.findall(r"(?m)^\| (\d+) \|", PAGES["train"])} == {"0", *map(str, codes)}


def test_messages_are_those_of_the_library():
    """Those that troubleshooting.md quotes; `…` stands for what a message is about."""
    trees = [ast.parse(path.read_text()) for path in Path(LIBRARY).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    said = "\n".join(node.value for node in nodes if isinstance(node.value, str))
    quoted = re.findall(r"(?m)^\| `(.+?)` \| ", PAGES["troubleshooting"])
    parts = [part.strip(" :") for message in quoted for part in message.split("…")]
    assert len(quoted) > 20 and [part for part in parts if part not in said] == []


def test_function_that_a_page_shows_pads_a_batch():
    text = next(each for each in re.findall(r"```python\n(.*?)```", PAGES["data"], re.DOTALL) if "def collate" in each)
    given: dict[str, Any] = {"torch": torch, "Tensor": torch.Tensor}
    exec(text, given)
    values, held = given["collate"]([torch.ones(2), torch.ones(3)])
    assert values.tolist() == held.float().tolist() == [[1, 1, 0], [1, 1, 1]]


# ---- an older layout


def brought_over(folder: Path, commands: str) -> set[str]:
    """What differs from a project of today after these commands, in one of an older layout that its owner changed."""
    files = "params.yaml", "dvc.lock", "results.lock"
    new, old = (copied(folder / name, ("src", "vendor", "artifacts"), files) for name in ("new", "old"))
    commit(new)
    package, library, results = old / "src" / PACKAGE, old / "vendor" / "samebits", old / "results.lock"
    edit(package / "train.py", ("sb.main(train)", "launch.call(PROJECT, train, CONFIG, OUT)"))
    (library / "cli.py").unlink()
    for path in (package / "__main__.py", library / "removed.py", results):
        path.write_text("of the older layout\n")
    commit(old)
    edit(package / "model.py", ("nn.ReLU()", "nn.GELU()"))
    for path in (package / "added.py", library / "removed.py", results):
        path.write_text("the owner's\n")
    commit(old)
    person = {f"GIT_{role}_{key}": "tester" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    environ = os.environ | person | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

    def said(*words: str) -> str:
        return subprocess.run(words, cwd=old, env=environ, check=True, capture_output=True, text=True).stdout

    said("sh", "-c", commands.replace("../new/PROJECT", str(new)))
    assert "the owner's" in results.read_text()
    return {*said("git", "diff", "--name-only", "layout").split()}


def test_commands_of_a_page_bring_an_older_layout_over(tmp_path: Path):
    (commands,) = [block for block in re.findall(r"(?ms)^ *```\n(.*?)^ *```", PAGES["upgrade"]) if "merge" in block]
    kept = {f"src/{PACKAGE}/model.py", f"src/{PACKAGE}/added.py", "results.lock"}
    assert brought_over(tmp_path / "one", commands) == kept
    partly = commands.replace("git rm -rqf vendor\n", "")
    assert partly != commands and brought_over(tmp_path / "two", partly) == {*kept, "vendor/samebits/removed.py"}
