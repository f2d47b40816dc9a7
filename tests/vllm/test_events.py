"""KV cache events: a block is told once, when every rank that stores a part of it has; routers can read it."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

# It imports all that is needed of vLLM, and keeps quiet about the warnings.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM is not importable", exc_type=ImportError)

from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.kv_cache_interface import KVCacheSpecKind
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvactors.vllm.events import ConnectorEvents, RankStored, block_stored

FINE = [bytes([i]) * 32 for i in range(8)]
TOKENS = list(range(1000, 1128))


@pytest.fixture(autouse=True)
def bytes_for_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tells integers, unless it is told otherwise."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def stored(index: int = 0, **changed: Any) -> BlockStored:
    arguments: dict[str, Any] = {
        "hashes": FINE,
        "index": index,
        "token_ids": TOKENS,
        "block_tokens": 16,
        "hash_tokens": 16,
        "group_id": 0,
        "spec_kind": KVCacheSpecKind.FULL_ATTENTION.value,
        "window": None,
        "lora_name": None,
    }
    return block_stored(**{**arguments, **changed})


def of_rank(rank: int, *events: BlockStored, ranks: int = 2) -> ConnectorEvents:
    mine = ConnectorEvents({0: ranks, 1: 1}, rank)
    mine.add_events(list(events))
    return mine


# -- when a block is told ----------------------------------------------------------------------------------------------


def test_a_block_is_told_once_when_its_last_rank_stored_it_in_whichever_step() -> None:
    scheduler = ConnectorEvents({0: 2, 1: 1})
    scheduler.merge_from(of_rank(0, stored(0), stored(1)))
    assert scheduler.pop_stored() == []
    scheduler.merge_from(of_rank(1, stored(1)))
    assert scheduler.pop_stored() == [stored(1)]
    assert scheduler.pop_stored() == []
    scheduler.merge_from(of_rank(1, stored(0)))
    assert scheduler.pop_stored() == [stored(0)]


def test_groups_have_their_own_number_of_ranks_and_their_own_blocks() -> None:
    scheduler = ConnectorEvents({0: 2, 1: 1})
    scheduler.merge_from(of_rank(0, stored(0), stored(0, group_id=1)))
    assert scheduler.pop_stored() == [stored(0, group_id=1)]


def test_a_rank_that_stores_a_block_again_does_not_stand_for_another() -> None:
    scheduler = ConnectorEvents({0: 2, 1: 1})
    for _ in range(3):
        scheduler.merge_from(of_rank(0, stored(0)))
        assert scheduler.pop_stored() == []
    scheduler.merge_from(of_rank(1, stored(0)))
    assert scheduler.pop_stored() == [stored(0)]


def test_what_never_becomes_complete_is_dropped_oldest_first() -> None:
    scheduler = ConnectorEvents({0: 2}, limit=2)
    scheduler.merge_from(of_rank(0, stored(0), stored(1), stored(2)))
    assert scheduler.pop_stored() == []
    scheduler.merge_from(of_rank(1, stored(1), stored(2)))
    assert scheduler.pop_stored() == [stored(1), stored(2)]
    scheduler.merge_from(of_rank(1, stored(0)))
    assert scheduler.pop_stored() == [], "its first report was dropped"


def test_clear_forgets_everything() -> None:
    scheduler = ConnectorEvents({0: 2})
    scheduler.merge_from(of_rank(0, stored(0), stored(1)))
    scheduler.pop_stored()
    scheduler.merge_from(of_rank(1, stored(1)))
    scheduler.clear_events()
    assert (scheduler.pop_stored(), bool(scheduler)) == ([], False)
    scheduler.merge_from(of_rank(1, stored(0)))
    assert scheduler.pop_stored() == []


# -- through vLLM ------------------------------------------------------------------------------------------------------


def output(events: ConnectorEvents | None) -> ModelRunnerOutput:
    sent = pickle.loads(pickle.dumps(events))
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(kv_cache_events=sent))


@pytest.mark.parametrize("silent", [None, ConnectorEvents({0: 3, 1: 1}, 0)], ids=["none", "empty"])
def test_vllm_joins_the_ranks_of_a_step_whoever_is_first(silent: ConnectorEvents | None) -> None:
    scheduler = ConnectorEvents({0: 3, 1: 1})
    steps: list[list[ConnectorEvents | None]] = [
        [of_rank(0, stored(0), stored(1)), of_rank(1, stored(0)), of_rank(2, stored(0))],
        [silent, of_rank(1, stored(1)), of_rank(2, stored(2), stored(1))],
        [silent, silent, silent],
    ]
    told = []
    for ranks in steps:
        joined = KVOutputAggregator(3).aggregate([output(events) for events in ranks])
        assert joined is not None
        assert joined.kv_connector_output is not None
        events = joined.kv_connector_output.kv_cache_events
        if events is not None:
            scheduler.merge_from(events)
        told.append(scheduler.pop_stored())
    assert told == [[stored(0)], [stored(1)], []]


def test_the_interface_of_vllm_hands_on_who_stored_what() -> None:
    events = of_rank(4, stored(0))
    events.add_events(of_rank(5, stored(0)).get_all_events())
    events.increment_workers()
    assert events.aggregate() is events
    assert events.get_all_events() == [RankStored(stored(0), 4), RankStored(stored(0), 5)]
    assert events.get_number_of_workers() == 2
    assert events.pop_stored() == [stored(0)]


# -- what is told ------------------------------------------------------------------------------------------------------


def test_the_first_block_has_no_parent_and_every_block_its_own_tokens() -> None:
    first, second = stored(0), stored(1, lora_name="adapter")
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([FINE[0]], None, TOKENS[:16])
    assert (second.block_hashes, second.parent_block_hash, second.token_ids) == ([FINE[1]], FINE[0], TOKENS[16:32])
    assert (second.block_size, second.medium, second.locality, second.lora_name) == (16, "STORAGE", "REMOTE", "adapter")


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_block_of_several_fine_hashes_has_the_hash_that_vllm_gives_it(index: int) -> None:
    event = stored(index, block_tokens=32)
    coarse = list(BlockHashListWithBlockSize(FINE, 16, 32))
    assert event.block_hashes == [coarse[index]]
    assert event.parent_block_hash == (coarse[index - 1] if index else None)
    assert event.token_ids == TOKENS[32 * index : 32 * index + 32]


def test_tokens_are_left_out_where_they_do_not_reach_the_end_of_the_block() -> None:
    assert stored(2, token_ids=TOKENS[:48]) == stored(2)
    assert stored(2, token_ids=TOKENS[:47]).token_ids == []
    assert stored(2, token_ids=[]).block_hashes == [FINE[2]]


def test_hashes_are_integers_where_vllm_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    event = stored(1)
    assert event.block_hashes == [int.from_bytes(FINE[1][-8:], "big")]
    assert event.parent_block_hash == int.from_bytes(FINE[0][-8:], "big")


@pytest.mark.parametrize("integers", ["0", "1"])
def test_a_batch_is_read_as_it_was_written(integers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", integers)
    window = stored(1, spec_kind=KVCacheSpecKind.SLIDING_WINDOW.value, window=4096, group_id=1, lora_name="adapter")
    batch = KVEventBatch(ts=1.5, events=[stored(0), window])
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    assert read.events == batch.events
    assert (read.events[1].kv_cache_spec_kind, read.events[1].kv_cache_spec_sliding_window) == ("sliding_window", 4096)
