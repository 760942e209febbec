"""What the core is asked for, as plain values: `Settings.options` fills them from params.yaml.

Their names, and what they nest, are those of the keys.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Parallel:
    """How a global batch is cut into micro-batches, and how their gradients are summed."""

    global_batch: int  # samples
    micro_batches: int
    shard: Literal["none", "optimizer", "full"] = "none"
    replicas: int = 1
    timeout_seconds: int = 600


@dataclass(frozen=True)
class Compute:
    """Arithmetic other than plain float32, and what a gradient that is not finite does: end the run, or skip."""

    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    nonfinite: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class Determinism:
    """The arithmetic of CPU and GPU, and the flags that are left off for measurements."""

    cpu: Literal["portable", "native"] = "portable"
    tf32: bool = False
    relax: tuple[str, ...] = ()


@dataclass(frozen=True)
class Integrity:
    """After how many steps a micro-batch is computed twice; 0: never."""

    recompute_every: int = 0


@dataclass(frozen=True)
class Loader:
    """How many processes make the samples."""

    workers: int = 0


@dataclass(frozen=True)
class Options:
    """All of it."""

    seed: int
    parallel: Parallel
    compute: Compute = Compute()
    determinism: Determinism = Determinism()
    integrity: Integrity = Integrity()
    loader: Loader = Loader()
