"""The plugin for vLLM-Ascend's model runner V1, on a stand-in: when it acts at all."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvactors.vllm import ascend_views
from kvactors.vllm.ascend_support import VIEWS
from kvactors.vllm.ascend_views import METHOD, MODULE, RUNNER
from tests.memory import npu_plugin

runner_module, views_on = npu_plugin.runner_module, npu_plugin.views_on  # fixtures


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_it_does_nothing_unless_it_is_asked(
    runner_module: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VIEWS, raising=False)
    if value is not None:
        monkeypatch.setenv(VIEWS, value)
    method, finders = getattr(vars(runner_module)[RUNNER], METHOD), list(sys.meta_path)
    ascend_views.register()
    assert getattr(vars(runner_module)[RUNNER], METHOD) is method
    assert sys.meta_path == finders
    assert not caplog.records


def test_twice_is_once(views_on: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    method = getattr(views_on, METHOD)
    caplog.clear()
    ascend_views.register()
    assert getattr(views_on, METHOD) is method
    assert not caplog.records


def test_a_runner_that_is_not_loaded_yet_is_left_to_load_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The plugin imports nothing of vLLM-Ascend, whose own patches come first."""
    package = tmp_path / "vllm_ascend"
    (package / "worker").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "worker" / "__init__.py").touch()
    (package / "worker" / "model_runner_v1.py").write_text(
        f"class {RUNNER}:\n    def {METHOD}(self, kv_cache_config, kv_cache_raw_tensors): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VIEWS, "1")
    finders = list(sys.meta_path)
    try:
        ascend_views.register()
        ascend_views.register()
        assert not any(name.startswith("vllm_ascend") for name in sys.modules)
        assert len(sys.meta_path) == len(finders) + 1
        assert find_spec(MODULE) is not None, "a look at it is no import"
        module = importlib.import_module(MODULE)
        assert getattr(getattr(vars(module)[RUNNER], METHOD), ascend_views.OURS)
        assert sys.meta_path == finders
    finally:
        sys.meta_path[:] = finders
        for name in [name for name in sys.modules if name.startswith("vllm_ascend")]:
            del sys.modules[name]


@pytest.mark.skipif(find_spec("vllm_ascend") is not None, reason="vLLM-Ascend is installed here")
def test_without_vllm_ascend_it_warns_and_lets_vllm_live(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VIEWS, "1")
    finders = list(sys.meta_path)
    ascend_views.register()
    assert "vLLM-Ascend is not installed here" in caplog.text
    assert sys.meta_path == finders


class OtherSignature:
    def _reshape_kv_cache_tensors(self, kv_cache_config: Any, raw: Any, layout: Any) -> None: ...


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({}, f"has no {RUNNER}.{METHOD}"),
        ({RUNNER: type(RUNNER, (), {})}, f"has no {RUNNER}.{METHOD}"),
        ({RUNNER: OtherSignature}, f"{RUNNER}.{METHOD} of this vLLM-Ascend takes (self, kv_cache_config"),
    ],
)
def test_an_unknown_runner_is_left_alone_with_a_warning(
    runner_module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    names: dict[str, Any],
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    del vars(runner_module)[RUNNER]
    vars(runner_module).update(names)
    monkeypatch.setenv(VIEWS, "1")
    before = dict(vars(OtherSignature))
    ascend_views.register()
    assert says in caplog.text
    assert "its own layout stays" in caplog.text
    assert dict(vars(OtherSignature)) == before


def test_vllm_finds_the_plugin() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["kvactors_ascend_views"].partition(":")
    assert getattr(importlib.import_module(module), function) is ascend_views.register
