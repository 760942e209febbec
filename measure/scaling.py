"""Steps on one, two and four processes, the project's beside a plain script's: the table of docs/scaling.md.

python measure/scaling.py [--only convnet] [--rounds N] [--out FILE]

All numbers of processes take turns in one run, so ratios are of pairs. Bytes are those that the kernel counted on the
loopback interface, so run it alone.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from ratios import FEWEST, beside
from rounds import PINNED, ROOT, ROUNDS, WAYS, WORKLOADS, Taken, harness, measured

RESULT = ROOT / "docs" / "scaling.md"
REQUESTED = "convnet", "large"
PROCESSES = 1, 2, 4
HEAD = "workload | processes | way | ms per step | beside one process | beside plain | kB sent | by formula"


# way -> bytes that each of many processes sends for a number: of a parameter (float32), and of a buffer (float64)
BYTES = {PINNED: (2 * 4, 0), "step": (2 * 4, 2 * 8)}


def sizes(*settings: str) -> tuple[int, int]:
    """How many numbers a project's model holds: parameters, and in buffers those with fractions."""
    config = harness.configured(*settings)
    from repro_project.model import build

    model = build(config)
    buffers = (buffer.numel() for buffer in model.buffers() if buffer.is_floating_point())
    return sum(parameter.numel() for parameter in model.parameters()), sum(buffers)


def rows(workload: str, held: Sequence[int], taken: dict[tuple[str, int], Taken]) -> Iterator[list[str]]:
    """The lines of the table on one workload, from what each way on so many processes took."""
    for (way, ranks), one in taken.items():
        others = taken[way, PROCESSES[0]], taken[PINNED, ranks]
        so = sum(number * size for number, size in zip(held, BYTES[way], strict=True)) * (ranks - 1) / ranks
        yield [
            WORKLOADS[workload].title, str(ranks), WAYS[way].title, f"{1000 * median(one.seconds):.1f}",
            *(beside(one.seconds, other.seconds) for other in others), f"{one.sent / 1000:.1f}", f"{so / 1000:.1f}",
        ]  # fmt: skip


def lines(project: Path, requested: Namespace) -> Iterator[list[str]]:
    """The lines of the table; all ways, on all numbers of processes, take turns."""
    for workload in requested.only:
        cases = [(way, ranks) for ranks in PROCESSES for way in BYTES]
        ways = {f"{way}-{ranks}": replace(WAYS[way], ranks=ranks) for way, ranks in cases}
        found = measured(project, ways, WORKLOADS[workload], 1, requested.rounds)
        held = harness.within(project, sizes, *WORKLOADS[workload].settings)
        yield from rows(workload, held, dict(zip(cases, found.values(), strict=True)))


if __name__ == "__main__":
    harness.measure(__doc__, RESULT, (HEAD, lines), parts=REQUESTED, fewest=FEWEST, rounds=ROUNDS)
