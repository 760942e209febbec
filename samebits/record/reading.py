"""Reading of the records in a run directory, each held to the form that its readers rely on."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, StringConstraints

from ..base.files import parse_json, read_json, read_text
from ..base.forms import ABSENT, Form, NotFinite, Sha256
from . import names


class Code(Form):
    """Its commit and the SHA-256 of its patch."""

    commit: Annotated[str, StringConstraints(pattern="^[0-9a-f]{40}$")] | None
    patch: Sha256 | None


class File(Form):
    """A prepared file."""

    path: str
    sha256: Sha256


class Data(Form):
    """The manifest of the prepared data."""

    files: list[File]


class Started(Form):
    """What a run began with that started from another one."""

    weights: Sha256
    state: Sha256 = ABSENT


class Arithmetic(Form, extra="forbid"):
    """The core of a release."""

    arithmetic: PositiveInt


class Preimage(Form):
    """The ingredients of a content address. Earlier releases state core's files, and some runs their world size."""

    config: dict[str, Any]
    code: dict[str, str]
    core: Arithmetic | dict[str, str] = Field(default_factory=dict)
    data: Data
    lock: dict[str, str]
    seed: int
    world_size: PositiveInt | None = None
    start: Started = ABSENT


class Parts(Form, extra="allow"):
    """The digest of each part of a preimage."""

    __pydantic_extra__: dict[str, Sha256] = Field(init=False)
    data: Sha256


class Address(Form):
    """The content address."""

    address: Sha256
    parts: Parts
    preimage: Preimage
    core_files: dict[str, Sha256] = ABSENT


class Environment(Form):
    """The numeric environment and its class."""

    environment: Sha256
    name: str = Field(alias="class")
    preimage: dict[str, Any]
    before: list[dict[str, Any]] = ABSENT


class Recorded(Environment):
    """What environment.json holds."""

    environment: str
    informational: dict[str, Any]


class Tags(Form):
    """Those that MLflow shows."""

    address: str = Field(alias="repro.address")


class Tracking(Form):
    """Where the run is tracked."""

    uri: str
    experiment: str


class Dataset(Form):
    """What MLflow calls the data."""

    name: str
    digest: str


class Tensor(Form):
    """An input or an output of the network, as MLflow describes it."""

    name: str
    dtype: str
    shape: list[int]


Number = float | NotFinite


class Stopped(Form):
    """Why a run ended before it had so many steps as planned, in its owner's words."""

    reason: str
    planned: int


class Best(Form):
    """After how many steps the weights were those that a run ends with, and the number for which they were chosen."""

    step: int
    value: Number


class Segment(Form):
    """Steps of a run that were trained again, with the same bits, and how."""

    first: int
    stop: int
    ranks: PositiveInt
    workers: int
    shard: str


class Proof(Form):
    """What a run has shown of itself: its parts that were trained again; circumstances that were others then.

    `not_tried` says why some were not, `varying` names logged numbers that were others.
    """

    segments: list[Segment]
    changed: list[str] = ABSENT
    not_tried: dict[str, str]
    varying: list[str] = ABSENT


class Run(Form):
    """What run.json holds."""

    id: str
    started: int
    ended: int | None = None
    status: str
    config: dict[str, Any]
    code: Code
    resumed: list[int] = ABSENT
    stopped: Stopped = ABSENT
    best: Best = ABSENT
    files: list[str] = ABSENT
    segments: list[list[int]] = ABSENT
    states: dict[str, Sha256] = ABSENT
    tags: Tags
    tracking: Tracking
    dataset: Dataset
    shapes: dict[str, list[Tensor]] = ABSENT


class MetricRow(Form):
    """A line of metrics.jsonl."""

    step: int
    time: int
    metrics: dict[str, float]


class Upload(Form):
    """How far an upload came, or why it did not begin."""

    complete: bool
    id: str = ABSENT
    uri: str = ABSENT
    rows: int = ABSENT
    run: str = ABSENT
    where: str = ABSENT


class Next(Form):
    """What came of the step after the state that was saved when the run was stopped."""

    step: int
    digests: dict[str, Sha256]


Identity = Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]  # of a run: paths are made of it
Column = Annotated[str, StringConstraints(pattern="^(output|gradient|weights|optimizer) .*$")]
FORMS = {
    names.ADDRESS: Address,
    names.ENVIRONMENT: Recorded,
    names.RUN: Run,
    names.NEXT: Next,
    names.METRICS: dict[str, float],
    names.TENSOR_COLUMNS: list[Column],
}


def read_record(folder: Path, name: str) -> Any:
    """What the record of this name in a run directory holds.

    Raises:
        UserError: it is missing, not JSON, or lacks what its readers need.
    """
    return read_json(folder / name, FORMS[name])


def metric_rows(folder: Path, done: int = 0) -> list[dict[str, Any]]:
    """The whole rows of metrics.jsonl after the first `done`; a line still being written has no newline yet.

    Raises:
        UserError: a whole line is no row.
    """
    path = folder / names.METRIC_ROWS
    lines = read_text(path).split("\n")[:-1]
    return [parse_json(line, f"{path}, line {number}", MetricRow) for number, line in enumerate(lines[done:], done + 1)]
