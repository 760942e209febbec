"""What the verbs of analysis share."""

from pathlib import Path

import click

from ..front import Ours as Ours

Folder = click.Path(file_okay=False, path_type=Path)


as_json_option = click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON.")
signers_option = click.option(
    "--signers", type=Path, help="The keys to trust: an allowed-signers file, as in ssh-keygen(1)."
)
run_patch_option = click.option(
    "--run-patch",
    is_flag=True,
    help="Run the uncommitted code of a record (code.patch), whoever wrote it: it may do all that you may do.",
)
