"""The table of flags: every row is set, read back, refused when contradicted, and missed when left off."""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Trained, python, trained

from samebits.address.address import digest
from samebits.base.text import differences
from samebits.config.settings import Determinism
from samebits.core import flags
from samebits.core.errors import UserError
from samebits.core.flag_table import ALLOCATION
from samebits.core.flags import FLAGS, Flag, applicable, apply, can_be_portable, effective, missing_variables
from samebits.environment.canary import OPERATIONS, RELEASED, arithmetic_canary
from samebits.environment.environment import numeric_environment
from samebits.record.classes import class_of
from samebits.record.receipt import read

STRICT = Determinism(cpu="portable", relax=())
HERE = {flag.name: flag for flag in applicable(STRICT)}
VARIABLES = [name for name, flag in HERE.items() if flag.setting]
WRITTEN = [name for name, flag in HERE.items() if flag.write]


def relaxed(*names: str) -> Determinism:
    return Determinism(cpu="portable", relax=names)


def set_by_hand(flag: Flag) -> object:
    """Give a flag a value other than the strict one, and return it."""
    other = {"deterministic_debug_mode": 0, "float32_matmul_precision": "medium", "fp32_precision": "ieee"}
    value = other.get(flag.name, not flag.strict)
    flag.write(value)
    seen = flag.read()
    assert seen != flag.strict
    return seen


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Leave the process as strict as it was."""
    apply(STRICT)
    yield
    apply(STRICT)


# Written down a second time, so that no flag is lost or turned around unnoticed: a new row needs one here.
WANTED = {
    "PYTHONHASHSEED": 0,
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
    "ATEN_CPU_CAPABILITY": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": 3,
    "NPY_DISABLE_CPU_FEATURES": "X86_V3",
    "OPENBLAS_CORETYPE": "Haswell",
    "nnpack": False,
    "deterministic_debug_mode": 2,
    "backends.cudnn.deterministic": True,
    "backends.cudnn.benchmark": False,
    "backends.cudnn.allow_tf32": False,
    "float32_matmul_precision": "highest",
    "fp32_precision": "none",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": False,
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": False,
    "backends.mkldnn.deterministic": True,
    "mem_efficient_sdp": False,
    "cudnn_sdp": False,
    "utils.deterministic.fill_uninitialized_memory": False,
    "jit_profiling_executor": False,
    "jit_profiling_mode": False,
}


def test_table_holds_every_switch_with_its_strict_value():
    assert {flag.name: flag.strict for flag in FLAGS} == WANTED


def test_a_row_is_a_variable_or_written_and_rows_have_names_of_their_own():
    assert all((flag.setting is None) != (flag.write is None) for flag in FLAGS)
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)


def test_the_tests_themselves_run_in_the_strict_environment():
    assert missing_variables(STRICT) == {}


def test_the_tests_themselves_use_the_package_and_no_copy_of_it():
    assert flags is sys.modules["samebits.core.flags"]
    assert flags.__spec__.name == flags.__name__ == "samebits.core.flags"


def test_no_switch_is_left_off_unasked():
    portable = can_be_portable()
    assert applicable(STRICT) == [flag for flag in FLAGS if portable or not flag.portable]


@pytest.mark.parametrize("name", HERE)
def test_switch_reads_back_strict_after_apply(name: str):
    if name in WRITTEN:
        set_by_hand(HERE[name])
    apply(STRICT)
    assert effective()[name] == HERE[name].strict


@pytest.mark.parametrize("name", WRITTEN)
def test_switch_left_off_is_visible_and_alone(name: str):
    for each in WRITTEN:
        set_by_hand(HERE[each])
    apply(relaxed(name))
    assert [each for each in HERE if effective()[each] != HERE[each].strict] == [name]


def test_all_left_off_changes_nothing():
    before = {name: set_by_hand(HERE[name]) for name in WRITTEN}
    apply(relaxed("all"))
    assert {name: effective()[name] for name in WRITTEN} == before


@pytest.mark.parametrize("name", WRITTEN)
def test_switch_whose_setting_fails_is_caught_by_name(name: str, monkeypatch: pytest.MonkeyPatch):
    set_by_hand(HERE[name])
    broken = replace(HERE[name], write=lambda value: None)
    monkeypatch.setattr(flags, "FLAGS", [broken if s.name == name else s for s in FLAGS])
    with pytest.raises(UserError) as refused:
        apply(STRICT)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"flag {name}: ") and f"{HERE[name].strict!r} wanted: {HERE[name].why}" in line
    monkeypatch.undo()


def test_threads_changed_behind_the_variables_are_caught():
    assert os.environ["OMP_NUM_THREADS"] == "1"
    torch.set_num_threads(2)
    try:
        with pytest.raises(UserError, match="flag OMP_NUM_THREADS: 2 is effective, 1 wanted"):
            apply(STRICT)
    finally:
        torch.set_num_threads(1)


# ---- TF32

TF32 = Determinism(cpu="portable", tf32=True, relax=())
PARTS = [*itertools.product(("cuda", "mkldnn"), ("matmul", "conv", "rnn"))]


def precisions() -> dict[str, str]:
    """What torch's newer names say of products and convolutions."""
    return {".".join(part): torch._C._get_fp32_precision_getter(*part) for part in PARTS}


