"""From the parts' results to a table in Markdown.

python benchmarks/table.py RESULTS benchmarks/gpu.md      what `make gpu` does; a CPU's results are refused
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from parts import PARTS, SIDES, WAYS, Row

WHOLE = "whole"
NOTHING = "—"


@dataclass(frozen=True)
class Result:
    """What a part has left: what it ran on, its rows, how it ended."""

    header: Row
    rows: list[Row]
    end: str

    @property
    def name(self) -> str:
        """The part's."""
        return self.header["part"]

    @property
    def is_good(self) -> bool:
        """Whether nothing failed or differed; a part that was stopped is good as far as it came."""
        return all(map(is_good, self.rows)) and not self.end.startswith("failed")

    @property
    def machine(self) -> str:
        """What was measured on, and with which versions."""
        has = self.header
        device = has["gpu"] if has["device"] == "cuda" else "a CPU"
        return (
            f"{device}, torch {has['torch']} (the locks have {has['locked_torch']}), CUDA {has['cuda']}, "
            f"Python {has['python']}, numpy {has['numpy']}; epochs: {has['epochs']}; bundle {has['bundle']}"
        )


def read(results: Path) -> dict[str, Result]:
    """The results by part, in the table's order; a file without its last line was cut off."""
    found = {}
    for path in (results / f"{part.name}.jsonl" for part in PARTS):
        header, *rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.is_file() else [None]
        if header:
            ends = rows.pop()["end"] if rows and "end" in rows[-1] else "cut off"
            found[path.stem] = Result(header, rows, ends)
    return found


def is_good(row: Row) -> bool:
    """Whether a row tells of nothing that failed or differs."""
    return row.get("verdict", "EQUAL").startswith(("EQUAL", "not tried"))


def write(results: Path, to: Path, only: str = "") -> int:
    """Write the table of results that are of the device `only`, where one is named.

    Returns the exit code: 0 if all that was measured is EQUAL, 1 if not, 2 if there are no such results.
    """
    found = read(results)
    devices = {result.header["device"] for result in found.values()}
    if not found or (only and devices != {only}):
        seen = f"results of {' and '.join(sorted(devices))}" if found else "no results"
        wanted = f"those of {only or 'run.sh PART'} wanted; {to} is left as it is"
        print(f"{results}: {seen} seen, {wanted}", file=sys.stderr)
        return 2
    to.write_text(document(found))
    print(to.read_text())
    return 0 if all(result.is_good for result in found.values()) else 1


def document(found: dict[str, Result]) -> str:
    """The whole text."""
    on_cpu = any(result.header["device"] == "cpu" for result in found.values())
    lines = ["# A rehearsal on a CPU: nothing here was measured on a GPU" if on_cpu else "# On a GPU", "", ABOUT, ""]
    for machine in dict.fromkeys(result.machine for result in found.values()):
        names = [result.name for result in found.values() if result.machine == machine]
        lines += [f"- {machine}: {len(names)} parts{'' if len(names) == len(found) else ': ' + ', '.join(names)}"]
    for kind, (title, head, cells) in SECTIONS.items():
        rows = [row for result in found.values() if result.name.split("-")[0] == kind for row in cells(result)]
        if rows:
            lines += ["", f"## {title}", "", f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
            lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    ends = {part.name: found[part.name].end.split("\n")[0] if part.name in found else "not run" for part in PARTS}
    lines += ["", "## Not measured to the end", ""]
    for end in dict.fromkeys(ends.values()):
        if end != WHOLE:
            lines += [f"- {end}: {', '.join(name for name in ends if ends[name] == end)}"]
    if set(ends.values()) == {WHOLE}:
        lines += ["Nothing: all parts came to their end."]
    for result in found.values():
        said = [(row["way"], row.get("said", row["verdict"])) for row in result.rows if not is_good(row)]
        said += [("end", result.end)] if result.end.startswith("failed") else []
        for way, text in said:
            lines += ["", f"### {result.name}: {way}", "", "```", text, "```"]
    return "\n".join(lines) + "\n"


def _case(result: Result) -> list[str]:
    return result.name.split("-")[1:]


def _bits(result: Result) -> Iterator[list[object]]:
    verdicts = {row["way"]: row.get("verdict") for row in result.rows}
    yield [*_case(result), *(verdicts.get(way, NOTHING) for way in WAYS)]


def _pairs(result: Result) -> Iterator[list[object]]:
    rows, (one, other) = result.rows, SIDES[result.name.split("-")[0]]
    if rows:
        times = [f"{statistics.median(row[side]['ms'] for row in rows):.2f}" for side in (one, other)]
        ratios = sorted(row[one]["ms"] / row[other]["ms"] for row in rows)
        peaks = [f"{max(row[side]['MiB'] for row in rows):.0f}" for side in (one, other) if rows[0][side]["MiB"]]
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})"
        yield [*_case(result), " / ".join(times), ratio, " / ".join(peaks) if len(peaks) == 2 else NOTHING, len(rows)]


def _verify(result: Result) -> Iterator[list[object]]:
    yield from ([row["way"], row["verdict"]] for row in result.rows)


def _machine(result: Result) -> Iterator[list[object]]:
    facts = {row["fact"]: row["value"] for row in result.rows}
    if environment := facts.get("samebits env"):
        seen = environment["preimage"].get("cuda") or {}
        about = environment["informational"]
        yield from map(list, (seen | {key: about[key] for key in ("system", "cpu", "cores")}).items())


CASE = "model | precision | mode"
PAIRS = f"size | {CASE} | step time, ms | ratio (lowest … highest pair) | peak memory, MiB | pairs"
SECTIONS: dict[str, tuple[str, str, Callable[[Result], Iterator[list[object]]]]] = {
    "machine": ("The machine", "what | value", _machine),
    "bits": ("The same bits", f"{CASE} | {' | '.join(WAYS)}", _bits),
    "verify": ("`samebits verify`", "way | verdict", _verify),
    "peer": ("The project beside a plain PyTorch script: project / plain", PAIRS, _pairs),
    "cost": ("What strictness costs: strict / relaxed", PAIRS, _pairs),
}

ABOUT = """Written by `make gpu`. The weights and the trace root of each training are compared with those of one process
without loader workers. `again` compiles anew, too; ranks share the one card through gloo; `killed` is by SIGKILL. A
step time is the median over a run's steps, and then over the runs; relaxed is PyTorch's defaults. The plain
script has the same model, samples, micro-batches, optimizer and precision, and no flag; it records nothing. The runs
of a pair follow each other. `small` is the project as released. `large` has 256 samples a step in 2 micro-batches, 8
blocks, a width of 256 (convnet) or 1024 (transformer), and trains 6 epochs. `full` is a transformer of 85 million
parameters, likewise. Measured on:"""


if __name__ == "__main__":
    sys.exit(write(Path(sys.argv[1]), Path(sys.argv[2]), only="cuda"))
