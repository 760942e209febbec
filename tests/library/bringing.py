"""Train cases of brought.py in one process, or as one rank, each into a folder of its own.

    bringing.py <package> MODE FOLDER CASE,… KEY=VALUE …

MODE is `whole`, or `stopped`: then each training ends after its second step, as by SIGTERM. One that was stopped in
FOLDER goes on from there. Rank 0 writes FOLDER/whole.json: the digests of the weights and of the trace of each case,
or the line with which it was refused.
"""

import gc
import hashlib
import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from brought import BROKEN, CASES


def main(package: str, mode: str, folder: Path, cases: list[str], overrides: list[str]) -> None:
    """Train these cases."""
    project = import_module("samebits.base.project").Project.at(Path.cwd())
    run_of, params, errors = (import_module(f"samebits.{name}") for name in ("run", "config.params", "core.errors"))
    config = params.load(import_module(f"{package}.config").Config, overrides=overrides)
    digests = {}
    gc.freeze()  # else each run looks for who holds its objects among all that torch made
    for number, name in enumerate(cases):
        if mode == "stopped" and name == BROKEN:
            continue  # who resumes it would find that by the step that is made again
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # each has a process group of its own
        try:
            with suppress(errors.Preempted), run_of.Run(project, config, folder / name) as run:
                case = CASES[name]()
                more = {"steps": case.steps, "state": case.state, "order": case.order}
                for step in run.steps(case.model, case.optimizers, case.dataset, **more):
                    for loss, update in [(case.loss, case.update), *case.more]:
                        for batch in step:
                            step.backward(loss(case.model, batch))
                        update(step, step.loss)
                    if case.is_enough(step):
                        run.stop("it is enough")
                    run._stop.came = mode == "stopped" and step.number == 1  # all that the handler does
                case.ends()
                run.finish()
        except errors.RunError as refused:
            digests[name] = [str(refused)]
            continue
        if mode == "whole" and run.world.is_main:
            files = [folder / name / file for file in ("model.safetensors", "trace/steps.bin")]
            digests[name] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    if mode == "whole" and run.world.is_main:
        (folder / "whole.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4].split(","), sys.argv[5:])
