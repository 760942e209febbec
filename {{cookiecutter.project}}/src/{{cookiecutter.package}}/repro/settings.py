"""The typed config behind params.yaml: the keys the machinery reads, loading, overriding, flattening.

Every key must stand in params.yaml; there are no hidden defaults. A key is one of three kinds, and
only the first enters the content address:

- ordinary: asks for other numbers
- `ENVIRONMENT`: its effect is read back and recorded in the numeric environment
- `NEUTRAL`: must not change a bit
"""

import difflib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from .errors import Refused


class Kind:
    """Marks a key that stays out of the content address; see the module's docstring."""


NEUTRAL, ENVIRONMENT = Kind(), Kind()


class Section(BaseModel):
    """A group of keys: unknown ones are refused, values are finite and not changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Data(Section):
    """The dataset file, the SHA-256 that its bytes must have, and where the prepared splits lie."""

    raw: Annotated[str, NEUTRAL]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    prepared: Annotated[str, NEUTRAL]


class Parallel(Section):
    """How a global batch is split and its gradients are summed."""

    global_batch: PositiveInt
    shards: PositiveInt
    reduce: Literal["order_free", "ddp"]
    lsb: Annotated[int, Field(le=0)]
    timeout_seconds: Annotated[PositiveInt, NEUTRAL]

    @property
    def limit_exponent(self) -> int:
        """A shard may add up to 2**this multiples of 2**lsb, so that all shards' sum stays below 2**53."""
        return 53 - (self.shards - 1).bit_length()

    @model_validator(mode="after")
    def _shards_divide_the_batch(self) -> Self:
        if self.global_batch % self.shards:
            raise ValueError(f"global_batch={self.global_batch} does not divide into shards={self.shards} equal parts")
        return self

    @model_validator(mode="after")
    def _leave_room_for_gradients(self) -> Self:
        if self.lsb + self.limit_exponent < 1:
            raise ValueError(
                f"lsb={self.lsb} leaves no room for values of 1 and more with shards={self.shards}; "
                f"{1 - self.limit_exponent} or more is wanted"
            )
        return self


class Compute(Section):
    """Arithmetic other than plain float32; asking for it leaves the portable class of environments."""

    precision: Literal["float32", "bfloat16"]
    compile: bool

    @property
    def plain(self) -> bool:
        """Whether the arithmetic keeps to what was proved portable."""
        return self.precision == "float32" and not self.compile


class Determinism(Section):
    """Which CPU arithmetic, and which switches are left off (for measurements)."""

    cpu: Literal["portable", "native"]
    relax: tuple[str, ...]


class Checkpoint(Section):
    """How often the state is saved, how many saves are kept, and what a failed save means."""

    every: PositiveInt
    keep: PositiveInt
    on_error: Literal["stop", "continue"]


class Integrity(Section):
    """How often ranks compare their weights and recompute a shard; 0: never."""

    compare_every: NonNegativeInt
    recompute_every: NonNegativeInt


class Trace(Section):
    """How much is written down of what happens in a step."""

    level: Literal["off", "step", "tensor"]
    values: Annotated[int, Field(ge=-1)]


class Receipt(Section):
    """The ssh key that signs the receipts of runs: a private one's file, or a public one's for ssh-agent."""

    key: str


class Loader(Section):
    """DataLoader settings that change speed only."""

    workers: NonNegativeInt


class Tracking(Section):
    """Where MLflow records the run, and how long the end of a run waits for the upload."""

    enabled: bool
    uri: str
    experiment: str
    wait_seconds: NonNegativeInt

    @model_validator(mode="after")
    def _keep_credentials_out_of_files(self) -> Self:
        if re.search(r"://[^/\s]*@", self.uri):
            raise ValueError(
                "uri holds a user or a password, and files are no place for them; wanted a URI without them. "
                "Set the environment variable MLFLOW_TRACKING_URI instead"
            )
        return self


