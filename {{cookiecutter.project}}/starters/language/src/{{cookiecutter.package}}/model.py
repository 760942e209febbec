"""The Llama of the transformers library, with initial weights of this run's seed; nothing is downloaded."""

from torch import Tensor, nn
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from .config import Config
from .data import TOKENS


class Llama(nn.Module):
    """(batch, tokens) to (batch, tokens, TOKENS) logits of the next one; embedding and head share their weights."""

    def __init__(self, width: int, layers: int, heads: int, context: int, recompute: bool) -> None:
        super().__init__()
        requested = LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.llama = LlamaForCausalLM(requested)
        if recompute:
            self.llama.activation_checkpointing_enable({"use_reentrant": False})

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits alone; the library's model gives them in an object."""
        logits: Tensor = self.llama(tokens).logits
        return logits


def build(config: Config) -> nn.Module:
    """The network that `model` in params.yaml describes; its initial weights follow from the generators' state."""
    model = config.model
    return Llama(model.width, model.layers, model.heads, model.context, model.recompute)
