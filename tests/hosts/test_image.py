"""The Dockerfile, built unchanged on a stand-in for the CUDA base: what it holds, and what it trains to."""

import faulthandler
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from baked import Bake, BakedProject
from engine import BASE_PYTHON, Engine, engine, standin
from machine import free_port, sh, until
from postgres import Database

USER = 10001  # the image's own
NAME, EDITOR, SERVER = "repro-project:test", "repro-project-editor:test", "repro-project-mlflow:test"
PYTHON = "standin-python:bookworm"  # stands in for the server's base
TRAIN = "torch-cpu", "train-cpu", "run"
LOCKS = {NAME: TRAIN, EDITOR: (*TRAIN, "dev", "server"), SERVER: ("server",)}
SECRET = "pa55word-of-the-build"
VERIFIED = "weights sharded on 3 ranks", "killed and resumed on 2 ranks", "other circumstances"


@dataclass(frozen=True)
class Image:
    """The image of a project, the engine that has it, and the project that it was built from."""

    engine: Engine
    base: str
    digests: list[str]  # of two builds that shared nothing
    reused: list[list[str]]  # the steps that the second of them, and one after it, took from a build before
    project: BakedProject

    def run(self, *command: str, mounts: tuple[str, ...] = (), name: str = NAME) -> str:
        """Run a command as the image's user, without network and with a read-only root file system."""
        hard = ("--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--user", f"{USER}:{USER}")
        volumes = [word for mount in mounts for word in ("--volume", mount)]
        return self.engine.docker("run", *hard, "--env", f"REPRO_IMAGE={self.digests[0]}", *volumes, name, *command)


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine's loopback, which a build on the host's network sees; where."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def download(project: BakedProject, folder: Path) -> None:
    """Get the packages of the CPU lock, for the Python of the base."""
    (index,) = re.findall(r"^ARG TORCH_INDEX=(.*)$", project.text("Dockerfile"), re.MULTILINE)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    wanted = ["--no-deps", "--require-hashes", "--python-version", BASE_PYTHON, "--dest", folder]
    torch, *others = (f"--requirement={project.path}/requirements/{lock}.txt" for lock in LOCKS[EDITOR])
    sh(*pip, *wanted, "--extra-index-url", index, torch)
    sh(*pip, *wanted, *others)


def cached(log: str) -> list[str]:
    """Return the steps that BuildKit says to have taken from a build before, but for the base images."""
    steps = dict(re.findall(r"^#(\d+) (\[.*)$", log, re.MULTILINE))
    numbers = re.findall(r"^#(\d+) CACHED$", log, re.MULTILINE)
    return [steps[number] for number in numbers if " FROM " not in steps[number]]


