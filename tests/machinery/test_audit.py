"""`repro audit` names the operations and lines that put bits at risk, and nothing in a project that has none."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from clone import command
from conftest import PACKAGE, PROJECT, Trained, training
from project.repro.errors import Refused
from project.repro.files import read_json
from project.repro.lab import catalogue, rules
from project.repro.lab.audit import Audit, Finding
from project.repro.lab.catalogue import ROWS, UNSEEN, Call, entries
from project.repro.lab.syntax import Source
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

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
    done: subprocess.CompletedProcess[str]

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


def copied(folder: Path) -> Path:
    """This project's files, in a folder."""
    for part in ("src", "requirements"):
        shutil.copytree(PROJECT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("params.yaml", "dvc.yaml", "pyproject.toml"):
        shutil.copyfile(PROJECT / name, folder / name)
    artifacts = folder / "artifacts"
    artifacts.mkdir()
    (artifacts / "model.safetensors").write_text("the weights of a run\n")
    return folder


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
    path.write_text(text)


def audit(project: Path, prepared: Path, *words: str) -> Audited:
    done = command(project, PACKAGE, "audit", "--set", f"data.prepared={prepared}", *words)
    assert "Traceback" not in done.stderr, done.stderr
    return Audited(project, done)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it is shipped."""
    return copied(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def planted(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """An audit of a project in which much is planted."""
    project = copied(tmp_path_factory.mktemp("planted"))
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
    assert planted.done.returncode == 1 and planted.done.stderr == ""


def test_operation_that_is_not_portable_is_found(planted: Audited):
    found = planted.found("portability", "sqrt float32")
    assert found | planted.line("blocks/model.py", "torch.sqrt(") == found
    assert found["module"] == "planted (Planted)" and found["instead"] == "repro.training.exact.sqrt(x)"


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
    if not torch.cuda.is_available():
        assert (
            f"verdicts on CUDA are from the catalogue of torch {torch.__version__}: there is no GPU here"
            in (planted.facts["notes"])
        )


@pytest.fixture(scope="module")
def clean(bare: Path, prepared: Path) -> Audited:
    return audit(bare, prepared)


def test_shipped_project_has_no_finding(clean: Audited):
    lines = clean.done.stdout.splitlines()
    assert clean.done.returncode == 0 and clean.done.stderr == "", clean.done.stdout
    assert lines[0].startswith("no findings in ") and "convolution (backends.cudnn.deterministic)" in lines[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "asked", ["model.name=transformer", "compute.compile=true", "compute.precision=bfloat16", "determinism.cpu=native"]
)
def test_shipped_project_has_no_finding_in_other_ways(asked: str, bare: Path, prepared: Path):
    ended = audit(bare, prepared, "--set", asked)
    assert ended.done.returncode == 0, ended.done.stdout
    judged = asked == "model.name=transformer"
    assert ("portability is not judged" in ended.done.stdout) is not judged


def test_audit_leaves_the_project_as_it_is(clean: Audited):
    held = list((clean.project / "artifacts").iterdir())
    assert [path.name for path in held] == ["model.safetensors"] and held[0].read_text() == "the weights of a run\n"
    assert not (clean.project / "build" / "audit").exists()


@pytest.mark.long
def test_watch_changes_no_bit(bare: Path, prepared: Path, tmp_path: Path, untracked: Trained):
    out = tmp_path / "run"
    arguments = training(out, prepared, "tracking.enabled=false")
    done = command(bare, f"{PACKAGE}.repro.lab.audited", tmp_path / "step.json", *arguments)
    assert done.returncode == 0, done.stderr
    assert read_json(tmp_path / "step.json")["operations"] == []
    assert Trained(out, done).weights == untracked.weights


@pytest.mark.long
def test_relaxed_switches_hold_nothing(bare: Path, prepared: Path):
    found = audit(bare, prepared, "--json", "--set", "determinism.relax=[all]").facts["operations"]
    assert [each["name"].split(" (")[0] for each in found] == ["convolution", "convolution_backward"]
    assert all("not deterministic: the switch deterministic_debug_mode is relaxed" in each["why"] for each in found)


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
    with pytest.raises(Refused) as refused:
        Source(path, "model.py")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_syntax_error_ends_with_exit_code_2(bare: Path, prepared: Path, tmp_path: Path):
    project = Path(shutil.copytree(bare, tmp_path / "project"))
    edit(project / "src" / PACKAGE / "model.py", ("def build(", "def build("), ("class Block", "class class"))
    done = audit(project, prepared).done
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"src/{PACKAGE}/model.py:")


@pytest.mark.long
def test_training_that_does_not_begin_is_told(bare: Path, prepared: Path, tmp_path: Path):
    missing = audit(bare, tmp_path / "nothing").done
    assert missing.returncode == 2 and missing.stdout == "" and len(missing.stderr.splitlines()) == 1
    assert missing.stderr.endswith("manifest.json: missing. Prepare the data first: make repro\n")
    unknown = audit(bare, prepared, "--set", "model.nam=x").done
    assert unknown.returncode == 2 and "unknown key" in unknown.stderr


@pytest.mark.long
def test_training_that_fails_in_its_step_tells_what_was_seen(bare: Path, prepared: Path, tmp_path: Path):
    project = Path(shutil.copytree(bare, tmp_path / "project"))
    source = project / "src" / PACKAGE / "train.py"
    loss = "    return F.cross_entropy(network(images), labels)"
    edit(source, (loss, "    torch.cumsum(network(images), 0)\n    raise ValueError('no loss')"))
    done = command(project, PACKAGE, "audit", "--set", f"data.prepared={prepared}")
    assert done.returncode == 2 and "ValueError: no loss" in done.stderr
    assert "cumsum (torch.cumsum)" in done.stdout


def test_hint_is_told_and_not_counted():
    hint = Finding("Code", "data.py", 3, "Thread()", "they end in any order", hint=True)
    told = Audit([hint], {"calls": 7}, 2, ["a note"])
    assert told.counted == [] and list(told.lines()) == [
        "Code",
        "  data.py:3  Thread()",
        "      hint: they end in any order",
        "no findings (1 hint) in 7 calls, which make the weights and one step, and in 2 files",
        "a note",
    ]


# ---- the catalogue


def test_every_entry_of_the_installed_catalogue_is_mapped():
    assert catalogue.unknown() == []
    assert {entry.name for entry in entries()} == {*ROWS, *UNSEEN}
    assert {throws: sum(entry.throws is throws for entry in entries()) for throws in (False, True)} == {
        False: 23,
        True: 25,
    }


def test_every_operation_of_the_table_is_one_of_torch():
    known = {catalogue.plain(name.partition(".")[0]) for name in torch._C._dispatch_get_all_op_names()}
    assert {operation for row in ROWS.values() for operation in row.operations} <= known


def test_conditions_are_read():
    by_name = {(entry.name, entry.throws): entry for entry in entries()}
    interpolate = by_name["torch.nn.functional.interpolate", True]
    assert interpolate.of_gradients and interpolate.devices == {"cuda"} and "trilinear" in interpolate.condition
    assert by_name["torch.Tensor.index_copy", False].devices == {"cpu", "cuda"}
    assert by_name["torch.nn.MaxUnpool2d", True].devices == set()
    assert by_name["torch.Tensor.scatter_reduce", False].keywords == {"reduce": {"sum", "mean"}}
    assert by_name["torch.gather", False].of_gradients


def test_entry_that_the_table_lacks_is_told(monkeypatch: pytest.MonkeyPatch):
    text = (torch.use_deterministic_algorithms.__doc__ or "").replace("torch.histc", "torch.newer")
    assert "torch.newer" in {entry.name for entry in entries(text)} and entries(None) == ()
    monkeypatch.setattr(catalogue, "entries", lambda: entries(text))
    assert catalogue.unknown() == ["torch.newer"]


class Names(TorchDispatchMode):
    """Collects the names in the catalogue of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {verdict.entry.name for verdict in catalogue.verdicts(Call(function, args, kwargs or {}))}
        return function(*args, **(kwargs or {}))


def unpooled(n: int) -> torch.Tensor:
    pool, unpool = getattr(F, f"max_pool{n}d"), getattr(F, f"max_unpool{n}d")
    return unpool(*pool(image(n), 2, return_indices=True), 2)


def image(n: int) -> torch.Tensor:
    return torch.rand(1, 2, *[4] * n, requires_grad=True)


def row() -> torch.Tensor:
    return torch.rand(6, requires_grad=True)


PICK = torch.tensor([0, 2, 1])
DENSE = torch.rand(1, 3, 3)
CALLS: dict[str, Callable[[], torch.Tensor]] = {
    **{f"torch.nn.Conv{n}d": lambda n=n: getattr(nn, f"Conv{n}d")(2, 2, 3)(image(n)) for n in (1, 2, 3)},
    **{
        f"torch.nn.ConvTranspose{n}d": lambda n=n: getattr(nn, f"ConvTranspose{n}d")(2, 2, 3)(image(n))
        for n in (1, 2, 3)
    },
    **{
        f"torch.nn.{mode}Pad{n}d": lambda mode=mode, n=n: getattr(nn, f"{mode}Pad{n}d")(1)(image(n))
        for mode in ("Replication", "Reflection")
        for n in (1, 2, 3)
    },
    **{
        f"torch.nn.FractionalMaxPool{n}d": lambda n=n: getattr(nn, f"FractionalMaxPool{n}d")(2, output_size=2)(image(n))
        for n in (2, 3)
    },
    **{f"torch.nn.MaxUnpool{n}d": lambda n=n: unpooled(n) for n in (1, 2, 3)},
    **{f"torch.nn.AdaptiveAvgPool{n}d": lambda n=n: getattr(nn, f"AdaptiveAvgPool{n}d")(2)(image(n)) for n in (2, 3)},
    "torch.nn.MaxPool3d": lambda: F.max_pool3d(image(3), 2),
    "torch.nn.AvgPool3d": lambda: F.avg_pool3d(image(3), 2),
    "torch.nn.AdaptiveMaxPool2d": lambda: F.adaptive_max_pool2d(image(2), 2),
    "torch.nn.functional.interpolate": lambda: F.interpolate(image(1), scale_factor=2, mode="linear"),
    "torch.nn.functional.grid_sample": lambda: F.grid_sample(image(2), torch.rand(1, 3, 3, 2), align_corners=False),
    "torch.nn.NLLLoss": lambda: F.cross_entropy(image(2), torch.zeros(1, 4, 4, dtype=torch.long)),
    "torch.nn.CTCLoss": lambda: F.ctc_loss(
        torch.rand(3, 1, 4, requires_grad=True).log_softmax(-1), torch.ones(1, 1, dtype=torch.long), (3,), (1,)
    ),
    "torch.nn.EmbeddingBag": lambda: nn.EmbeddingBag(4, 2, mode="max")(PICK.view(1, 3)),
    "torch.bmm": lambda: torch.bmm(DENSE.to_sparse(), DENSE),
    "torch.Tensor.__getitem__": lambda: row()[PICK],
    "torch.Tensor.index_put": lambda: row().index_put((PICK,), torch.ones(3)),
    "torch.Tensor.put_": lambda: torch.zeros(6).put_(PICK, torch.ones(3)),
    "torch.Tensor.scatter_add_": lambda: torch.zeros(6).scatter_add_(0, PICK, torch.ones(3)),
    "torch.Tensor.scatter_reduce": lambda: torch.zeros(6).scatter_reduce(0, PICK, torch.ones(3), "sum"),
    "torch.Tensor.scatter": lambda: torch.zeros(6).scatter(0, PICK, torch.ones(3)),
    "torch.Tensor.index_copy": lambda: torch.zeros(6).index_copy(0, PICK, torch.ones(3)),
    "torch.index_add": lambda: torch.zeros(6).index_add(0, PICK, torch.ones(3)),
    "torch.index_select": lambda: row().index_select(0, PICK),
    "torch.gather": lambda: row().gather(0, PICK),
    "torch.histc": lambda: torch.histc(row().detach(), 3),
    "torch.bincount": lambda: torch.bincount(PICK, torch.ones(3)),
    "torch.median": lambda: torch.median(row(), 0).values,
    "torch.cumsum": lambda: row().cumsum(0),
    "torch.Tensor.resize_": lambda: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.quint8).resize_(2),
}
HARMLESS: dict[str, Callable[[], torch.Tensor]] = {
    "slices": lambda: row()[1:3] * row()[::2].sum(),
    "index of what has no gradient": lambda: row().detach()[PICK],
    "sum of integers": lambda: PICK.cumsum(0),
    "median without indices": lambda: row().median(),
    "count without weights": lambda: torch.bincount(PICK),
    "loss of classes": lambda: F.cross_entropy(torch.rand(3, 4, requires_grad=True), PICK),
    "nearest": lambda: F.interpolate(image(2), scale_factor=2, mode="nearest"),
    "bag of sums": lambda: nn.EmbeddingBag(4, 2, mode="sum")(PICK.view(1, 3)),
    "dense product": lambda: torch.bmm(DENSE, DENSE),
    "value scattered": lambda: torch.zeros(6).scatter(0, PICK, 1.0),
    "largest scattered": lambda: torch.zeros(6).scatter_reduce(0, PICK, torch.ones(3), "amax"),
    "pooling": lambda: F.max_pool2d(F.avg_pool2d(image(2), 2), 2),
}


