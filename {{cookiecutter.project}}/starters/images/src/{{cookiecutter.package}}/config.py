"""The typed config behind params.yaml."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

import samebits as sb

Share = Annotated[float, Field(ge=0, lt=1)]


class Model(sb.Section):
    """The residual network; see model.py."""

    width: PositiveInt
    depth: PositiveInt
    stages: PositiveInt


class Data(sb.Data):
    """How the images are made; see prepare.py, which is given these keys alone."""

    test_percent: Annotated[int, Field(gt=0, lt=100)]
    side: PositiveInt


class Train(sb.Section):
    """The optimisation and the augmentation; see train.py and data.py."""

    epochs: PositiveInt
    crop: NonNegativeInt
    flip: Share
    jitter: Share
    learning_rate: PositiveFloat
    momentum: Share
    weight_decay: NonNegativeFloat
    warmup: Share
    smoothing: Share
    average: Share
    evaluate_every: sb.Neutral[PositiveInt]
    evaluate_batch: PositiveInt


class Config(sb.Settings):
    """All of params.yaml."""

    model: Model
    data: Data
    train: Train
