"""Reading of YAML files that people edit."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ..base.files import read_text, require
from ..core.errors import UserError


def read_yaml(path: Path, form: Any, remedy: str, kind: str = "safe") -> Any:
    """What a YAML file holds; of the kind `rt` it can be written again with its comments.

    Raises:
        UserError: the file is missing, not YAML, or not of the `form`, a type.
    """
    return parse_yaml(read_text(path, remedy), str(path), form, remedy, kind)


def parse_yaml(text: str, place: str, form: Any = object, remedy: str = "", kind: str = "safe") -> Any:
    """The value in a text that was read at `place`.

    Raises:
        UserError: as `read_yaml`.
    """
    try:
        value = YAML(typ=kind).load(text)
    except (YAMLError, ValueError) as error:  # the latter for numbers and dates that are none
        raise UserError(f"{place}: not YAML: {' '.join(str(error).split())}. {remedy}".rstrip()) from None
    except RecursionError:
        raise UserError(f"{place}: not YAML that can be read: it is nested too deep. {remedy}".rstrip()) from None
    require(value, place, form, remedy)
    return value
