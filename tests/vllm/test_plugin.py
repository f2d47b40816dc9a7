"""vLLM finds the plugin by its entry point and calls it, and lives on where the choice cannot apply."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.engine import ENVIRONMENT, ROOT


@pytest.mark.skipif(find_spec("vllm_ascend") is not None, reason="vLLM-Ascend is installed here")
def test_vllm_calls_the_plugin_and_lives_without_vllm_ascend(tmp_path: Path) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "kvactors_plugins-0.dist-info"  # as installed now, whenever this environment was set up
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvactors-plugins\nVersion: 0\n")
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items()) for group, names in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    ran = subprocess.run(
        [sys.executable, "-c", "from vllm.plugins import load_general_plugins; load_general_plugins(); print('alive')"],
        cwd=ROOT,
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            "VLLM_PLUGINS": "kvactors_ascend_views",
            "KVACTORS_ASCEND_VIEWS": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    assert "alive" in ran.stdout
    assert "KVACTORS_ASCEND_VIEWS=1 has no effect: vLLM-Ascend is not installed here" in ran.stderr
