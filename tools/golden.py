"""The golden set: digests of short trainings that only a change of core's arithmetic may change.

    python tools/golden.py     # `make golden`: train everything, compare, and write tests/golden.json

A digest belongs to inputs (code, config, data, versions of packages). With the same inputs, each world size, each
`parallel.shard` and each number of loader workers gives the one digest of its row. Digests of bfloat16 and of compiled
code may depend on the CPU: they are compared between worlds and with a repeat, and not stored.

core/ARITHMETIC and the digests change together. `conflicts` says when they do not; the tests apply it to all committed
versions of the file.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bake import ROOT, VENV, bake, in_venv, make_venv, venv_of

GOLDEN = ROOT / "tests" / "golden.json"
NETWORKS_SCRIPT = ROOT / "tests" / "library" / "golden_networks.py"
NETWORKS = "batchnorm", "dropout", "gan", "ties", "unused"
WORLDS = (1, "none"), *product((2, 3), ("none", "optimizer", "full"))  # ranks, parallel.shard
MAX_RANKS = 3
# Overrides with which a starter makes 3 steps, the last one across the end of an epoch where it trains by epochs.
EPOCH_OF_1438 = "train.epochs=1", "parallel.global_batch=512"
STARTERS = {
    "digits": EPOCH_OF_1438,
    "images": EPOCH_OF_1438,
    "language": ("train.steps=3",),
    "series": EPOCH_OF_1438,
    "finetuning": EPOCH_OF_1438,
    "tabular": ("train.epochs=1", "parallel.global_batch=80", "train.evaluate_every=1"),
    "blank": ("train.epochs=1", "parallel.global_batch=128"),
}
NOT_PORTABLE = {"bfloat16": ("compute.precision=bfloat16",), "compile": ("compute.compile=true",)}

Digests = dict[str, dict[str, str]]  # by name, such as networks/ties: its inputs and its digest, both in hex


def conflicts(current: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why the golden set `current` contradicts `earlier` versions of the file, a line for each reason.

    Rows are compared where their inputs are the same. A change of the integer is justified if any version with the
    previous integer had another digest.
    """
    lines = []
    arithmetic = current["arithmetic"]
    for version in earlier:
        changed = _changed(version["digests"], current["digests"])
        if version["arithmetic"] == arithmetic and changed:
            lines.append(f"{', '.join(changed)}: the digest changes and core/ARITHMETIC stays {arithmetic}: raise it")
    previous = [version for version in earlier if version["arithmetic"] != arithmetic]
    last = [version for version in previous if version["arithmetic"] == previous[-1]["arithmetic"]]
    if last and not any(_changed(version["digests"], current["digests"]) for version in last):
        old = last[-1]["arithmetic"]
        lines.append(f"core/ARITHMETIC: {old} -> {arithmetic}, and no golden digest changes: put {old} back")
    return list(dict.fromkeys(lines))


