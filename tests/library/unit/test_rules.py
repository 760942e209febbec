"""Habits of code that put bits at risk are found where they are planted, and not in their harmless twins."""

from pathlib import Path
from textwrap import dedent

import pytest

from samebits.analysis.audit import rules
from samebits.analysis.audit.syntax import Source

STARTERS = Path(__file__).resolve().parents[3] / "{{cookiecutter.project}}" / "starters"


LISTING, SET, SEED, DRAW, LOADER, FLAG, WARN, THREADS = (
    "unsorted listing", "order of a set", "seed", "draw at import", "own loader", "flag", "warn_only", "threads",
)  # fmt: skip
PART, SPLIT, VARIABLE, LIBRARY, NORM = (
    "part of a rank", "split", "environment variable", "function of the C library", "norm of the gradients",
)  # fmt: skip
LISTS = "    def f(self): return list(self.x)\n"
RISKS = (  # the rule, a first line, a second one that is found, and a twin in which nothing is
    (LISTING, "import os", "x = os.listdir('.')[0]", "x = sorted(os.listdir('.'))[0]"),
    (LISTING, "from os import listdir as ls", "x = [n for n in ls('.')]", "x = sorted(n for n in ls('.') if n)"),
    (
        LISTING,
        "from pathlib import Path as P",
        "x = [*P('.').parent.iterdir()]",
        "x = sorted([*P('.').parent.iterdir()])",
    ),
    (
        LISTING,
        "from pathlib import Path",
        "f = lambda at: list((Path(at) / 'x').rglob('*'))",
        "class Index:\n    def glob(self, x): return [n for n in self.glob(x)]\n\nx = list(Index().glob('*'))",
    ),
    (LISTING, "from glob import glob", "for x in glob('*'): print(x)", "x = len(glob('*'))"),
    (LISTING, "import os", "x = os.listdir('.')\ny = x[0]", "x = os.listdir('.')\nx.sort()\ny = 'a' in os.listdir()"),
    (LISTING, "import os", "with os.scandir('.') as it: x = list(it)", "with os.scandir('.') as it: x = sorted(it)"),
    (
        LISTING,
        "import os",
        "for at, _, names in os.walk('.'): print(names)",
        "for at, folders, names in os.walk('.'):\n    folders.sort()\n    print(sorted(names))",
    ),
    (SET, "import torch", "x = torch.tensor(list({1, 2}))", "x = torch.tensor(sorted({1, 2}))"),
    (SET, "n = set('ab') | {'c'}", "for x in n: print(x)", "for x in sorted(n): print(x)\ny = 'a' in n"),
    (
        SET,
        "def f(x: set[str], y: list[str]):",
        "    return [n for n in x]",
        "    return [n for n in y], {n for n in x}, len(x)",
    ),
    (SET, "class A:", f"{LISTS}    def g(self): self.x = set()", f"{LISTS}    def g(self): self.x = []"),
    (SET, "", "x = ''.join({'a', 'b'})", "def set(x): return x\nfor x in set([1]): print(x)"),
    (SEED, "import time, torch", "torch.manual_seed(int(time.time()))", "torch.manual_seed(3)\nx = time.time()"),
    (SEED, "import uuid as u", "seed = u.uuid4().int", "name = u.uuid4().hex"),
    (SEED, "import numpy as np", "f = lambda: np.random.default_rng()", "f = lambda s: np.random.default_rng(s)"),
    (SEED, "from random import Random", "x = Random()", "x = Random(3)"),
    (
        SEED,
        "import torch",
        "x = torch.Generator().seed()",
        "x = torch.Generator().manual_seed(3)\ny = torch.initial_seed()",
    ),
    (SEED, "", "x = hash('a')", "class A:\n    def __hash__(self): return hash('a')"),
    (SEED, "import os", "x = os.urandom(3)", "x = os.getpid()"),
    (DRAW, "import torch", "x = torch.rand(3)", "def f(): return torch.rand(3)"),
    (DRAW, "import torch", "def f(x=torch.rand(3)): pass", "f = lambda: [torch.rand(3) for _ in 'ab']"),
    (DRAW, "from random import shuffle as mix", "x = mix([1])", "def f():\n    def g(): return mix([1])\n    return g"),
    (DRAW, "from torch import nn", "class A: x = nn.Linear(2, 2)", "class A: x = nn.ReLU()"),
    (
        LOADER,
        "from torch.utils import data",
        "f = lambda x: data.DataLoader(x)",
        "class DataLoader: pass\nDataLoader()",
    ),
    (FLAG, "from torch.backends import cudnn", "cudnn.benchmark = True", "x = cudnn.m"),
    (FLAG, "import torch", "torch.set_num_threads(4)", "x = torch.get_num_threads()"),
    (FLAG, "import torch.backends as b", "setattr(b.cudnn, 'm', 1)", "class A: pass\nsetattr(A(), 'm', 1)"),
    (WARN, "f = print", "f(True, warn_only=True)", "f(True, warn_only=False)"),
    (SPLIT, "import random", "def load(x): random.shuffle(x)", "def augmented(x): random.shuffle(x)"),
    (
        SPLIT,
        "from torch.utils.data import random_split as split",
        "def prepare(x): return split(x, [1, 2])",
        "def prepare(x, g): return split(x, [1, 2], generator=g)",
    ),
    (VARIABLE, "import os", "x = os.environ['LR']", "x = os.path.join('a', 'b')"),
    (VARIABLE, "from os import getenv", "x = getenv('LR', '1')", "def f(getenv): return getenv('LR')"),
    (LIBRARY, "import math as m", "rate = 1 + m.cos(0.3)", "rate = m.sqrt(0.3) * m.pi * m.floor(2.5)"),
    (LIBRARY, "import numpy as np", "x = np.exp([0.3])", "x = np.sqrt([0.3])"),
    (NORM, "from torch.nn import utils", "utils.clip_grad_norm_([], 1)", "utils.clip_grad_value_([], 1)"),
    (
        THREADS,
        "from concurrent import futures",
        "f = lambda x: [*futures.as_completed(x)]",
        "def as_completed(x): return x\nf = as_completed([])",
    ),
)


