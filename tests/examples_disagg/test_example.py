"""The whole example on real vLLM: the request is handed over, and has the answer of a single engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples_disagg.fakes import EXAMPLE, ROOT

LONGEST_S = 280
"""An idle machine takes a minute."""


@pytest.mark.vllm
@pytest.mark.timeout(LONGEST_S + 60)
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; see .ci/install-vllm")
@pytest.mark.skipif(find_spec("mooncake") is None, reason="Mooncake is not installed here")
def test_a_request_is_handed_over(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLE / "start.py"), "--model", "gptoss", "--once", "--check", "--folder", str(tmp_path)]
    with subprocess.Popen(
        words,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its servers
            said, _ = process.communicate(timeout=40)
    assert process.returncode == 0, said
    assert re.findall(r"(prefill|decode) │ +(\d+) │ +(\d+) │ +(\d+) ", said) == [
        ("prefill", "897", "0", "0"),
        ("decode", "0", "897", "0"),
    ]
    assert "the tokens are those of a single engine: yes" in said
    assert "largest difference of their log-probabilities: 0\n" in said
