"""The typed config behind params.yaml."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from samebits.config import settings
from samebits.config.settings import NEUTRAL, Section, Settings

BASE = "base.safetensors"  # the name of the weights to start from, among the prepared data

Fraction = Annotated[float, Field(ge=0, le=1)]


class Model(Section):
    """The base and its adapters; see model.py and lora.py."""

    width: PositiveInt
    depth: PositiveInt
    dropout: Annotated[float, Field(ge=0, lt=1)]
    rank: PositiveInt
    scale: PositiveFloat


class Data(settings.Data):
    """The weights to start from, and how the dataset is prepared; see prepare.py, which is given these keys alone."""

    base: Annotated[str, NEUTRAL]
    base_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    test_percent: Annotated[int, Field(gt=0, lt=100)]


class Train(Section):
    """The optimisation and the augmentation; see train.py and data.py."""

    epochs: PositiveInt
    shift: NonNegativeInt
    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat
    warmup: Fraction
    decay: Fraction
    clip_norm: PositiveFloat
    nonfinite: Literal["stop", "skip"]
    evaluate_every: Annotated[PositiveInt, NEUTRAL]
    evaluate_batch: PositiveInt


class Config(Settings):
    """All of params.yaml."""

    model: Model
    data: Data
    train: Train
