"""One digest for everybody: training on other CPUs than this machine's."""

import faulthandler
import json
from collections.abc import Mapping
from pathlib import Path

import disguise
import golden
import pytest
import yaml
from baked import Bake, InstalledProject
from disguise import HERE
from playing import DIGITS, PROGRAM, THREADS, Played, Training, copied, few, on_each, play, prepared, python, strict
from test_starters import more, of_starter  # noqa: F401 - a fixture

WITH_AVX2 = [profile for profile in disguise.profiles() if profile != "ivb"]
# One CPU of each group whose bits differ unless they are pinned. Where CPUs are emulated, one of another maker than
# this machine's does all trainings.
OTHER = "zen2" if disguise.here_is("GenuineIntel") else "haswell"
TRAINED_ON = ["haswell", "icx", "zen2", "zen4"] if disguise.faulting() else [OTHER]
# Starters train on one without AVX-512, and one with it, both of another maker than Intel.
OF_STARTERS = ["zen2", "zen4"] if disguise.faulting() else [OTHER]
WIDEST = "icx" if disguise.faulting() else HERE if disguise.here_is("avx512f") else "haswell"
# Unpinned, each gives a digest of its own.
NATIVE = TRAINED_ON if disguise.faulting() else [HERE, OTHER]
MODELS = ("convnet", "transformer")
STARTERS = ("images", "language", "series")  # the others have no layer that none of these and no model has
# Where a CPU is emulated a step takes seconds: the same operations on less. And QEMU 7.2 takes ymm4 for no index where
# values are gathered (by the rule of rsp elsewhere), as oneDNN's LSTM does.
EMULATED = {
    "convnet": ("model.depth=1",),
    "transformer": ("model.depth=1",),
    "images": ("model.width=8", "model.depth=1"),
    "language": ("model.width=16", "model.layers=1", "model.recompute=false", "train.steps=2"),
    "series": ("model.cell=gru",),
}


def less(name: str) -> tuple[str, ...]:
    """Return the overrides that make this training smaller, where CPUs are emulated."""
    return () if disguise.faulting() else EMULATED.get(name, ())


@pytest.fixture(scope="module")
def of_models(project: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    """One epoch of each model of the first starter."""
    data = few(project, tmp_path_factory.mktemp("models") / "data")
    keys = "train.epochs=1", *data
    return {model: Training(project, (*keys, f"model.name={model}", *less(model))) for model in MODELS}


@pytest.fixture(scope="module")
def of_starters(
    bake: Bake,
    project: InstalledProject,
    more: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Training]:
    """A training of each of these starters, as short as `samebits verify` makes it, or shorter, on one process."""
    out, trainings = tmp_path_factory.mktemp("starters"), dict[str, Training]()
    for name in STARTERS:
        laid = of_starter(name, bake, project, more)
        params = yaml.safe_load(laid.text("params.yaml"))
        digits = params["data"]["raw"] == str(DIGITS)
        data = few(laid, out / name) if digits else prepared(laid, out / name, "data.test_percent=1")
        trainings[name] = Training(laid, (*params["verify"]["shorten"], *data, *less(name)))
    return trainings


@pytest.fixture(scope="module")
def portable(
    of_models: dict[str, Training],
    of_starters: dict[str, Training],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Played]:
    """What each CPU with AVX2 gives while all flags are on, in the environment that all starters train in."""
    faulthandler.cancel_dump_traceback_later()  # it takes minutes
    out = tmp_path_factory.mktemp("portable")
    (laid, *_) = (training.project for training in of_starters.values())

    def work(profile: str) -> Played:
        models = of_models if profile in (*TRAINED_ON, HERE) else {}
        starters = of_starters if profile in (*OF_STARTERS, HERE) else {}
        return play(laid, profile, out / profile, models | starters, networks=True)

    # what takes longest first
    return on_each([*OF_STARTERS, *(profile for profile in WITH_AVX2 if profile not in OF_STARTERS), HERE], work)


@pytest.mark.parametrize("profile", WITH_AVX2)
def test_canary_is_released_on_every_cpu_with_avx2(profile: str, portable: dict[str, Played]) -> None:
    """Ten milliseconds of arithmetic tell that all portable flags are in force."""
    assert portable[profile].canary


WIDE = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "NPY_DISABLE_CPU_FEATURES", "OPENBLAS_CORETYPE")


