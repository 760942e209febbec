"""The cases of tools/portability.py that real models have: layers, attention, losses, optimizers, random numbers."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

tensors_in = import_module("samebits.environment.portable").tensors_in

Case = tuple[str, Callable[[], None]]  # a name, and what computes
FLOATS = (torch.float32, torch.float64)


def backward(result: Any, inputs: Any) -> None:
    """Propagate a fixed, uneven gradient from all results that have one to all inputs."""
    outputs = [each for each in tensors_in(result) if each.requires_grad and each.dtype in FLOATS]
    wanted = [each for each in tensors_in(inputs) if each.requires_grad and each.is_leaf]
    if outputs and wanted:
        weights = [numbers(*each.shape, kind=each.dtype) for each in outputs]
        torch.autograd.grad(outputs, wanted, weights, allow_unused=True)


def numbers(*shape: int, kind: torch.dtype = torch.float32, start: int = 1) -> Tensor:
    """Multiples of 2**-15 in (-1, 1), made by integer arithmetic alone."""
    i = torch.arange(start, start + math.prod(shape))
    return (((i * i * 7919 + i * 104729) * 40503 % 65521 - 32760).to(kind) / 32768).reshape(shape)


def elements(function: Callable[..., Any], inputs: list[Tensor]) -> None:
    """Call a function of tensors, forward and backward."""
    backward(function(*inputs), inputs)


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    *((partial(nn.Linear, k, n), (m, k)) for m, k, n in ((1, 1, 1), (3, 5, 7), (8, 300, 500), (257, 129, 33))),
    (partial(nn.Linear, 384, 1536), (4, 64, 384)),
    *((partial(nn.Conv1d, 16, 24, 5, stride=s, padding=2), (4, 16, 51)) for s in (1, 2)),
    *((partial(nn.Conv2d, 32, 48, k, stride=s, padding=k // 2), (4, 32, 19, 19)) for k in (1, 3, 7) for s in (1, 2)),
    (partial(nn.Conv2d, 32, 32, 3, padding=1, groups=32), (4, 32, 17, 17)),
    (partial(nn.Conv2d, 32, 64, 3, padding=2, groups=4, dilation=2, bias=False), (2, 32, 16, 16)),
    (partial(nn.Conv2d, 3, 64, 7, stride=2, padding=3), (2, 3, 64, 64)),
    (partial(nn.Conv2d, 3, 192, 16, stride=16), (2, 3, 64, 64)),
    (partial(nn.Conv3d, 4, 8, 3, padding=1), (2, 4, 9, 9, 9)),
    (partial(nn.ConvTranspose1d, 8, 6, 4, stride=2), (2, 8, 33)),
    (partial(nn.ConvTranspose2d, 16, 8, 4, stride=2, padding=1), (2, 16, 13, 13)),
    (partial(nn.ConvTranspose3d, 4, 2, 3), (2, 4, 7, 7, 7)),
    (partial(nn.BatchNorm1d, 65), (37, 65)),
    (partial(nn.BatchNorm2d, 48), (8, 48, 15, 15)),
    (partial(nn.InstanceNorm2d, 12, affine=True), (4, 12, 15, 15)),
    (partial(nn.GroupNorm, 4, 48), (8, 48, 15, 15)),
    *((partial(nn.LayerNorm, n), (4, 65, n)) for n in (7, 64, 769)),
    (partial(nn.RMSNorm, 769), (4, 65, 769)),
    *((partial(kind, 40, 56, 2, bidirectional=two, batch_first=True), (6, 23, 40))
      for kind in (nn.LSTM, nn.GRU, nn.RNN) for two in (False, True)),
    (partial(nn.TransformerEncoderLayer, 64, 4, 256, activation="gelu", batch_first=True), (4, 37, 64)),
    (partial(nn.TransformerEncoderLayer, 96, 3, 200, batch_first=True, norm_first=True), (2, 130, 96)),
    *((kind, (8, 50, 129)) for kind in (nn.Softmax, nn.LogSoftmax, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU)),
    (partial(nn.GELU, "tanh"), (8, 50, 129)),
    *((partial(kind, 3, 2, padding=1), (4, 16, 27, 27)) for kind in (nn.MaxPool2d, nn.AvgPool2d)),
    *((partial(kind, 5), (4, 16, 27, 27)) for kind in (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)),
    *((partial(nn.Upsample, scale_factor=2.0, mode=mode), (2, 9, 13, 13)) for mode in ("bilinear", "bicubic")),
    (partial(nn.Dropout, 0.3), (64, 129)),
    (partial(nn.Dropout2d, 0.3), (8, 12, 9, 9)),
    (partial(nn.PixelShuffle, 2), (2, 16, 9, 9)),
    (partial(nn.PReLU, 16), (8, 16, 9)),
    (partial(nn.CosineSimilarity, 1), (64, 129)),
]  # fmt: skip


def of_layers(kind: torch.dtype) -> Iterator[Case]:
    for make, shape in LAYERS:
        for last in (False, True):  # channels
            if not last or len(shape) == 4:
                yield str(make), partial(_layer, make, shape, kind, last)


def _layer(make: Callable[[], nn.Module], shape: tuple[int, ...], kind: torch.dtype, last: bool) -> None:
    module = make().to(kind)
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, kind=kind, start=place) / 4)
    inputs = numbers(*shape, kind=kind, start=9)
    inputs = inputs.contiguous(memory_format=torch.channels_last) if last else inputs
    inputs.requires_grad_()
    given = [inputs, inputs.flip(0)] if isinstance(module, nn.CosineSimilarity) else [inputs]
    backward(module(*given), [inputs, *module.parameters()])


def _attention(kind: torch.dtype, tokens: int, width: int, masked: bool = False, **options: Any) -> None:
    query, key, value = (numbers(2, 3, tokens, width, kind=kind, start=n).requires_grad_() for n in (1, 2, 3))
    mask = numbers(tokens, tokens, start=4) > -0.5 if masked else None
    backward(F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options), [query, key, value])


def _classes(kind: torch.dtype, **options: Any) -> None:
    logits = (numbers(65, 101, kind=kind) * 9).requires_grad_()
    backward(F.cross_entropy(logits, torch.arange(65) % 101, **options), logits)


def _embedding(kind: torch.dtype, **options: Any) -> None:
    weight = numbers(99, 33, kind=kind).requires_grad_()
    backward(F.embedding(torch.arange(300).reshape(10, 30) * 7 % 99, weight, **options), weight)


def _products(kind: torch.dtype) -> None:
    for m, k, n in ((1, 9, 1), (3, 5, 7), (64, 64, 64), (33, 129, 257), (256, 512, 384)):
        one, other = numbers(m, k, kind=kind).requires_grad_(), numbers(k, n, kind=kind, start=2).requires_grad_()
        backward(one @ other, [one, other])
        backward(one.expand(3, m, k) @ other, [one, other])
        backward(torch.einsum("mk,kn->nm", one, other), [one, other])
        backward(torch.baddbmm(numbers(2, m, n, kind=kind), one.expand(2, m, k), other.expand(2, k, n)), [one, other])
        backward(one @ numbers(k, kind=kind), one)


def _reductions(kind: torch.dtype) -> None:
    for shape in ((7,), (16389,), (129, 127), (12, 33, 65)):
        x = (numbers(*shape, kind=kind) * 5).requires_grad_()
        for function in (
            torch.sum, torch.mean, torch.std, torch.var, torch.norm, torch.amax, torch.prod, torch.median,
            partial(torch.logsumexp, dim=-1), partial(torch.cumsum, dim=-1), partial(torch.std, dim=0),
            partial(torch.norm, p=1), partial(torch.norm, p=3), partial(torch.linalg.vector_norm, dim=-1),
            partial(torch.sum, dim=0), partial(torch.mean, dim=-1), partial(torch.var, dim=-1),
            partial(torch.sort, dim=-1),
            partial(F.normalize, dim=-1), partial(torch.topk, k=5), partial(torch.var_mean, dim=-1),
        ):  # fmt: skip
            backward(function(x), x)


def _clipping(kind: torch.dtype, foreach: bool) -> None:
    parameters = [nn.Parameter(numbers(*shape, kind=kind)) for shape in ((33,), (16, 16), (999,), (7, 5, 3))]
    for place, parameter in enumerate(parameters):
        parameter.grad = numbers(*parameter.shape, kind=kind, start=place) * 9
    nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
    nn.utils.clip_grad_value_(parameters, 0.01, foreach=foreach)


def _optimizer(make: type[torch.optim.Optimizer], kind: torch.dtype, **options: Any) -> None:
    shapes = [(16, 16), (33, 5)] if make is torch.optim.Muon else [(33,), (16, 16), (999,), (7, 5, 3)]
    parameters = [nn.Parameter(numbers(*shape, kind=kind)) for shape in shapes]
    optimizer = make(parameters, **options)
    for step in range(3):
        for place, parameter in enumerate(parameters):
            parameter.grad = numbers(*parameter.shape, kind=kind, start=place + 10 * step)
        optimizer.step()


OPTIONS = ({}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"momentum": 0.9, "nesterov": True},
           {"momentum": 0.9, "fused": True}, {"amsgrad": True, "foreach": True}, {"amsgrad": True, "foreach": False},
           {"amsgrad": True, "fused": True}, {"weight_decay": 0.1}, {"centered": True, "momentum": 0.5})  # fmt: skip


def _draws(kind: torch.dtype) -> None:
    for size in (1, 7, 16, 999):
        torch.rand(size, dtype=kind)
        torch.randn(size, dtype=kind)
        torch.randn_like(torch.zeros(size, dtype=kind))
        torch.randperm(size)
        torch.randint(0, 9, (size,))
        torch.normal(torch.zeros(size, dtype=kind), 2.0)
        torch.bernoulli(torch.full((size,), 0.3, dtype=kind))
        torch.multinomial(torch.full((size + 1,), 0.5, dtype=kind), size, replacement=True)
        torch.poisson(torch.full((size,), 3.5, dtype=kind))
        torch._standard_gamma(torch.full((size,), 0.4, dtype=kind))
        F.gumbel_softmax(torch.zeros(size, dtype=kind), dim=0)
        F.rrelu(numbers(size, kind=kind), training=True)
        F.dropout(torch.ones(size, dtype=kind), 0.3)
        for name in ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_"):
            getattr(torch.zeros(size, dtype=kind), name)()
        torch.zeros(size, dtype=kind).geometric_(0.3)
    for function in (
        nn.init.kaiming_normal_, nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.xavier_uniform_,
        nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.eye_, partial(nn.init.sparse_, sparsity=0.1),
    ):  # fmt: skip
        function(torch.zeros(65, 33, dtype=kind))


def of_models(kind: torch.dtype) -> Iterator[Case]:
    for tokens, width in ((5, 8), (70, 24), (130, 64)):
        for options in ({}, {"is_causal": True}, {"dropout_p": 0.2}):
            yield "attention", partial(_attention, kind, tokens, width, **options)
    yield "attention", partial(_attention, kind, 70, 24, masked=True)
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"ignore_index": 3}):
        yield "cross_entropy", partial(_classes, kind, **options)
    for options in ({}, {"padding_idx": 3}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        yield "embedding", partial(_embedding, kind, **options)
    yield "products", partial(_products, kind)


def of_optimizer(make: type[torch.optim.Optimizer], kind: torch.dtype) -> Iterator[Case]:
    return ((make.__name__, partial(_optimizer, make, kind, **options)) for options in OPTIONS)


def of_clipping(kind: torch.dtype) -> Iterator[Case]:
    return (("clip", partial(_clipping, kind, foreach)) for foreach in (False, True))


def of_distances(kind: torch.dtype) -> Iterator[Case]:
    one, other = numbers(40, 33, kind=kind), numbers(30, 33, kind=kind, start=2)
    for function in (torch.cdist, partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")):
        yield "cdist", partial(elements, function, [one.requires_grad_(), other.requires_grad_()])
    for function in (F.pdist, torch.norm, partial(torch.std, dim=0), partial(F.normalize, dim=-1)):
        yield "distances", partial(elements, function, [one.requires_grad_()])


OPTIMIZERS = [
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type) and each not in (torch.optim.Optimizer, torch.optim.LBFGS)
]
# By name, the cases of a kind of number. In short without matrix products, which an emulator takes too long for: those
# are plain sums of products.
SHORT: dict[str, Callable[[torch.dtype], Iterable[Case]]] = {
    **{each.__name__: partial(of_optimizer, each) for each in OPTIMIZERS},
    "clipping": of_clipping,
    "distances": of_distances,
    "reductions": lambda kind: [("reductions", partial(_reductions, kind))],
    "draws": lambda kind: [("draws", partial(_draws, kind))],
}
WHOLE = {"layers": of_layers, "models": of_models, **SHORT}
