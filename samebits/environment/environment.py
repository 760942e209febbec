"""The numeric environment: the libraries, the hardware and the settings in force here that may change bits."""

import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from ..base.redact import SECRET, without_credentials
from ..config.settings import Compute
from ..core.flags import effective, is_portable
from ..core.options import Determinism
from ..record.classes import OWN, described
from .canary import arithmetic_canary
from .portable import COMPILED

# Only these variables are read: no other one may reach a record.
PREFIXES = (
    "ATEN_", "CUBLAS_", "CUDNN_", "DNNL_", "GLOO_", "KMP_", "MKL_", "NCCL_", "NPY_", "OMP_", "ONEDNN_", "OPENBLAS_",
    "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_",
)  # fmt: skip
NAMES = ("CUDA_LAUNCH_BLOCKING", "GLIBC_TUNABLES", "NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED")
# These change no bit: where files lie, how much is logged, which network card is used, on which cores threads run.
UNRELATED = re.compile(
    r"_(HOME|DIR|PATH|LOGS?|DEBUG\w*|VERBOSE|IFNAME|HCA|GID_INDEX|ASYNC_ERROR_HANDLING)$|_CACHE|_LOG_|^OMP_(PROC_BIND|PLACES)$"
)


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The listed variables that may change bits, by name; values that look like secrets are hidden."""
    return {
        name: "(hidden)" if SECRET.search(name) else without_credentials(value)
        for name, value in sorted(environ.items())
        if (name.startswith(PREFIXES) or name in NAMES) and not UNRELATED.search(name)
    }


def numeric_environment(determinism: Determinism, device: torch.device, own: Sequence[str] = ()) -> dict[str, Any]:
    """The preimage of the environment's digest; call it after the flags are applied.

    `own` names variables that the owner's code reads. That one is not set is a value, too.
    """
    gpu = None
    if device.type == "cuda":
        from . import cuda

        gpu = cuda.found(device)
    relaxed = {"relaxed": sorted(determinism.relax)} if determinism.relax else {}
    read = {name: without_credentials(value) if (value := os.environ.get(name)) is not None else None for name in own}
    stated = relaxed | ({OWN: read} if own else {})
    return stated | {
        "torch": {"version": torch.__version__, "git": torch.version.git_version},
        "cuda": gpu,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),  # the mathematics of Python, and NumPy's random numbers
        "image": os.environ.get("REPRO_IMAGE"),
        "device": device.type,
        "cpu": {
            "machine": platform.machine(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "arithmetic": arithmetic_canary(),
            # The portable pins make the model irrelevant for proven operations; without them it decides bits.
            "model": None if is_portable(determinism) else _cpu_model(),
            "non_portable": [],  # operations that the run calls; see `with_non_portable`
        },
        "threads": torch.get_num_threads(),
        "flags": effective(),
        "variables": variables(),
    }


def with_non_portable(environment: dict[str, Any], operations: Collection[str]) -> dict[str, Any]:
    """The environment of a run that calls operations whose bits may depend on the CPU: with the CPU's model.

    Where code is compiled among them, the compiler belongs to it, too.
    """
    found = environment | {"cpu": environment["cpu"] | {"model": _cpu_model(), "non_portable": sorted(operations)}}
    if COMPILED not in operations:
        return found
    from .compiler import compiler  # which few runs need

    return found | {"compiler": compiler()}


def record(environment: dict[str, Any], compute: Compute, **facts: Any) -> dict[str, Any]:
    """What `environment.json` holds; `facts` join the informational ones."""
    return described(environment, compute.plain) | {"informational": informational() | facts}


def informational() -> dict[str, Any]:
    """Facts that help a reader and change no bit."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
    }


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or "unknown"