@pytest.fixture(scope="module")
def image(bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image of a project with the default answers, from the CPU lock."""
    faulthandler.cancel_dump_traceback_later()  # it takes minutes
    folder = tmp_path_factory.mktemp("engine")
    projects = [bake(), bake()]
    download(projects[0], folder / "wheels")
    with engine(folder) as docker, served(folder / "wheels") as packages:
        base = standin(docker, folder)
        pip = folder / "pip.conf"
        pip.write_text(f"[global]\nno-index = true\nfind-links = http://builder:{SECRET}@{packages}/\n")
        options = f"--progress plain --network host --secret id=pipconf,src={pip}"
        made = ["make", "image", "DEVICE=cpu", f"BASE_IMAGE={base}"]
        digests, reused = [], []
        for project in projects:
            # pip's cache alone is removed: a file system that has just lost many files is slow to make as many
            docker.docker("builder", "prune", "--all", "--force", "--filter", "type=exec.cachemount")
            words = f"{options} --no-cache" if digests else options
            built = sh(*made, f"IMAGE={NAME}", f"BUILD_OPTIONS={words}", cwd=project.path, env=docker.env)
            digests.append(docker.inspect(NAME)["Id"])
        # now, while the engine remembers what it built; the stage with Python's venv stands in for the server's base
        reused.append(cached(built.stderr))
        options += f" --build-arg SERVER_BASE={PYTHON}"
        for name, target in ((PYTHON, "builder"), (SERVER, "mlflow"), (EDITOR, "editor")):
            words = f"{options} --target {target}"
            built = sh(*made, f"IMAGE={name}", f"BUILD_OPTIONS={words}", cwd=project.path, env=docker.env)
            reused.append(cached(built.stderr))
        yield Image(docker, base, digests, reused[:2], projects[0])


@pytest.fixture
def checkout(image: Image, tmp_path: Path) -> Path:
    """A checkout of the project for the image's user, to be mounted."""
    copy = Path(shutil.copytree(image.project.path, tmp_path / "checkout", symlinks=True))
    sh("chown", "--recursive", f"{USER}:{USER}", copy)
    return copy


def test_builds_that_share_nothing_give_one_digest(image: Image) -> None:
    """Two checkouts of one commit, no cache: every layer, and the image with its dates."""
    assert image.digests[0] == image.digests[1]
    second, later = image.reused
    assert not second and later


def names(texts: Iterable[str]) -> set[str]:
    """Return the names of packages, written alike, but for what a venv brings and a lock may pin, too."""
    return {re.sub("[-_.]+", "-", text).lower() for text in texts} - {"pip", "setuptools"}


def installed(image: Image, name: str) -> set[str]:
    """Return the packages of an image's Python."""
    listed = "import importlib.metadata as m; print(*(each.name for each in m.distributions()), sep='\\n')"
    return names(image.run("python", "-c", listed, name=name).splitlines())


def test_each_image_holds_its_locks_and_nothing_else(image: Image) -> None:
    """The one that trains has no tools and no MLflow server; the server's no torch, and no layer of the CUDA base."""
    for name, locks in LOCKS.items():
        pins = "".join(image.project.text(f"requirements/{lock}.txt") for lock in locks)
        locked = names(re.findall(r"^(\S+)==", pins, re.MULTILINE))
        assert installed(image, name) - {"repro-project"} == locked, name
    tools = {"pytest", "mypy", "ruff", "mlflow", "flask"}
    assert not tools & installed(image, NAME) and tools < installed(image, EDITOR)
    assert not {"torch", "dvc"} & installed(image, SERVER)
    base, server = (image.engine.inspect(name)["RootFS"]["Layers"] for name in (PYTHON, SERVER))
    assert server[: len(base)] == base and len(server) == len(base) + 2  # folders, packages


def test_user_of_the_image_is_not_root_and_writes_nowhere_but_in_tmp(image: Image) -> None:
    """Its root file system is read-only here, and not its own anyway."""
    assert image.run("id", "-u").strip() == str(USER)
    refused = image.run("sh", "-c", "touch /opt/venv/x 2>&1 || touch /etc/x 2>&1 || touch /tmp/x && echo only in /tmp")
    assert refused.count("Read-only file system") == 2 and refused.endswith("only in /tmp\n")


def test_environment_is_the_portable_class_and_names_the_image(image: Image) -> None:
    """`samebits env`, from the image alone."""
    environment = json.loads(image.run("samebits", "env"))
    assert environment["preimage"]["image"] == image.digests[0]
    assert environment["class"].startswith("cpu-portable/torch-")


def test_dvc_repro_in_the_image_gives_the_released_digest(image: Image, checkout: Path) -> None:
    """On a mounted checkout; the receipt carries the image's digest, and nothing else of the checkout changes."""
    mounts = (f"{checkout}:/work",)
    image.run("dvc", "repro", mounts=mounts)
    (released,) = yaml.safe_load(image.project.text("results.lock"))["results"]
    said = f"reproduced bit for bit: {released['source']} (weights {released['weights']})"
    assert said in image.run("samebits", "check", mounts=mounts)
    receipt = json.loads((checkout / "artifacts" / "receipt.json").read_bytes())
    assert receipt["predicate"]["environment"]["preimage"]["image"] == image.digests[0]
    assert receipt["subject"][0]["digest"]["sha256"] == released["weights"]
    assert len(receipt["predicate"]["proof"]["segments"]) == 3, receipt["predicate"]["proof"]
    assert image.run("git", "status", "--porcelain", mounts=mounts) == ""


def test_contract_is_verified_in_the_image(image: Image, checkout: Path) -> None:
    """`samebits verify` without any network: by torchrun, sharded, killed and resumed, in other circumstances."""
    (checkout / "build").mkdir(exist_ok=True)
    sh("chown", f"{USER}:{USER}", checkout / "build")
    only = " ".join(f"--only '{way}'" for way in VERIFIED)
    mounts = tuple(f"{checkout / name}:/work/{name}" for name in ("data", "build"))
    table = image.run("sh", "-c", f"samebits prepare >/dev/null && samebits verify {only}", mounts=mounts)
    assert f"\nEQUAL: {1 + len(VERIFIED)} of {1 + len(VERIFIED)} trainings\n" in table, table


def test_pipeline_of_the_project_trains_in_the_image(image: Image, checkout: Path) -> None:
    """By the very command of its workflow, on the checkout; what builds the image there is `make image`, as here."""
    job = yaml.safe_load(image.project.text(".github/workflows/ci.yml"))["jobs"]["image"]
    build, smoke = (step["run"] for step in job["steps"] if "run" in step)
    (base,) = re.findall(r"^make image DEVICE=cpu BASE_IMAGE=(.*)$", build)
    named = sh("sh", "-c", f"echo {base}", cwd=checkout).stdout.strip()
    assert named.startswith("python:") and f"ARG SERVER_BASE={named}\n" in image.project.text("Dockerfile")
    assert list(job["env"]) == ["IMAGE"]
    printed = sh("sh", "-c", smoke, cwd=checkout, env={**image.engine.env, "IMAGE": NAME}).stdout
    assert re.search(r"^train: weights [0-9a-f]{64}\nevaluate: ", printed, re.MULTILINE), printed


def test_own_tests_pass_in_the_image_of_developers(image: Image, checkout: Path) -> None:
    """All of the project's tests but the `samebits verify` of the test above, on a mounted checkout."""
    words = ("env", "PYTHONPATH=/work/src:/work/vendor", "python", "-m", "pytest", "-p", "no:cacheprovider")
    printed = image.run(*words, "--ignore=tests/test_verify.py", mounts=(f"{checkout}:/work",), name=EDITOR)
    assert re.search(r"\d+ passed", printed) and "skipped" not in printed


def places(engine: Engine, name: str, folder: Path, *texts: str) -> list[list[str]]:
    """Where in an image each text stands: its history, its configuration, its layers."""
    history = engine.docker("history", "--no-trunc", name)
    found = [["history"] if text in history else [] for text in texts]
    archive = folder / "image.tar"
    engine.docker("save", "--output", archive, name)
    with tarfile.open(archive) as blobs:
        for blob in (member for member in blobs if member.isfile()):
            file = blobs.extractfile(blob)
            assert file
            content = file.read()
            for text, there in zip(texts, found, strict=True):
                there += [blob.name] if text.encode() in content else []
    archive.unlink()
    return found


def test_secret_of_the_build_is_nowhere_in_the_image(image: Image, tmp_path: Path) -> None:
    """It was passed the documented way, and pip used it. What is in the image for sure is found."""
    sure = "org.opencontainers.image.revision", "def learning_rate"
    secret, *rest = places(image.engine, NAME, tmp_path, SECRET, *sure)
    assert secret == [] and all(rest)


def test_secret_that_leaks_is_found(image: Image, tmp_path: Path) -> None:
    """As an argument it stands in the history, copied in a layer."""
    leaks = {
        "argument": "ARG TOKEN\nRUN true",
        "layer": "RUN --mount=type=secret,id=token cp /run/secrets/token /root/",
    }
    (tmp_path / "token").write_text(SECRET)
    for name, lines in leaks.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "Dockerfile").write_text(f"FROM {image.base}\n{lines}\n")
        image.engine.docker("build", "--quiet", "--network", "host", "--build-arg", f"TOKEN={SECRET}", "--tag", name,
                            "--secret", f"id=token,src={tmp_path / 'token'}", tmp_path / name)  # fmt: skip
        (found,) = places(image.engine, name, tmp_path, SECRET)
        assert ("history" in found) == (name == "argument") and found


