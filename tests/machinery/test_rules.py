"""Habits of code that put bits at risk are found where they are planted, and not in their harmless twins."""

import ast
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from conftest import PACKAGE
from project.repro.analysis.audit import rules
from project.repro.analysis.audit.syntax import Source

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


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
    audit = f"{PACKAGE}.repro.analysis.audit"
    code = f"import {audit}.rules, {audit}.audit, sys; sys.exit('torch' in sys.modules)"
    assert ast.parse(code) and subprocess.run([sys.executable, "-c", code]).returncode == 0
