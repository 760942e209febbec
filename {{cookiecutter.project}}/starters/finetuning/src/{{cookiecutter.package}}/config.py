"""The typed config behind params.yaml."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

import samebits as sb

BASE = "base.safetensors"  # the name of the weights to start from, among the prepared data

Fraction = Annotated[float, Field(ge=0, le=1)]


class Model(sb.Section):
    """The base and its adapters; see model.py and lora.py."""

    width: PositiveInt
    depth: PositiveInt
    dropout: Annotated[float, Field(ge=0, lt=1)]
    rank: PositiveInt
    scale: PositiveFloat


class Data(sb.Data):
    """The weights to start from, and how the dataset is prepared; see prepare.py, which is given these keys alone."""

    base: sb.Neutral[str]
    base_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    test_percent: Annotated[int, Field(gt=0, lt=100)]


class Train(sb.Section):
    """The optimisation and the augmentation; see train.py and data.py."""

    epochs: PositiveInt
    shift: NonNegativeInt
    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat
    warmup: Fraction
    decay: Fraction
    clip_norm: PositiveFloat
    evaluate_every: sb.Neutral[PositiveInt]
    evaluate_batch: PositiveInt


class Config(sb.Settings):
    """All of params.yaml."""

    model: Model
    data: Data
    train: Train
