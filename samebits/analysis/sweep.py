"""`samebits sweep`: a run for each combination of values, by processes of `samebits train`. What is done stays done."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

from ..address.address import content_address, digest
from ..base.project import Project
from ..base.shape import plain
from ..config.params import load
from ..config.settings import Settings
from ..core.errors import RunError, UserError
from ..record import names
from ..record.reading import read_record
from ..record.receipt import read
from ..record.view import is_stated
from ..start import trainings
from ..start.ranks import handling

MOST = 10_000  # runs of a sweep
PAUSE = 0.05  # seconds between two looks at processes that run
PARENT = "samebits.tracking.parent"  # the module that keeps MLflow's run of a sweep
SPAN = re.compile(r"(-?\d+)\.\.(-?\d+)")
COMMA = re.compile(r",(?![^\[{]*[\]}])")  # one that stands in no list
TRACKING = "MLFLOW_TRACKING_URI"
VISIBLE = "CUDA_VISIBLE_DEVICES"  # it decides no bit, and no record holds it
Report = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """A run of a sweep: the values that it is given, as they were typed, its content address and its directory."""

    values: Mapping[str, str]
    config: Settings
    address: str
    folder: Path

    @property
    def name(self) -> str:
        """Its values, in a line."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def log(self) -> Path:
        """What its process prints."""
        return self.folder.with_suffix(".log")

    def is_done(self) -> bool:
        """Whether its directory holds it, finished and as its receipt states."""
        try:
            receipt = read(self.folder)
            finished = read_record(self.folder, names.RUN)["status"] == "FINISHED"
        except RunError:
            return False
        stated = receipt.stated
        requested = self.config.environmental().items()
        same = stated["address"] == self.address and all(stated["config"].get(key) == held for key, held in requested)
        return finished and same and is_stated(receipt, names.WEIGHTS) and is_stated(receipt, names.METRICS)


@dataclass(frozen=True)
class Failed:
    """A run that came to no end: its exit code, and the last line that it printed."""

    wanted: Wanted
    code: int
    last: str

    def line(self) -> str:
        """What a reader has to know."""
        return f"FAILED: {self.wanted.name}: exit code {self.code}: {self.last} ({self.wanted.log})"


def values(word: str) -> tuple[str, list[str]]:
    """A key and its values out of KEY=VALUE,VALUE or KEY=FIRST..LAST.

    Raises:
        UserError: it has none.
    """
    key, equals, text = word.partition("=")
    if not key or not equals:
        raise UserError(f"{word}: KEY=VALUE,VALUE or KEY=FIRST..LAST wanted, such as seed=0..4")
    if span := SPAN.fullmatch(text):
        first, last = map(int, span.groups())
        if not 0 <= last - first < MOST:
            raise UserError(f"{word}: {first} to {last} seen, 1 to {MOST} whole numbers wanted, the smallest first")
        return key, [str(number) for number in range(first, last + 1)]
    found = [value.strip() for value in COMMA.split(text)]
    if not all(found):
        raise UserError(f"{word}: an empty value seen, a list such as {key}=1,2 wanted")
    return key, found


def planned(
    project: Project,
    schema: type[Settings],
    words: Sequence[str],
    overrides: Sequence[str],
    ranks: int,
    out: Path,
    report: Report,
) -> list[Wanted]:
    """The runs of a sweep, in the order of its words; the last key changes first.

    Raises:
        UserError: a word, a key or a value is wrong, or two combinations are one run.
    """
    pairs = [values(word) for word in words]
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise UserError(f"{twice[0]}: named twice; give all its values in one word")
    combinations = [dict(zip(keys, chosen, strict=True)) for chosen in product(*(held for _, held in pairs))]
    if len(combinations) > MOST:
        raise UserError(f"{len(combinations)} combinations seen, at most {MOST} wanted")
    configs, problems = [], dict[str, None]()
    for each in combinations:
        try:
            configs.append(load(schema, overrides=(*overrides, *_texts(each))))
        except UserError as refused:
            problems |= dict.fromkeys(str(refused).splitlines())
    if problems:
        raise UserError("\n".join(problems))
    if (most := min(config.parallel.micro_batches for config in configs)) < ranks:
        raise UserError(f"--ranks {ranks} given, at most parallel.micro_batches={most} wanted: each runs one")
    found: dict[str, Wanted] = {}
    data: dict[str, dict[str, Any]] = {}  # manifests
    for each, config in zip(combinations, configs, strict=True):
        of = config.data.model_dump_json()
        if of not in data:
            data[of] = trainings.prepared(project, config, report)
        address = content_address(project, config, data[of]).digest
        wanted = Wanted(each, config, address, out / address[:16])
        if other := found.get(address):
            raise UserError(
                f"{other.name} and {wanted.name}: one content address ({address[:16]}), so they are one run: sweep "
                f"values that ask for other numbers, and give the rest by --set"
            )
        found[address] = wanted
    return [*found.values()]


def _texts(chosen: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in chosen.items()]