def test_tf32_is_for_a_gpu_alone_and_every_other_flag_stays_strict():
    strict = precisions()
    apply(TF32)
    assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
    seen = effective()
    others = {name for name in HERE if seen[name] != HERE[name].strict}
    assert others == {"backends.cudnn.allow_tf32", "float32_matmul_precision"}
    assert precisions() == strict | dict.fromkeys(("cuda.matmul", "cuda.conv", "cuda.rnn"), "tf32")
    flags.require_held()
    apply(STRICT)  # as the next run of this process may ask for
    assert precisions() == strict and not torch.backends.cuda.matmul.allow_tf32
    assert {name: effective()[name] for name in HERE} == {name: HERE[name].strict for name in HERE}


@pytest.mark.parametrize(
    ("determinism", "change", "name"),
    [
        (STRICT, lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), "float32_matmul_precision"),
        (STRICT, lambda: setattr(torch.backends.cudnn, "allow_tf32", True), "backends.cudnn.allow_tf32"),
        (TF32, lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False), "float32_matmul_precision"),
        (TF32, lambda: torch.set_float32_matmul_precision("high"), "float32_matmul_precision"),  # of a CPU, too
        (TF32, lambda: torch.set_float32_matmul_precision("medium"), "float32_matmul_precision"),
        (TF32, lambda: setattr(torch.backends.cudnn, "allow_tf32", False), "backends.cudnn.allow_tf32"),
    ],
)
def test_code_that_contradicts_the_tf32_that_was_requested_is_refused(
    determinism: Determinism, change: Callable[[], None], name: str
):
    apply(determinism)
    flags.require_held()  # the control
    change()
    with pytest.raises(UserError, match=f"(?m)^flag {name}: .* is effective, .* wanted: "):
        flags.require_held()


def test_tf32_changes_no_bit_on_a_cpu_and_is_another_environment():
    strict = numeric_environment(STRICT, torch.device("cpu"))
    apply(TF32)
    assert arithmetic_canary() == strict["cpu"]["arithmetic"]
    rounded = numeric_environment(TF32, torch.device("cpu"))
    assert digest(rounded) != digest(strict) and class_of(rounded, plain=True) == class_of(strict, plain=True)
    assert {each.field for each in differences(strict, rounded)} == {
        "flags.backends.cudnn.allow_tf32", "flags.float32_matmul_precision"
    }  # fmt: skip
    for environment, name in ((strict, "cuda"), (rounded, "cuda-tf32")):
        on_gpu = environment | {"device": "cuda"}
        assert class_of(on_gpu, plain=True) == f"{name}/{digest(on_gpu)[:16]}"


