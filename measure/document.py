"""The price of determinism beside what people would use instead: the table of docs/peers.md.

python measure/document.py [--only convnet-1] [--rounds N] [--out FILE]
"""

import time
from collections.abc import Iterator, Sequence

from ratios import FEWEST, HEAD, SHARES_HEAD, rows, shares
from rounds import CELLS, LIBRARIES, ROOT, ROUNDS, WORKLOADS, by_recipe, harness, make_peers_venv, measured, ways_of

RESULT = ROOT / "docs" / "peers.md"


def tables(only: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """What stands between the marks, again after each part of the table."""
    lines, parts, place = [HEAD], [SHARES_HEAD], ""
    for recipe, cells in by_recipe(only).items():
        with harness.prepared(recipe) as project:
            if any(way.script in LIBRARIES for cell in cells for way in ways_of(cell).values()):
                make_peers_venv()
            place = place or harness.about()
            for cell in cells:
                began, (workload, ranks) = time.monotonic(), CELLS[cell]
                taken = measured(project, ways_of(cell), WORKLOADS[workload], ranks, rounds)
                lines += rows(workload, ranks, taken)
                parts.append(shares(workload, ranks, taken))
                print(f"{cell}: {time.monotonic() - began:.0f} s", flush=True)
                yield f"{place} {rounds} rounds.", "\n".join(lines), "\n".join(parts)


def main() -> None:
    """Measure, and write the table into the document."""
    requested = harness.arguments(__doc__, RESULT, CELLS, FEWEST, rounds=ROUNDS)
    for made in tables(requested.only, requested.rounds):  # an interrupted measurement leaves what it has
        harness.write(requested.out, *made)
    print("\n\n".join(made))


if __name__ == "__main__":
    main()
