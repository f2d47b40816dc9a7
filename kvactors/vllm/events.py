"""KV cache events for routers: which blocks this instance put into the store, told once every rank has stored its part.

Each worker notes what it committed in a step (`ConnectorEvents`); vLLM puts the reports of all ranks together. The scheduler
side keeps one `ConnectorEvents`, into which it merges those of every step: ranks may finish a block in different steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored, KVConnectorKVEvents
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvactors.core.layout import KVLayout
from kvactors.vllm.worker import StoredBlock

MAX_INCOMPLETE = 100_000
"""Blocks that wait for further ranks; beyond it the oldest are dropped, and never told. They hold no tokens."""


class RankStored(NamedTuple):
    """A block, and one rank that stored its part of it. vLLM hands it on without looking inside."""

    event: BlockStored
    rank: int


class ConnectorEvents(KVConnectorKVEvents):  # type: ignore[misc]
    """Blocks that ranks stored. Ranks are told apart: one that stores a block twice does not stand for another.

    Args:
        storing_ranks: vLLM's group index -> how many ranks store a part of each block (heads times pipeline stages).
        rank: whose events `add_events` takes; among all workers of the vLLM engine. The scheduler's own adds none.
        limit: see `MAX_INCOMPLETE`.
    """

    def __init__(self, storing_ranks: Mapping[int, int], rank: int = 0, limit: int = MAX_INCOMPLETE) -> None:
        self._storing_ranks = dict(storing_ranks)
        self._rank = rank
        self._limit = limit
        self._workers = 1
        self._reports: list[RankStored] = []
        self._incomplete: OrderedDict[tuple[Any, ...], set[int]] = OrderedDict()
        """(group, block hash) -> ranks that stored it, of reports that were looked at; oldest first"""

    def __bool__(self) -> bool:
        """Whether there is anything to hand on; vLLM takes no notice of a report that is false."""
        return bool(self._reports)

    # -- vLLM's interface ----------------------------------------------------------------------------------------------

    def add_events(self, events: Sequence[BlockStored | RankStored]) -> None:
        """Adds blocks that this rank stored, or what another rank's `get_all_events` gave."""
        self._reports += [e if isinstance(e, RankStored) else RankStored(e, self._rank) for e in events]

    def get_all_events(self) -> list[RankStored]:
        return list(self._reports)

    def aggregate(self) -> ConnectorEvents:
        """Nothing to do: only `pop_stored` can tell what is complete, over several steps."""
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._workers += count

    def get_number_of_workers(self) -> int:
        """How many ranks' reports are in here; what is complete does not depend on it, since a rank may have none."""
        return self._workers

    def clear_events(self) -> None:
        self._reports.clear()
        self._incomplete.clear()
        self._workers = 1

    # -- the scheduler's side ------------------------------------------------------------------------------------------

    def merge_from(self, other: KVConnectorKVEvents) -> None:
        """Takes in what the workers reported for a step."""
        self.add_events(other.get_all_events())

    def pop_stored(self) -> list[BlockStored]:
        """The blocks that became complete, each once; to be called each step."""
        stored: list[BlockStored] = []
        for event, rank in self._reports:
            block = (event.group_idx, *event.block_hashes)
            ranks = self._incomplete.setdefault(block, set())
            ranks.add(rank)
            if len(ranks) >= self._storing_ranks[event.group_idx]:
                del self._incomplete[block]
                stored.append(event)
        self._reports.clear()
        while len(self._incomplete) > self._limit:
            self._incomplete.popitem(last=False)
        return stored


def block_stored(
    *,
    hashes: Sequence[bytes],
    index: int,
    token_ids: Sequence[int],
    block_tokens: int,
    hash_tokens: int,
    group_id: int,
    spec_kind: str,
    window: int | None,
    lora_name: str | None,
) -> BlockStored:
    """The event for one block of a group, with the hashes by which vLLM itself tells of its blocks.

    Args:
        hashes: fine chained hashes of the request, one per `hash_tokens` tokens from token 0.
        index: which block of `block_tokens` tokens; its hash is the last fine hash in it.
        token_ids: the request's tokens from token 0. If they do not reach the end of the block, the event has none.
        group_id: vLLM's index of the KV cache group.
        spec_kind: vLLM's name of the group's kind, such as "full_attention".
        window: tokens of a sliding window; None where there is none.
    """
    fine = block_tokens // hash_tokens
    tokens = [int(t) for t in token_ids[index * block_tokens : (index + 1) * block_tokens]]
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(hashes[(index + 1) * fine - 1])],
        parent_block_hash=maybe_convert_block_hash(hashes[index * fine - 1]) if index else None,
        token_ids=tokens if len(tokens) == block_tokens else [],
        block_size=block_tokens,
        lora_id=None,
        medium=MEDIUM_STORAGE,
        lora_name=lora_name,
        group_idx=group_id,
        kv_cache_spec_kind=spec_kind,
        kv_cache_spec_sliding_window=window,
        locality="REMOTE",
    )


class EventTeller:
    """A worker's blocks as vLLM's events, with what vLLM says of their groups."""

    def __init__(self, config: Any, layout: KVLayout, hash_tokens: int, rank: int) -> None:
        self._layout, self._hash_tokens, self._rank = layout, hash_tokens, rank
        specs = {g.id: config.kv_cache_groups[g.id].kv_cache_spec for g in layout.groups}
        self._kinds = {g: str(get_kv_cache_spec_kind(spec).value) for g, spec in specs.items()}
        self._windows = {g: get_kv_cache_spec_sliding_window(spec) for g, spec in specs.items()}

    def events(self, stored: Iterable[StoredBlock]) -> ConnectorEvents:
        """One report of this rank."""
        report = ConnectorEvents({}, self._rank)
        report.add_events(
            [
                block_stored(
                    hashes=request.event.hashes,
                    index=index,
                    token_ids=request.event.token_ids,
                    block_tokens=self._layout.group(group_id).block_tokens,
                    hash_tokens=self._hash_tokens,
                    group_id=group_id,
                    spec_kind=self._kinds[group_id],
                    window=self._windows[group_id],
                    lora_name=request.event.lora_name,
                )
                for request, group_id, index in stored
                if request.event is not None
            ]
        )
        return report
