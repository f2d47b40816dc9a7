"""One debug line for each layer of a hybrid or a pure attention model, which begins with the prefix and reads as text."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from kvactors.memory import allocate_kv_cache, cache_views
from tests.memory.model import raw
from tests.memory.runner import (
    attention_spec,
    by_layer,
    placed,
    placed_attention_spec,
    placed_state_spec,
    state_spec,
)

PREFIX = "[non-contiguous-kv-cache] "
STATES = state_spec(((3, 4), (2, 2, 3)), (torch.bfloat16, torch.float32), 128)

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """What was logged, as the lines that a handler writes."""
    caplog.set_level(logging.DEBUG, "kvactors.memory")
    write = logging.Formatter()
    return lambda: [write.format(record) for record in caplog.records if record.name == "kvactors.memory"]


def test_a_hybrid_model(lines: Lines) -> None:
    """Padded pages of 128 bytes: the strides are of 64 elements of 2 bytes and 32 of 4, and nothing is contiguous."""
    config = by_layer(5, [{"a.0": attention_spec(page=128)}, {"s.1": STATES}], shared=[("a.0", "s.1")])
    cache_views(config, allocate_kv_cache(config))
    assert lines() == [
        f"{PREFIX}attention layer=a.0 mode=hybrid shape=[(5, 2, 4, 3), (5, 2, 4, 3)] "
        "stride=[(64, 12, 3, 1), (64, 12, 3, 1)] contiguous=[False, False]",
        f"{PREFIX}state layer=s.1 page_bytes=128 storage_offset=[0, 6] shape=[(5, 3, 4), (5, 2, 2, 3)] "
        "stride=[(64, 4, 1), (32, 6, 3, 1)] contiguous=[False, False]",
    ]


def test_a_gqa_model(lines: Lines) -> None:
    """One tensor for both, and one each: only the latter are contiguous."""
    config = by_layer(5, [{"a.0": attention_spec(), "a.1": attention_spec()}])
    cache_views(config, {"a.0": raw(480), "a.1": (raw(240), raw(240))})
    assert lines() == [
        f"{PREFIX}attention layer=a.0 mode=gqa shape=[(5, 2, 4, 3), (5, 2, 4, 3)] "
        "stride=[(48, 12, 3, 1), (48, 12, 3, 1)] contiguous=[False, False]",
        f"{PREFIX}attention layer=a.1 mode=gqa shape=[(5, 2, 4, 3), (5, 2, 4, 3)] "
        "stride=[(24, 12, 3, 1), (24, 12, 3, 1)] contiguous=[True, True]",
    ]


@pytest.mark.parametrize("hybrid", [True, False])
def test_layers_in_one_buffer(lines: Lines, hybrid: bool) -> None:
    """One view for K and V of a layer, one for all its states."""
    groups = [{"a.0": placed_attention_spec(), "a.1": placed_attention_spec()}]
    places = {"a.0": (0, 256), "a.1": (128, 256)}
    if hybrid:
        groups.append({"s.2": placed_state_spec(104)})
        places["s.2"] = (0, 256)
    config = placed(5, 5 * 256, groups, places)
    cache_views(config, allocate_kv_cache(config))
    mode = "hybrid" if hybrid else "gqa"
    expected = [
        f"{PREFIX}attention layer={name} mode={mode} shape=[(5, 2, 4, 6)] stride=[(128, 24, 6, 1)] contiguous=[False]"
        for name in ("a.0", "a.1")
    ]
    if hybrid:
        expected.append(
            f"{PREFIX}state layer=s.2 page_bytes=256 storage_offset=[0] shape=[(5, 1, 1, 104)] "
            "stride=[(256, 104, 104, 1)] contiguous=[False]"
        )
    assert lines() == expected


def test_nothing_is_said_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvactors.memory")
    config = by_layer(5, [{"s.1": STATES}])
    cache_views(config, allocate_kv_cache(config))
    assert caplog.records == []