def places(runs: Sequence[Wanted], ranks: int, jobs: int) -> list[dict[str, str]]:
    """For each of the runs that are made at a time, the variable that gives it GPUs of its own; on a CPU none.

    Raises:
        UserError: there are too few.
    """
    left = [each for each in runs if not each.is_done()]
    jobs = min(jobs, len(left))
    seen = _gpus() if jobs > 1 and any(each.config.device != "cpu" for each in left) else []
    if not seen:
        return [{} for _ in range(jobs)]
    if len(seen) < jobs * ranks:
        raise UserError(
            f"--jobs {jobs} of {ranks} rank{'s' * (ranks > 1)}: {len(seen)} GPUs seen, {jobs * ranks} wanted, one for "
            f"each rank of each job; give fewer --jobs, or --set device=cpu"
        )
    return [{VISIBLE: ",".join(seen[job * ranks : (job + 1) * ranks])} for job in range(jobs)]


def _gpus() -> list[str]:
    """The GPUs that a training sees here, by the names that CUDA_VISIBLE_DEVICES has for them."""
    import torch

    count, named = torch.cuda.device_count(), os.environ.get(VISIBLE, "")
    return [name.strip() for name in named.split(",")][:count] if named else [str(number) for number in range(count)]


def made(
    project: Project, runs: Sequence[Wanted], overrides: Sequence[str], ranks: int,
    places: Sequence[Mapping[str, str]], report: Report,
) -> list[Failed]:  # fmt: skip
    """Make those of the runs that are not done, at a time as many as there are `places`. Returns those that failed.

    A signal ends the processes, which save their states, and then this one.
    """
    left = [each for each in runs if not each.is_done()]
    processes, cores = len(places) * ranks, len(os.sched_getaffinity(0))
    if processes > cores:
        report(f"{processes} processes share {cores} cores: fewer --jobs are as fast")
    failed: list[Failed] = []
    for count, (wanted, code) in enumerate(_ended(project, left, overrides, ranks, places), 1):
        if code or not wanted.is_done():
            failed.append(Failed(wanted, code, _last(wanted.log)))
            report(f"{count}/{len(left)}  {wanted.name}: FAILED with exit code {code}")
        else:
            report(f"{count}/{len(left)}  {wanted.name}: weights {read(wanted.folder).weights[:16]}")
    return failed


def _ended(
    project: Project, left: Sequence[Wanted], overrides: Sequence[str], ranks: int, places: Sequence[Mapping[str, str]]
) -> Iterator[tuple[Wanted, int]]:
    """Start the runs in their order, one in each place; each with its exit code, as it ends."""
    waiting, free = [*left], [*places]
    running: dict[int, tuple[Wanted, trainings.Started, Mapping[str, str]]] = {}
    environ = environment(project)
    with handling(_interrupt):
        try:
            while waiting or running:
                while waiting and free:
                    wanted, place = waiting.pop(0), free.pop(0)
                    words = _words(wanted, overrides, ranks)
                    process = trainings.start(project, words, wanted.log, {**environ, **place})
                    running[process.pid] = wanted, process, place
                done = {pid: code for pid, (_, process, _) in running.items() if (code := process.poll()) is not None}
                for pid, code in done.items():
                    wanted, _, place = running.pop(pid)
                    free.append(place)
                    yield wanted, code
                if not done:
                    time.sleep(PAUSE)
        finally:
            for _, process, _ in running.values():
                process.send_signal(signal.SIGTERM)
            for _, process, _ in running.values():
                process.wait()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _words(wanted: Wanted, overrides: Sequence[str], ranks: int) -> list[str]:
    wanted.folder.parent.mkdir(parents=True, exist_ok=True)
    given = trainings.sets([*overrides, *_texts(wanted.values)])
    place = "--out", wanted.folder, "--ranks", str(ranks)
    return trainings.command("train", {}, "--quiet", *place, *given)


def environment(project: Project) -> dict[str, str]:
    """The variables of the trainings, which prove themselves and are tracked as if each had been started by hand."""
    kept = {name: value for name, value in trainings.environment(project).items() if name not in trainings.UNPROVED}
    return kept | {name: os.environ[name] for name in (TRACKING, trainings.PROVE) if name in os.environ}


def _last(log: Path) -> str:
    """The last line that a process printed."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return plain(lines[-1]) if lines else "it printed nothing"


def tracked(
    project: Project, runs: Sequence[Wanted], report: Report, status: str = "RUNNING", files: Sequence[Path] = ()
) -> str:
    """MLflow's run of a sweep, whose children its runs are, given this status and these files; empty without tracking.

    That no server answers is reported, and no reason to train less.
    """
    tracking = runs[0].config.tracking
    if not tracking.enabled:
        return ""
    wanted = {
        "uri": tracking.uri,
        "experiment": tracking.experiment,
        "sweep": digest(sorted(each.address for each in runs))[:16],
        "keys": list(runs[0].values),
        "status": status,
        "files": [str(file.absolute()) for file in files],
    }
    words = trainings.command(PARENT, {}, json.dumps(wanted))
    try:
        return trainings.run(project, words, environ=environment(project)).split()[-1]
    except trainings.Ended as failure:
        report(f"MLflow has no run of this sweep: {plain(failure.said[-1] if failure.said else str(failure.code))}")
        return ""
