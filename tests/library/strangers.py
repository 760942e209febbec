"""Train networks of other people on many world sizes, as worlds.py does its own: the project's model.py is others.py.

strangers.py <package> OUT CASE …      CASE: as in worlds.py, with the name of a network
"""

import sys

import torch
import worlds
from torch import Tensor, nn
from torch.nn import functional as F


def loss_of(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    """The mean loss of a micro-batch of images, whose pixels are from 0 to 1 in steps; dropout is seeded."""
    torch.manual_seed(seed)
    return F.cross_entropy(model(x.sigmoid().mul(16).round() / 16), torch.arange(seed, seed + len(x)) % 10)


if __name__ == "__main__":
    worlds.PACKAGE, worlds.OUT, *worlds.CASES = sys.argv[1:]
    worlds.loss_of = loss_of
    networks = worlds.import_module(f"{worlds.PACKAGE}.model").NETWORKS
    worlds.MODELS = {name: (build, worlds.IMAGES) for name, build in networks.items()}
    worlds.main()
