"""`samebits audit` names the operations and lines that put bits at risk, and nothing in a project that has none."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from clone import Forked, command, copied, edit, project_in, verb
from support import PACKAGE, Trained, training

from samebits.address.manifest import sha256_file
from samebits.analysis.audit.audit import Audit
from samebits.analysis.audit.rules import Finding
from samebits.analysis.audit.syntax import Source
from samebits.base.files import read_json
from samebits.core.errors import UserError
from samebits.start import trainings

PLANTED = '''import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F


class Planted(nn.Module):
    """Operations at risk; each is named beside its line."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, c, h, w) to the same."""
        index = torch.arange(len(x)) % 2
        x = x + torch.zeros_like(x).index_add_(0, index, x)
        x = x + torch.zeros_like(x).scatter_add_(0, index.view(-1, 1, 1, 1).expand_as(x), x)
        x = x + torch.zeros_like(x).index_copy_(0, torch.arange(len(x)), x)  # audit: fine, no place is named twice
        x = F.interpolate(x, scale_factor=2, mode="bilinear")[..., ::2, ::2]
        x = x + torch.zeros_like(x).put_(torch.arange(3), x.detach().flatten()[:3])
        x = torch.utils.checkpoint.checkpoint(torch.cumsum, x, -1, use_reentrant=False)
        x = torch.sqrt(x.abs() + 1)
        rows = x.flatten(1).unsqueeze(0).log_softmax(-1)
        return x + F.ctc_loss(rows, torch.ones(len(x), 1, dtype=torch.long), (1,) * len(x), (1,) * len(x))
'''
DATA = '''

def listed(folder: Path) -> list[str]:
    """The file system decides the order."""
    import os as system

    return [name for name in system.listdir(folder)]
