"""What the loops of ordinary.py are written with, as repositories have it: data, networks, averages, a schedule."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

STEPS, SIDE, CLASSES, WORDS, LENGTH = 4, 6, 4, 16, 8


class Images(Dataset[tuple[Tensor, int]]):
    """Pairs of a (1, SIDE, SIDE) float32 image, shifted at random, and its class."""

    def __init__(self, count: int = 96) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        self.images = torch.rand(count, 1, SIDE, SIDE, generator=generator) + self.labels.view(-1, 1, 1, 1) / CLASSES

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        shift = int(torch.randint(3, ()))
        return self.images[index].roll(shift, dims=-1), int(self.labels[index])


class Series(Dataset[Tensor]):
    """Noisy waves of different lengths, (length,) float32."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Tensor:
        return torch.sin(torch.arange(4 + index % 5) * 0.7 + index) + 0.1 * torch.rand(())


def padded(series: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A batch of series, (batch, longest), and the mask of what they hold."""
    lengths = torch.tensor([len(each) for each in series])
    values = nn.utils.rnn.pad_sequence(series, batch_first=True)
    return values, torch.arange(values.shape[1]) < lengths[:, None]


class Forecaster(nn.Module):
    """The next value of a series at each of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.cell(values[..., None])[0])[..., 0]

    def errors(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The squared errors of a padded batch, and how many there are."""
        values, held = batch
        errors = (self(values[:, :-1]) - values[:, 1:]).square() * held[:, 1:]
        return errors.sum(), held[:, 1:].sum()


def network(width: int = 8) -> nn.Sequential:
    features = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * width, CLASSES))
    return nn.Sequential(features, head)


def cross_entropy(network: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(network(images), labels)


@torch.no_grad()
def accuracy(model: nn.Module, dataset: Dataset[Any]) -> float:
    was = model.training
    model.eval()
    right = 0
    for images, labels in DataLoader(dataset, batch_size=32):
        right += (model(images).argmax(1) == labels).sum().item()
    model.train(was)
    return right / len(dataset)  # type: ignore[arg-type]


class ModelEma(nn.Module):
    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, other in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(mine * self.decay + other * (1 - self.decay))


class CosineScheduler:
    """A rate for each update, by a class that is none of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: int, warmup: int) -> None:
        self.optimizer, self.updates, self.warmup = optimizer, updates, warmup
        self.base_values = [group["lr"] for group in optimizer.param_groups]
        self.step_update(0)

    def step_update(self, number: int) -> None:
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            wave = 0.5 * (1 + math.cos(math.pi * number / self.updates))
            group["lr"] = base * (number + 1) / self.warmup if number < self.warmup else base * wave

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of LENGTH tokens and those that follow, int64."""

    def __init__(self) -> None:
        self.tokens = torch.randint(WORDS, (128,), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens) - LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index : index + LENGTH], self.tokens[index + 1 : index + 1 + LENGTH]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        many, length, width = x.shape
        q, k, v = (
            part.view(many, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(many, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks, self.ln_f = nn.ModuleList(Block(width, 2) for _ in range(2)), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


class EMA:
    """A shadow of the weights, which takes their place for an evaluation."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}
        self.backup: dict[str, Tensor] = {}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = (1.0 - self.decay) * p.data + self.decay * self.shadow[name]

    def apply_shadow(self) -> None:
        for name, p in self.model.named_parameters():
            self.backup[name] = p.data
            p.data = self.shadow[name]

    def restore(self) -> None:
        for name, p in self.model.named_parameters():
            p.data = self.backup[name]
        self.backup = {}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Curriculum:
    """Lets harder samples in once the easier ones are learned."""

    def __init__(self) -> None:
        self.level, self.best = 0.25, float("inf")

    def update(self, loss: float) -> None:
        if loss < self.best:
            self.best, self.level = loss, min(1.0, self.level + 0.25)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class MultiTask(nn.Module):
    """Two heads, and how uncertain each task is: losses are weighted by it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 16), nn.BatchNorm1d(16), nn.SiLU())
        self.classify, self.brightness = nn.Linear(16, CLASSES), nn.Linear(16, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        return self.classify(features), self.brightness(features).squeeze(-1)
