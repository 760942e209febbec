"""The typed config behind params.yaml: tides."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from samebits.config import settings
from samebits.config.settings import NEUTRAL, Section, Settings

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Model(Section):
    """See model.py."""

    hidden: tuple[PositiveInt, ...]
    dropout: Fraction


class Data(settings.Data):
    """See prepare.py and data.py."""

    hours: PositiveInt
    held_out: Fraction
    noise: NonNegativeFloat


class Train(Section):
    """See train.py."""

    steps: PositiveInt
    momentum: Fraction
    evaluate_every: Annotated[PositiveInt, NEUTRAL]


class Rate(Section):
    """The learning rate falls linearly."""

    first: PositiveFloat
    last: PositiveFloat


class Config(Settings):
    """All of params.yaml."""

    model: Model
    data: Data
    train: Train
    rate: Rate
