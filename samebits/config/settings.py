"""The typed config behind params.yaml: the keys that the library reads.

A key that may change bits must stand in params.yaml. A neutral one of the library's own has a default: a release with a
new one breaks no project. A key is one of three kinds, and only the first enters the content address:

- ordinary: asks for other numbers
- `ENVIRONMENT`: its effect is read back and recorded in the numeric environment
- `NEUTRAL`: must not change a bit
"""

import re
from collections.abc import Iterator
from math import isfinite
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, to_jsonable_python

from ..base.redact import without_credentials
from ..base.text import flatten
from ..base.variables import unfit
from ..core import options


class Kind:
    """Marks a key that stays out of the content address; see the module's docstring."""


NEUTRAL, ENVIRONMENT = Kind(), Kind()
T = TypeVar("T")
Neutral = Annotated[T, NEUTRAL]
Environment = Annotated[T, ENVIRONMENT]


LARGEST = 2**53 - 1  # and its negative: canonical JSON (RFC 8785), of which receipts are, holds no larger whole number
SECONDS = 10**6  # the longest time: some of the clocks that wait count milliseconds in 32 bits


class Section(BaseModel):
    """A group of keys: unknown ones are refused, receipts can hold all numbers, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _numbers_that_a_receipt_holds(cls, value: Any) -> Any:
        for number in _numbers(to_jsonable_python(value, inf_nan_mode="constants")):
            if isinstance(number, int) and abs(number) > LARGEST:
                raise PydanticCustomError("too_large", f"whole numbers from -{LARGEST} to {LARGEST} wanted")
            if not isfinite(number):
                raise PydanticCustomError("finite_number", "finite numbers wanted")
        return value


def _numbers(value: Any) -> Iterator[float]:
    """The numbers in a JSON-compatible value."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)


Check = Literal["remembered", "every_byte"]


class Data(Section):
    """The dataset (a file or a folder), its SHA-256, how that is checked, and where the prepared splits lie.

    `read` says what a run reads: the prepared data alone, or the dataset itself as well, which is checked before each.
    """

    raw: Annotated[str, NEUTRAL]
    read: Literal["prepared", "both"]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    check: Annotated[Check, NEUTRAL] = "remembered"
    prepared: Annotated[str, NEUTRAL] = "data/prepared"
    license: Annotated[str, NEUTRAL] = ""
    source: Annotated[str, NEUTRAL] = ""

    @model_validator(mode="after")
    def _keep_credentials_out_of_receipts(self) -> Self:
        if without_credentials(self.source) != self.source:
            raise ValueError("source holds a user, a password or a query, and receipts state it; wanted a URL without")
        return self


# A key of earlier releases -> its value there that is the only way today. params.yaml may still contain it.
IGNORED = {"parallel.reduce": "tree"}


class Parallel(Section):
    """The split of a global batch into micro-batches, and the shards of gradients, optimizer state and weights."""

    global_batch: Annotated[int, Field(gt=0, le=2**20)]  # whose samples a host holds at once
    micro_batches: PositiveInt
    shard: Annotated[Literal["none", "optimizer", "full"], NEUTRAL] = "none"
    replicas: Annotated[PositiveInt, NEUTRAL] = 1
    timeout_seconds: Annotated[int, Field(gt=0, le=SECONDS), NEUTRAL] = 600

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_key(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and keys.get("reduce") == IGNORED["parallel.reduce"]:
            return {name: value for name, value in keys.items() if name != "reduce"}
        return keys

    @model_validator(mode="after")
    def _micro_batches_divide_the_batch(self) -> Self:
        if self.global_batch % self.micro_batches:
            wanted = f"micro_batches={self.micro_batches}"
            raise ValueError(f"global_batch={self.global_batch} does not divide into {wanted} equal parts")
        return self


class Compute(Section):
    """Arithmetic other than plain float32, which leaves the portable class of environments; and what infinities do."""

    precision: Literal["float32", "bfloat16"]
    compile: bool
    nonfinite: Literal["stop", "skip"]

    @property
    def plain(self) -> bool:
        """Whether the arithmetic keeps to what was proved portable."""
        return self.precision == "float32" and not self.compile


class Determinism(Section):
    """The arithmetic of CPU and GPU, and the flags that are left off for measurements."""

    cpu: Literal["portable", "native"]
    tf32: bool = False
    relax: tuple[str, ...]


Name = Annotated[str, Field(min_length=1)]


class Unhashed(Section):
    """Top-level modules, and files of the project, that a run may use although no hash covers them."""

    modules: tuple[Name, ...]
    files: tuple[Name, ...]


Digest = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]  # SHA-256, or none


