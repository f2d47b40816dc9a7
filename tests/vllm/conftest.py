"""Tests in this folder run real vLLM; without it they are skipped, and say so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = find_spec("vllm") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(300))  # an engine takes 15 s to start, on a busy machine over a minute
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; see .ci/install-vllm"))
