"""Some things have one door: one module runs git, one writes durably, one knows where it lies, and so on."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from samebits.base.project import LIBRARY


@dataclass(frozen=True)
class Door:
    """What only some modules may do.

    Attributes:
        passes: whether a node of a module's syntax tree does it.
        modules: those that may, each with what for.
        fault: a line that does it.
        control: a line that looks like it, and does not.
    """

    passes: Callable[[ast.AST], bool]
    modules: Mapping[str, str]
    fault: str
    control: str


def is_text(node: ast.AST, *texts: str) -> bool:
    return isinstance(node, ast.Constant) and node.value in texts


def runs_git(node: ast.AST) -> bool:
    """It begins a command with the word, or gives it to a function."""
    if isinstance(node, ast.List | ast.Tuple):
        return bool(node.elts) and is_text(node.elts[0], "git")
    return isinstance(node, ast.Call) and any(is_text(each, "git") for each in node.args)


def starts_processes(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(each.name in ("subprocess", "multiprocessing") for each in node.names)
    names = ("os.system", "os.popen", "os.posix_spawn", "os.fork", "os.execv", "os.execve", "os.execvp")
    return isinstance(node, ast.Attribute) and ast.unparse(node) in names


def knows_where_it_lies(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "__file__"


def writes_durably(node: ast.AST) -> bool:
    """It has the kernel write, gives a file the place of another one, or names what is not yet whole."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.endswith(".part")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
        # text is replaced by two arguments, and these are no files
        return len(node.args) == 1 and ast.unparse(node.func.value) not in ("self", "optimizers")
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.replace", "os.fsync", "os.fdatasync")


def reads_a_trace(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "chains.rows"


DOORS = {
    "git": Door(
        runs_git,
        {
            "base/git.py": "it runs git",
            "analysis/doctor/checks.py": "asks whether it is installed",
            "analysis/doctor/doctor.py": "the name of a check",
        },
        'subprocess.run(["git", "status"])',
        'git(folder, "status")',
    ),
    "processes": Door(
        starts_processes,
        {
            "start/trainings.py": "trainings, and whatever else of analysis is Python",
            "start/warm.py": "forks of a training",
            "start/anew.py": "this process again, without what it holds",
            "tracking/follower.py": "the uploader",
            "address/pull.py": "DVC",
            "base/git.py": "git",
            "record/signature.py": "ssh-keygen",
            "environment/cuda.py": "nvidia-smi",
            "environment/compiler.py": "the compiler's version",
            "core/flags.py": "this process again, with its variables",
            "front.py": "this process again, as the command",
            "analysis/doctor/hardware.py": "nvidia-smi",
        },
        "import subprocess",
        "from . import trainings",
    ),
    "places": Door(
        knows_where_it_lies,
        {"base/project.py": "LIBRARY"},
        "HERE = Path(__file__).parent",
        "Path(torch.__file__).parent",
    ),
    "durable": Door(
        writes_durably,
        {"base/files.py": "it writes durably", "record/removal.py": "the names of what it removes"},
        "beside.replace(path)",
        'text.replace("a", "b").split()',
    ),
    "trace": Door(
        reads_a_trace,
        {"record/view.py": "RunView", "prove/again.py": "a part of a run, before there is a receipt"},
        "chains.rows(path, STEP)",
        "chains.root(path, 8)",
    ),
}


def passing(door: Door, source: str) -> bool:
    return any(map(door.passes, ast.walk(ast.parse(source))))


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(LIBRARY.rglob("*.py")):
        yield path.relative_to(LIBRARY).as_posix(), path.read_text()


@pytest.mark.parametrize("name", DOORS)
def test_thing_is_done_by_these_modules_alone(name: str):
    door = DOORS[name]
    assert {module for module, source in sources() if passing(door, source)} == {*door.modules}


@pytest.mark.parametrize("name", DOORS)
def test_module_that_does_it_too_is_found_and_one_that_asks_is_not(name: str):
    door = DOORS[name]
    module = "def work():\n    {}\n"
    assert passing(door, module.format(door.fault)) and not passing(door, module.format(door.control))


def test_python_is_started_by_three_modules():
    """Others hand it the words."""
    starting = [
        module
        for module, source in sources()
        if passing(DOORS["processes"], source)
        and "sys.executable" in source
        and Path(module).parts[0] in ("analysis", "start")
    ]
    assert starting == ["start/anew.py", "start/trainings.py", "start/warm.py"]
