"""Train networks of other people on many world sizes, as worlds.py does its own: the project's model.py is networks.py.

strangers.py <package> FAULT OUT CASE …      CASE: network,micro-batches,ranks,shard,replicas,ranks per host
"""

import sys

import torch
import worlds
from torch import Tensor, nn
from torch.nn import functional as F


class Network(worlds.Case):
    """One training of a network that reads images of pixels from 0 to 16."""

    def loss(self, model: nn.Module, x: Tensor, seed: int) -> Tensor:
        """The mean loss of a micro-batch; dropout is seeded."""
        torch.manual_seed(seed)
        pixels = x.repeat(1, 2).sigmoid().mul(16).round() / 16
        return F.cross_entropy(model(pixels.view(-1, 1, 8, 8)), torch.arange(seed, seed + len(x)) % 10)


if __name__ == "__main__":
    worlds.PACKAGE, worlds.FAULT, worlds.OUT, *worlds.CASES = sys.argv[1:]
    worlds.Case = Network
    worlds.MODELS = worlds.import_module(f"{worlds.PACKAGE}.model").NETWORKS
    worlds.main()
