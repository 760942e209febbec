"""The pages of the library, by task: `samebits docs` lists them, shows one, or finds those that have a word."""

import re
from collections.abc import Iterator

from ..base.project import LIBRARY
from ..base.shape import plain
from ..core.errors import UserError

FOLDER = LIBRARY / "docs"
INDEX = "index"  # the page that names the others, in the order of `samebits docs`


def pages() -> dict[str, str]:
    """The text of each page by its name, as the index has them."""
    names = re.findall(r"\]\(([\w-]+)\.md\)", _text(INDEX))
    return {name: _text(name) for name in dict.fromkeys(names)}


def listing() -> str:
    """The name and the title of each page."""
    found = pages()
    width = max(map(len, found))
    return "\n".join(f"{name.ljust(width)}  {next(_headings(text))}" for name, text in found.items())


def about(word: str) -> str:
    """The page of this name; or the one that has the word; or the names of those that have it, with their sections.

    Raises:
        UserError: no page has it.
    """
    found = pages()
    if word in found or word == INDEX:
        return _text(word)
    hits = {name: sections for name, text in found.items() if (sections := [*_headings(text, word)])}
    if not hits:
        raise UserError(f"{plain(word)}: no page has this word; samebits docs lists the pages")
    if len(hits) == 1:
        return found[next(iter(hits))]
    width = max(map(len, hits))
    return "\n".join(f"{name.ljust(width)}  {'; '.join(sections)}" for name, sections in hits.items())


def _text(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text("utf-8").rstrip("\n")


def _headings(text: str, word: str = "") -> Iterator[str]:
    """The headings of the sections of a page that have a word, in whatever case."""
    for section in re.split(r"(?m)^#{1,3} (?=[A-Z])", text)[1:]:
        if word.lower() in section.lower():
            yield section.partition("\n")[0]
