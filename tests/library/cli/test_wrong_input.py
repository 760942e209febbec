"""What a user meets who gives something wrong, and the help."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from project import train as train_module
from project.config import Config
from support import OURS, PROJECT, python

from samebits.cli import main
from samebits.config.params import load
from samebits.front import STAGES
from samebits.record import receipt

COMMANDS = {
    ("--set", "sede=1"): (1, "--set sede: unknown key; did you mean seed?"),
    ("--set", "seed=x", "--set", "model.width=3"): (2, "--set model.width: 3 given, a multiple of 8 wanted"),
    ("--set", "determinism.relax=[nnpakc]"): (1, "determinism.relax: unknown flag 'nnpakc'; known: all, "),
    ("--sett", "seed=1"): (2, "No such option"),
    ("--set",): (1, "requires an argument"),
    ("--out", "params.yaml"): (1, "Directory 'params.yaml' is a file"),
    ("seed=1",): (1, "unexpected extra argument (seed=1)"),
}


@pytest.mark.parametrize("arguments", COMMANDS)
def test_user_meets_a_line_and_exit_code_2(arguments: tuple[str, ...]):
    lines, wanted = COMMANDS[arguments]
    done = python("-m", "samebits", "train", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert wanted in done.stderr and len(done.stderr.splitlines()) <= lines


BEFORE_THE_VERB = {
    ("--verson",): "No such option '--verson'. Did you mean '--version'?\n",
    ("trian",): "No such command 'trian'. Did you mean 'train'?\n",
}


@pytest.mark.parametrize("words", BEFORE_THE_VERB)
def test_misspelt_word_before_the_verb_is_met_with_the_nearest_in_a_line(words: tuple[str, ...]):
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.output) == (2, BEFORE_THE_VERB[words])


def test_contradicting_variable_is_refused_by_name():
    done = python("-m", "samebits", "train", env={"MKL_CBWR": "AVX2"})
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "MKL_CBWR=AVX2 is set, COMPATIBLE is wanted" in done.stderr
    assert "--set 'determinism.relax=[MKL_CBWR]'" in done.stderr


@pytest.mark.parametrize("stage", ["prepare", "train", "evaluate"])
def test_help_names_the_stage(stage: str):
    done = python("-m", "samebits", stage, "--help")
    assert done.returncode == 0 and f"Usage: python -m samebits {stage}" in done.stdout
    assert all(option in done.stdout for option in ("--set KEY=VALUE", "--out"))


def test_run_with_the_largest_numbers_that_are_accepted_ends_with_a_receipt(
    config: Config, prepared: Path, tmp_path: Path
):
    """Of the neutral keys; and a float that JSON writes as a whole number."""
    largest = {
        "checkpoint": {"every": 2**53 - 1, "keep": 2**53 - 1},
        "integrity": {"compare_every": 2**53 - 1, "recompute_every": 2**53 - 1},
        "trace": {"values": 2**53 - 1},
        "parallel": {"timeout_seconds": 10**6, "replicas": 2**53 - 1},
        "train": {"clip_norm": 1e20, "epochs": 1, "evaluate_every": 2**53 - 1, "evaluate_batch": 2**53 - 1},
    }
    overrides = [f"{section}.{key}={value!r}" for section, keys in largest.items() for key, value in keys.items()]
    overrides += ["tracking.enabled=false", "loader.workers=1", f"data.prepared={prepared}", f"seed={2**53 - 1}"]
    STAGES["train"](OURS, train_module.train)(load(Config, PROJECT / "params.yaml", overrides), tmp_path)
    assert receipt.read(tmp_path).stated["config"]["train.clip_norm"] == 1e20
