"""Whether the project has become slower beside a plain script than docs/peers.md says.

python measure/check.py [--only convnet-1] [--way step] [--rounds N] [--document FILE]

Exit code 1: of some way the interval of the ratio lies wholly above the committed ratio times 1.15. Exit code 2: there
is nothing to compare with. `--slower` plants a fault: a share of each step to sleep.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace

from document import RESULT
from ratios import FEWEST, WORSE, Cell, has_grown, ratio, read
from rounds import CELLS, PLAIN, ROUNDS, WAYS, Taken, harness, trained, ways_of

OURS = [name for name, way in WAYS.items() if way.script == "ours"]


def compared(part: tuple[str, int], taken: Mapping[str, Taken], committed: Mapping[Cell, float]) -> bool:
    """Print a line for each way but the plain script; whether one of them has become slower."""
    grown = []
    for name in [name for name in taken if name != PLAIN]:
        fresh, before = ratio(taken[name].seconds, taken[PLAIN].seconds), committed[*part, name]
        grown.append(has_grown(fresh, before))
        verdict = f"SLOWER, at most {WORSE * before:.2f} wanted" if grown[-1] else "holds"
        print(f"{'-'.join(map(str, part)):14} {name:10} {fresh}  committed {before:.2f}  {verdict}", flush=True)
    return any(grown)


def main() -> int:
    """Measure the plain script and the project, and print a line for each ratio."""
    requested = harness.arguments(__doc__, None, CELLS, FEWEST, OURS, rounds=ROUNDS, document=RESULT, slower=0.0)
    committed = read(requested.document.read_text()) if requested.document.is_file() else {}
    ways = {cell: {PLAIN: WAYS[PLAIN]} for cell in requested.only}
    for cell, chosen in ways.items():
        for name in [name for name in ways_of(cell) if name in requested.way]:
            if (*CELLS[cell], name) not in committed:
                message = f"{requested.document}: no ratio of {cell} {name} seen; write it with: make measure"
                print(message, file=sys.stderr)
                return 2
            chosen[name] = replace(WAYS[name], slower=requested.slower)
    grown = [compared(part, taken, committed) for _, part, taken in trained(ways, requested.rounds)]
    return int(any(grown))


if __name__ == "__main__":
    sys.exit(main())
