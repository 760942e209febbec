"""State of any shape comes back from the files as it was: same types, same keys, same bits."""

import json
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from functools import reduce
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from samebits.checkpoint import stored
from samebits.core.errors import UserError
from samebits.core.ranks import World
from samebits.core.trees import copied, leaves, pack, realized, unpack

ALONE = World(0, 1, torch.device("cpu"))
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int64, torch.uint16, torch.uint64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn]
LAYOUTS = {
    "plain": lambda tensor: tensor,
    "turned": lambda tensor: tensor.mT if tensor.ndim > 1 else tensor,
    "repeated": lambda tensor: tensor[:1].expand(3, *tensor.shape[1:]) if tensor.ndim and len(tensor) else tensor,
    "conjugate": lambda tensor: tensor.conj(),
    "negative": lambda tensor: tensor.conj().imag if tensor.is_complex() else tensor,
    "parameter": lambda tensor: nn.Parameter(tensor, tensor.is_floating_point() and tensor.itemsize > 1),
}
SHAPES = [(), (0,), (1,), (5,), (2, 3), (3, 0, 2), (2, 2, 2)]


def tensor_of(seed: int, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> Tensor:
    """Any bits, of this dtype; among them infinities, many a NaN and -0.0."""
    drawn = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    tensor = drawn % 2 == 1 if dtype == torch.bool else drawn.view(dtype)
    return LAYOUTS[layout](tensor.reshape(shape))


tensors = st.builds(tensor_of, st.integers(0, 9), *map(st.sampled_from, (DTYPES, SHAPES, list(LAYOUTS))))
numbers = st.sampled_from(
    [numpy.float64(0.1), numpy.float32(0.1), numpy.float16("nan"), numpy.int8(3), numpy.bool_(True)]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4) | numbers
# what is written alike, or holds what separates names
KEYS = [
    "a",
    "b",
    "a.b",
    "a']['b",
    "0",
    0,
    "0.weight",
    1,
    True,
    "True",
    -1,
    None,
    "None",
    "",
    "\ud800",
    "\u00e9:5",
    1 << 70,
]
keys = st.sampled_from(KEYS) | st.text(st.characters(), max_size=3) | st.integers()


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(keys, inner, max_size=4)
    lists = st.lists(inner, max_size=4)
    kinds = [lists, lists.map(tuple), mappings, mappings.map(OrderedDict), mappings.map(lambda d: defaultdict(list, d))]
    return st.one_of(*kinds, st.dictionaries(keys, st.integers(), max_size=3).map(Counter))


trees = st.recursive(scalars | tensors, nested, max_leaves=12)


def came_back(tree: Any) -> Any:
    """The tree as a checkpoint gives it back."""
    held: dict[str, Any] = {}
    packed = pack(tree, "state", held)
    ways = [way for way, _ in leaves(packed, "state")]
    assert len(ways) == len({*ways}), "two ways read alike"
    with tempfile.TemporaryDirectory() as folder:
        stored.save({name: copied(tensor) for name, tensor in held.items()}, Path(folder), "others", ALONE)
        return realized(unpack(json.loads(json.dumps(packed)), stored.read(Path(folder), "others")))


def require_same(one: Any, other: Any) -> None:
    """Equal in type, structure and each bit; the order of keys, too."""
    if isinstance(one, Tensor):
        assert (
            type(other) is Tensor and (one.dtype, one.shape) == (other.dtype, other.shape) and not other.requires_grad
        )
        there, here = (each.detach().resolve_conj().resolve_neg().contiguous().view(-1) for each in (one, other))
        assert torch.equal(there.view(torch.uint8), here.view(torch.uint8))
        return
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        assert [(type(key), key) for key in one] == [(type(key), key) for key in other]
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            require_same(*pair)
    else:
        assert repr(one) == repr(other)


SHARED = torch.ones(2)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(trees)
@example({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
@example({0: torch.ones(1), "0": torch.zeros(1)})
@example({"ema": {"fast": torch.ones(1)}, "ema.fast": torch.zeros(1)})
@example([SHARED, {"again": SHARED, "part": SHARED[1:]}])
@example({"deep": reduce(lambda tree, _: [{"in": tree}], range(40), torch.ones(1))})
def test_what_is_packed_comes_back_as_it_was(tree: Any):
    require_same(tree, came_back(tree))


class Few(IntEnum):
    ONE = 1


REFUSED = {
    "set": {1, 2},
    "deque": deque([1]),
    "Pair": namedtuple("Pair", "a b")(1, 2),
    "Few": Few.ONE,
    "dict with the keys 0.5": {0.5: 1},
    "dict with the keys (1, 2)": {(1, 2): 1},
    "defaultdict": defaultdict(lambda: 0),
    "longdouble": numpy.longdouble(1),
    "bytes": b"a",
    "Tensor (torch.complex128": torch.ones(1, dtype=torch.complex128),
    "Tensor (torch.float32, torch.sparse_coo": torch.ones(2).to_sparse(),
    "Tensor (torch.float32, torch.strided, meta": torch.ones(2, device="meta"),
}


@pytest.mark.parametrize(("message", "tree"), REFUSED.items(), ids=REFUSED)
def test_what_would_not_come_back_is_refused_by_name(message: str, tree: Any):
    with pytest.raises(UserError) as refused:
        pack({"a": [tree]}, "state", {})
    assert str(refused.value).startswith(f"state['a'][0]: a {message}"), refused.value
