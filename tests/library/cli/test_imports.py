"""What a command must not load."""

import ast
import subprocess
import sys


def test_rules_import_no_torch():
    audit = "samebits.analysis.audit"
    code = f"import {audit}.rules, {audit}.audit, sys; sys.exit('torch' in sys.modules)"
    assert ast.parse(code) and subprocess.run([sys.executable, "-c", code]).returncode == 0
