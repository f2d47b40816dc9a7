"""The slots of a client's staging memory."""

from __future__ import annotations

import pytest

from kvactors.stores.copying import view
from kvactors.stores.mooncake.staging import SLOTS, StagingBuffers


def test_slots_are_whole_pages_that_do_not_overlap() -> None:
    staging = StagingBuffers(SLOTS * 8192 + 5000)
    slots = sorted(slot for _ in range(SLOTS) if (slot := staging.take()) is not None)
    assert staging.slot_bytes == 8192
    assert slots == [staging.address + i * 8192 for i in range(SLOTS)]
    assert staging.address % 4096 == 0
    assert staging.nbytes == SLOTS * 8192
    view(staging.address, staging.nbytes)[:] = 1


def test_none_is_waited_for_and_what_comes_back_is_given_again() -> None:
    staging = StagingBuffers(SLOTS * 4096)
    slots = [staging.take() for _ in range(SLOTS)]
    assert staging.take() is None
    assert slots[1] is not None
    staging.give_back(slots[1])
    assert [staging.take(), staging.take()] == [slots[1], None]


@pytest.mark.parametrize("nbytes", [0, 1, SLOTS * 4096 - 1])
def test_too_little_memory_is_no_slot(nbytes: int) -> None:
    staging = StagingBuffers(nbytes)
    assert (staging.nbytes, staging.take()) == (0, None)
