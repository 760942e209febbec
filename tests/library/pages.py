"""A report as a reader takes it: its words, its tables, its pictures; and how the tests ask for one."""

import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from click.testing import CliRunner
from clone import ours
from support import OURS

from samebits.cli import main

VOID = {"meta", "wbr", "img"}
IMAGE = re.compile('<img src="data:image/svg\\+xml;base64,([^"]*)"([^>]*)>')
# All that a page is made of. No element of them loads or runs anything, but for an image that holds its own bytes.
PLAIN = "html head meta title style body header h1 h2 ul li section p div span details summary figure figcaption footer"
TABLES, DRAWN = "a table caption thead tbody tr th td wbr", "svg g path defs clippath rect use text image line img"
ELEMENTS = {*f"{PLAIN} {TABLES} {DRAWN}".split()}


class Page(HTMLParser):
    """A page as a reader, or a browser, takes it: with what its images hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source, self.words, self.open = text, list[str](), list[str]()
        self.elements, self.links, self.styles = set[str](), list[str](), list[str]()
        self.rows: list[list[str]] = []
        self.alts: list[str] = []
        self.attributes: set[str] = set()
        self.feed(drawn(text))
        assert self.open == [], "an element that nothing closes"

    @property
    def text(self) -> str:
        """All words of the page."""
        return "".join(self.words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        for name, value in attrs:
            self.attributes.add(name)
            self.alts += [value or ""] if name == "alt" else []
            if name in ("href", "xlink:href", "src", "action", "clip-path"):
                self.links.append(value or "")
            if name == "style":
                self.styles.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
        if {"th", "td"} & {*self.open}:
            self.rows[-1][-1] += data

    def row(self, head: str) -> list[str]:
        """The cells of the one row with this head."""
        (found,) = [row[1:] for row in self.rows if row[0] == head]
        return found

    def picture(self, title: str) -> str:
        """The figure of this title."""
        figures = re.findall("<figure>.*?</figure>", self.source, re.DOTALL)
        (found,) = [each for each in figures if f"<figcaption>{title}<" in each]
        return drawn(found)


def drawn(text: str) -> str:
    """HTML with the SVG, which is well formed, of each image behind it."""
    return IMAGE.sub(lambda image: f"<img{image[2]}>{_svg(image[1])}", text)


def _svg(code: str) -> str:
    text = b64decode(code, validate=True).decode()
    ElementTree.fromstring(text)
    return text[text.index("<svg") :]


def message(*words: str | Path, code: int = 0) -> str:
    """What `samebits report` says, in this process."""
    done = CliRunner().invoke(main, ["report", *map(str, words)], obj=ours(OURS))
    assert done.exit_code == code, done.output
    return done.output


def page(*words: str | Path) -> Page:
    """The page on these runs."""
    message(*words, "--out", "page.html")
    return Page(Path("page.html").read_text("utf-8"))


def given(name: str, value: Any) -> list[str]:
    """An option whose file holds a value."""
    Path(f"{name}.json").write_text(json.dumps(value))
    return [f"--{name}", f"{name}.json"]
