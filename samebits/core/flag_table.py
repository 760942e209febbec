"""The table of flags: each setting that decides bits, with the value that makes them repeat.

A new flag is one row. `flags` sets the rows, reads them back and records them.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import libraries
from .libraries import Value
from .options import Determinism


@dataclass(frozen=True)
class Flag:
    """One row of the table.

    `strict` is the effective value wanted, as `read` returns it once torch is loaded, and `tf32` the one wanted in its
    place with `determinism.tf32`; `setting` is the text of the environment variable `name`, for rows that are
    variables; `write` sets the others.
    A `portable` row applies only where the CPU can compute the portable bits and they are asked for.
    A `scheduled` variable is one that schedulers set for every job, of any program: it is replaced.
    """

    name: str
    strict: Value
    why: str
    read: Callable[[], Value]
    write: Callable[[Value], None] | None = None
    setting: str | None = None
    portable: bool = False
    scheduled: bool = False
    tf32: Value | None = None

    def wanted(self, determinism: Determinism) -> Value:
        """The effective value that a run here must have."""
        return self.tf32 if determinism.tf32 and self.tf32 is not None else self.strict

    def effective(self) -> Value:
        """The value now; where libraries contradict themselves, their complaint."""
        try:
            return self.read()
        except RuntimeError as error:  # of torch, where its older and newer names of one setting are mixed
            return str(error).partition(",")[0]


def torch_of(path: str) -> tuple[Any, str]:
    """The object that holds the last name of a dotted path below torch, and that name. torch is imported here, late."""
    import torch

    *owners, name = path.split(".")
    owner = torch
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


def _attribute(path: str, strict: Value, why: str, tf32: Value | None = None) -> Flag:
    return Flag(
        path,
        strict,
        why,
        read=lambda: getattr(*torch_of(path)),
        write=lambda value: setattr(*torch_of(path), value),
        tf32=tf32,
    )


def _functions(name: str, reader: str, writer: str, strict: Value, why: str, portable: bool = False) -> Flag:
    return Flag(
        name,
        strict,
        why,
        read=lambda: getattr(*torch_of(reader))(),
        write=lambda value: getattr(*torch_of(writer))(value),
        portable=portable,
    )


def _portable(
    name: str, setting: str, strict: Value, why: str, read: Callable[[], Value], scheduled: bool = False
) -> Flag:
    return Flag(name, strict, why, read, setting=setting, portable=True, scheduled=scheduled)


def _swapped(name: str, path: str, strict: Value, why: str) -> Flag:
    """A setting that has one function, which takes the new value and returns the old one."""

    def write(value: Value) -> None:
        getattr(*torch_of(path))(value)

    def read() -> Value:
        before: Value = getattr(*torch_of(path))(strict)
        write(before)
        return before

    return Flag(name, strict, why, read, write)


# The parts of torch's newer names of a float32's precision that no older name covers.
PRECISIONS = ("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), ("mkldnn", "conv"), ("mkldnn", "rnn")


def _precisions() -> Value:
    read = getattr(*torch_of("_C._get_fp32_precision_getter"))
    seen = {".".join(part): read(*part) for part in PRECISIONS}
    return ", ".join(f"{part}={value}" for part, value in seen.items() if value != "none") or "none"


def _set_precisions(value: Value) -> None:
    for part in PRECISIONS:
        getattr(*torch_of("_C._set_fp32_precision_setter"))(*part, value)


TF32_PRODUCTS = "cuda=tf32, mkldnn=ieee"  # of matrices: on a GPU alone, so that a CPU keeps its bits


def _products() -> Value:
    read = getattr(*torch_of("_C._get_fp32_precision_getter"))
    seen = {backend: read(backend, "matmul") for backend in ("cuda", "mkldnn")}
    if len({*seen.values()}) > 1:  # which the older name cannot say
        return ", ".join(f"{backend}={value}" for backend, value in seen.items())
    older: Value = getattr(*torch_of("get_float32_matmul_precision"))()
    return older


def _set_products(value: Value) -> None:
    getattr(*torch_of("set_float32_matmul_precision"))("highest" if value == TF32_PRODUCTS else value)
    if value == TF32_PRODUCTS:
        setattr(*torch_of("backends.cuda.matmul.allow_tf32"), True)


MKL_COMPATIBLE = 3  # MKL_CBWR_COMPATIBLE in mkl_types.h
MKL_ALL = -1  # MKL_CBWR_ALL


FLAGS = (
    Flag(
        "PYTHONHASHSEED",
        0,
        "the order of sets of strings follows the hash seed",
        setting="0",
        read=lambda: int(sys.flags.hash_randomization),
    ),
    Flag(
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
        read=lambda: getattr(*torch_of("get_num_threads"))(),
        scheduled=True,
    ),
    _portable(
        "MKL_NUM_THREADS",
        "1",
        1,
        "the thread count decides how MKL splits sums",
        read=lambda: libraries.mkl("mkl_serv_get_max_threads"),
        scheduled=True,
    ),
    _portable(
        "OPENBLAS_NUM_THREADS",
        "1",
        1,
        "the thread count decides how NumPy's OpenBLAS splits products",
        read=libraries.openblas_threads,
        scheduled=True,
    ),
    _portable(
        "ATEN_CPU_CAPABILITY",
        "avx2",
        "AVX2",
        "PyTorch's own kernels differ between vector widths",
        read=lambda: getattr(*torch_of("backends.cpu.get_cpu_capability"))(),
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
    Flag(
        "fp32_precision",
        "none",
        "TF32 and bfloat16 passes replace float32 products and convolutions otherwise",
        read=_precisions,
        write=_set_precisions,
    ),
    _attribute("backends.cudnn.deterministic", True, "cuDNN picks only deterministic algorithms"),
    _attribute("backends.cudnn.benchmark", False, "timing decides the algorithm otherwise"),
    _attribute("backends.cudnn.allow_tf32", False, "TF32 keeps 10 bits of the mantissa", tf32=True),
    Flag(
        "float32_matmul_precision",
        "highest",
        "TF32 and bfloat16 passes replace float32 products otherwise",
        read=_products,
        write=_set_products,
        tf32=TF32_PRODUCTS,
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
    _swapped(
        "jit_profiling_executor",
        "_C._jit_set_profiling_executor",
        False,
        "torch.jit.script would compile anew after so many calls in one process",
    ),
    _swapped(
        "jit_profiling_mode",
        "_C._jit_set_profiling_mode",
        False,
        "torch.jit.script would compile for the shapes that one process has met",
    ),
)

# How glibc's malloc keeps what is freed. They change the time of a step and no bit (docs/allocation.md), so they are no
# flags: no record holds them. Gradients of a micro-batch are as large as those of the one before it; by default
# glibc returns their memory to the system in between, and the kernel fills every page with zeros anew.
ALLOCATION = {
    "MALLOC_MMAP_MAX_": "0",  # no block is mapped by itself; one above 32 MiB always would be
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),  # bytes free at the heap's end before it shrinks
}
# NAME=value of an environment where somebody else has decided about the same
ALLOCATION_DECIDED = re.compile(r"MALLOC_(MMAP|TRIM|TOP)_|GLIBC_TUNABLES=.*glibc\.malloc\.")
