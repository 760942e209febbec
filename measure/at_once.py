"""Whether micro-batches may share a pass: how many gradients keep their bits where torch.func.vmap makes all at once.

python measure/at_once.py
"""

import subprocess

from rounds import VENV, in_venv, prepared

CODE = """
import warnings
from pathlib import Path
from repro_project.config import Config
from repro_project.repro.config.params import load
from repro_project.repro.core.flags import apply, set_environment

MODELS = [
    load(Config, Path("params.yaml"), ["device=cpu", f"model.name={name}", "model.dropout=0.0"])
    for name in ("transformer", "convnet")
]
set_environment(MODELS[0].determinism)
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from repro_project.model import build

warnings.simplefilter("ignore")  # vmap tells of operations that it makes one after another
apply(MODELS[0].determinism)
for config in MODELS:
    title = config.model.name
    torch.manual_seed(0)
    model = build(config)
    number = config.parallel.micro_batches
    size = config.parallel.global_batch // number
    images, labels = torch.rand(number, size, 1, 8, 8), torch.randint(10, (number, size))
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def loss(weights, images, labels):
        copied = {name: buffer.clone() for name, buffer in buffers.items()}
        return cross_entropy(functional_call(model, (weights, copied), (images,)), labels)

    each, again = ([grad(loss)(weights, *batch) for batch in zip(images, labels)] for _ in range(2))
    of = len(each) * len(weights)
    equal = sum(torch.equal(one[name], other[name]) for one, other in zip(each, again) for name in weights)
    print(f"{title}: one by one, and again: {equal} of {of} gradients have the same bits")
    try:
        together = vmap(grad(loss), (None, 0, 0))(weights, images, labels)
    except RuntimeError as error:
        print(f"{title}: at once: refused by vmap: {error}".split(".")[0])
        continue
    equal = sum(torch.equal(together[name][n], each[n][name]) for name in weights for n in range(number))
    print(f"{title}: at once: {equal} of {of}")
"""


def main() -> None:
    """Print a line for each model."""
    with prepared() as project:
        subprocess.run([VENV / "bin" / "python", "-c", CODE], cwd=project, env=in_venv(project), check=True)


if __name__ == "__main__":
    main()
