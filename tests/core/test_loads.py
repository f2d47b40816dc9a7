"""What a read knows of the sessions that it is made under: the oldest of them, and the earliest life of the master."""

from __future__ import annotations

import pytest

from kvactors.core.config import EngineConfig
from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.loads import StepLoads
from kvactors.core.ranges import group_ranges
from kvactors.core.sessions import GetSession

LAYERS = 2


def loads_of(*keys: str) -> StepLoads:
    entries = [CacheEntry("k", 8)]
    layout = KVLayout("m", [Group(0, GroupKind.FULL, 16, dict.fromkeys(range(LAYERS), entries))])
    bases = {(0, layer, "k"): 1000 * (layer + 1) for layer in range(LAYERS)}
    loads = StepLoads(group_ranges(layout, 0, bases, EngineConfig()))
    for block, key in enumerate(keys):
        loads.add("r", block, key, block)
    loads.seal()
    return loads


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["old first", "new first"])
def test_a_call_is_as_old_as_its_oldest_session_until_they_are_renewed(order: tuple[int, int]) -> None:
    """I11: the pool refuses a read of which any session is of an earlier life of the master."""
    loads = loads_of("old", "new")
    sessions = [GetSession("old", opened_at=5.0, epoch=1), GetSession("new", opened_at=7.0, epoch=2)]
    for i in order:
        loads.note_opened(sessions[i])
    [first] = loads.start(0, set())
    assert (first.part.oldest_s, first.part.epoch) == (5.0, 1)
    loads.renewed(first.part, 9.0)
    [second] = loads.start(1, set())
    assert second.part.oldest_s == 9.0, "or each layer would renew them once more"
