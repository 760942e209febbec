"""Text made from a Jinja template that lies beside the code that fills it."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..base.shape import plain


def render(template: Path, **values: Any) -> str:
    """The template with these values. Into `.html.j2` each goes as text, whatever marks are in it.

    Raises:
        jinja2.UndefinedError: the template names a value that is not there.
    """
    html = template.name.endswith(".html.j2")
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=html,
        finalize=_plain if html else None,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template.name).render(values)


def _plain(value: Any) -> Any:
    return value if isinstance(value, Markup | StrictUndefined) else plain(str(value))
