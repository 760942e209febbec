"""The numeric environment: what changes bits changes its digest, and secrets stay out of every record."""

import json
import os
import platform
from typing import Any

import pytest
import torch
from project.config import Config
from support import SECRETS, WORD, Trained, python

from samebits.address.address import digest
from samebits.base.redact import without_credentials
from samebits.config.settings import Compute, Determinism
from samebits.core import flags
from samebits.environment.canary import RELEASED
from samebits.environment.compiler import compiler
from samebits.environment.environment import numeric_environment, record, variables
from samebits.record.classes import class_of, described, promises

STRICT = Determinism(cpu="portable", relax=())
PLAIN = Compute(precision="float32", compile=False, nonfinite="stop")
CPU = torch.device("cpu")


def environment() -> dict[str, Any]:
    flags.apply(STRICT)
    return numeric_environment(STRICT, CPU)


def test_it_has_the_fields_that_decide_bits():
    seen = environment()
    assert set(seen) == {
        *("torch", "cuda", "numpy", "python", "libc", "image", "device", "cpu", "threads", "flags", "variables")
    }
    assert seen["torch"]["version"] == torch.__version__ and seen["threads"] == 1
    assert seen["flags"] == flags.effective()
    assert digest(seen) == digest(environment())


# ---- variables

RELEVANT = {
    "NCCL_ALGO": "Ring",
    "TORCH_CUDNN_V8_API_DISABLED": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "MKL_CBWR": "AVX2",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA",
    "OMP_NUM_THREADS": "2",
    "KMP_AFFINITY": "compact",
    "NVIDIA_TF32_OVERRIDE": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "REPRO_IMAGE": "registry/image@sha256:0",
}
UNRELATED = {
    "HOME": "/elsewhere",
    "PATH_TO_DATA": "/data",
    "LANG": "C",
    "SLURM_JOB_ID": "1",
    "MASTER_PORT": "1234",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_HOME": "/cache",
    "TORCH_LOGS": "+dynamo",
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_IB_HCA": "mlx5_0",
    "NCCL_IB_GID_INDEX": "3",
    "TORCHINDUCTOR_CACHE_DIR": "/cache",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "MALLOC_MMAP_MAX_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}


@pytest.mark.parametrize("name", [*RELEVANT, *UNRELATED])
def test_variable_changes_the_digest_where_it_may_change_bits(name: str, monkeypatch: pytest.MonkeyPatch):
    before = environment()
    monkeypatch.setenv(name, (RELEVANT | UNRELATED)[name])
    after = numeric_environment(STRICT, CPU)
    assert (after != before) == (digest(after) != digest(before)) == (name in RELEVANT)


def test_variable_that_the_owner_lists_is_another_environment_and_class_with_each_value(
    monkeypatch: pytest.MonkeyPatch,
):
    """Also where it is not set."""
    flags.apply(STRICT)
    seen = []
    for value in (None, "", "one", "two", "https://user:word@host/two", "https://user:other@host/two"):
        monkeypatch.delenv("PLANTED", raising=False)
        if value is not None:
            monkeypatch.setenv("PLANTED", value)
        assert digest(numeric_environment(STRICT, CPU)) == digest(environment())
        seen.append(numeric_environment(STRICT, CPU, ["PLANTED"]))
        assert class_of(seen[-1], True).startswith("cpu-portable/") and promises(class_of(seen[-1], True))
    assert [each["own_variables"]["PLANTED"] for each in seen[:4]] == [None, "", "one", "two"]
    assert len({*map(digest, seen), digest(environment())}) == len({class_of(each, True) for each in seen}) + 1 == 6
    assert "word" not in str(seen)


def test_switch_left_off_changes_the_digest():
    before = environment()
    torch.backends.cudnn.benchmark = True
    after = numeric_environment(STRICT, CPU)
    flags.apply(STRICT)
    assert digest(after) != digest(before)
    assert {name for name in before if before[name] != after[name]} == {"flags"}


CLASS = """
from samebits.config.settings import Determinism
from samebits.core import flags as flags
strict = Determinism(cpu="portable", relax=())
flags.apply(strict)
import torch
from samebits.environment.environment import numeric_environment
from samebits.record.classes import class_of
environment = numeric_environment(strict, torch.device("cpu"))
print(class_of(environment, plain=True), environment["libc"])
import hashlib, random, numpy
from samebits.core.seeds import seed_everything
seed_everything(5)
N = 4096
safe = [random.random() for _ in range(N)], random.sample(range(N), N)
safe += numpy.random.rand(N), numpy.random.permutation(N)
safe += torch.rand(N), torch.randperm(N), *(torch.randn(n) for n in (16, 17, 19, N))
asking = [random.gauss(0, 1) for _ in range(N)], numpy.random.gamma(0.5, 1, N), torch.randn(N, dtype=torch.float64)
for numbers in (safe, asking):
    print(hashlib.sha256(b"".join(numpy.asarray(each).tobytes() for each in numbers)).hexdigest())
"""
WITHOUT_FMA = "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX2_Usable,-FMA_Usable"  # of glibc since 2.33, and before


def test_c_library_that_computes_otherwise_is_another_class():
    """Without FMA, a few of a thousand exponentials have another last bit, and so have deviates of many kinds."""
    clean, other = (python("-c", CLASS, env={"GLIBC_TUNABLES": tunables}) for tunables in (None, WITHOUT_FMA))
    message, differing = (done.stdout.splitlines() for done in (clean, other))
    assert message[0].startswith("cpu-portable/") and differing[0].startswith("cpu/"), clean.stderr + other.stderr
    assert message[0].endswith(f" {platform.libc_ver()[0]} {platform.libc_ver()[1]}")
    assert message[1] == differing[1]  # the draws that your-model.md calls the same on every CPU
    assert message[2] != differing[2]


# ---- secrets

URLS = {
    "https://user:pa55word@host/x": "https://host/x",
    "https://pa55word@host:8080/x": "https://host:8080/x",
    "https://user:pa55word@with-at@host": "https://host",
    "postgresql+psycopg2://me:pa55word@db/m": "postgresql+psycopg2://db/m",
    "https://host/x?token=pa55word&y=1": "https://host/x",
    "postgresql://host/db?user=me&password=pa55word": "postgresql://host/db",
    "postgresql://me:pa55/word@db/m": "postgresql://db/m",
    "postgresql://me:pa55?word@db/m": "postgresql://(hidden)",
    "https://host/x?token=pa55@word": "https://(hidden)",
    "from http://a:pa55word@b/c to s3://d:pa55word@e/f": "from http://b/c to s3://e/f",
    "'https://user:pa55word@host/x'": "'https://host/x'",
    "sqlite:////a/b.db": "sqlite:////a/b.db",
    "https://host/x": "https://host/x",
    "me@host: what?": "me@host: what?",
    ":4096:8": ":4096:8",
}


@pytest.mark.parametrize("text", URLS)
def test_urls_lose_their_credentials_and_nothing_else_changes(text: str):
    assert without_credentials(text) == URLS[text]


SECRET_NAMES = [
    *("NCCL_FAKE_TOKEN", "TORCH_SECRET", "PYTORCH_API_KEY", "OMP_PASSWORD", "MKL_PASSWD", "GLOO_AUTH"),
    *("TRITON_CREDENTIALS", "TORCHINDUCTOR_KEY_FILE"),
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_variable_with_the_name_of_a_secret_is_hidden(name: str):
    assert variables({name: WORD}) == {name: "(hidden)"}


def test_only_listed_variables_are_read():
    assert variables({"AWS_SECRET_ACCESS_KEY": WORD, "MKL": WORD, "DATABASE_URL": WORD, "MY_NCCL_ALGO": WORD}) == {}
    assert variables({"TORCH_URL": SECRETS["TORCH_URL"]}) == {"TORCH_URL": "https://host/x"}


def files_with(word: str, trained: Trained) -> list[str]:
    """The files of a run directory that hold a word."""
    assert trained.out.is_dir()
    return [path.name for path in trained.out.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]


@pytest.mark.long
def test_no_record_of_a_run_holds_a_secret(offline: Trained):
    assert offline.done.returncode == 0, offline.done.stderr
    names = {path.name for path in offline.out.iterdir()}
    assert {"environment.json", "run.json", "address.json", "tracking.log", "tracking.json"} <= names
    assert files_with(WORD, offline) == []
    assert WORD not in offline.done.stdout + offline.done.stderr


def test_the_search_finds_what_is_there(offline: Trained):
    assert "environment.json" in files_with("TORCH_URL", offline)
    assert "tracking.log" in files_with("127.0.0.1", offline)  # the server that is down was tried
    assert "tracking.json" in files_with("http://127.0.0.1:1", offline)


def test_repro_env_prints_what_a_run_records_and_no_secret(offline: Trained):
    done = python("-m", "samebits", "env", env=SECRETS)
    assert done.returncode == 0 and WORD not in done.stdout + done.stderr
    printed, recorded = json.loads(done.stdout), json.loads((offline.out / "environment.json").read_text())
    for name in ("environment", "class", "preimage"):
        assert printed[name] == recorded[name]
    assert recorded["preimage"]["variables"]["NCCL_FAKE_TOKEN"] == "(hidden)"
    assert recorded["preimage"]["variables"]["TORCH_URL"] == "https://host/x"
    assert "AWS_SECRET_ACCESS_KEY" not in json.dumps(recorded)


# ---- the class


def released(**changes: Any) -> dict[str, Any]:
    """The environment of a machine in the portable class."""
    seen = environment()
    return seen | {"cpu": seen["cpu"] | {"arithmetic": RELEASED}} | changes


def is_portable(seen: dict[str, Any], compute: Compute = PLAIN) -> bool:
    return class_of(seen, compute.plain) == f"cpu-portable/torch-{torch.__version__.partition('+')[0]}"


def test_class_is_portable_for_the_released_arithmetic_alone():
    assert is_portable(released())
    assert not is_portable(released(cpu=released()["cpu"] | {"arithmetic": "0" * 64}))
    assert not is_portable(released(threads=2))
    assert not is_portable(released(device="cuda"))
    assert not is_portable(released(), Compute(precision="bfloat16", compile=False, nonfinite="stop"))
    assert not is_portable(released(), Compute(precision="float32", compile=True, nonfinite="stop"))


BUILDS = {
    "2.13.0+cpu": "2.13.0",
    "2.13.0+cu130": "2.13.0",
    "2.13.0": "2.13.0",
    "2.12.0+cpu": "2.12.0+cpu",
    "2.13.0+rocm7.0": "2.13.0+rocm7.0",
    "2.13.0a0+git1234567": "2.13.0a0+git1234567",
}


@pytest.mark.parametrize("version", BUILDS)
def test_builds_that_were_compared_are_one_class_and_no_others(version: str):
    seen = released(torch={"version": version, "git": "0" * 40})
    assert class_of(seen, plain=True) == f"cpu-portable/torch-{BUILDS[version]}"
    otherwise = seen | {"cpu": seen["cpu"] | {"arithmetic": "0" * 64}}
    assert class_of(otherwise, plain=True) == f"cpu/{digest(otherwise)[:16]}"


def test_outside_the_portable_class_each_environment_is_its_own():
    one, other = released(threads=2), released(threads=3)
    assert class_of(one, plain=True) == f"cpu/{digest(one)[:16]}" != class_of(other, plain=True)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "nnpack", "all"])
