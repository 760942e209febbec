"""The ResNet of the transformers library, with initial weights of this run's seed; nothing is downloaded."""

from torch import Tensor, nn
from transformers.models.resnet import ResNetConfig, ResNetForImageClassification

from .config import Config
from .data import CLASSES


class Classifier(nn.Module):
    """(batch, 3, side, side) images to (batch, CLASSES) logits; the library's model gives them in an object."""

    def __init__(self, width: int, depth: int, stages: int) -> None:
        super().__init__()
        widths = [width * 2**stage for stage in range(stages)]
        requested = ResNetConfig(
            embedding_size=width, hidden_sizes=widths, depths=[depth] * stages, layer_type="basic", num_labels=CLASSES
        )
        self.resnet = ResNetForImageClassification(requested)

    def forward(self, images: Tensor) -> Tensor:
        """The logits alone."""
        logits: Tensor = self.resnet(images).logits
        return logits


def build(config: Config) -> nn.Module:
    """The network that `model` in params.yaml describes; its initial weights follow from the generators' state."""
    model = config.model
    return Classifier(model.width, model.depth, model.stages)