'''


@dataclass(frozen=True)
class Audited:
    """An audit that ended: the project and what it printed."""

    project: Path
    done: Any  # of a command, or of a verb in this process

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads(self.done.stdout)

    def found(self, group: str, name: str) -> dict[str, Any]:
        """The one finding of this name in a group."""
        (found,) = [each for each in self.facts[group] if each["name"].split(" (")[0] == name]
        return found

    def line(self, file: str, code: str) -> dict[str, Any]:
        """File and line of some code."""
        path = self.project / "src" / PACKAGE / file
        (number,) = [n for n, line in enumerate(path.read_text().splitlines(), 1) if code in line]
        return {"file": f"src/{PACKAGE}/{file}", "line": number}


def shipped(folder: Path) -> Path:
    """This project's files, with the weights of a run."""
    copied(folder, ("src", "vendor", "requirements"), ("params.yaml", "dvc.yaml", "pyproject.toml"))
    (folder / "artifacts").mkdir()
    (folder / "artifacts" / "model.safetensors").write_text("the weights of a run\n")
    return folder


SMALL = "model.width=8", "model.depth=1"


def audit(project: Path, prepared: Path, *words: str) -> Audited:
    """Audit a small network, in this process and a fork."""
    overrides = trainings.sets([f"data.prepared={prepared}", *SMALL])
    with pytest.MonkeyPatch.context() as patched, TemporaryDirectory() as logs:
        patched.chdir(project)
        patched.setattr(trainings, "run", Forked(Path(logs)))
        return Audited(project, verb("audit", *overrides, *words, project=project_in(project)))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it is shipped."""
    return shipped(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def planted(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """An audit of a project in which much is planted."""
    project = shipped(tmp_path_factory.mktemp("planted"))
    source = project / "src" / PACKAGE
    (source / "blocks").mkdir()
    (source / "blocks" / "model.py").write_text(PLANTED)  # a file of the same name as the owner's other one
    with (source / "data.py").open("a") as data:
        data.write(DATA)
    dropout = "        self.dropout = nn.Dropout(dropout)\n"
    edit(
        source / "model.py",
        ("from .config import", "from .blocks.model import Planted\nfrom .config import"),
        (dropout, f"{dropout}        self.planted = Planted()\n"),
        ("self.features(images)", "self.planted(self.features(images))"),
    )
    (source / "strange\nname.py").write_text("")
    return audit(project, prepared, "--json")


# ---- operations

OPERATIONS = {  # name -> its code, the function in the catalogue, whether the verdict is of CUDA
    "index_add": (".index_add_(", "torch.index_add", True),
    "scatter_add": (".scatter_add_(", "torch.Tensor.scatter_add_", True),
    "upsample_bilinear2d_backward": ("F.interpolate(", "torch.nn.functional.interpolate", True),
    "cumsum": ("torch.cumsum", "torch.cumsum", True),
    "_ctc_loss_backward": ("F.ctc_loss(", "torch.nn.CTCLoss", True),
    "put": (".put_(", "torch.Tensor.put_", False),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_found_with_line_module_and_way_out(name: str, planted: Audited):
    code, function, cuda = OPERATIONS[name]
    found = planted.found("operations", name)
    assert found | planted.line("blocks/model.py", code) == found
    assert found["module"] == "planted (Planted)" and function in found["name"] and found["instead"]
    assert ("on CUDA: " in found["why"]) is cuda and not found["silenced"]


def test_operation_that_raises_here_is_told_and_the_step_goes_on(planted: Audited):
    assert planted.found("operations", "put")["why"].startswith("it raises here: it has no deterministic kernel")
    assert planted.facts["failed"] == "" and planted.facts["calls"] > 500
    assert planted.done.exit_code == 1 and planted.done.stderr == ""


def test_operation_that_is_not_portable_is_found(planted: Audited):
    found = planted.found("portability", "sqrt float32")
    assert found | planted.line("blocks/model.py", "torch.sqrt(") == found
    assert found["module"] == "planted (Planted)" and found["instead"] == "samebits.sqrt(x)"


def test_comment_silences_an_operation(planted: Audited):
    found = planted.found("operations", "index_copy")
    assert found["silenced"] and found | planted.line("blocks/model.py", "audit: fine") == found
    assert planted.facts["findings"] == sum(
        not (each["silenced"] or each["hint"])
        for group in ("operations", "portability", "code")
        for each in planted.facts[group]
    )


def test_code_is_found(planted: Audited):
    (found,) = planted.facts["code"]
    assert found | planted.line("data.py", "system.listdir") == found and found["name"] == "system.listdir(folder)"


def test_source_of_cuda_verdicts_is_said(planted: Audited):
    note = f"verdicts on CUDA are from the catalogue of torch {torch.__version__}: there is no GPU here"
    assert torch.cuda.is_available() or note in planted.facts["notes"]


@pytest.fixture(scope="module")
def clean(bare: Path, prepared: Path) -> Audited:
    """As a user has it: the command, and the step in a process that it starts."""
    return Audited(bare, command(bare, "audit", "--set", f"data.prepared={prepared}"))


def test_shipped_project_has_no_finding(clean: Audited):
    lines = clean.done.stdout.splitlines()
    assert clean.done.returncode == 0 and clean.done.stderr == "", clean.done.stdout
    assert lines[0].startswith("no findings in ") and "convolution (backends.cudnn.deterministic)" in lines[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "requested",
    ["model.name=transformer", "compute.compile=true", "compute.precision=bfloat16", "determinism.cpu=native"],
)
def test_shipped_project_has_no_finding_in_other_ways(requested: str, bare: Path, prepared: Path):
    ended = audit(bare, prepared, "--set", requested)
    assert ended.done.exit_code == 0, ended.done.output
    judged = requested == "model.name=transformer"
    assert ("portability is not judged" in ended.done.stdout) is not judged


def test_audit_leaves_the_project_as_it_is(clean: Audited):
    held = list((clean.project / "artifacts").iterdir())
    assert [path.name for path in held] == ["model.safetensors"] and held[0].read_text() == "the weights of a run\n"
    assert not (clean.project / "build" / "audit").exists()


@pytest.mark.long
def test_watch_changes_no_bit(bare: Path, prepared: Path, tmp_path: Path, untracked: Trained):
    out = tmp_path / "run"
    own = tmp_path / "step.json", *training(out, prepared, "tracking.enabled=false")
    Forked(tmp_path)(project_in(bare), trainings.command(trainings.AUDITED, {}, *own))
    assert read_json(tmp_path / "step.json")["operations"] == []
    assert sha256_file(out / "model.safetensors") == untracked.weights


@pytest.mark.long
def test_relaxed_switches_hold_nothing(bare: Path, prepared: Path):
    found = audit(bare, prepared, "--json", "--set", "determinism.relax=[all]").facts["operations"]
    assert [each["name"].split(" (")[0] for each in found] == ["convolution", "convolution_backward"]
    assert all("not deterministic: the flag deterministic_debug_mode is relaxed" in each["why"] for each in found)


# ---- what goes wrong


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"def f(:\n    pass\n", ":1: no Python that can be read: "),
        (b"x = '\xff'\n", ": no Python that can be read: "),
        (b"\0", ": no Python that can be read: "),
    ],
)
def test_file_that_is_no_python_is_refused_in_a_line(content: bytes, said: str, tmp_path: Path):
    path = tmp_path / "model.py"
    path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        Source(path, "model.py")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_syntax_error_ends_with_exit_code_2(bare: Path, prepared: Path, tmp_path: Path):
    project = Path(shutil.copytree(bare, tmp_path / "project"))
    edit(project / "src" / PACKAGE / "model.py", ("def build(", "def build("), ("class Block", "class class"))
    done = audit(project, prepared).done
    assert done.exit_code == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"src/{PACKAGE}/model.py:")


@pytest.mark.long
def test_training_that_does_not_begin_is_told(bare: Path, prepared: Path, tmp_path: Path):
    missing = audit(bare, tmp_path / "nothing").done
    assert missing.exit_code == 2 and missing.stdout == "" and len(missing.stderr.splitlines()) == 1
    assert missing.stderr.endswith("manifest.json: missing. Prepare the data first: make repro\n")
    unknown = audit(bare, prepared, "--set", "model.nam=x").done
    assert unknown.exit_code == 2 and "unknown key" in unknown.stderr


@pytest.mark.long
def test_training_that_fails_in_its_step_tells_what_was_seen(bare: Path, prepared: Path, tmp_path: Path):
    project = Path(shutil.copytree(bare, tmp_path / "project"))
    source = project / "src" / PACKAGE / "train.py"
    loss = "            step.backward(F.cross_entropy(model(images), labels))"
    edit(source, (loss, "            torch.cumsum(model(images), 0)\n            raise ValueError('no loss')"))
    done = audit(project, prepared).done
    assert done.exit_code == 2 and "ValueError: no loss" in done.stderr
    assert "cumsum (torch.cumsum)" in done.stdout


def test_hint_is_told_and_not_counted():
    hint = Finding("Code", "data.py", 3, "Thread()", "they end in any order", hint=True)
    message = Audit([hint], {"calls": 7}, 2, ["a note"])
    assert message.counted == [] and list(message.lines()) == [
        "Code",
        "  data.py:3  Thread()",
        "      hint: they end in any order",
        "no findings (1 hint) in 7 calls, which make the weights and one step, and in 2 files",
        "a note",
    ]
