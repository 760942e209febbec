"""A GPU's part of the numeric environment. Loads on request: a run on a CPU has none."""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import torch


def found(device: torch.device) -> dict[str, Any]:
    """The libraries, the hardware and the driver, as the numeric environment holds them."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "runtime": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cublas": _loaded_cublas(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
    }


def _loaded_cublas() -> str | None:
    """The version that the cuBLAS in this process's memory says it has; None before it is loaded."""
    torch.ones(1, 1, device="cuda").mm(torch.ones(1, 1, device="cuda"))  # loads it
    found = re.search(r"\S*/libcublas\.so\S*", Path("/proc/self/maps").read_text())
    if not found:
        return None
    library, parts = ctypes.CDLL(found.group()), []
    for kind in range(3):  # libraryPropertyType: major, minor, patch
        value = ctypes.c_int()
        library.cublasGetProperty(kind, ctypes.byref(value))
        parts.append(str(value.value))
    return ".".join(parts)


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split("\n")[0].strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
