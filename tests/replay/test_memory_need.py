"""The warning before a replay that needs more memory than there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvactors.layouts import FAMILIES
from kvactors.replay.live import run_live
from kvactors.replay.memory_need import available_bytes, memory_warning, pool_bytes
from kvactors.replay.plan import Plan, ReplayOptions, plan_replay

SAMPLE = Path(__file__).parents[2] / "examples" / "sample_trace.jsonl"


def plan_of(layout: str = "seed-example", **options: Any) -> Plan:
    return plan_replay(ReplayOptions(str(SAMPLE), FAMILIES[layout].build(), requests=20, **options))


def test_what_is_foretold_is_what_the_store_holds_at_the_end() -> None:
    plan = plan_of()
    layout = plan.options.layout
    blocks = run_live(plan).report.blocks
    saved = {g.id: sum(part.saved for name, part in blocks.items() if name == str(g.id)) for g in layout.groups}
    assert sum(saved.values()) > 0
    assert pool_bytes(plan) == sum(layout.object_bytes(g) * n for g, n in saved.items())


@pytest.mark.parametrize(
    ("more", "options", "warns"),
    [(-1, {}, True), (0, {}, False), (-1, {"capacity": 1 << 30}, False), (None, {}, False)],
)
def test_a_warning_names_what_is_needed_and_what_helps(more: int | None, options: dict[str, Any], warns: bool) -> None:
    plan = plan_of(**options)
    warning = memory_warning(plan, None if more is None else pool_bytes(plan) + more)
    assert (warning is not None) is warns
    assert warning is None or ("--scale" in warning and "--capacity" in warning)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("MemTotal: 9 kB\nMemAvailable:   1024 kB\n", 1 << 20), ("MemAvailable: much\n", None), ("", None)]
)
def test_what_the_machine_has_is_read_or_asked_of_the_system(tmp_path: Path, text: str, nbytes: int | None) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(text)
    found = available_bytes(meminfo)
    assert found == nbytes if nbytes is not None else found is None or found > 0
