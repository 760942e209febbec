"""Yours: the typed config behind params.yaml. Add a key here and there, and it enters the content address."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

import samebits as sb

Fraction = Annotated[float, Field(ge=0, le=1)]


class Model(sb.Section):
    """Which network, and how large; see model.py."""

    name: Literal["convnet", "transformer"]
    width: Annotated[int, Field(gt=0, le=2**14, multiple_of=8)]
    depth: Annotated[int, Field(gt=0, le=1000)]
    dropout: Annotated[float, Field(ge=0, lt=1)]


class Data(sb.Data):
    """How the dataset is prepared; see prepare.py, which is given these keys alone."""

    test_percent: Annotated[int, Field(gt=0, lt=100)]


class Train(sb.Section):
    """The optimisation and the augmentation; see train.py and data.py."""

    epochs: PositiveInt
    shift: Annotated[int, Field(ge=0, le=8)]  # images have 8 x 8 pixels
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
