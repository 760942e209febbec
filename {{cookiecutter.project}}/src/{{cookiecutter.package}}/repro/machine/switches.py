"""The table of switches: each setting that decides bits, with the value that makes them repeat.

One row drives all uses: setting the switch, refusing a contradiction, and reading back what is
effective. A new switch is one row. Variables are read by libraries once, when they load, so they
must stand before torch is imported (`set_environment`); the other switches are set after (`apply`).
"""

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..asked.settings import Determinism
from ..errors import Refused
from . import libraries
from .libraries import Value


@dataclass(frozen=True)
class Switch:
    """One row of the table.

    `strict` is the effective value wanted, as `read` returns it once torch is loaded; `setting` is the
    text of the environment variable `name`, for rows that are variables; `write` sets the others.
    A `portable` row applies only where the CPU can compute the portable bits and they are asked for.
    """

    name: str
    strict: Value
    why: str
    read: Callable[[], Value]
    write: Callable[[Value], None] | None = None
    setting: str | None = None
    portable: bool = False


def _torch(path: str) -> tuple[Any, str]:
    """The object that holds the last name of a dotted path below torch, and that name. torch is imported here, late."""
    import torch

    *owners, name = path.split(".")
    owner = torch
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


def _attribute(path: str, strict: Value, why: str) -> Switch:
    return Switch(
        path,
        strict,
        why,
        read=lambda: getattr(*_torch(path)),
        write=lambda value: setattr(*_torch(path), value),
    )


def _functions(name: str, reader: str, writer: str, strict: Value, why: str, portable: bool = False) -> Switch:
    return Switch(
        name,
        strict,
        why,
        read=lambda: getattr(*_torch(reader))(),
        write=lambda value: getattr(*_torch(writer))(value),
        portable=portable,
    )


def _portable(name: str, setting: str, strict: Value, why: str, read: Callable[[], Value]) -> Switch:
    return Switch(name, strict, why, read, setting=setting, portable=True)


MKL_COMPATIBLE = 3  # MKL_CBWR_COMPATIBLE in mkl_types.h
MKL_ALL = -1  # MKL_CBWR_ALL


SWITCHES = (
    Switch(
        "PYTHONHASHSEED",
        0,
        "the order of sets of strings follows the hash seed",
        setting="0",
        read=lambda: int(sys.flags.hash_randomization),
    ),
    Switch(
        "CUBLAS_WORKSPACE_CONFIG",
        ":4096:8",
        "cuBLAS shares workspaces between streams unless they are fixed",
        setting=":4096:8",
        read=lambda: os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ),
    _portable(
        "OMP_NUM_THREADS",
        "1",
        1,
        "the thread count decides how sums are split",
        read=lambda: getattr(*_torch("get_num_threads"))(),
    ),
    _portable(
        "MKL_NUM_THREADS",
        "1",
        1,
        "the thread count decides how MKL splits sums",
        read=lambda: libraries.mkl("mkl_serv_get_max_threads"),
    ),
    _portable(
        "ATEN_CPU_CAPABILITY",
        "avx2",
        "AVX2",
        "PyTorch's own kernels differ between vector widths",
        read=lambda: getattr(*_torch("backends.cpu.get_cpu_capability"))(),
    ),
    _portable(
        "ONEDNN_MAX_CPU_ISA",
        "AVX2",
        "AVX2",
        "oneDNN's convolutions differ between vector widths",
        # oneDNN hides its effective value: the canary shows whether it obeyed
        read=lambda: os.environ.get("ONEDNN_MAX_CPU_ISA"),
    ),
    _portable(
        "MKL_CBWR",
        "COMPATIBLE",
        MKL_COMPATIBLE,
        "MKL takes another path for each maker and model of CPU",
        read=lambda: libraries.mkl("mkl_serv_cbwr_get", MKL_ALL),
    ),
    _portable(
        "NPY_DISABLE_CPU_FEATURES",
        "X86_V4,AVX512_ICL,AVX512_SPR",  # NumPy's names of what AVX-512 CPUs have
        "X86_V3",
        "NumPy's own kernels differ between vector widths",
        read=libraries.numpy_kernels,
    ),
    _portable(
        "OPENBLAS_CORETYPE",
        "Haswell",
        "Haswell",
        "NumPy's OpenBLAS has other kernels for each model of CPU",
        read=libraries.openblas_kernels,
    ),
    _functions(
        "nnpack",
        "_C._get_nnpack_enabled",
        "backends.nnpack.set_flags",
        False,
        "NNPACK is chosen or not by what the CPU is",
        portable=True,
    ),
    _functions(
        "deterministic_debug_mode",
        "get_deterministic_debug_mode",
        "set_deterministic_debug_mode",
        2,
        "operations without a deterministic kernel stop the run instead of changing its bits",
    ),
    _attribute("backends.cudnn.deterministic", True, "cuDNN picks only deterministic algorithms"),
    _attribute("backends.cudnn.benchmark", False, "timing decides the algorithm otherwise"),
    _attribute("backends.cudnn.allow_tf32", False, "TF32 keeps 10 bits of the mantissa"),
    _functions(
        "float32_matmul_precision",
        "get_float32_matmul_precision",
        "set_float32_matmul_precision",
        "highest",
        "TF32 and bfloat16 passes replace float32 products otherwise",
    ),
    _attribute(
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        False,
        "split sums would round in float16",
    ),
    _attribute(
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        False,
        "split sums would round in bfloat16",
    ),
    _attribute("backends.mkldnn.deterministic", True, "oneDNN picks only deterministic algorithms"),
    _functions(
        "mem_efficient_sdp",
        "backends.cuda.mem_efficient_sdp_enabled",
        "backends.cuda.enable_mem_efficient_sdp",
        False,
        "its backward pass adds atomically; flash attention has a deterministic one",
    ),
    _functions(
        "cudnn_sdp",
        "backends.cuda.cudnn_sdp_enabled",
        "backends.cuda.enable_cudnn_sdp",
        False,
        "its backward pass promises no order",
    ),
    _attribute(
        "utils.deterministic.fill_uninitialized_memory",
        False,
        "filling costs time and hides code that reads memory before it writes it",
    ),
)


