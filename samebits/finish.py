"""The end of a run: from its weights to its receipt."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .address import manifest
from .base.files import write_json
from .base.project import Project
from .checkpoint import final
from .config.settings import Settings
from .core.errors import RunError
from .folder import Folder
from .record import names, proved, statement
from .record.curves import write_curves
from .tracking import logged


def finish(
    project: Project,
    config: Settings,
    folder: Folder,
    model: nn.Module,
    unsharded: nn.Module,
    metrics: Mapping[str, float],
    root: str | None,
    prove: Callable[[], dict[str, Any]],
    is_honest: bool,
    report: Callable[[str], None],
) -> dict[str, str]:
    """Write the weights, the final metrics, the curves and, of an honest run, the receipt.

    Args:
        unsharded: the model, or what stands for it where its weights are sharded.
        root: that of the trace.
        prove: returns what the receipt states of the run's proof; it comes when all else is written.

    Returns:
        What is told of them, by name.
    """
    out, tracking = folder.out, config.tracking
    folder.require()
    final.write(unsharded, out)
    if tracking.enabled and tracking.model and (message := logged.write(model, project, out)):
        report(message)
    write_json(out / names.METRICS, metrics)
    write_curves(out)
    sha256 = manifest.sha256_file(out / names.WEIGHTS)
    results = {"weights": sha256, "trace": root or "off"}
    if not is_honest:
        return results | {"receipt": "none"}
    stated = prove()
    name = statement.write(out, statement.statement(project, out, sha256, root, stated))
    if config.receipt.key:
        from .record.signature import sign

        try:
            sign(out, config.receipt.key)
        except RunError as failure:
            report(str(failure))  # no reason to lose the run
    return results | {"proof": proved.words(stated), "receipt": name}
