"""The typed config behind params.yaml."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

import samebits as sb

Fraction = Annotated[float, Field(ge=0, le=1)]


class Model(sb.Section):
    """The language model; see model.py."""

    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    context: PositiveInt
    recompute: sb.Neutral[bool]


class Data(sb.Data):
    """How the text becomes tokens; see prepare.py, which is given these keys alone."""

    test_percent: Annotated[int, Field(gt=0, lt=100)]


class Train(sb.Section):
    """The optimisation; see train.py."""

    steps: PositiveInt
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
