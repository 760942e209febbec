"""The operations that torch itself calls nondeterministic, and how to know them in what the dispatcher sees.

The docstring of `torch.use_deterministic_algorithms` lists them: those that act deterministically while it is on, and
those that throw then, each with its conditions. It is read from the torch that is installed. It speaks of functions as
people call them. `ROWS` says which ATen operations these are.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from ...core.batch import tensors_in
from ...environment.portable import plain

HEADING = re.compile(r"operations will\s+(act|throw)\b.*?``mode=True``:", re.DOTALL)
NAME = re.compile(r":\w+:`([\w.]+)`")
KEYWORD = re.compile(r"``(\w+)='?(\w+)'?``")


@dataclass(frozen=True)
class Entry:
    """A line of torch's lists, such as `torch.index_add` "when called on CUDA tensor"."""

    name: str
    condition: str
    throws: bool  # while the mode is on; else the mode gives it another kernel, which is deterministic

    @property
    def devices(self) -> set[str]:
        """The kinds of devices on which it holds; none are all."""
        return {device for device in ("cpu", "cuda") if device.upper() in self.condition}

    @property
    def of_gradients(self) -> bool:
        """Whether it holds for what is differentiated alone."""
        return "differentiate" in self.condition or "requires grad" in self.condition

    @property
    def keywords(self) -> dict[str, set[str]]:
        """The values of arguments for which it holds."""
        found: dict[str, set[str]] = {}
        for name, value in KEYWORD.findall(self.condition):
            found.setdefault(name, set()).add(value)
        return found


@cache
def entries(text: str | None = torch.use_deterministic_algorithms.__doc__) -> tuple[Entry, ...]:
    """All lines of both lists; none where Python was told to drop docstrings (`python -OO`)."""
    text = inspect.cleandoc(text or "")
    headings = list(HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)] * bool(headings)
    return tuple(
        Entry(name.group(1), item[name.end() :].strip(), heading.group(1) == "throw")
        for heading, end in zip(headings, ends, strict=True)
        for item in _items(text[heading.end() : end])
        if (name := NAME.search(item))
    )


def _items(text: str) -> Iterator[str]:
    """The bullets at the head of a text, each in one line; a list ends where a line is indented less."""
    item, edge = "", 0
    for line in filter(str.strip, text.splitlines()):
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("* "):
            if item:
                yield item
            item, edge = line.strip()[2:], indent
        elif item and indent > edge:
            item += f" {line.strip()}"
        elif item:
            break
    if item:
        yield item


@dataclass(frozen=True)
class Call:
    """A call of an ATen operation, as the dispatcher sees it."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @cached_property
    def name(self) -> str:
        """The operation, as `portable.txt` names it: in place or not is one."""
        return plain(self.function.name())

    def __getitem__(self, argument: str) -> Any:
        """The value of an argument of this name; None where it has none."""
        given = dict(zip((each.name for each in self.function._schema.arguments), self.args, strict=False))
        defaults = {each.name: each.default_value for each in self.function._schema.arguments}
        return (defaults | given | dict(self.kwargs)).get(argument)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [*tensors_in(self.args), *tensors_in(self.kwargs)]

    @property
    def device(self) -> str:
        """The kind of device on which it runs."""
        kinds = {tensor.device.type for tensor in self.tensors}
        return "cuda" if "cuda" in kinds else next(iter(kinds), "cpu")

    @property
    def has_gradient(self) -> bool:
        """Whether it is a gradient's, or will have one."""
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)
        return wanted or self.name.endswith("_backward")


@dataclass(frozen=True)
class Row:
    """The ATen operations of a name in the catalogue.

    `when` stands in for the keywords of the entry, where the dispatcher sees other ones. `held` is the flag that
    holds what has no other kernel to be chosen. `instead` is a way that needs no such kernel.
    """

    operations: tuple[str, ...]
    instead: str = ""
    when: Callable[[Call], bool] | None = None
    held: str = ""


def _floating(call: Call) -> bool:
    kind = call["dtype"] or call["self"].dtype
    return kind.is_floating_point or kind.is_complex


def _sparse(call: Call) -> bool:
    return any(tensor.layout is not torch.strided for tensor in call.tensors)


MAX = 2  # the mode of embedding bags
CUDNN = Row(("convolution", "convolution_backward"), held="backends.cudnn.deterministic")
SUMMED = "one_hot(index).T @ source; or sort by the index, then torch.segment_reduce"
DISTINCT = "nothing is at risk while the index names no place twice"
POOL = "a pooling with a fixed window that divides the input: reshape, then mean or amax"
REFLECTED = "torch.cat of the edge, flipped, and the input"
REPEATED = "torch.cat of the edge, expanded, and the input"
# torch.nn.functional.interpolate itself takes that way round, whatever the catalogue says
FIXED = (
    "mode='nearest-exact', or a product with a fixed matrix; for 2-D and 3-D linear modes torch has a slow way round"
)
UNPOOLED = "zeros.scatter(-1, indices.flatten(-2), x.flatten(-2))"

