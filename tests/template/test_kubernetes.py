"""The Kubernetes TrainJob: what Kubeflow Trainer's published API knows, and what its torch runtime makes of it."""

import copy
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from bake import VENV, python_path
from baked import Answers, Bake, BakedProject, Environment, InstalledProject, weights
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob as TrainJob
from machine import free_port
from pydantic import ValidationError

TRAINJOB = "deploy/kubernetes/trainjob.yaml"
ANSWERS: dict[str, Answers] = {
    "default": {},
    "long": {"project": "p" * 39 + "-123456789a", "package": "q" * 50},
    "words of YAML": {"project": "yes", "package": "null_", "mlflow_tracking_uri": "https://example.org:"},
    "no web server": {"package": "a_", "mlflow_tracking_uri": "postgresql+psycopg2://db.example/runs"},
    "own file": {"mlflow_tracking_uri": "sqlite:///runs.db"},
}
LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # RFC 1035, what services and pods may be called
QUANTITY = re.compile(r"\d+([KMGT]i)?")

Start = Callable[[list[str], Environment], subprocess.Popen[str]]

# Where in the default job a fault is planted, what stands there then, and what is said of it.
ABSENT = object()
POD = ("spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec", "replicatedJobs", 0,
       "template", "spec", "template", "spec")  # fmt: skip
FAULTS: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "misspelt at the top": (("metadatas",), {"name": "a"}, "metadatas: unknown"),
    "misspelt in the spec": (("spec", "runtimePatch"), [], "spec.runtimePatch: unknown"),
    "of an older version": (("spec", "podTemplateOverrides"), [], "spec.podTemplateOverrides: unknown"),
    "of Python, not of the API": (("spec", "trainer", "num_nodes"), 2, "spec.trainer.num_nodes: unknown"),
    "misspelt in the trainer": (("spec", "trainer", "numProcsPerNode"), 4, "spec.trainer.numProcsPerNode: unknown"),
    "misspelt in the pod": ((*POD, "securityContext", "runAsNonroot"), True, "securityContext.runAsNonroot: unknown"),
    "misspelt in the container": (
        (*POD, "containers", 0, "securityContext", "capabilities", "drops"),
        ["ALL"],
        "capabilities.drops: unknown",
    ),
    "misspelt in a volume": ((*POD, "volumes", 1, "emptyDir", "size"), "8Gi", "volumes[1].emptyDir.size: unknown"),
    "of a pod, not of a patch": ((*POD, "hostNetwork"), True, "hostNetwork: unknown"),
    "of a container, not of a patch": ((*POD, "containers", 0, "image"), "a", "containers[0].image: unknown"),
    "a word for a number": (("spec", "trainer", "numNodes"), "2", "numNodes"),
    "a number for a word": (("spec", "trainer", "env", 0, "value"), 1, "value"),
    "a line for a list": (("spec", "trainer", "command"), "torchrun", "command"),
    "a mapping for a list": ((*POD, "volumes"), {"name": "volume"}, "Volume"),
    "a word for a truth": ((*POD, "securityContext", "runAsNonRoot"), "true", "runAsNonRoot"),
    "no runtime": (("spec", "runtimeRef"), ABSENT, "runtimeRef"),
    "no manager": (("spec", "runtimePatches", 0, "manager"), ABSENT, "manager"),
    "no path": ((*POD, "containers", 0, "volumeMounts", 0, "mountPath"), ABSENT, "volumeMounts[0].mountPath: missing"),
    "one name twice": ((*POD, "containers", 0, "volumeMounts", 1, "name"), "volume", "volumeMounts: volume, twice"),
}


def faults(manifest: dict[str, Any]) -> list[str]:
    """What the published models refuse of a manifest, or give back otherwise: they drop what they do not know."""
    try:
        known = TrainJob.from_dict(copy.deepcopy(manifest)).to_dict()
    except ValidationError as error:
        return [str(error)]
    return [*differences(manifest, known), *repeated(manifest)]


def differences(given: Any, known: Any, place: str = "") -> Iterator[str]:
    """The places of what was given and is not known, and of what is wanted and was not given."""
    if isinstance(given, dict):
        for key in given | known:
            below = f"{place}.{key}".removeprefix(".")
            if key in given and key in known:
                yield from differences(given[key], known[key], below)
            else:
                yield f"{below}: {'unknown' if key in given else 'missing'}"
    elif isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from differences(one, other, f"{place}[{number}]")
    elif given != known:
        yield f"{place}: {given!r} became {known!r}"