def _changed(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the names of rows with the same inputs and another digest."""
    return [name for name, row in after.items() if (old := before.get(name)) and old != row and _same(old, row)]


def _same(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return one["inputs"] == other["inputs"]


def committed_versions() -> list[dict[str, Any]]:
    """Return the golden set as each commit that changed it left it, oldest first."""
    name = f"./{GOLDEN.relative_to(ROOT)}"
    commits = _git("log", "--reverse", "--format=%H", "--diff-filter=AM", "--", name).split()
    return [json.loads(_git("show", f"{commit}:{name}")) for commit in commits]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def network_inputs(packages: str) -> str:
    """Return the digest of what decides a network's golden digest beside core: its script, and versions of packages."""
    return hashlib.sha256(NETWORKS_SCRIPT.read_bytes() + packages.encode()).hexdigest()


def network_cases(networks: Iterable[str] = NETWORKS) -> list[str]:
    """Return cases for the script whose digest is stored: each network, world and shard, and a loader worker."""
    cases = [f"{name},{ranks},{shard},0,float32,," for name in networks for ranks, shard in WORLDS]
    return [*cases, *(f"{name},2,none,1,float32,," for name in networks)]


def half_cases(networks: Iterable[str] = NETWORKS) -> list[str]:
    """Return cases with bfloat16, in two worlds each."""
    return [f"{name},{ranks},none,0,bfloat16,," for name in networks for ranks in (1, MAX_RANKS)]


def compiled_cases(networks: Iterable[str] = NETWORKS) -> list[str]:
    """Return cases with torch.compile, in two worlds each."""
    return [f"{name},{ranks},none,0,float32,compile," for name in networks for ranks in (1, 2)]


def by_network(digests: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the different digests by network, from those of cases without a fault.

    A network whose digest is not stored has its variant behind its name, such as `ties/bfloat16`.
    """
    digests_by_label: dict[str, set[str]] = {}
    for case, digest in digests.items():
        network, _, _, _, precision, compiled, _ = case.split(",")
        variant = [precision] if precision != "float32" else []
        digests_by_label.setdefault("/".join(filter(None, (network, *variant, compiled))), set()).add(digest)
    return digests_by_label


def train_networks(folder: Path, cases: Sequence[str]) -> dict[str, str]:
    """Train cases on one set of ranks, started by torchrun; return the digest of each."""
    out, kernels = folder / "networks.json", folder / "kernels"
    launcher = "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={MAX_RANKS}"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(kernels)}
    subprocess.run([VENV / "bin" / "python", *launcher, NETWORKS_SCRIPT, out, *cases], env=env, check=True)
    return dict(json.loads(out.read_text()))


def train_starter(project: Path, env: Mapping[str, str], ranks: int, *overrides: str) -> dict[str, str]:
    """Make the short run of a starter in its project, whose data are prepared; return its row of the golden set."""
    out = Path("build", "golden")
    keys = *overrides, "tracking.enabled=false", "prove.when=never", "record.finished=replace"
    words = [word for key in keys for word in ("--set", key)]
    command = ["python", "-m", "samebits", "train", *words, "--out", str(out), "--ranks", str(ranks)]
    done = subprocess.run(command, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    weights, trace = (next(line.split()[1] for line in done.stdout.splitlines() if line.startswith(word))
                      for word in ("weights ", "trace "))  # fmt: skip
    parts = json.loads((project / out / "address.json").read_text())["parts"]
    inputs = "".join(digest for name, digest in sorted(parts.items()) if name != "core")
    return {"inputs": hashlib.sha256(inputs.encode()).hexdigest(), "digest": f"{weights} {trace}"}


def starter_rows(name: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Make all short runs of a starter; yield a label and the row of each: all rows of a label must be equal."""
    project = bake(folder, starter=name)
    make_venv(project, venv_of(name))
    env = in_venv(project, venv=venv_of(name))
    subprocess.run(["python", "-m", "samebits", "prepare"], cwd=project, env=env, check=True)
    for ranks, shard in WORLDS:
        workers = "loader.workers=1" if ranks == 2 else "loader.workers=0"
        yield name, train_starter(project, env, ranks, *STARTERS[name], f"parallel.shard={shard}", workers)
    for label, overrides in NOT_PORTABLE.items():
        for ranks in (1, 2, 1):
            yield f"{name}/{label}", train_starter(project, env, ranks, *STARTERS[name], *overrides)


def network_rows(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Train all networks, twice where the digest is not stored; yield a label and a row for each digest."""
    code = "import numpy, torch; print(torch.__version__.partition('+')[0], numpy.__version__)"
    packages = subprocess.run([VENV / "bin" / "python", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    inputs = network_inputs(packages.stdout.strip())
    not_stored = [*half_cases(), *compiled_cases()]
    for name, cases in (("first", [*network_cases(), *not_stored]), ("second", not_stored)):
        (folder / name).mkdir()
        for label, digests in by_network(train_networks(folder / name, cases)).items():
            for digest in digests:
                yield label, {"inputs": inputs, "digest": digest}


def main() -> int:
    """Train the golden set and write it; return the exit code."""
    rows: Digests = {}
    failures = []
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as name:
        folder = Path(name)
        starters = [("starters", starter_rows(starter, folder)) for starter in STARTERS]
        for kind, labelled_rows in [("networks", network_rows(folder)), *starters]:
            for label, row in labelled_rows:
                print(f"{kind}/{label}: {row['digest'][:16]}", flush=True)
                first = rows.setdefault(f"{kind}/{label}", row)
                if first != row:
                    failures.append(f"{kind}/{label}: expected {first['digest']}, got {row['digest']}")
    arithmetic = int((ROOT / "samebits" / "core" / "ARITHMETIC").read_text())
    golden = {"arithmetic": arithmetic, "digests": {name: row for name, row in rows.items() if name.count("/") == 1}}
    failures += conflicts(golden, committed_versions())
    if failures:
        print(*failures, sep="\n", file=sys.stderr)
        return 1
    GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")
    print(f"{GOLDEN.relative_to(ROOT)}: {len(golden['digests'])} digests of arithmetic {arithmetic}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
