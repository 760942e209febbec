"""What the tests share: the package under any name, a strict process, the prepared data, and trainings.

Tests write `from samebits import seeds`: `project` is another name for the one package under src/
that holds the library. It is the same modules, imported once.
"""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from victim import Start, Victim
from warm import PACKAGE, PATIENCE, PROJECT, Warm

if TYPE_CHECKING:
    from attempt import Finish
    from project.config import Config
    from server import Proxy, Server

pytest.register_assert_rewrite("server")  # it asserts too, and tells as much


# This project is what is tested, installed or not, by this process and by those it starts.
HERE = [str(PROJECT / "src"), str(PROJECT / "vendor")]
sys.path[:0] = [*HERE, str(PROJECT / "requirements")]
OURS = import_module("samebits.base.project").Project(PROJECT / "src" / PACKAGE)
import_module("samebits.loader").cover(PACKAGE)  # as the command does
del os.environ["SAMEBITS_PACKAGE"]  # processes that the tests start do it themselves
sys.path.append(str(Path(__file__).parents[2] / "build" / "hypothesis"))  # where the template's Makefile puts it
os.environ["PYTHONPATH"] = os.pathsep.join([*HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # dvc, and the python of its stages


class Alias(MetaPathFinder, Loader):
    """Finds `project` and its submodules by importing the package's own."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Answer for `project` alone."""
        return ModuleSpec(name, self) if name.partition(".")[0] == "project" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its own name."""
        module = import_module(PACKAGE + spec.name.removeprefix("project"))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: it has run already."""
        module.__spec__ = module.__spec__.loader_state


if PACKAGE != "project":
    sys.meta_path.insert(0, Alias())


def pytest_configure(config: pytest.Config) -> None:
    """Give this process the strict environment, by starting it again where something is missing.

    It must happen before torch is imported, and while standard output is the real one: pytest captures it
    when it imports this file, and again from the first test on, but not now.
    """
    from samebits.base.project import work_for
    from samebits.config.settings import Determinism
    from samebits.core.errors import UserError
    from samebits.core.flags import set_environment

    work_for(OURS)
    assert "torch" not in sys.modules, "torch was imported too early to be strict"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background begins without it
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "GIT_"))]:
        del os.environ[name]  # a real tracking server or repository is none of the tests' business
    try:
        set_environment(Determinism(cpu="portable", relax=()))
    except UserError as refused:
        pytest.exit(f"the tests want the strict environment:\n{refused}", returncode=2)


