"""Whether micro-batches may share a pass: how many gradients keep their bits where torch.func.vmap makes all at once.

python measure/at_once.py
"""

import warnings

from rounds import harness

MODELS = "transformer", "convnet"


def lines(name: str) -> list[str]:
    """What is printed of one model."""
    config = harness.configured("device=cpu", f"model.name={name}", "model.dropout=0.0")
    import torch
    from repro_project.model import build
    from torch.func import functional_call, grad, vmap
    from torch.nn.functional import cross_entropy

    warnings.simplefilter("ignore")  # vmap tells of operations that it makes one after another
    torch.manual_seed(0)
    model, number = build(config), config.parallel.micro_batches
    size = config.parallel.global_batch // number
    images, labels = torch.rand(number, size, 1, 8, 8), torch.randint(10, (number, size))
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def loss(weights, images, labels):
        copied = {name: buffer.clone() for name, buffer in buffers.items()}
        return cross_entropy(functional_call(model, (weights, copied), (images,)), labels)

    each, again = ([grad(loss)(weights, *batch) for batch in zip(images, labels, strict=True)] for _ in range(2))
    of = len(each) * len(weights)
    equal = sum(torch.equal(one[key], other[key]) for one, other in zip(each, again, strict=True) for key in weights)
    apart = [f"{name}: one by one, and again: {equal} of {of} gradients have the same bits"]
    try:
        together = vmap(grad(loss), (None, 0, 0))(weights, images, labels)
    except RuntimeError as error:
        return [*apart, f"{name}: at once: refused by vmap: {error}".split(".")[0]]
    equal = sum(torch.equal(together[key][n], each[n][key]) for key in weights for n in range(number))
    return [*apart, f"{name}: at once: {equal} of {of}"]


def every() -> list[str]:
    """What is printed of all models."""
    return [line for name in MODELS for line in lines(name)]


def main() -> None:
    """Print it."""
    with harness.prepared() as project:
        print("\n".join(harness.within(project, every)))


if __name__ == "__main__":
    main()