class Start(Section):
    """What a run begins with that starts from another one: see `samebits train --from`, which fills these in."""

    run: str = ""
    receipt: Digest = ""
    weights: Digest = ""
    state: Digest = ""

    @property
    def addressed(self) -> dict[str, str]:
        """What enters the content address, as a part of its own: nothing where weights are drawn."""
        return {name: value for name, value in (("weights", self.weights), ("state", self.state)) if value}


class Checkpoint(Section):
    """How often the state is saved, how many saves are kept, and whether a failed save ends the run."""

    every: PositiveInt = 50
    keep: PositiveInt = 3
    on_error: Literal["stop", "continue"] = "stop"


class Integrity(Section):
    """How often ranks compare their weights and recompute a micro-batch; 0: never."""

    compare_every: NonNegativeInt = 50
    recompute_every: NonNegativeInt = 0


STEPS = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)


class Trace(Section):
    """How much of a step is written down, and of which steps a profile."""

    level: Literal["off", "step", "tensor"] = "step"
    values: Annotated[int, Field(ge=-1)] = -1
    profile: str = ""

    @field_validator("profile")
    @classmethod
    def _steps_of_a_profile(cls, value: str) -> str:
        steps = STEPS.fullmatch(value)
        if value and not (steps and int(steps[1]) < int(steps[2])):
            raise ValueError(f"{value!r} given, FIRST:STOP wanted, such as 10:13 for steps 10, 11 and 12")
        return value


class Record(Section):
    """The fate of a finished run whose directory another is to have, and whether a run shows its steps."""

    finished: Literal["keep", "replace", "refuse"] = "keep"
    progress: bool = True


class Receipt(Section):
    """The ssh key that signs the receipts of runs: a private one's file, or a public one's for ssh-agent."""

    key: str = ""


