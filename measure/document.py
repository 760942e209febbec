"""The price of determinism beside what people would use instead: the table of docs/peers.md.

python measure/document.py [--only convnet-1] [--rounds N] [--out FILE]
"""

from ratios import FEWEST, HEAD, SHARES_HEAD, rows, shares
from rounds import CELLS, ROOT, ROUNDS, harness, trained, ways_of

RESULT = ROOT / "docs" / "peers.md"


def main() -> None:
    """Measure, and write the tables into the document; an interrupted measurement leaves what it has."""
    requested = harness.arguments(__doc__, RESULT, CELLS, FEWEST, rounds=ROUNDS)
    lines, parts = [HEAD], [SHARES_HEAD]
    for place, cell, taken in trained({cell: ways_of(cell) for cell in requested.only}, requested.rounds):
        made = rows(*cell, taken)
        print("\n".join(made), flush=True)
        lines += made
        parts += shares(*cell, taken)
        harness.write(requested.out, f"{place} {requested.rounds} rounds.", "\n".join(lines), "\n".join(parts))


if __name__ == "__main__":
    main()
