"""The typed config behind params.yaml."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

import samebits as sb

Share = Annotated[float, Field(ge=0, lt=1)]


class Model(sb.Section):
    """The recurrent network; see model.py."""

    cell: Literal["lstm", "gru"]
    width: Annotated[int, Field(gt=0, multiple_of=10)]
    layers: PositiveInt
    dropout: Share


class Data(sb.Data):
    """How the dataset is prepared; see prepare.py, which is given these keys alone."""

    test_percent: Annotated[int, Field(gt=0, lt=100)]


class Train(sb.Section):
    """The optimisation and the augmentation; see train.py and data.py."""

    epochs: PositiveInt
    scale: Share
    skip: Share
    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat
    rise: Annotated[float, Field(gt=0, lt=1)]
    clip_norm: PositiveFloat
    evaluate_every: sb.Neutral[PositiveInt]
    evaluate_batch: PositiveInt


class Config(sb.Settings):
    """All of params.yaml."""

    model: Model
    data: Data
    train: Train
