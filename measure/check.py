"""Whether the project has become slower beside a plain script than docs/peers.md says.

python measure/check.py [--only convnet-1] [--way step] [--rounds N]

Exit code 1: of some way the interval of the ratio lies wholly above the committed ratio times 1.15. Exit code 2: there
is nothing to compare with.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from document import RESULT
from ratios import FEWEST, WORSE, Cell, has_grown, ratio, read
from rounds import CELLS, PLAIN, ROUNDS, WAYS, WORKLOADS, Taken, by_recipe, measured, prepared, ways_of

OURS = [name for name, way in WAYS.items() if way.script == "ours"]


def compared(cell: str, taken: Mapping[str, Taken], committed: Mapping[Cell, float]) -> tuple[list[str], bool]:
    """A line for each way but the plain script, and whether one of them has become slower."""
    lines, grown = [], False
    for name in [name for name in taken if name != PLAIN]:
        fresh, before = ratio(taken[name].seconds, taken[PLAIN].seconds), committed[*CELLS[cell], name]
        grows = has_grown(fresh, before)
        grown = grown or grows
        verdict = f"SLOWER, at most {WORSE * before:.2f} wanted" if grows else "holds"
        lines.append(f"{cell:14} {name:10} {fresh}  committed {before:.2f}  {verdict}")
    return lines, grown


def main() -> int:
    """Measure the plain script and the project, and print a line for each ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CELLS, help="this part of the table alone; repeatable")
    parser.add_argument("--way", action="append", choices=OURS, help="this way alone; repeatable")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"{FEWEST} or more")
    parser.add_argument("--document", type=Path, default=RESULT, help="the ratios to compare with")
    parser.add_argument("--slower", type=float, default=0.0, help="a planted fault: a share of each step to sleep")
    requested = parser.parse_args()
    if requested.rounds < FEWEST:
        parser.error(f"--rounds {requested.rounds} seen, {FEWEST} or more wanted for an interval")
    committed = read(requested.document.read_text()) if requested.document.is_file() else {}
    ways = {
        cell: {
            name: replace(way, slower=requested.slower)
            for name, way in ways_of(cell).items()
            if name in (requested.way or OURS)
        }
        for cell in requested.only or CELLS
    }
    missing = [(cell, name) for cell, names in ways.items() for name in names if (*CELLS[cell], name) not in committed]
    if missing:
        parser.error(f"{requested.document}: no ratio of {' '.join(missing[0])} seen; write it with: make measure")
    slower = False
    for recipe, cells in by_recipe(ways).items():
        with prepared(recipe) as project:
            for cell in cells:
                workload, ranks = CELLS[cell]
                both = {PLAIN: WAYS[PLAIN], **ways[cell]}
                taken = measured(project, both, WORKLOADS[workload], ranks, requested.rounds)
                lines, grown = compared(cell, taken, committed)
                slower = slower or grown
                print("\n".join(lines), flush=True)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
