"""The typed config behind params.yaml: tides."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

import samebits as sb

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Model(sb.Section):
    """See model.py."""

    hidden: tuple[PositiveInt, ...]
    dropout: Fraction


class Data(sb.Data):
    """See prepare.py and data.py."""

    hours: PositiveInt
    held_out: Fraction
    noise: NonNegativeFloat


class Rate(sb.Section):
    """The learning rate falls linearly."""

    first: PositiveFloat
    last: PositiveFloat


class Train(sb.Section):
    """See train.py."""

    steps: PositiveInt
    momentum: Fraction
    evaluate_every: PositiveInt  # not neutral: it decides when the run ends
    patience: PositiveInt
    log_every: sb.Neutral[PositiveInt]
    rate: Rate


class Config(sb.Settings):
    """All of params.yaml."""

    model: Model
    data: Data
    train: Train