def test_switch_left_off_leaves_the_portable_class_even_where_its_value_is_the_strict_one(name: str):
    """As where sets of strings have another order in each process, which no value read back can show."""
    strict, left_off = (numeric_environment(each, CPU) for each in (STRICT, Determinism(cpu="portable", relax=(name,))))
    left_off |= {key: strict[key] for key in ("cpu", "flags")}
    assert left_off == strict | {"relaxed": [name]}
    found = class_of(left_off, plain=True)
    assert found == f"relaxed/{digest(left_off)[:16]}" and not promises(found)
    assert promises(class_of(strict, plain=True))
    assert class_of(released(relaxed=[name]), plain=True).startswith("relaxed/")  # whatever computes here


def test_environment_and_class_are_of_all_that_a_run_was_in():
    one, two, slow = released(), released(numpy="1.0"), released(threads=2)
    alone = described(slow, plain=True)
    assert alone == {"environment": digest(slow), "class": f"cpu/{digest(slow)[:16]}", "preimage": slow}
    within = described(two, plain=True, before=[one])
    assert within["class"] == described(one, plain=True)["class"] and within["before"] == [one]
    assert within["environment"] not in {digest(one), digest(two)}
    mixed = [described(one, True, [slow]), described(slow, True, [one]), described(slow, True, [two]), alone]
    for part in ("environment", "class"):
        assert len({each[part] for each in mixed}) == 4
    assert [promises(each["class"]) for each in mixed] == [False, False, False, True]


def test_no_secret_of_the_compilers_variables_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXXFLAGS", "-O2 --proxy=https://user:pa55word@host/x")
    monkeypatch.setenv("TORCHDYNAMO_TOKEN", "pa55word")
    found = compiler()["variables"]
    assert found["CXXFLAGS"].startswith("-O2 ") and "pa55word" not in json.dumps(found)


def test_what_helps_a_reader_stays_out_of_the_digest(config: Config):
    made = record(environment(), config.compute, world_size=4)
    assert made["environment"] == digest(made["preimage"])
    assert made["informational"]["world_size"] == 4 and made["informational"]["cores"] == os.cpu_count()
    assert "host" not in made["preimage"] and made["informational"]["host"]
