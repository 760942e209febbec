"""What the tests share: the package, whatever its name is; the environment of a run; the config, with data prepared.

The tests are yours. Of your model and your data they ask for the few names that `samebits docs your-model` lists.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
(PACKAGE,) = [path.parent.name for path in (ROOT / "src").glob("*/train.py")]

# This tree is what is tested, installed or not, by this process and by those it starts.
HERE = [str(ROOT / "src"), str(ROOT / "vendor")]
sys.path[:0] = HERE
os.environ["PYTHONPATH"] = os.pathsep.join([*HERE, *filter(None, [os.environ.get("PYTHONPATH")])])


def ours(name: str) -> Any:
    """A module of the package: `ours("model").build` is the `build` of model.py."""
    return import_module(f"{PACKAGE}.{name}")


def params(*overrides: str) -> Any:
    """The config that params.yaml asks for, with overrides as those of --set."""
    return import_module("samebits.config.params").load(ours("config").Config, ROOT / "params.yaml", overrides)


def pytest_configure() -> None:
    """Start pytest again with the environment of a run, where a variable is missing: torch reads them when it loads.

    Then have the dataset there: DVC brings it to a clone. What is wrong with it is said once, before any test.
    """
    try:
        import_module("samebits.core.flags").set_environment(params().determinism)
        import_module("samebits.address.manifest").require_raw(data_in(params()))
    except import_module("samebits.core.errors").UserError as refused:
        pytest.exit(str(refused), returncode=2)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The config, and the data that it asks for, prepared in a folder of the tests' own."""
    config = params()
    config = config.model_copy(update={"data": data_in(config, prepared=str(tmp_path_factory.mktemp("prepared")))})
    prepare(config)
    return config


def data_in(config: Any, **places: str) -> Any:
    """The keys of `data`, with the dataset as it is named from anywhere, and with other places."""
    return config.data.model_copy(update={"raw": str(ROOT / config.data.raw), **places})


def prepare(config: Any) -> None:
    """Prepare the data as `samebits prepare` does."""
    front, project = import_module("samebits.front"), import_module("samebits.base.project").Project.at(ROOT)
    front.call(project, front.STAGES["prepare"](project, ours("prepare").prepare), config, Path(), only="data")


@pytest.fixture(scope="session")
def world(config: Any) -> Any:
    """One process, with its device, and with the flags of a run set."""
    return import_module("samebits.stage").alone(config)


def micro_batches(config: Any, world: Any, steps: int = 1, workers: int = 0) -> list[Any]:
    """The batches of the first steps, one for each micro-batch, as the loop of train.py gets them."""
    sampling = import_module("samebits.core.sampling")
    config = config.model_copy(update={"loader": config.loader.model_copy(update={"workers": workers})})
    train_set, _ = ours("data").load(config)
    plan = sampling.Plan(len(train_set), config.parallel.global_batch, config.parallel.micro_batches, config.seed)
    keys = sampling.MicroBatches(plan, range(plan.micro_batches), 0, steps)
    loading = sampling.Loading(config.options, world, collate=getattr(ours("data"), "collate", None))
    on_device = import_module("samebits.core.batch").on_device
    return [on_device(batch, world.device) for batch in loading.loader(train_set, keys)]
