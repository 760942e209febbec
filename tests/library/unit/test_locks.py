"""The locks: complete, hashed, naming no place, and alike in what they share but for what torch's CUDA build brings."""

import io
import re
import shutil
import urllib.request
from pathlib import Path

import bump
import pytest
from check_locks import AROUND, CPU, CUDA, ROOT, TORCH_CPU, misfits, parse, read_locks, seconds
from with_uv import variables
from write_locks import FILES, HEADER, TORCH_HEADER, LockError, render, torch_hashes

# What is changed in which file, and how the line begins that must then be found.
PROJECT = "pyproject.toml"
PLANTED = {
    "bound out of reach": (PROJECT, '"numpy>=[^"]*"', '"numpy>=99"', "numpy: pyproject.toml wants >=99"),
    "new dependency": (PROJECT, '"numpy>', '"new", "numpy>', "new: wanted by pyproject.toml, missing"),
    "dependency gone": (PROJECT, ' *"rfc8785[^"]*",', "", "rfc8785: a direct dependency in the train-cpu lock"),
    "new tool": (PROJECT, '"ruff>', '"new", "ruff>', "new: wanted by pyproject.toml, missing in the dev lock"),
    "new extra": (PROJECT, '"dvc>', '"dvc[s3]>', "dvc: the run lock was not made for 'dvc[s3]"),
    "pin gone": (CUDA, r"(?m)^pydantic==.*\n( .*\n)+", "", "pydantic: wanted by pyproject.toml, missing"),
    "versions apart": (CPU, r"(?m)^rich==\S+", "rich==15.99", "rich: the train-cpu lock has 15.99, the train-cuda"),
    "torch apart": (TORCH_CPU, r"torch==\S+", "torch==2.99+cpu", "torch: the train-cpu lock has 2.99+cpu, the train-"),
    "purposes apart": (
        AROUND["run"],
        r"(?m)^numpy==\S+",
        "numpy==2.99",
        "numpy: the train-cpu lock has 2.4.6, the run",
    ),
    "only CPU": (CPU, r"\Z", "zz==1\n    # via rich\n", "zz: the train-cpu lock has it, the train-cuda lock does not"),
    "stranger": (CUDA, r"\Z", "zz==1\n    # via rich\n", "zz: only in the train-cuda lock, asked for by ['rich']"),
    "another CUDA": ("Dockerfile", r"cuda:13\.0\.", "cuda:13.1.", "Dockerfile: the base has CUDA 13.1, torch in"),
    "another major": ("Dockerfile", r"cuda:13\.0\.", "cuda:12.8.", "Dockerfile: the base has CUDA 12.8, torch in"),
    "base by tag": ("Dockerfile", r"04@sha256:\w+", "04", "Dockerfile: BASE_IMAGE is not nvidia/cuda:VERSION"),
    "server by tag": ("Dockerfile", r"worm@sha256:\w+", "worm", "Dockerfile: SERVER_BASE is not python:VERSION-"),
    "server on CUDA": ("Dockerfile", "SERVER_BASE=python", "SERVER_BASE=nvidia/cuda", "Dockerfile: SERVER_BASE is not"),
    "server's Python": ("Dockerfile", r"python:3\.12\.", "python:3.14.", "Dockerfile: SERVER_BASE has Python 3.14, py"),
    "another Ubuntu": (
        "Dockerfile",
        r"ubuntu24\.04",
        "ubuntu26.04",
        "Dockerfile: nobody noted which Python",
    ),
    "another Python": (PROJECT, r">=3\.11,<3\.14", ">=3.13", "Dockerfile: Ubuntu 24.04 has Python 3.12, pyproject"),
    "no snapshot": ("Dockerfile", r"APT_SNAPSHOT=\w+", "APT_SNAPSHOT=", "Dockerfile: APT_SNAPSHOT is not a moment"),
    "other moment": ("Dockerfile", r"EPOCH=\d+", "EPOCH=1", "Dockerfile: SOURCE_DATE_EPOCH is not APT_SNAPSHOT's 17"),
    "hash gone": (TORCH_CPU, r" \\\n    --hash=\S+", "", "torch: no hash in the train-cpu lock"),
    "hash altered": (
        CUDA,
        r"(?m)^(numpy==\S+ \\\n    --hash=sha256:).{8}",
        "numpy==2.4.6 \\\n    --hash=sha256:" + "0" * 8,
        "numpy: other hashes in the train-cuda lock than in the train-cpu lock",
    ),
}


def test_locks_fit_pyproject_and_each_other() -> None:
    assert misfits() == []


