"""Networks of other people, small, by name: the tests lay this file over a project, as its model.py.

Images are enlarged to SIZE x SIZE. Networks for text read pixels as tokens, and the digit is the token that comes next.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from .config import Config
from .data import CLASSES, SIDE

SIZE, TOKENS, MASK, WIDTH = 32, 18, 17, 32  # a pixel is one of 17 tokens; 17 stands for the digit
IMAGES = {"num_channels": 1, "num_labels": CLASSES}
TEXT = {"vocab_size": TOKENS, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def library(module: str, name: str, config: str, **keys: Any) -> nn.Module:
    """A network of the transformers library with weights of this run's seed; nothing is downloaded."""
    held = import_module(f"transformers.models.{module}")
    network: nn.Module = getattr(held, name)(getattr(held, config)(**keys))
    return network


class Images(nn.Module):
    """(batch, 1, SIDE, SIDE) images to (batch, CLASSES) logits, of a network that gives them in an object."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """The logits alone."""
        large = images.repeat_interleave(SIZE // SIDE, 2).repeat_interleave(SIZE // SIDE, 3)
        logits: Tensor = self.network(large).logits
        return logits


class Text(nn.Module):
    """(batch, 1, SIDE, SIDE) images to (batch, CLASSES) logits: what a language model foretells behind the pixels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """The logits of the digits, at the token that stands for the digit."""
        tokens = nn.functional.pad((images * 16).round().long().flatten(1), (0, 1), value=MASK)
        logits: Tensor = self.network(tokens).logits[:, -1, :CLASSES]
        return logits


class Recurrent(nn.Module):
    """(batch, 1, SIDE, SIDE) images to (batch, CLASSES) logits: rows are read one after another, both ways."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(SIDE, WIDTH, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """The logits, from what stands behind the last row."""
        read, _ = self.recurrent(images[:, 0])
        logits: Tensor = self.head(read[:, -1])
        return logits


def stages(hidden: str, depths: str, count: int = 3) -> dict[str, Any]:
    """Keys of a network whose later stages are wider."""
    return {hidden: [WIDTH // 2 * 2**stage for stage in range(count)], depths: [1] * count}


LAYERS = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}
PICTURES: dict[str, Callable[[], nn.Module]] = {
    "swin": partial(
        library, "swin", "SwinForImageClassification", "SwinConfig",
        image_size=SIZE, patch_size=2, window_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], **IMAGES,
    ),
    "mobilenet-v2": partial(
        library, "mobilenet_v2", "MobileNetV2ForImageClassification", "MobileNetV2Config",
        image_size=SIZE, depth_multiplier=0.25, **IMAGES,
    ),
    "convnext-v2": partial(
        library, "convnextv2", "ConvNextV2ForImageClassification", "ConvNextV2Config",
        image_size=SIZE, patch_size=2, num_stages=3, drop_path_rate=0.1, **stages("hidden_sizes", "depths"), **IMAGES,
    ),
    "resnet": partial(
        library, "resnet", "ResNetForImageClassification", "ResNetConfig",
        embedding_size=16, layer_type="bottleneck", **stages("hidden_sizes", "depths"), **IMAGES,
    ),
    "vit": partial(
        library, "vit", "ViTForImageClassification", "ViTConfig",
        image_size=SIZE, patch_size=8, hidden_dropout_prob=0.1, **LAYERS, **IMAGES,
    ),
}  # fmt: skip
TEXTS: dict[str, Callable[[], nn.Module]] = {
    "bert": partial(library, "bert", "BertForMaskedLM", "BertConfig", **LAYERS, **TEXT | {"pad_token_id": 0}),
    "gpt2": partial(
        library, "gpt2", "GPT2LMHeadModel", "GPT2Config",
        n_embd=WIDTH, n_layer=2, n_head=2, n_positions=SIDE * SIDE + 1, use_cache=False, **TEXT,
    ),
    "llama": partial(
        library, "llama", "LlamaForCausalLM", "LlamaConfig",
        max_position_embeddings=SIDE * SIDE + 1, use_cache=False, tie_word_embeddings=False, **LAYERS, **TEXT,
    ),
}  # fmt: skip
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda make=make: Images(make()) for name, make in PICTURES.items()},
    **{name: lambda make=make: Text(make()) for name, make in TEXTS.items()},
    "lstm": partial(Recurrent, nn.LSTM),
    "gru": partial(Recurrent, nn.GRU),
}


def build(config: Config) -> nn.Module:
    """The network that `model.name` in params.yaml names; its initial weights follow from the generators' state."""
    return NETWORKS[config.model.name]()
