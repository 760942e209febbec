"""Run directories made by hand: what a training leaves, without a training. A hostile one, too.

    python handmade.py FOLDER

writes the hostile run, and prints its path. Only the standard library is needed.
"""

import hashlib
import json
import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HEX = "0123456789abcdef" * 4
ENVIRONMENT = {
    "device": "cpu",
    "cpu": {"model": "one"},
    "torch": {"version": "2.13.0"},
    "python": "3.11.7",
    "cuda": None,
}
PHASES = ("load", "compute", "update")
# What a browser might run, or a terminal, LaTeX or XML might take for its own; as a name of a file it has no slash.
IMAGE = "<img src=x onerror=alert(1)>"
HOSTILE = (
    IMAGE,
    "</style><script>document.title='taken'</script>",
    "]]><svg onload=alert(2)>",
    r"$\alpha$ and $x",
    "\"'onmouseover='alert(3)",
    "&lt;script&gt;alert(4)&lt;/script&gt;",
    "{{7*7}} \x1b[31m\u202e\n",
    "javascript:alert(5)",
)


def canonical(value: Any) -> bytes:
    """JSON as RFC 8785 wants it, for the plain values that stand here."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(value: Any) -> str:
    """SHA-256 of a value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def chain(rows: Sequence[tuple[int, ...]]) -> bytes:
    """Rows of steps.bin, each with the hash over all rows before it."""
    content, link = bytearray(), bytes(24)
    for row in rows:
        packed = struct.pack("<IIQQQQ", *row)
        link = hashlib.sha256(link + packed).digest()[:24]
        content += packed + link
    return bytes(content)


def traced(steps: int, part: int | None = None, phase: str = "loss", as_number: int = 9) -> list[tuple[int, ...]]:
    """The rows of a trace; from step `part` on it is another one, and differs first in `phase`."""
    found = []
    for step in range(steps):
        row = {"batch": step + 1, "loss": step + 2, "gradient": step + 3, "weights": 0}
        if part is not None and step >= part:
            later = list(row)[list(row).index(phase) :] if step == part else list(row)
            row |= {name: row[name] + 1000 * as_number for name in later if name != "weights"}
        found.append((step, 0, *row.values()))
    return found


def write(
    folder: Path,
    steps: int = 12,
    status: str = "FINISHED",
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    rows: Sequence[tuple[int, ...]] | None = None,
    curves: Mapping[str, Callable[[int], float]] | None = None,
    metrics: Mapping[str, float] | None = None,
    environment: Mapping[str, Any] | None = None,
    host: str = "a-host",
    ranks: int = 1,
    weights: str = HEX,
    proof: Mapping[str, Any] | None = None,
) -> Path:
    """Write what a run leaves in `folder`; a receipt only of a finished one."""
    requested = {"train.learning_rate": 0.004, "model.width": 32} | dict(config or {})
    data = {"files": [{"path": "train.npy", "sha256": HEX}]}
    code = {"code": {"train.py": HEX}, "core": {"step.py": HEX}, "lock": {"torch": "2.13.0"}}
    preimage = {"config": requested, **code, "data": data, "seed": seed}
    parts = {name: digest(part) for name, part in preimage.items()}
    address = {"address": digest(preimage), "parts": parts, "preimage": preimage}
    held = dict(environment or ENVIRONMENT)
    around = {"host": host, "cpu": "a CPU", "cores": 2, "system": "Linux", "world_size": ranks}
    class_of = {"environment": digest(held), "class": f"cpu/{digest(held)[:16]}", "preimage": held}
    run = {
        "id": digest(str(folder))[:32], "started": 1000, "ended": 9500 if status != "RUNNING" else None,
        "status": status, "config": {**requested, "seed": seed}, "code": {"commit": HEX[:40], "patch": None},
        "tags": {"repro.address": address["address"]}, "tracking": {"uri": "", "experiment": "any"},
        "dataset": {"name": "any", "digest": HEX}, "resumed": [],
    }  # fmt: skip
    outcome = dict(metrics or {"accuracy": 0.975}) | ({"steps": steps} if steps else {})
    trace = chain(traced(steps) if rows is None else rows)
    folder.mkdir(parents=True)
    (folder / "trace").mkdir()
    (folder / "trace" / "steps.bin").write_bytes(trace)
    for name, value in (("address", address), ("run", run), ("environment", class_of | {"informational": around})):
        (folder / f"{name}.json").write_text(json.dumps(value))
    logged = curves or {"loss": lambda step: 2.5 * 0.9**step}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            row = {"step": step, "time": 1000 + step, "metrics": {name: of(step) for name, of in logged.items()}}
            file.write(json.dumps(row) + "\n")
    for rank in range(ranks):
        with (folder / "trace" / f"rank{rank:04d}.jsonl").open("w") as file:
            for step in range(steps):
                seconds = {phase: 0.001 * (place + 1 + rank) for place, phase in enumerate(PHASES)}
                row = {"step": step, "rank": rank, "host": host, "seconds": seconds, "memory": 2**28 + rank * 2**20}
                file.write(json.dumps(row) + "\n")
    if status == "FINISHED":
        (folder / "metrics.json").write_text(json.dumps(outcome))
        exact = {name: value if math.isfinite(value) else repr(value) for name, value in outcome.items()}
        informational = around | {"resumed": [], "seconds": 8.5, "started": 1000, "of": str(folder)}
        stated = {
            "schema": 1, **address, "environment": class_of, "config": run["config"], "code": run["code"],
            "metrics": exact, "trace": trace[-24:].hex() if trace else None, "informational": informational,
        }  # fmt: skip
        stated |= {"proof": proof} if proof else {}
        statement = {
            "_type": "https://in-toto.io/Statement/v1",
            "predicateType": "https://github.com/org/repro-template/receipt/v1",
            "subject": [{"name": "model.safetensors", "digest": {"sha256": weights}}],
            "predicate": stated,
        }
        (folder / "receipt.json").write_bytes(canonical(statement))
    return folder


def hostile(folder: Path) -> Path:
    """A run whose every word is an attack: its folder's name, keys, values, metrics, host, and hardware."""
    words = {f"setting {number} {word}": word for number, word in enumerate(HOSTILE)}
    curves = {word: lambda step: 1.0 / (step + 1) for word in HOSTILE}
    environment = {**ENVIRONMENT, **words, "cpu": {"model": IMAGE}, "torch": {"version": HOSTILE[1]}}
    metrics = dict.fromkeys(HOSTILE, 0.5)
    out = folder / IMAGE
    return write(out, config=words, curves=curves, metrics=metrics, environment=environment, host=HOSTILE[1])


if __name__ == "__main__":
    print(hostile(Path(sys.argv[1])))
