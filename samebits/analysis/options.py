"""What the verbs of analysis share: the project that they are about, and options that several have."""

from pathlib import Path
from typing import Protocol

import click

from ..base.project import Project
from ..config.settings import Settings

Folder = click.Path(file_okay=False, path_type=Path)


class Ours(Protocol):
    """What these verbs ask of the project that the command is about."""

    project: Project
    schema: type[Settings]

    def tracking_uri(self) -> str:
        """Where MLflow keeps its runs."""


as_json_option = click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON.")
signers_option = click.option(
    "--signers", type=Path, help="The keys to trust: an allowed-signers file, as in ssh-keygen(1)."
)
run_patch_option = click.option(
    "--run-patch",
    is_flag=True,
    help="Run the uncommitted code of a record (code.patch), whoever wrote it: it may do all that you may do.",
)
