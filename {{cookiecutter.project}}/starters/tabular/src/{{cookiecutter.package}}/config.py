"""The typed config behind params.yaml."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

import samebits as sb

Percent = Annotated[int, Field(gt=0, lt=50)]


class Model(sb.Section):
    """The perceptron and the embeddings before it; see model.py."""

    embedding: PositiveInt
    width: PositiveInt
    depth: PositiveInt
    dropout: Annotated[float, Field(ge=0, lt=1)]


class Data(sb.Data):
    """How the table is split; see prepare.py, which is given these keys alone."""

    test_percent: Percent
    validation_percent: Percent


class Train(sb.Section):
    """The optimisation; see train.py."""

    epochs: PositiveInt
    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat
    evaluate_every: PositiveInt
    patience: PositiveInt
    evaluate_batch: PositiveInt


class Config(sb.Settings):
    """All of params.yaml."""

    model: Model
    data: Data
    train: Train