def can_be_portable(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU can compute the portable bits: x86-64 with AVX2, on Linux."""
    return (
        platform.machine() == "x86_64"
        and cpuinfo.is_file()
        and re.search(r"^flags\s*:.*\bavx2\b", cpuinfo.read_text(), re.MULTILINE) is not None
    )


def is_portable(determinism: Determinism) -> bool:
    """Whether the portable rows apply to a run here."""
    return determinism.cpu == "portable" and can_be_portable()


def applicable(determinism: Determinism) -> list[Switch]:
    """The rows a run here must hold: those not relaxed, the portable ones where they apply."""
    names = {switch.name for switch in SWITCHES}
    for name in determinism.relax:
        if name not in names | {"all"}:
            raise Refused(f"determinism.relax: unknown switch {name!r}; known: all, {', '.join(sorted(names))}")
    portable = is_portable(determinism)
    return [
        switch
        for switch in SWITCHES
        if not {"all", switch.name} & set(determinism.relax) and (portable or not switch.portable)
    ]


def missing_variables(determinism: Determinism, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables still to be set, by name.

    Raises:
        Refused: variables that hold another value; they are named, never overridden.
    """
    missing, contradictions = {}, []
    for switch in applicable(determinism):
        if switch.setting is None:
            continue
        seen = environ.get(switch.name)
        if seen is None:
            missing[switch.name] = switch.setting
        elif seen != switch.setting:
            contradictions.append(
                f"{switch.name}={seen} is set, {switch.setting} is wanted ({switch.why}). "
                f"Unset it, or leave the switch off: --set 'determinism.relax=[{switch.name}]'"
            )
    if contradictions:
        raise Refused("\n".join(contradictions))
    return missing


def set_environment(determinism: Determinism) -> None:
    """Put every variable in place. Where one was missing, start the same command again, once.

    Some variables work only from process start (PYTHONHASHSEED), others only before torch or numpy
    load. Starting again serves both, and after it nothing is missing.
    """
    missing = missing_variables(determinism)
    if missing:
        os.environ.update(missing)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def apply(determinism: Determinism) -> None:
    """Set every applicable switch that is not a variable, then check that all of them are effective.

    Raises:
        Refused: switches whose effective value is not the strict one.
    """
    rows = applicable(determinism)
    for switch in rows:
        if switch.write:
            switch.write(switch.strict)
    wrong = [(switch, seen) for switch in rows if (seen := switch.read()) != switch.strict]
    if wrong:
        raise Refused(
            "\n".join(
                f"switch {row.name}: {seen!r} is effective, {row.strict!r} wanted: {row.why}" for row, seen in wrong
            )
        )
    if getattr(*_torch("get_num_threads"))() > 1:
        libraries.touch_vector_functions()


def effective() -> dict[str, Value]:
    """The value of every switch as it is now, by name."""
    return {switch.name: switch.read() for switch in SWITCHES}