@pytest.mark.parametrize(("file", "pattern", "replacement", "finding"), PLANTED.values(), ids=PLANTED)
def test_check_finds_a_planted_misfit(tmp_path: Path, file: str, pattern: str, replacement: str, finding: str) -> None:
    for name in ("pyproject.toml", "Dockerfile"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    changed, count = re.subn(pattern, lambda _: replacement, (tmp_path / file).read_text())
    assert count
    (tmp_path / file).write_text(changed)
    found = misfits(tmp_path)
    assert any(line.startswith(finding) for line in found), found


DIGEST = "sha256:" + "0" * 64
NEXT = f"nvidia/cuda:13.0.3-cudnn-runtime-ubuntu24.04@{DIGEST}"
NEXT_SERVER = f"python:3.13.1-slim-trixie@{DIGEST}"


def test_bump_changes_its_lines_and_nothing_else() -> None:
    before = (ROOT / "Dockerfile").read_text()
    moved = [
        f"BASE_IMAGE={NEXT}",
        f"SERVER_BASE={NEXT_SERVER}",
        "APT_SNAPSHOT=20270101T000000Z",
        "SOURCE_DATE_EPOCH=1798761600",
    ]
    after = bump.put(before, dict(line.split("=") for line in moved))
    changed = [line for line, old in zip(after.splitlines(), before.splitlines(), strict=True) if line != old]
    assert changed == [f"ARG {line}" for line in moved]
    assert seconds("20270101T000000Z") == "1798761600"


def test_bump_tells_what_changed() -> None:
    assert bump.changes({"torch": "1", "gone": "2", "same": "3"}, {"torch": "4", "same": "3", "new": "5"}) == [
        "gone: 2 -> none",
        "new: none -> 5",
        "torch: 1 -> 4",
    ]


def test_bump_takes_a_base_by_digest_only() -> None:
    assert bump.with_digest("BASE_IMAGE", NEXT) == NEXT
    assert bump.with_digest("SERVER_BASE", NEXT_SERVER) == NEXT_SERVER
    with pytest.raises(bump.BumpError, match="cudnn-runtime-ubuntuRELEASE"):
        bump.with_digest("BASE_IMAGE", NEXT_SERVER)
    with pytest.raises(bump.BumpError, match="python:VERSION-slim-DEBIAN"):
        bump.with_digest("SERVER_BASE", NEXT)


def test_cuda_lock_adds_only_what_torch_brings() -> None:
    locks = read_locks()
    added = locks["train-cuda"].keys() - locks["train-cpu"].keys()
    askers = {asker for name in added for asker in locks["train-cuda"][name].via}
    assert askers <= added | {"torch"}
    assert {"triton", "nvidia-nccl-cu13"} <= added
    assert not locks["train-cpu"].keys() - locks["train-cuda"].keys()
    around = {name for purpose in AROUND for name in locks[purpose]}
    assert not added & around and "torch" not in around


def test_training_loads_no_tools() -> None:
    """Nor DVC and MLflow, so that a newer one changes nothing in what a training loads."""
    held = read_locks()["train-cuda"].keys()
    assert not held & {"pytest", "ruff", "mypy", "pip-tools", "dvc", "mlflow", "mlflow-skinny", "psycopg2-binary"}


def test_every_pin_has_hashes() -> None:
    assert [pin.name for lock in read_locks().values() for pin in lock.values() if not pin.hashes] == []


def test_torch_cpu_has_a_wheel_for_every_python() -> None:
    (torch,) = parse((ROOT / TORCH_CPU).read_text())
    assert torch.version.endswith("+cpu")
    assert len(set(torch.hashes)) == 3


@pytest.mark.parametrize("file", FILES)
def test_lock_names_no_place(file: str) -> None:
    text = (ROOT / file).read_text()
    assert "/" not in text  # neither a path nor a URL
    assert re.search(r"\.(com|dev|io|net|org)\b", text) is None


@pytest.mark.parametrize("line", ["--index-url there", "numpy @ file:///x.whl", "numpy>=2", "-e ."])
def test_lock_holds_nothing_but_pins(line: str) -> None:
    with pytest.raises(ValueError, match="neither a pin nor a hash"):
        parse(f"{line}\n")


@pytest.mark.parametrize("file", FILES)
def test_lock_is_written_byte_for_byte_as_it_stands(file: str) -> None:
    text = (ROOT / file).read_text()
    assert render(parse(text), TORCH_HEADER if file == TORCH_CPU else HEADER) == text


def test_torch_hashes_come_from_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = '<a href="/torch-2.14.0%2Bcpu-cp{0}-cp{0}-manylinux_2_28_x86_64.whl#sha256={0:0>64}">wheel</a>\n'
    pages = {"there/torch/": "".join(map(wheel.format, (311, 312, 313))), "gap/torch/": wheel.format(311)}
    monkeypatch.setattr(urllib.request, "urlopen", lambda page, timeout: io.BytesIO(pages[page].encode()))
    assert torch_hashes("2.14.0+cpu", "there/") == tuple(f"sha256:{tag:0>64}" for tag in (311, 312, 313))
    with pytest.raises(LockError, match=r"gap/torch/ has no cp312 wheel of 2\.14\.0"):
        torch_hashes("2.14.0+cpu", "gap")


# ---- uv in the place of pip

CONFIGURED = """\
:env:.cert='/etc/ssl/own.pem'
global.cert='/etc/ssl/other.pem'
global.extra-index-url='https://two.example.org/simple\\nhttps://three.example.org/simple'
global.find-links="/wheels /it's/wheels"
global.index-url='https://one.example.org/simple'
global.require-virtualenv='true'
install.find-links='/own/wheels'
list.format='columns'
"""


def test_uv_asks_the_mirrors_that_pip_is_configured_with():
    assert variables(CONFIGURED) == {
        "UV_DEFAULT_INDEX": "https://one.example.org/simple",
        "UV_INDEX": "https://two.example.org/simple https://three.example.org/simple",
        "UV_FIND_LINKS": "/own/wheels",
        "SSL_CERT_FILE": "/etc/ssl/own.pem",
    }
    assert variables(CONFIGURED.replace("install.find", "list.find"))["UV_FIND_LINKS"] == "/wheels,/it's/wheels"
    assert variables("") == {}
