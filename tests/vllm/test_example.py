"""The example for a laptop runs, and its second run loads from the store."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.vllm.engine import ROOT


def test_the_example_loads_what_it_saved() -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "examples/vllm_cpu/run.py", "--model", "gptoss", "--prompts", "2"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-4000:]}"
    rows = re.findall(r"(\d+) │ +(\d+) │ +(\d+) │ +(\w+) │ +\d+ ms │ +\d+ ms", ran.stdout)
    assert rows == [("1", "900", "896", "yes"), ("2", "900", "896", "yes")], ran.stdout