def repeated() -> torch.Tensor:
    return torch.repeat_interleave(row(), torch.tensor([1, 2, 1, 1, 2, 1]))


def seen(function: Callable[[], torch.Tensor]) -> set[str]:
    with Names() as names:
        result = function()
        if result.requires_grad:
            result.sum().backward()
    return names.seen


def test_every_entry_has_a_call():
    assert {*CALLS} == {*ROWS}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", ROWS)
def test_call_of_an_entry_is_known(name: str):
    assert name in seen(CALLS[name])


def test_repetition_is_told_as_the_selection_that_it_is():
    assert "torch.index_select" in seen(repeated) and {*UNSEEN} == {"torch.repeat_interleave"}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_call_is_not_told(name: str):
    assert seen(HARMLESS[name]) == set()


# ---- the rules

LISTING, SET, SEED, DRAW, LOADER, SWITCH, WARN, THREADS = (
    "unsorted listing", "order of a set", "seed", "draw at import", "own loader", "switch", "warn_only", "threads",
)  # fmt: skip
RISKS = (  # the rule, code in which line 2 is found, and a twin in which nothing is
    (LISTING, "import os\nx = os.listdir('.')[0]", "import os\nx = sorted(os.listdir('.'))[0]"),
    (
        LISTING,
        "from os import listdir as ls\nx = [n for n in ls('.')]",
        "from os import listdir as ls\nx = sorted(n for n in ls('.') if n)",
    ),
    (
        LISTING,
        "from pathlib import Path as P\nx = [*P('.').parent.iterdir()]",
        "from pathlib import Path as P\nx = sorted([*P('.').parent.iterdir()])",
    ),
    (
        LISTING,
        "from pathlib import Path\nf = lambda at: list((Path(at) / 'x').rglob('*'))",
        "class Index:\n    def glob(self, x): return [n for n in self.glob(x)]\n\nx = list(Index().glob('*'))",
    ),
    (LISTING, "from glob import glob\nfor x in glob('*'): print(x)", "from glob import glob\nx = len(glob('*'))"),
    (
        LISTING,
        "import os\nx = os.listdir('.')\ny = x[0]",
        "import os\nx = os.listdir('.')\nx.sort()\ny = 'a' in os.listdir('.')",
    ),
    (
        LISTING,
        "import os\nwith os.scandir('.') as it: x = list(it)",
        "import os\nwith os.scandir('.') as it: x = sorted(it)",
    ),
    (
        LISTING,
        "import os\nfor at, _, names in os.walk('.'): print(names)",
        "import os\nfor at, folders, names in os.walk('.'):\n    folders.sort()\n    print(sorted(names))",
    ),
    (SET, "import torch\nx = torch.tensor(list({1, 2}))", "import torch\nx = torch.tensor(sorted({1, 2}))"),
    (SET, "n = set('ab') | {'c'}\nfor x in n: print(x)", "n = set('ab')\nfor x in sorted(n): print(x)\ny = 'a' in n"),
    (
        SET,
        "def f(x: set[str]):\n    return [n for n in x]",
        "def f(x: set[str], y: list[str]):\n    return [n for n in y], {n for n in x}, len(x)",
    ),
    (
        SET,
        "class A:\n    def f(self): return list(self.x)\n    def g(self): self.x = set()",
        "class A:\n    def f(self): return list(self.x)\n    def g(self): self.x = []",
    ),
    (SET, "\nx = ''.join({'a', 'b'})", "def set(x): return x\nfor x in set([1]): print(x)"),
    (
        SEED,
        "import time, torch\ntorch.manual_seed(int(time.time()))",
        "import time, torch\ntorch.manual_seed(3)\nx = time.time()",
    ),
    (SEED, "import uuid as u\nseed = u.uuid4().int", "import uuid as u\nname = u.uuid4().hex"),
    (
        SEED,
        "import numpy as np\nf = lambda: np.random.default_rng()",
        "import numpy as np\nf = lambda s: np.random.default_rng(s)",
    ),
    (SEED, "from random import Random\nx = Random()", "from random import Random\nx = Random(3)"),
    (
        SEED,
        "import torch\nx = torch.Generator().seed()",
        "import torch\nx = torch.Generator().manual_seed(3)\ny = torch.initial_seed()",
    ),
    (SEED, "\nx = hash('a')", "class A:\n    def __hash__(self): return hash('a')"),
    (SEED, "import os\nx = os.urandom(3)", "import os\nx = os.getpid()"),
    (DRAW, "import torch\nx = torch.rand(3)", "import torch\ndef f(): return torch.rand(3)"),
    (DRAW, "import torch\ndef f(x=torch.rand(3)): pass", "import torch\nf = lambda: [torch.rand(3) for _ in 'ab']"),
    (
        DRAW,
        "from random import shuffle as mix\nx = mix([1])",
        "import random\ndef f():\n    def g(): return random.random()\n    return g",
    ),
    (DRAW, "from torch import nn\nclass A: x = nn.Linear(2, 2)", "from torch import nn\nclass A: x = nn.ReLU()"),
    (
        LOADER,
        "from torch.utils.data import DataLoader\nf = lambda x: DataLoader(x)",
        "class DataLoader: pass\nf = lambda: DataLoader()",
    ),
    (
        SWITCH,
        "from torch.backends import cudnn\ncudnn.benchmark = True",
        "from torch.backends import cudnn\nx = cudnn.m",
    ),
    (SWITCH, "import torch\ntorch.set_num_threads(4)", "import torch\nx = torch.get_num_threads()"),
    (SWITCH, "import torch.backends as b\nsetattr(b.cudnn, 'm', 1)", "class A: pass\nsetattr(A(), 'm', 1)"),
    (WARN, "f = print\nf(True, warn_only=True)", "f = print\nf(True, warn_only=False)"),
    (
        THREADS,
        "from concurrent import futures\nf = lambda x: [*futures.as_completed(x)]",
        "def as_completed(x): return x\nf = as_completed([])",
    ),
)