class Settings(Section):
    """The keys the machinery reads. A project's `Config` adds its own."""

    seed: Annotated[int, Field(ge=0, lt=2**53)]  # below 2**53 so that canonical JSON holds it exactly
    device: Annotated[Literal["auto", "cpu", "cuda"], ENVIRONMENT]
    data: Data
    parallel: Parallel
    compute: Compute
    determinism: Annotated[Determinism, ENVIRONMENT]
    checkpoint: Annotated[Checkpoint, NEUTRAL]
    integrity: Annotated[Integrity, NEUTRAL]
    trace: Annotated[Trace, NEUTRAL]
    receipt: Annotated[Receipt, NEUTRAL]
    loader: Annotated[Loader, NEUTRAL]
    tracking: Annotated[Tracking, NEUTRAL]

    @model_validator(mode="after")
    def _only_the_order_free_sum_recomputes(self) -> Self:
        if self.integrity.recompute_every and self.parallel.reduce == "ddp":
            raise ValueError("integrity.recompute_every needs parallel.reduce=order_free; set it to 0 with ddp")
        return self

    def addressed(self) -> dict[str, Any]:
        """The numerics-relevant part, without the seed: nested and JSON-compatible."""
        return {key: value for key, value in _addressed(self).items() if key != "seed"}

    def flat(self) -> dict[str, Any]:
        """Every key as `section.key`, JSON-compatible."""
        return dict(_flatten(self.model_dump(mode="json")))


def _addressed(section: BaseModel) -> dict[str, Any]:
    dumped = section.model_dump(mode="json")
    kept = {}
    for name, field in type(section).model_fields.items():
        if not any(isinstance(mark, Kind) for mark in field.metadata):
            value = getattr(section, name)
            kept[name] = _addressed(value) if isinstance(value, BaseModel) else dumped[name]
    return kept


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


S = TypeVar("S", bound=Settings)


def load(schema: type[S], path: Path, overrides: Sequence[str] = ()) -> S:
    """Read `path` (YAML), apply `KEY=VALUE` overrides, and check everything against `schema`.

    Raises:
        Refused: no such file, broken YAML, an unknown or missing key, a value out of range; all at once.
    """
    try:
        tree = YAML(typ="safe").load(path.read_text("utf-8"))
    except FileNotFoundError:
        raise Refused(f"{path}: missing. Run from the project's root, where params.yaml lies.") from None
    except (UnicodeDecodeError, YAMLError) as error:
        raise Refused(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise Refused(f"{path}: {type(tree).__name__} seen, a mapping of keys wanted")
    problems = [problem for override in overrides if (problem := _override(tree, override))]
    try:
        config = schema.model_validate(tree)
    except ValidationError as error:
        problems += [_problem(path, schema, detail) for detail in error.errors()]
    if problems:
        raise Refused("\n".join(problems))
    return config


def _override(tree: dict[str, Any], override: str) -> str | None:
    """Change a key of `tree`; return what is wrong with the override, if anything is."""
    key, separator, text = override.partition("=")
    known = dict(_flatten(tree))
    if not separator:
        return f"--set {override}: wanted KEY=VALUE, for example --set seed=1"
    if key not in known:
        return f"--set {key}: unknown key{_nearest(key, list(known))}"
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    try:
        value = YAML(typ="safe").load(io.StringIO(text)) if text else ""
    except YAMLError:
        value = text  # not YAML, hence plain text: the schema says whether text will do
    # a name such as 2026 or null stays text where text stands now
    tree[name] = text if isinstance(tree[name], str) and not isinstance(value, str) else value
    return None


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(known)}"


def _problem(path: Path, schema: Any, detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{path}: {key}: missing; add the key (the project's README describes each)"
    if detail["type"] == "extra_forbidden":
        *sections, _ = detail["loc"]
        for section in sections:
            schema = schema.model_fields[section].annotation
        return (
            f"{path}: {key}: unknown key{_nearest(key, ['.'.join([*sections, name]) for name in schema.model_fields])}"
        )
    wanted = detail["msg"].removeprefix("Value error, ")
    return f"{path}: {key + ': ' if key else ''}{_shown(detail['input'])}{wanted}"


def _shown(value: Any) -> str:
    return "" if isinstance(value, dict | BaseModel) else f"{value!r} given; "