def test_canary_differs_on_a_cpu_without_avx2(project: InstalledProject, tmp_path: Path) -> None:
    """Such a CPU is of another class, whatever else is pinned."""
    assert not play(project, "ivb", tmp_path, relax=WIDE).canary


NUMPYS = ("NPY_DISABLE_CPU_FEATURES",)
# The second column: whether only a CPU with AVX-512 can show what the flag is for.
LEFT_OFF = [
    (("MKL_CBWR",), False),
    (("ATEN_CPU_CAPABILITY",), True),
    (("ONEDNN_MAX_CPU_ISA",), True),
    (NUMPYS, True),
    (("OPENBLAS_CORETYPE",), True),
    (("nnpack",), False),
    (THREADS, False),  # either one pins both libraries
]
SHOWN = [relax for relax, wide in LEFT_OFF if not wide or WIDEST != "haswell"]


@pytest.mark.parametrize("relax", SHOWN, ids=" ".join)
def test_canary_notices_each_switch_left_off(
    relax: tuple[str, ...], project: InstalledProject, portable: dict[str, Played], tmp_path: Path
) -> None:
    """On a CPU with AVX-512 every portable flag matters, and two threads are not one."""
    threads = dict.fromkeys(THREADS, "2") if relax == THREADS else {}
    played = play(project, WIDEST, tmp_path, relax=relax, **threads)
    assert not played.canary
    assert (played.draws != portable[WIDEST].draws) == (relax == NUMPYS)


def test_draws_and_numpys_arithmetic_are_one_digest_on_every_cpu(portable: dict[str, Played]) -> None:
    """Normal, beta and gamma deviates of python, NumPy and torch, and powers, as an augmentation takes them."""
    digests = {profile: played.draws for profile, played in portable.items()}
    assert len(digests) >= 3 and len(set(digests.values())) == 1, digests


def test_golden_networks_give_their_stored_digest_on_every_cpu(portable: dict[str, Played]) -> None:
    rows = json.loads(golden.GOLDEN.read_text())["digests"]
    stored = {name: rows[f"networks/{name}"]["digest"] for name in golden.NETWORKS}
    assert {profile: dict(played.networks) for profile, played in portable.items()} == dict.fromkeys(portable, stored)


def of_each(training: str, played: Mapping[str, Played]) -> dict[str, str]:
    """Return the digest of a training on each CPU that it was done on."""
    return {profile: each.weights[training] for profile, each in played.items() if training in each.weights}


@pytest.mark.parametrize("training", [*MODELS, *STARTERS])
def test_portable_training_is_one_digest_on_every_cpu(training: str, portable: dict[str, Played]) -> None:
    """Intel and AMD, with AVX-512 and without, train to the weights of this very machine."""
    digests = of_each(training, portable)
    assert len(digests) == 1 + len(TRAINED_ON if training in MODELS else OF_STARTERS) > 1, digests
    assert len(set(digests.values())) == 1, digests


def test_trainings_differ(portable: dict[str, Played]) -> None:
    """So none stands for another one."""
    assert len({*portable[HERE].weights.values()}) == len(MODELS) + len(STARTERS)


def test_training_that_leaves_its_disguise_is_found(project: InstalledProject, tmp_path: Path) -> None:
    """The planted fault: a variable is missing that a training sets by starting itself again."""
    program = PROGRAM.format(cpu="portable", relax=(), trainings=[(str(project.path), [], [])], networks=[])
    variables = strict(project)
    kept = {name: value for name, value in variables.items() if not name.startswith("MALLOC_")}
    assert kept != variables
    with pytest.raises(AssertionError, match="started again, out of its disguise"):
        python(copied(project, tmp_path), HERE, "-c", program, **kept)


def test_native_training_differs_between_cpus(
    project: InstalledProject, of_models: dict[str, Training], tmp_path: Path
) -> None:
    """The control: unpinned, the same CPUs give a digest each, so their disguise reaches the arithmetic."""
    one_thread = {"OMP_NUM_THREADS": "1"}  # so that nothing but the CPU differs
    one = {"convnet": of_models["convnet"]}

    def work(profile: str) -> Played:
        return play(project, profile, tmp_path / profile, one, cpu="native", **one_thread)

    digests = of_each("convnet", on_each(NATIVE, work))
    assert len(set(digests.values())) == len(NATIVE) >= 2, digests