def test_server_of_the_compose_file_answers_in_its_image(image: Image) -> None:
    """Its own target, command, health check and hardening; PostgreSQL is another process here."""
    server = yaml.safe_load(image.project.text("compose.yaml"))["services"]["mlflow"]
    assert server["build"] == {"context": ".", "target": "mlflow", "args": ["SERVER_BASE"]}
    database, port = Database(), str(free_port())
    command = [word.replace("5000", port) for word in image.engine.inspect(SERVER)["Config"]["Cmd"]]
    variables = {name: value for name, value in server["environment"].items() if name in ("PGUSER", "PGDATABASE")}
    variables |= {"PGHOST": "127.0.0.1", "PGPORT": str(database.port), "PGPASSWORD": "any"}
    hard = [f"--cap-drop={name}" for name in server["cap_drop"]]
    hard += [f"--security-opt={option}" for option in server["security_opt"]]
    assert server["read_only"] and server["tmpfs"] == ["/tmp"]
    environment = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    absent = "/usr/bin/git", "/etc/passwd"  # the real base has no git, and no account for the user
    volumes = ["--volume=/mlartifacts", *(f"--volume=/dev/null:{path}" for path in absent)]
    container = image.engine.docker("run", "--detach", "--network=host", "--read-only", "--tmpfs=/tmp",
                                    *volumes, *hard, *environment, SERVER, *command).strip()  # fmt: skip
    check = [word.replace("5000", port) for word in server["healthcheck"]["test"][1:]]
    try:
        until(lambda: image.engine.succeeds("exec", container, *check), "the server is healthy")
        assert ["mlflow"] in database.query("SELECT tableowner FROM pg_tables WHERE tablename = 'runs'")
    finally:
        image.engine.docker("rm", "--force", container)
        database.end()