def source(folder: Path, code: str) -> Source:
    path = folder / "code.py"
    path.write_text(dedent(code))
    return Source(path, "code.py")


@pytest.mark.parametrize(("rule", "first", "second", "twin"), RISKS)
def test_rule_finds_what_is_planted_and_not_its_twin(rule: str, first: str, second: str, twin: str, tmp_path: Path):
    found = rules.found(source(tmp_path, f"{first}\n{second}"))
    (why,) = [each.why for each in rules.RULES if each.name == rule]
    assert [(each.why, each.line, each.silenced) for each in found] == [(why, 2, False)]
    assert rules.found(source(tmp_path, f"{first}\n{twin}")) == []


LOOP = """\
def train(run, model):
    total, losses = 0.0, []
    for step in run.steps(model):
        for number, batch in enumerate(step):
            loss = model(batch)
            step.backward(loss)
            {}
        total += step.loss
        losses.append(step.loss)
"""


@pytest.mark.parametrize("line", ["total += loss.item()", "losses.append(loss)", "run.seen[number] += 1"])
def test_what_is_added_up_over_a_ranks_micro_batches_is_found(line: str, tmp_path: Path):
    (found,) = rules.found(source(tmp_path, LOOP.format(line)))
    assert (found.line, found.why) == (7, next(each.why for each in rules.RULES if each.name == PART))


@pytest.mark.parametrize("line", ["loss += 1", "batch += 1", "pass", "parts = [loss]; parts.append(loss)"])
def test_what_is_of_one_micro_batch_is_not(line: str, tmp_path: Path):
    assert rules.found(source(tmp_path, LOOP.format(line))) == []


def test_every_rule_is_tested():
    assert {rule for rule, *_ in RISKS} | {PART} == {rule.name for rule in rules.RULES}


def test_comment_with_a_reason_silences_a_line(tmp_path: Path):
    listing = "import os\nx = [\n    *os.listdir('.'),  # audit: fine{}\n]\n"
    text = "import os\nx = [*os.listdir('# audit: fine, no comment')]\n"
    for code, silenced in ((listing.format(", each is deleted"), True), (listing.format(""), False), (text, False)):
        assert [each.silenced for each in rules.found(source(tmp_path, code))] == [silenced]


@pytest.mark.parametrize(
    "content", [b"", b"\xef\xbb\xbfx = 1\n", b"# -*- coding: latin-1 -*-\nimport os\nx = sorted(os.listdir('\xe9'))\n"]
)
def test_empty_file_and_other_encodings_are_read(content: bytes, tmp_path: Path):
    path = tmp_path / "code.py"
    path.write_bytes(content)
    assert rules.found(Source(path, "code.py")) == []


@pytest.mark.parametrize("path", sorted(STARTERS.rglob("*.py")), ids=lambda path: f"{path.parents[2].name}/{path.name}")
def test_starters_have_no_finding(path: Path):
    assert [each for each in rules.found(Source(path, path.name)) if not each.silenced] == []
