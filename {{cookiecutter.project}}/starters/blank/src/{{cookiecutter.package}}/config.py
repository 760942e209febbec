"""Your keys: each stands here with its type, and in params.yaml with its value."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

import samebits as sb


class Model(sb.Section):
    """What model.py asks for."""

    width: PositiveInt


class Data(sb.Data):
    """What prepare.py asks for; it is given these keys alone."""

    test_percent: Annotated[int, Field(gt=0, lt=100)]


class Train(sb.Section):
    """What train.py asks for."""

    epochs: PositiveInt
    learning_rate: PositiveFloat


class Config(sb.Settings):
    """All of params.yaml. What `samebits` itself asks for is in `sb.Settings`."""

    model: Model
    data: Data
    train: Train