def repeated(given: Any, place: str = "") -> Iterator[str]:
    """Names that stand twice in a list: the API server keys all lists of named things by name here."""
    if isinstance(given, dict):
        for key, value in given.items():
            yield from repeated(value, f"{place}.{key}".removeprefix("."))
    elif isinstance(given, list):
        names = Counter(item["name"] for item in given if isinstance(item, dict) and "name" in item)
        yield from (f"{place}: {name}, twice" for name, count in names.items() if count > 1)
        for number, item in enumerate(given):
            yield from repeated(item, f"{place}[{number}]")


def plant(manifest: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Change one place of a manifest."""
    *above, last = path
    inner: Any = manifest
    for key in above:
        inner = inner[key]
    if value is ABSENT:
        del inner[last]
    else:
        inner[last] = value


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    """The patch of the pod."""
    inner: Any = manifest
    for key in POD:
        inner = inner[key]
    return inner


def environment(manifest: dict[str, Any]) -> dict[str, str]:
    """The variables of the container."""
    return {variable["name"]: variable["value"] for variable in manifest["spec"]["trainer"]["env"]}


def mounted(manifest: dict[str, Any]) -> dict[str, Any]:
    """The volumes of the container, by where they are mounted."""
    (container,) = pod(manifest)["containers"]
    volumes = {volume["name"]: volume for volume in pod(manifest)["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}


@pytest.fixture(params=ANSWERS, scope="module")
def baked(request: pytest.FixtureRequest, bake: Bake) -> tuple[Answers, BakedProject]:
    """A generated project, and the answers that differ from the defaults."""
    answers = ANSWERS[request.param]
    return answers, bake(**answers)


@pytest.fixture(scope="module")
def job(baked: tuple[Answers, BakedProject]) -> dict[str, Any]:
    """The TrainJob of a generated project."""
    return yaml.safe_load(baked[1].text(TRAINJOB))


@pytest.fixture(scope="module")
def default(bake: Bake) -> dict[str, Any]:
    """The TrainJob of a project with the default answers."""
    return yaml.safe_load(bake().text(TRAINJOB))


def test_published_api_knows_every_key(job: dict[str, Any]) -> None:
    """Whatever the answers; and it is what the models are of."""
    assert faults(job) == []
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}


@pytest.mark.parametrize(("path", "value", "said"), FAULTS.values(), ids=FAULTS)
def test_planted_fault_is_found(default: dict[str, Any], path: tuple[str | int, ...], value: Any, said: str) -> None:
    """With its place."""
    planted = copy.deepcopy(default)
    plant(planted, path, value)
    (fault,) = faults(planted)
    assert said in fault


def test_names_fit_what_is_made_of_them(job: dict[str, Any]) -> None:
    """The controllers refuse a job of whose name they cannot make names of pods; a manager is a domain and a path."""
    name, patch = job["metadata"]["name"], job["spec"]["runtimePatches"][0]
    longest = f"{name}-node-0-{job['spec']['trainer']['numNodes'] - 1}-abcde"
    assert LABEL.fullmatch(longest) and len(longest) <= 63
    domain, _, path = patch["manager"].partition("/")
    assert all(LABEL.fullmatch(label) for label in domain.split(".")) and path == "train"


def test_image_is_named_by_digest_and_recorded_by_id(job: dict[str, Any]) -> None:
    """The registry's name for it, and the one that does not depend on how a registry packs it."""
    assert job["spec"]["trainer"]["image"].endswith("@sha256:DIGEST")
    assert environment(job)["REPRO_IMAGE"] == "sha256:ID"


def test_variables_of_torchrun_are_left_to_the_runtime(job: dict[str, Any]) -> None:
    """It refuses a job that sets them; and of this container, variables in a patch."""
    assert not [name for name in environment(job) if name.startswith("PET_")]
    assert [container.keys() for container in pod(job)["containers"]] == [{"name", "securityContext", "volumeMounts"}]


def test_names_come_from_the_answers(baked: tuple[Answers, BakedProject], job: dict[str, Any]) -> None:
    """The same as everywhere else in the project."""
    answers, project = baked
    trainer, name = job["spec"]["trainer"], project.path.name
    assert trainer["image"].startswith(f"REGISTRY/{name}@")
    assert trainer["command"] == ["torchrun", "-m", "samebits", "train"]
    assert name.startswith(job["metadata"]["name"])
    uri = answers.get("mlflow_tracking_uri", "")
    shared = bool(uri) and not uri.startswith("sqlite")  # a file is no other pod's
    assert environment(job)["MLFLOW_TRACKING_URI"] == (uri if shared else "http://mlflow.default.svc:5000")


def test_checkpoints_and_data_lie_on_the_claim(baked: tuple[Answers, BakedProject], job: dict[str, Any]) -> None:
    """Beyond the life of a pod, in a run directory that bears the job's name."""
    claims = {path: volume["persistentVolumeClaim"]["claimName"]
              for path, volume in mounted(job).items() if "persistentVolumeClaim" in volume}  # fmt: skip
    assert claims == {"/volume": f"{baked[1].path.name}-data"}
    out = f"/volume/runs/{job['metadata']['name']}"
    assert job["spec"]["trainer"]["args"] == ["--set", "data.prepared=/volume/data/prepared", "--out", out]


def test_loader_workers_have_shared_memory(job: dict[str, Any]) -> None:
    """A part of the pod's memory, and counted in it."""
    assert mounted(job)["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_user_is_the_one_of_the_image(baked: tuple[Answers, BakedProject], job: dict[str, Any]) -> None:
    """Not root; and what lies on the claim is its group's."""
    *_, (user, group) = re.findall(r"^USER (\d+):(\d+)$", baked[1].text("Dockerfile"), re.MULTILINE)
    seen = {key: pod(job)["securityContext"][key] for key in ("runAsNonRoot", "runAsUser", "fsGroup")}
    assert seen == {"runAsNonRoot": True, "runAsUser": int(user), "fsGroup": int(group)}


def test_container_has_no_more_rights_than_a_training_needs(job: dict[str, Any]) -> None:
    """What Kubernetes asks of a pod of its standard "restricted"."""
    assert pod(job)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod(job)["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_each_rank_has_a_gpu_and_a_micro_batch(baked: tuple[Answers, BakedProject], job: dict[str, Any]) -> None:
    """More ranks than micro-batches would be refused when they start; what is not asked for may not be there."""
    trainer = job["spec"]["trainer"]
    micro_batches = yaml.safe_load(baked[1].text("params.yaml"))["parallel"]["micro_batches"]
    assert trainer["numNodes"] * trainer["numProcPerNode"] <= micro_batches
    requests, limits = (trainer["resourcesPerNode"][kind] for kind in ("requests", "limits"))
    assert requests.keys() == {"cpu", "memory"} and requests["memory"] == limits["memory"]
    assert limits["nvidia.com/gpu"] == str(trainer["numProcPerNode"])
    assert all(QUANTITY.fullmatch(quantity) for quantity in [*requests.values(), *limits.values()])


@pytest.fixture(scope="module")
def image(project: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder /work of the image: what .dockerignore lets in, so neither git nor data."""
    work = tmp_path_factory.mktemp("image")
    allowed = [line[1:] for line in project.text(".dockerignore").splitlines() if line.startswith("!")]
    for path in (path for pattern in allowed for path in project.path.glob(pattern)):
        (target := work / path.relative_to(project.path)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
    return work


@pytest.fixture
def start(project: InstalledProject, image: Path, tmp_path: Path) -> Iterator[Start]:
    """A function that starts a command in the image, on CPU and for one epoch; what is left is killed."""
    started = []
    short = ["--set", "device=cpu", "--set", "train.epochs=1", "--set", "tracking.enabled=false"]
    path = f"{VENV}/bin:{project.env['PATH']}"
    common = {**project.env, "PATH": path, "PYTHONPATH": python_path(image), "PYTHONDONTWRITEBYTECODE": "1"}
    shutil.copytree(project.path / "data" / "prepared", tmp_path / "volume" / "data" / "prepared")

    def start(command: list[str], env: Environment) -> subprocess.Popen[str]:
        command = [word.replace("/volume", str(tmp_path / "volume")) for word in command]
        output, errors = subprocess.PIPE, subprocess.STDOUT
        process = subprocess.Popen(
            [*command, *short], cwd=image, env={**common, **env}, stdout=output, stderr=errors, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.mark.long
def test_two_nodes_train_to_the_bits_of_one_process(default: dict[str, Any], start: Start, tmp_path: Path) -> None:
    """Started as the runtime starts them: by the job's own command, which learns the rest from variables."""
    trainer, variables = default["spec"]["trainer"], environment(default)
    meeting = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    ranks = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1"}
    processes = [
        start([*trainer["command"], *trainer["args"]], variables | meeting | ranks | {"PET_NODE_RANK": str(node)})
        for node in range(trainer["numNodes"])
    ]
    processes.append(start(["python", *trainer["command"][1:], *trainer["args"][:-1], "/volume/alone"], variables))
    for process in processes:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
    outs = [tmp_path / out.removeprefix("/") for out in (trainer["args"][-1], "/volume/alone")]
    assert [json.loads((out / "environment.json").read_text())["informational"]["world_size"] for out in outs] == [2, 1]
    assert weights(outs[0]) == weights(outs[1])