def test_run_with_tf32_states_it_and_has_the_same_bits_on_a_cpu(untracked: Trained, prepared: Path, tmp_path: Path):
    run = trained(tmp_path / "run", prepared, "tracking.enabled=false", "determinism.tf32=true")
    assert run.done.returncode == 0, run.done.stderr
    one, other = read(run.out).stated, read(untracked.out).stated
    assert run.weights == untracked.weights and one["trace"] == other["trace"]
    assert one["address"] == other["address"] and one["environment"] != other["environment"]
    assert one["config"]["determinism.tf32"] is True
    assert one["environment"]["preimage"]["flags"]["backends.cudnn.allow_tf32"] is True


# ---- variables

# What each variable holds instead. Torch takes MKL's thread count for both libraries, where it has MKL:
# either variable pins both, so these two are left off together. So are those of Python, of CUDA and of OpenBLAS.
INSTEAD = {
    "PYTHONHASHSEED": {"PYTHONHASHSEED": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "OPENBLAS_NUM_THREADS": "2"},
    "OMP_NUM_THREADS": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    "ATEN_CPU_CAPABILITY": {"ATEN_CPU_CAPABILITY": "default"},
    "ONEDNN_MAX_CPU_ISA": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "MKL_CBWR": {"MKL_CBWR": "AUTO"},
    "NPY_DISABLE_CPU_FEATURES": {"NPY_DISABLE_CPU_FEATURES": "X86_V3"},
    "OPENBLAS_CORETYPE": {"OPENBLAS_CORETYPE": "Nehalem"},
}
PROBED = [name for name in VARIABLES if name in INSTEAD]
PROBE = """
import json, sys
from samebits.environment import canary
from samebits.core import flags as flags
from samebits.config.settings import Determinism
flags.apply(Determinism(cpu="portable", relax=sys.argv[1:]))
print(json.dumps({"effective": flags.effective(), "canary": canary.arithmetic_canary()}))
"""


