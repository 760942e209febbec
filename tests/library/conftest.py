"""The environment of the library's tests, and their fixtures: the prepared data, trainings, a clone, a server."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from baked import STRICT
from support import HERE, OURS, PROJECT, SECRETS, TESTS, WORD, Trained, prepare_here, train_here, trained
from victim import Start, Victim
from warm import PATIENCE, Warm

if TYPE_CHECKING:
    from attempt import Finish
    from project.config import Config
    from server import Proxy, Server

pytest.register_assert_rewrite("server")  # it asserts too, and tells as much

# A real tracking server or repository is none of the tests' business.
FOREIGN = ("MLFLOW_", "GIT_")


def pytest_configure() -> None:
    """Work for the project in this process."""
    from samebits.base.project import work_for

    work_for(OURS)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background begins without it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Lead the processes that a test starts to the project's code and to dvc. pytest calls this for all tests."""
    if TESTS not in item.path.parents:
        return (yield)
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    os.environ.update(json.loads(os.environ[STRICT]), PYTHONPATH=os.pathsep.join(HERE))
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        with chdir(TESTS):  # not at the root, where the template's own copy of the library lies
            return (yield)
    finally:
        os.environ.clear()
        os.environ.update(before)


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


@pytest.hookimpl(tryfirst=True)
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


@pytest.fixture(scope="session")
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
