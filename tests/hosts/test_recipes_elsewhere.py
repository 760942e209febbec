"""Recipes train to one digest on CPUs other than this machine's, too."""

import faulthandler
from pathlib import Path

import disguise
import pytest
import yaml
from baked import InstalledProject, weights
from disguise import HERE
from test_portable import DIGITS, DISGUISED, few, python, strict
from test_recipes import laid, more  # noqa: F401 - the fixtures

# Where a CPU is emulated a step takes seconds: the same operations on less. And QEMU 7.2 takes ymm4 for no index where
# values are gathered (by the rule of rsp elsewhere), as oneDNN's LSTM does.
EMULATED = {
    "images": ["model.width=8"],
    "language": ["model.width=16", "train.steps=2"],
    "series": ["model.cell=gru"],
}
# One without AVX-512, and one with it, both of another maker than Intel.
CPUS = [cpu for cpu in ("zen2", "zen4") if cpu in disguise.profiles()]
TRAINING = (
    DISGUISED
    + """
import runpy, sys
sys.argv = ["samebits", "train", *{arguments}]
runpy.run_module("samebits", run_name="__main__", alter_sys=True)
"""
)


def test_short_training_is_one_digest_on_every_cpu(
    laid: InstalledProject,  # noqa: F811
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """As short as `samebits verify` makes it, or shorter, on one process."""
    faulthandler.cancel_dump_traceback_later()  # it takes minutes
    recipe = request.node.callspec.params["laid"]
    params = yaml.safe_load(laid.text("params.yaml"))
    overrides = [*params["verify"]["shorten"], "tracking.enabled=false"]
    overrides += [] if disguise.faulting() else EMULATED.get(recipe, [])
    overrides += few(laid, tmp_path) if params["data"]["raw"] == str(DIGITS) else ()
    settings = [word for override in overrides for word in ("--set", override)]
    digests = {}
    for cpu in (HERE, *CPUS):
        arguments = [*settings, "--out", str(tmp_path / cpu)]
        program = TRAINING.format(cpu="portable", relax=(), arguments=arguments)
        python(laid, cpu, "-c", program, **strict(laid, PYTHONPATH=laid.env["PYTHONPATH"]))
        digests[cpu] = weights(tmp_path / cpu)
    assert len(digests) >= 2 and len(set(digests.values())) == 1, digests