def source(folder: Path, code: str) -> Source:
    path = folder / "code.py"
    path.write_text(dedent(code))
    return Source(path, "code.py")


@pytest.mark.parametrize(("rule", "planted_code", "twin"), RISKS)
def test_rule_finds_what_is_planted_and_not_its_twin(rule: str, planted_code: str, twin: str, tmp_path: Path):
    found, _ = rules.found(source(tmp_path, planted_code))
    assert [(each.rule.name, each.line) for each in found] == [(rule, 2)]
    assert rules.found(source(tmp_path, twin)) == ([], [])


def test_every_rule_is_tested():
    assert {rule for rule, _, _ in RISKS} == {rule.name for rule in rules.RULES}


def test_comment_with_a_reason_silences_a_line(tmp_path: Path):
    listing = "import os\nx = [\n    *os.listdir('.'),  # audit: fine{}\n]\n"
    assert [len(each) for each in rules.found(source(tmp_path, listing.format(", each is deleted")))] == [0, 1]
    assert [len(each) for each in rules.found(source(tmp_path, listing.format("")))] == [1, 0]
    text = "import os\nx = [*os.listdir('# audit: fine, no comment')]\n"
    assert [len(each) for each in rules.found(source(tmp_path, text))] == [1, 0]


@pytest.mark.parametrize(
    "content", [b"", b"\xef\xbb\xbfx = 1\n", b"# -*- coding: latin-1 -*-\nimport os\nx = sorted(os.listdir('\xe9'))\n"]
)
def test_empty_file_and_other_encodings_are_read(content: bytes, tmp_path: Path):
    path = tmp_path / "code.py"
    path.write_bytes(content)
    assert rules.found(Source(path, "code.py")) == ([], [])


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*.py")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_recipes_have_no_finding(path: Path):
    assert rules.found(Source(path, path.name)) == ([], [])


def test_rules_import_no_torch():
    code = f"import {PACKAGE}.repro.lab.rules, {PACKAGE}.repro.lab.audit, sys; sys.exit('torch' in sys.modules)"
    assert ast.parse(code) and subprocess.run([sys.executable, "-c", code]).returncode == 0