class Loader(Section):
    """DataLoader settings that change speed only."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 0


class Tracking(Section):
    """Where MLflow records the run, and how long the end of a run waits for the upload."""

    enabled: bool = True
    uri: str = ""
    experiment: str = "Default"  # MLflow's own
    parent: str = ""
    model: bool = True
    system_seconds: Annotated[int, Field(ge=0, le=SECONDS)] = 0
    wait_seconds: Annotated[int, Field(ge=0, le=SECONDS)] = 60

    @model_validator(mode="after")
    def _keep_credentials_out_of_files(self) -> Self:
        if found := [mark for mark in "@?" if mark in self.uri]:
            raise ValueError(
                f"uri holds {found[0]!r}, before or after which a user or a password may stand, and files are no place "
                f"for them; wanted a URI without @ and ?. Set the environment variable MLFLOW_TRACKING_URI instead"
            )
        return self


Variable = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]


class Variables(Section):
    """Environment variables on which bits depend, by name: their values enter the numeric environment."""

    variables: tuple[Variable, ...] = ()

    @field_validator("variables")
    @classmethod
    def _of_the_run_alone(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if found := [f"{name} is of {kind}" for name in names if (kind := unfit(name))]:
            raise ValueError(f"{found[0]}, on which no bit may depend, and records are no place for it; remove it")
        return tuple(sorted({*names}))


class Prove(Section):
    """Whether a run trains parts of itself again before its receipt is written: how many, and how many steps."""

    when: Literal["end", "early", "never"] = "end"
    segments: Annotated[int, Field(gt=0, le=1000)] = 3
    steps: NonNegativeInt = 0


class Verify(Section):
    """How `samebits verify` shortens a training, and varies neutral keys: overrides of other keys, as `KEY=VALUE`."""

    shorten: tuple[str, ...] = ()
    vary: tuple[str, ...] = ()


class Settings(Section):
    """The keys the library reads. A project's `Config` adds its own."""

    seed: Annotated[int, Field(ge=0, lt=2**53)]  # below 2**53 so that canonical JSON holds it exactly
    device: Annotated[Literal["auto", "cpu", "cuda"], ENVIRONMENT]
    data: Data
    parallel: Parallel
    compute: Compute
    unhashed: Unhashed
    determinism: Annotated[Determinism, ENVIRONMENT]
    environment: Annotated[Variables, ENVIRONMENT] = Variables()
    start: Annotated[Start, NEUTRAL] = Start()  # what of it decides bits is a part of the address beside the config
    checkpoint: Annotated[Checkpoint, NEUTRAL] = Checkpoint()
    integrity: Annotated[Integrity, NEUTRAL] = Integrity()
    trace: Annotated[Trace, NEUTRAL] = Trace()
    record: Annotated[Record, NEUTRAL] = Record()
    receipt: Annotated[Receipt, NEUTRAL] = Receipt()
    loader: Annotated[Loader, NEUTRAL] = Loader()
    tracking: Annotated[Tracking, NEUTRAL] = Tracking()
    prove: Annotated[Prove, NEUTRAL] = Prove()
    verify: Annotated[Verify, NEUTRAL] = Verify()

    @model_validator(mode="after")
    def _no_compiled_units(self) -> Self:
        if self.compute.compile and self.parallel.shard == "full":
            raise ValueError("compute.compile=true works with parallel.shard=none or optimizer; full seen")
        return self

    @property
    def options(self) -> options.Options:
        """What the core is asked for."""
        parallel, compute, determinism = (each.model_dump() for each in (self.parallel, self.compute, self.determinism))
        return options.Options(
            self.seed,
            options.Parallel(**parallel),
            options.Compute(**compute),
            options.Determinism(**determinism),
            options.Integrity(self.integrity.recompute_every),
            options.Loader(self.loader.workers),
        )

    @classmethod
    def sections(cls) -> list[str]:
        """The top-level keys that are not neutral: a change of one asks for another run."""
        return [name for name, field in cls.model_fields.items() if NEUTRAL not in field.metadata]

    def addressed(self) -> dict[str, Any]:
        """The numerics-relevant part, without the seed: nested and JSON-compatible."""
        return {key: value for key, value in addressed(self).items() if key != "seed"}

    def environmental(self) -> dict[str, Any]:
        """The keys marked ENVIRONMENT as `section.key`, JSON-compatible."""
        return flatten(_marked(self, ENVIRONMENT))

    def flat(self) -> dict[str, Any]:
        """Every key as `section.key`, JSON-compatible."""
        return flatten(self.model_dump(mode="json"))


def addressed(section: BaseModel) -> dict[str, Any]:
    """The keys of a section that enter the content address, nested and JSON-compatible."""
    return _marked(section, None)


def _marked(section: BaseModel, wanted: Kind | None) -> dict[str, Any]:
    """The keys of one kind (None: ordinary ones), nested and JSON-compatible; a marked section is one key."""
    dumped = section.model_dump(mode="json")
    kept = {}
    for name, field in type(section).model_fields.items():
        kind = next((mark for mark in field.metadata if isinstance(mark, Kind)), None)
        value = getattr(section, name)
        if kind is None and isinstance(value, BaseModel):
            kept[name] = _marked(value, wanted)
        elif kind is wanted:
            kept[name] = dumped[name]
    return kept