def probe(instead: dict[str, str]) -> dict[str, Any]:
    """Effective values and canary of a process that leaves these variables off."""
    done = python("-c", PROBE, *instead, env=instead)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def probes() -> dict[str, dict[str, Any]]:
    """A process for each variable, or several, left off, and one with none."""
    cases = {"": {}} | {name: INSTEAD[name] for name in PROBED}
    with ThreadPoolExecutor(2) as two:
        return dict(zip(cases, two.map(probe, cases.values()), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", ["", *PROBED])
def test_variable_left_off_is_visible_and_alone(name: str, probes: dict[str, dict[str, Any]]):
    assert {*VARIABLES} <= {each for others in INSTEAD.values() for each in others}
    seen = probes[name]["effective"]
    assert {each for each in HERE if seen[each] != HERE[each].strict} == set(INSTEAD.get(name, ()))


SCHEDULED = [name for name in VARIABLES if HERE[name].scheduled]
REFUSED = [name for name in VARIABLES if name not in SCHEDULED]


def test_variables_that_schedulers_set_are_replaced_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    flags._report.cache_clear()
    given = {**missing_variables(STRICT, {}), **ALLOCATION, "OMP_NUM_THREADS": "8", "OPENBLAS_NUM_THREADS": "4"}
    for rank in ("1", "0", "0"):
        monkeypatch.setenv("RANK", rank)
        set_anew = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        assert flags.stated_variables(STRICT, given) == set_anew
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("OMP_NUM_THREADS=8, OPENBLAS_NUM_THREADS=4: replaced by 1 in this run")
    native = Determinism(cpu="native", relax=())
    assert SCHEDULED == ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    assert not {*SCHEDULED} & {*flags.stated_variables(native, given)} and not capsys.readouterr().err


@pytest.mark.parametrize("name", REFUSED)
def test_contradicting_variable_is_refused_by_name(name: str):
    with pytest.raises(UserError) as refused:
        missing_variables(STRICT, {name: "something"})
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{name}=something is set, {HERE[name].setting} is wanted ({HERE[name].why})")
    assert f"--set 'determinism.relax=[{name}]'" in line
    assert name not in missing_variables(relaxed(name), {name: "something"})


def test_all_contradictions_are_told_at_once():
    with pytest.raises(UserError) as refused:
        missing_variables(STRICT, dict.fromkeys(VARIABLES, "something"))
    assert len(str(refused.value).splitlines()) == len(REFUSED)


def test_missing_variables_are_those_not_set():
    assert list(missing_variables(STRICT, {})) == VARIABLES
    assert missing_variables(STRICT, missing_variables(STRICT, {})) == {}
    assert missing_variables(relaxed("all"), {}) == {}
    assert list(missing_variables(Determinism(cpu="native", relax=()), {})) == VARIABLES[:2]


OWN = {
    "MALLOC_MMAP_MAX_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "MALLOC_TOP_PAD_": "0",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA:glibc.malloc.mmap_max=65536",
}
OTHER = {"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA", "OWN_MALLOC_MMAP_MAX_": "1"}


@pytest.mark.parametrize("determinism", [STRICT, relaxed("all"), Determinism(cpu="native", relax=())])
def test_how_memory_is_kept_is_the_users_own_where_one_has_decided_it(determinism: Determinism):
    switched = missing_variables(determinism, {})
    assert flags.stated_variables(determinism, {}) == switched | ALLOCATION
    assert flags.stated_variables(determinism, switched | ALLOCATION) == {}
    for name, value in OWN.items():
        assert flags.stated_variables(determinism, switched | {name: value}) == {}
    for name, value in OTHER.items():
        assert flags.stated_variables(determinism, switched | {name: value}) == ALLOCATION


def test_unknown_switch_is_refused():
    with pytest.raises(UserError, match="unknown flag 'nnpakc'; known: all, ATEN_CPU_CAPABILITY"):
        applicable(relaxed("nnpakc"))


# ---- the canary

RELEASED_WITH = "2.13.0"  # the torch that computes RELEASED, in its CPU and its CUDA build
PINS = [name for name in PROBED if HERE[name].portable]


@pytest.mark.long
def test_canary_is_the_released_one_on_every_cpu_that_can_be_portable(probes: dict[str, dict[str, Any]]):
    assert arithmetic_canary() == arithmetic_canary() == probes[""]["canary"]
    if can_be_portable() and torch.__version__.split("+")[0] == RELEASED_WITH:
        assert arithmetic_canary() == RELEASED


@pytest.mark.long
@pytest.mark.parametrize("name", PINS)
def test_canary_changes_when_a_pin_is_left_off(name: str, probes: dict[str, dict[str, Any]]):
    assert probes[name]["canary"] != probes[""]["canary"]


@pytest.mark.parametrize("name", [name for name in HERE if HERE[name].portable and name in WRITTEN])
def test_canary_changes_when_a_written_pin_is_left_off(name: str):
    set_by_hand(HERE[name])
    assert arithmetic_canary() != RELEASED


def test_canary_draws_no_random_numbers_and_leaves_the_settings():
    before, state = effective(), torch.get_rng_state()
    arithmetic_canary()
    assert effective() == before and torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mkldnn.enabled and len(OPERATIONS) >= 5


# ---- which CPUs

LINES = {
    "flags\t\t: fpu sse2 avx avx2 fma": True,
    "flags\t\t: fpu sse2 avx": False,
    "flags\t\t: fpu avx2_lookalike": False,
    "Features\t: fp asimd": False,
    "bugs\t\t: avx2": False,
}


@pytest.mark.parametrize("line", LINES)
def test_portable_needs_avx2(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flags.platform, "machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\npower management:\n")
    assert can_be_portable(tmp_path / "cpuinfo") == LINES[line]
    assert not can_be_portable(tmp_path / "absent")
    monkeypatch.setattr(flags.platform, "machine", lambda: "aarch64")
    assert not can_be_portable(tmp_path / "cpuinfo")