def python(
    *arguments: str | Path, cwd: Path = PROJECT, env: Mapping[str, str | None] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run python to its end; variables of `env` are set, or unset where the value is None."""
    merged = {name: value for name, value in (os.environ | (env or {})).items() if value is not None}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=merged, capture_output=True, text=True, **options
    )


@pytest.fixture(scope="session")
def config() -> "Config":
    """The project's params.yaml."""
    from project.config import Config

    from samebits.config.params import load

    return load(Config, PROJECT / "params.yaml")


@pytest.fixture(scope="session")
def prepared(config: "Config", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset as `prepare` writes it, in a folder of the tests' own."""
    folder = tmp_path_factory.mktemp("prepared")
    places = {"raw": str(PROJECT / config.data.raw), "prepared": str(folder)}
    prepare_here(config.data.model_copy(update=places))
    return folder


def prepare_here(config: Any) -> None:
    """Prepare the data in this process, as the stage does: `config` is the section `data`."""
    from project import prepare

    from samebits.front import STAGES

    STAGES["prepare"](OURS, prepare.prepare)(config, Path())


def train_here(config: Any, out: Path) -> None:
    """Train in this process, as the stage does."""
    from project import train

    from samebits.front import STAGES

    STAGES["train"](OURS, train.train)(config, out)


@dataclass(frozen=True)
class Trained:
    """A training that ended: its run directory and what it printed."""

    out: Path
    done: subprocess.CompletedProcess[str]

    @property
    def weights(self) -> str:
        """The SHA-256 of its weights."""
        return hashlib.sha256((self.out / "model.safetensors").read_bytes()).hexdigest()


def training(out: Path, prepared: Path, *overrides: str) -> list[str]:
    """The arguments of a training for one epoch into `out`."""
    settings = ["train.epochs=1", f"tracking.wait_seconds={PATIENCE}", f"data.prepared={prepared}", *overrides]
    return [*(text for setting in settings for text in ("--set", setting)), "--out", str(out)]


def trained(
    out: Path,
    prepared: Path,
    *overrides: str,
    ranks: int | None = None,
    meanwhile: Callable[[Warm], None] = lambda process: None,
    **env: str,
) -> Trained:
    """Train for one epoch into `out`, warm and to the end; `meanwhile` is called as soon as it has started."""
    arguments, logs = training(out, prepared, *overrides), (out.with_suffix(".out"), out.with_suffix(".err"))
    process = Warm(*arguments, out=logs[0], err=logs[1], ranks=ranks, env=env)
    meanwhile(process)
    return Trained(out, subprocess.CompletedProcess(arguments, process.wait(), *(log.read_text() for log in logs)))


# Parts of these must never leave the environment; all hold the same word, so that one search finds any.
WORD = "pa55word"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "pa55word-of-aws",
    "NCCL_FAKE_TOKEN": "pa55word-of-nccl",
    "TORCH_URL": "https://user:pa55word@with-at@host/x?key=pa55word",
    "MLFLOW_TRACKING_URI": "http://user:pa55word@127.0.0.1:1",  # a server that is down
}


@pytest.fixture(scope="session")
def untracked(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A training without tracking."""
    out = tmp_path_factory.mktemp("untracked") / "run"
    return trained(out, prepared, "tracking.enabled=false")


@pytest.fixture(scope="session")
def offline(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A training whose tracking server is down from the start, with secrets in its environment."""
    from server import until

    out = tmp_path_factory.mktemp("offline") / "run"
    log = out / "tracking.log"

    def meanwhile(process: Warm) -> None:
        """Hold it until the server was tried in vain."""
        until(lambda: log.is_file() or process.poll() is not None)
        process.send_signal(signal.SIGSTOP)
        until(lambda: "127.0.0.1" in log.read_text() or process.poll() is not None)
        process.send_signal(signal.SIGCONT)

    return trained(out, prepared, "tracking.wait_seconds=1", meanwhile=meanwhile, **SECRETS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks a real MLflow server is long: it takes a minute to begin. The embedded store is asked all the same."""
    for item in items:
        if "server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Server"]:
    """One server for all tests."""
    from server import Server

    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server: "Server", monkeypatch: pytest.MonkeyPatch) -> Iterator["Proxy"]:
    """A proxy before the server, which this process and its children upload through."""
    from server import Proxy

    with Proxy(server.port) as proxy:
        Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
        yield proxy
        proxy.shutdown()


@pytest.fixture
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process uploads goes to the server, which may take its time."""
    from samebits.tracking import tracking

    monkeypatch.setitem(tracking.QUIET, "MLFLOW_HTTP_REQUEST_TIMEOUT", str(PATIENCE))
    if "server" in request.fixturenames:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("server").uri)


@pytest.fixture(scope="module")
def tracked(server: "Server", prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A training that the server followed; its URI, with a password, stands in the environment."""
    folder = tmp_path_factory.mktemp("tracked")
    uri = f"http://user:{WORD}@127.0.0.1:{server.port}"
    elsewhere = f"tracking.uri=sqlite:///{folder}/elsewhere.db"
    ended = trained(folder / "run", prepared, elsewhere, MLFLOW_TRACKING_URI=uri)
    assert ended.done.returncode == 0, ended.done.stderr
    return ended


@pytest.fixture
def scrambled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The words that permutations scramble, one for each walk: the work that finding samples is."""
    from samebits.core.order import Permutation

    encrypt, words = Permutation._encrypt, list[int]()

    def counting(self: "Permutation", word: Any) -> Any:
        words.extend([word] if isinstance(word, int) else word.tolist())
        return encrypt(self, word)

    monkeypatch.setattr(Permutation, "_encrypt", counting)
    return words


@pytest.fixture
def as_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages run in this process, which has loaded tests, from elsewhere, and analysis, which the address lacks."""
    from samebits.guards import stages

    monkeypatch.setattr(stages, "require_installed", lambda project, unhashed: None)
    for name in [name for name in sys.modules if name.startswith("samebits.analysis")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in an empty folder of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def start(tmp_path: Path, prepared: Path) -> Iterator[Start]:
    """A function that starts training for one epoch in the run directory `run`; what is left is killed."""
    victims = []

    def start(*settings: str, ranks: int | None = None, **cold: Any) -> Victim:
        settings = ("train.epochs=1", f"data.prepared={prepared}", "tracking.enabled=false", *settings)
        arguments = [text for setting in settings for text in ("--set", setting)]
        victims.append(Victim(tmp_path / "run", *arguments, ranks=ranks, **cold))
        return victims[-1]

    yield start
    for victim in victims:
        victim.kill()


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this project's files with uncommitted code, and a run of it in artifacts/."""
    from clone import clone

    return clone(tmp_path_factory.mktemp("clone") / "project")


@pytest.fixture(scope="session")
def whole(config: "Config", prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run gives that nobody interrupts: one process."""
    from attempt import STEPS, inside, result

    out = tmp_path_factory.mktemp("whole") / "run"
    train_here(inside(config, prepared), out)
    seen = result(out)
    assert [step for step, _ in seen["rows"]] == [*range(STEPS), STEPS - 1] and seen["status"] == "FINISHED"
    return seen


@pytest.fixture
def finish(config: "Config", prepared: Path, whole: dict[str, Any], tmp_path: Path) -> "Finish":
    """A function that goes on with the run in this process, to the result that it must have."""
    from attempt import inside, result

    def finish(workers: int = 1, **checkpoints: Any) -> None:
        train_here(inside(config, prepared, workers, **checkpoints), tmp_path / "run")
        assert result(tmp_path / "run") == whole

    return finish
