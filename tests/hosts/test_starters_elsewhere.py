"""Starters train to one digest on CPUs other than this machine's, too."""

import faulthandler
from pathlib import Path

import disguise
import yaml
from bake import python_path
from baked import Bake, InstalledProject, weights
from disguise import HERE
from test_portable import DIGITS, DISGUISED, few, prepared, python, strict
from test_starters import OTHERS, SMALLEST, more, of_starter  # noqa: F401 - a fixture

# Where a CPU is emulated a step takes seconds: the same operations on less. And QEMU 7.2 takes ymm4 for no index where
# values are gathered (by the rule of rsp elsewhere), as oneDNN's LSTM does.
EMULATED = {
    "images": ["model.width=8"],
    "language": ["model.width=16", "train.steps=2"],
    "series": ["model.cell=gru"],
}
# One without AVX-512, and one with it, both of another maker than Intel.
CPUS = [cpu for cpu in ("zen2", "zen4") if cpu in disguise.profiles()]
# One process imports torch, which takes longest where a CPU is emulated; what is forked from it stays on that CPU.
TRAININGS = (
    DISGUISED
    + """
import runpy, sys
import torch._dynamo, samebits.run
for project, path, arguments in {trainings}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, project
        continue
    for name in [name for name in sys.modules if name.partition(".")[0] == "samebits"]:
        del sys.modules[name]
    os.chdir(project)
    os.environ["PYTHONPATH"] = path
    sys.path[:0] = path.split(":")
    sys.argv = ["samebits", "train", *arguments]
    runpy.run_module("samebits", run_name="__main__", alter_sys=True)
    sys.exit()
"""
)


def test_short_training_is_one_digest_on_every_cpu(
    bake: Bake,
    project: InstalledProject,
    more: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """As short as `samebits verify` makes it, or shorter, on one process."""
    faulthandler.cancel_dump_traceback_later()  # it takes minutes
    settings: dict[str, tuple[InstalledProject, list[str]]] = {}
    for name in OTHERS:
        if name == SMALLEST:
            continue  # it has no layer that no other one has
        laid = of_starter(name, bake, project, more)
        (out := tmp_path / name).mkdir()
        params = yaml.safe_load(laid.text("params.yaml"))
        digits = params["data"]["raw"] == str(DIGITS)
        data = few(laid, out) if digits else prepared(laid, out, "data.test_percent=1")
        overrides = [*params["verify"]["shorten"], "tracking.enabled=false", *data]
        overrides += [] if disguise.faulting() else EMULATED.get(name, [])
        settings[name] = laid, [word for override in overrides for word in ("--set", override)]
    for cpu in (HERE, *CPUS):
        trainings = [
            (str(laid.path), python_path(laid.path), [*words, "--out", str(tmp_path / name / cpu)])
            for name, (laid, words) in settings.items()
        ]
        program = TRAININGS.format(cpu="portable", relax=(), trainings=trainings)
        python(laid, cpu, "-c", program, **strict(laid))
    digests = {name: {weights(tmp_path / name / cpu) for cpu in (HERE, *CPUS)} for name in settings}
    assert CPUS and all(len(each) == 1 for each in digests.values()), digests
    assert len(set().union(*digests.values())) == len(digests), digests  # each trained a model of its own