# A name in the catalogue -> its operations. `make test` of the template fails where the installed torch names others.
ROWS: dict[str, Row] = {
    **{f"torch.nn.{kind}{n}d": CUDNN for kind in ("Conv", "ConvTranspose") for n in (1, 2, 3)},
    **{f"torch.nn.ReplicationPad{n}d": Row((f"replication_pad{n}d_backward",), REPEATED) for n in (1, 2, 3)},
    **{f"torch.nn.ReflectionPad{n}d": Row((f"reflection_pad{n}d_backward",), REFLECTED) for n in (1, 2, 3)},
    **{f"torch.nn.FractionalMaxPool{n}d": Row((f"fractional_max_pool{n}d_backward",), POOL) for n in (2, 3)},
    "torch.nn.MaxPool3d": Row(("max_pool3d_with_indices_backward",), POOL),
    "torch.nn.AvgPool3d": Row(("avg_pool3d_backward",), POOL),
    "torch.nn.AdaptiveAvgPool2d": Row(("_adaptive_avg_pool2d_backward",), POOL),
    "torch.nn.AdaptiveAvgPool3d": Row(("_adaptive_avg_pool3d_backward",), POOL),
    "torch.nn.AdaptiveMaxPool2d": Row(("adaptive_max_pool2d_backward",), POOL),
    "torch.nn.MaxUnpool1d": Row(("max_unpool2d",), UNPOOLED),  # which is what torch calls for it
    "torch.nn.MaxUnpool2d": Row(("max_unpool2d",), UNPOOLED),
    "torch.nn.MaxUnpool3d": Row(("max_unpool3d",), UNPOOLED.replace("2", "3")),
    "torch.nn.functional.interpolate": Row(
        (
            "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
            "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
        ),
        FIXED,
    ),
    "torch.nn.functional.grid_sample": Row(
        ("grid_sampler_2d_backward", "grid_sampler_3d_backward"), "for a fixed grid, a product with a fixed matrix"
    ),
    # a row of classes per sample has a kernel that adds in one order; that for images has not
    "torch.nn.NLLLoss": Row(
        ("nll_loss2d_forward",), "one row per pixel: F.cross_entropy(x.movedim(1, -1).flatten(0, -2), labels.flatten())"
    ),
    "torch.nn.CTCLoss": Row(
        ("_ctc_loss_backward",),
        "that of cuDNN: int32 targets in one row on the CPU, blank=0, input lengths all alike; or the CPU's",
    ),
    "torch.nn.EmbeddingBag": Row(
        ("_embedding_bag_backward", "_embedding_bag_dense_backward"),
        "F.embedding, then amax over the bag",
        when=lambda call: bool(call["mode"] == MAX),
    ),
    "torch.bmm": Row(("bmm",), "a dense first factor", when=_sparse),
    "torch.Tensor.__getitem__": Row(("index",), "F.embedding(index, x) takes rows", when=lambda call: True),
    "torch.Tensor.index_put": Row(("index_put", "_index_put_impl", "_unsafe_index_put"), f"torch.where; {DISTINCT}"),
    "torch.Tensor.put_": Row(("put",), "x.view(-1).index_copy_(0, index, source)"),
    "torch.Tensor.scatter_add_": Row(("scatter_add",), SUMMED),
    "torch.Tensor.scatter_reduce": Row(("scatter_reduce",), SUMMED),
    "torch.Tensor.scatter": Row(("scatter",), DISTINCT, when=lambda call: isinstance(call["src"], Tensor)),
    "torch.Tensor.index_copy": Row(("index_copy",), DISTINCT),
    "torch.index_add": Row(("index_add",), SUMMED),
    "torch.index_select": Row(("index_select",), "F.embedding(index, x) takes rows"),
    "torch.gather": Row(("gather",), "(x * one_hot(index)).sum(-1)"),
    "torch.histc": Row(("histc",), "torch.bincount(torch.bucketize(x, edges))"),
    "torch.bincount": Row(
        ("bincount",), "one_hot(x).T @ weights", when=lambda call: isinstance(call["weights"], Tensor)
    ),
    "torch.median": Row(
        ("median", "nanmedian"), "the middle of torch.sort(x, dim)", when=lambda call: call["dim"] is not None
    ),
    "torch.cumsum": Row(("cumsum",), "x @ torch.ones(n, n).triu(), or the CPU's", when=_floating),
    "torch.Tensor.resize_": Row(("resize",), when=lambda call: call["self"].is_quantized),
}  # fmt: skip

# Names that no call can be given, and why.
UNSEEN = {
    "torch.repeat_interleave": "its gradient is that of an index_select, which torch calls for it and which is told"
}


def unknown() -> list[str]:
    """What the installed torch lists and neither table has."""
    return sorted({entry.name for entry in entries()} - {*ROWS, *UNSEEN})


@dataclass(frozen=True)
class Verdict:
    """What the catalogue says of a call: with which entry, and on which kind of device."""

    entry: Entry
    row: Row
    device: str


def verdicts(call: Call) -> list[Verdict]:
    """What the catalogue says of a call, here and on CUDA."""
    found = []
    for entry, row in _by_operation().get(call.name, ()):
        device = call.device if not entry.devices or call.device in entry.devices else "cuda"
        if device not in (entry.devices or {device}) or (entry.of_gradients and not call.has_gradient):
            continue
        if row.when(call) if row.when else _as_requested(call, entry):
            found.append(Verdict(entry, row, device))
    return found


def _as_requested(call: Call, entry: Entry) -> bool:
    return all(str(call[name]) in values for name, values in entry.keywords.items())


@cache
def _by_operation() -> dict[str, list[tuple[Entry, Row]]]:
    found: dict[str, list[tuple[Entry, Row]]] = {}
    for entry in entries():
        row = ROWS.get(entry.name, Row(()))
        for operation in row.operations:
            found.setdefault(operation, []).append((entry, row))
    return found
