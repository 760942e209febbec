"""Items of a first batch are made twice, the second time in another order, and compared.

An item that depends on those made before (a running mean, a counter, a cache of what was drawn) depends on workers,
ranks and kills; so does one that reads a clock, or draws where nobody seeds.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from .digest import bytes_of
from .errors import UserError
from .generators import state_of

DEPTH = 8  # objects in objects
DRAWS = "the sequence of numbers that it draws"


def prints(item: Any, own: Sequence[Any]) -> dict[str, str]:
    """What an item holds, each part under its way, in few characters; and how it left the generators."""
    left = numpy.random.get_state(), torch.get_rng_state(), *map(state_of, own)
    python = repr(random.getstate())  # 625 numbers, of which `_parts` would look at each
    return dict(_parts(item, "", DEPTH)) | {DRAWS: python + "".join(text for _, text in _parts(left, "", DEPTH))}


def require_repeated(index: int, once: dict[str, str], again: dict[str, str]) -> None:
    """Refuse an item that is another one when it is made again.

    Raises:
        UserError: naming it, and what in it differs.
    """
    for way in once | again:
        if once.get(way) != again.get(way):
            what = way if way == DRAWS else f"item{way}"
            raise UserError(
                f"item {index} of the dataset is another one when it is made again, after others: {what} differs. Let "
                f"it depend on its index alone, and on what it draws from random, numpy.random, torch or a generator "
                f"of its own"
            )


def _parts(held: Any, way: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(held, Tensor) and held.layout == torch.strided and not held.is_meta:
        yield way, f"{held.dtype} {[*held.shape]} {_hash(bytes_of(held.cpu()).numpy())}"
    elif isinstance(held, numpy.ndarray) and held.dtype != object:
        yield way, f"{held.dtype} {held.shape} {_hash(numpy.ascontiguousarray(held).tobytes())}"
    elif isinstance(held, bytes | str):
        yield way, _hash(held if isinstance(held, bytes) else held.encode(errors="surrogatepass"))
    elif held is None or isinstance(held, int | float | complex | numpy.generic):
        yield way, repr(held)
    elif not depth:
        return
    elif isinstance(held, Mapping):
        yield way, str(len(held))
        for key, value in held.items():
            yield from _parts(value, f"{way}[{key!r}]", depth - 1)
    elif isinstance(held, list | tuple | numpy.ndarray):
        yield way, str(len(held))
        for place, value in enumerate(held):
            yield from _parts(value, f"{way}[{place}]", depth - 1)
    elif callable(getattr(held, "tobytes", None)) and hasattr(held, "mode"):  # an image of PIL
        yield way, f"{held.mode} {held.size} {_hash(held.tobytes())}"
    else:
        for name, value in getattr(held, "__dict__", {}).items():
            yield from _parts(value, f"{way}.{name}", depth - 1)


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
