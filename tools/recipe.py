"""Lay a recipe over a generated project: its files, its keys in params.yaml, the packages that it adds.

python3 tools/recipe.py NAME PROJECT

A recipe is a folder in `recipes/`. Python files go into the project's package, other files to their own places. A
section of its params.yaml replaces the project's section of that name. What stands in its packages.toml is
added to pyproject.toml, and the pins of recipes/requirements.txt to both locks of what a training loads. `git diff`
shows it all.
"""

import re
import shutil
import sys
import tomllib
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
LOCK = RECIPES / "requirements.txt"  # what the recipes add to them, all together
LOCKS = "train-cpu.txt", "train-cuda.txt"
PACKAGES = "packages.toml"
DIRECT = "# via pyproject.toml"
APART = {"params.yaml", PACKAGES, "README.md"}  # merged, or the recipe's own
REMOTE = Path("data", "remote")  # where a project with the default answers shares its data
CONFUSION = "confusion.csv"  # of classes; a recipe whose evaluation writes none has no plot of it
PLOT = re.compile(rf"(?m)^  - [^\n]*:\n(?:      [^\n]*\n)*?[^\n]*{re.escape(CONFUSION)}[^\n]*\n")


def known() -> list[str]:
    """The names of all recipes."""
    return sorted(path.parent.name for path in RECIPES.glob("*/README.md"))


def blocks(text: str, begin: str) -> dict[str, str]:
    """The parts of a text by their first words; a line that fits `begin` begins one. Before them is "" alone."""
    first, *parts = re.split(rf"(?m)^(?={begin})", text)
    return {"": first, **{re.split("[:=]", part)[0]: part for part in parts}}


def with_sections(text: str, other: str) -> str:
    """A params.yaml with the sections of another in place of its own."""
    ours, theirs = blocks(text, r"\w+:"), blocks(other, r"\w+:")
    del theirs[""]  # what it says of itself
    assert theirs.keys() <= ours.keys(), f"{theirs.keys() - ours.keys()}: dvc.yaml does not list them"
    return "".join(theirs.get(name, part).rstrip("\n") + part[len(part.rstrip("\n")) :] for name, part in ours.items())


def with_pins(lock: str, added: str, packages: str) -> str:
    """A lock with the pins of another among its own, by name; direct ones where `packages` ask for them."""
    ours, theirs = blocks(lock, r"[a-z0-9]"), blocks(added, r"[a-z0-9]")
    wanted = {re.split("[<>=~!]", line)[0] for line in tomllib.loads(packages)["project"]["dependencies"]}
    theirs = {name: pin for name, pin in theirs.items() if DIRECT not in pin or name in wanted}
    merged = {**theirs, **ours}
    return "".join(merged[name] for name in sorted(merged))


def with_dependencies(text: str, added: str) -> str:
    """A pyproject.toml that asks for more packages; `added` holds these and, after a blank line, tables of its own."""
    opening, tables = "dependencies = [\n", added.partition("\n\n")[2]
    lines = [f'    "{line}",\n' for line in tomllib.loads(added)["project"]["dependencies"]]
    missing = [line for line in lines if line not in text]
    if not missing:
        return text
    return text.replace(opening, opening + "".join(missing), 1).rstrip("\n") + "\n\n" + tables


def md5(pointer: Path) -> str:
    """The MD5 that a pointer of DVC states, as DVC names a file by it."""
    return "/".join(re.findall("md5: (..)(.*)", pointer.read_text())[0])


def share(pointer: Path) -> None:
    """Have DVC and git treat a dataset as the project's own: git ignores it, and the tracked remote holds it."""
    ignored, name, raw = pointer.parent / ".gitignore", f"/{pointer.stem}\n", pointer.with_suffix("")
    if name not in (text := ignored.read_text()):
        ignored.write_text(text + name)
    project = pointer.parents[2]
    if (project / REMOTE).is_dir():
        shared = project / REMOTE / "files" / "md5" / md5(pointer)
        shared.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(raw, shared)


def add_packages(name: str, project: Path) -> None:
    """Have the project ask for the packages of a recipe, and its locks pin them."""
    requested, packages = project / "pyproject.toml", (RECIPES / name / PACKAGES).read_text()
    requested.write_text(with_dependencies(requested.read_text(), packages))
    for path in (project / "requirements" / lock for lock in LOCKS):
        path.write_text(with_pins(path.read_text(), LOCK.read_text(), packages))


def lay(name: str, project: Path) -> None:
    """Lay a recipe over the project in this folder."""
    recipe = RECIPES / name
    (package,) = (path.parent for path in project.glob("src/*/train.py"))
    files = [path.relative_to(recipe) for path in recipe.rglob("*") if path.is_file()]
    for file in (file for file in files if str(file) not in APART and file.suffix != ".pyc"):
        shutil.copy(recipe / file, (package if file.suffix == ".py" else project) / file)
    for file in (file for file in files if file.suffix == ".dvc"):
        share(project / file)
    if CONFUSION not in (package / "evaluate.py").read_text():
        stages = project / "dvc.yaml"
        stages.write_text(PLOT.sub("", stages.read_text()))
        (project / "artifacts" / CONFUSION).unlink(missing_ok=True)
    keys = project / "params.yaml"
    keys.write_text(with_sections(keys.read_text(), (recipe / keys.name).read_text()))
    if (recipe / PACKAGES).is_file():
        add_packages(name, project)


def main(words: list[str]) -> int:
    """The command line."""
    if len(words) != 2 or words[0] not in known():
        print(
            f"{' '.join(words) or 'nothing'} given, NAME PROJECT wanted; names: {', '.join(known())}", file=sys.stderr
        )
        return 2
    name, project = words[0], Path(words[1])
    if not [*project.glob("src/*/train.py")]:
        print(f"{project}: no src/PACKAGE/train.py seen, the folder of a generated project wanted", file=sys.stderr)
        return 2
    lay(name, project)
    print(f"{name} laid over {project}; next, there: git diff, make verify, make repro")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
