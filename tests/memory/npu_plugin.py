"""A stand-in for vLLM-Ascend, and the plugin applied to it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from kvactors.vllm import ascend_views
from kvactors.vllm.ascend_support import VIEWS
from kvactors.vllm.ascend_views import METHOD, MODULE, RUNNER
from tests.memory.npu_runner import (
    StandInRunner,
)


@pytest.fixture
def runner_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vLLM-Ascend that is loaded, with a runner of its own."""
    module = ModuleType(MODULE)
    vars(module)[RUNNER] = type(RUNNER, (StandInRunner,), {METHOD: StandInRunner._reshape_kv_cache_tensors})
    monkeypatch.setitem(sys.modules, "vllm_ascend", ModuleType("vllm_ascend"))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.fixture
def views_on(runner_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The runner's class with the plugin applied."""
    monkeypatch.setenv(VIEWS, "1")
    ascend_views.register()
    runner: type[Any] = vars(runner_module)[RUNNER]
    return runner
