"""Whatever the placement in one buffer: `cache_views` makes what vLLM's `allocate_kv_cache` makes, and refuses the same."""

from __future__ import annotations

import json
from pathlib import Path

from tests.vllm.engine import run_alone

LAYOUTS = {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"}


def test_both_make_the_same_views_and_refuse_the_same_placements(tmp_path: Path) -> None:
    run_alone("tests.vllm.random_placements", tmp_path / "times.json")
    times = json.loads((tmp_path / "times.json").read_text())
    assert all(times.get(what, 0) >= 30 for what in LAYOUTS | {"refused", "met", "split", "padded", "several tensors"}), times
