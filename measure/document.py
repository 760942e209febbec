"""The price of determinism beside what people would use instead: the table of docs/peers.md.

python measure/document.py [--only convnet-1] [--rounds N] [--out FILE]
"""

import argparse
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ratios import FEWEST, HEAD, SHARES_HEAD, rows, shares
from rounds import CELLS, ROOT, ROUNDS, WORKLOADS, about, by_recipe, measured, prepared, ways_of

RESULT = ROOT / "docs" / "peers.md"
MARKS = "<!-- measured -->", "<!-- end -->"


def tables(only: Sequence[str] | None, rounds: int) -> Iterator[str]:
    """What stands between the marks, again after each part of the table."""
    lines, parts, place = list[str](), list[str](), ""
    for recipe, cells in by_recipe(only or CELLS).items():
        with prepared(recipe, [way for cell in cells for way in ways_of(cell).values()]) as project:
            place = place or about()
            for cell in cells:
                began, (workload, ranks) = time.monotonic(), CELLS[cell]
                taken = measured(project, ways_of(cell), WORKLOADS[workload], ranks, rounds)
                lines += rows(workload, ranks, taken)
                parts.append(shares(workload, ranks, taken))
                print(f"{cell}: {time.monotonic() - began:.0f} s", flush=True)
                yield "\n".join([f"{place} {rounds} rounds.", "", HEAD, *lines, "", SHARES_HEAD, *parts])


BETWEEN = re.compile(".*?".join(map(re.escape, MARKS)), re.DOTALL)


def marked(out: Path) -> str:
    """The text of a document that a table has a place in; an empty one where there is none yet."""
    text = out.read_text() if out.is_file() else "\n".join(MARKS) + "\n"
    if not BETWEEN.search(text):
        sys.exit(f"{out}: no lines {' and '.join(MARKS)} seen, between which the table is to stand")
    return text


def write(out: Path, made: str) -> None:
    """Put what was measured into a document, between its marks."""
    out.write_text(BETWEEN.sub(lambda _: "\n".join([MARKS[0], made, MARKS[1]]), marked(out)))


def arguments(description: str | None, parts: Iterable[str], out: Path) -> argparse.Namespace:
    """What a command line asks for: parts of the table, rounds, and a document that has a place for it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=parts, help="this part of the table alone; repeatable")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=out)
    asked = parser.parse_args()
    if asked.rounds < FEWEST:
        parser.error(f"--rounds {asked.rounds} seen, {FEWEST} or more wanted for an interval")
    marked(asked.out)
    return asked


def main() -> None:
    """Measure, and write the table into the document."""
    asked, made = arguments(__doc__, CELLS, RESULT), ""
    for made in tables(asked.only, asked.rounds):  # an interrupted measurement leaves what it has
        write(asked.out, made)
    print(made)


if __name__ == "__main__":
    main()
