"""Which of vLLM's blocks of a request take part in a hand-off, read from its block tables. Pure.

vLLM's tables begin at token 0 and have block 0 where there is none. What is given to the hand-off says where each list begins,
so that the tables of both instances meet by position; of a state group it is one block, the last real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvactors.core.layout import GroupKind
from kvactors.disagg.blocks import NULL_BLOCK, GroupBlocks, RequestBlocks
from kvactors.vllm.layouts import group_kind
from kvactors.vllm.support import inner_specs


@dataclass(frozen=True, slots=True)
class HandoffGroup:
    """One of vLLM's cache groups that take part.

    Attributes:
        number: the group's number in vLLM, which is its place in block tables.
        window, chunk_tokens: how far back its attention reads; None = to the start.
        scratch_slots: slots at the end of a state group's table that hold no state to keep (speculative decoding).
    """

    number: int
    kind: GroupKind
    block_tokens: int
    window: int | None = None
    chunk_tokens: int | None = None
    scratch_slots: int = 0

    def skipped_blocks(self, computed: int) -> int:
        """Blocks at the start of a table that vLLM gives back once so many tokens are computed: nothing later reads them."""
        if self.window is not None:
            return max(0, computed - self.window + 1) // self.block_tokens
        if self.chunk_tokens is not None:
            return computed // self.chunk_tokens * self.chunk_tokens // self.block_tokens
        return 0


def handoff_groups(config: Any) -> list[HandoffGroup]:
    """The groups of a `KVCacheConfig` that take part, in order.

    Raises:
        LayoutError: a group of an unknown kind.
    """
    found: list[HandoffGroup] = []
    for number in config.transfer_group_ids:
        spec = config.kv_cache_groups[number].kv_cache_spec
        kind, inner = group_kind(spec), inner_specs(spec)[0]
        found.append(
            HandoffGroup(
                number,
                kind,
                int(spec.block_size),
                window=int(inner.sliding_window) if kind is GroupKind.SLIDING_WINDOW else None,
                chunk_tokens=int(inner.attention_chunk_size) if kind is GroupKind.CHUNKED_LOCAL else None,
                scratch_slots=int(getattr(inner, "num_speculative_blocks", 0)) if kind is GroupKind.STATE else 0,
            )
        )
    return found


def loses_a_block(groups: Sequence[HandoffGroup], tokens: int) -> bool:
    """Whether a prompt of so many tokens ends where a window, or a chunk, leaves a block.

    With all tokens computed vLLM has given that block back on both sides, and yet decode computes the last token once more,
    which reads it. Then it is decode that computes that token first, as with a recurrent state.
    """
    return tokens > 0 and any(g.skipped_blocks(tokens) > g.skipped_blocks(tokens - 1) for g in groups)


def prefill_blocks(groups: Sequence[HandoffGroup], tables: Sequence[Sequence[int]], tokens: int) -> RequestBlocks:
    """What prefill holds of a request of which it computed so many tokens."""
    return RequestBlocks(tokens, tuple(_blocks(groups, tables, 0, tokens)))


def decode_blocks(
    groups: Sequence[HandoffGroup], tables: Sequence[Sequence[int]], local_tokens: int, tokens: int
) -> RequestBlocks:
    """What decode wants of a request.

    Args:
        local_tokens: it has these itself.
        tokens: how far the hand-off is to reach.
    """
    return RequestBlocks(tokens, tuple(_blocks(groups, tables, local_tokens, tokens)))


def real_ids(blocks: RequestBlocks) -> set[int]:
    """All blocks that are named."""
    return {i for group in blocks.groups for i in group.ids} - {NULL_BLOCK}


def _blocks(groups: Sequence[HandoffGroup], tables: Sequence[Sequence[int]], begin: int, end: int) -> Iterator[GroupBlocks]:
    for group in groups:
        table = tables[group.number]
        if group.kind is GroupKind.STATE:
            kept = table[: max(0, len(table) - group.scratch_slots)]
            first = next((i for i in reversed(range(len(kept))) if kept[i] != NULL_BLOCK), len(kept))
            yield GroupBlocks(first, tuple(int(i) for i in kept[first : first + 1]))
            continue
        first, past = begin // group.block_tokens, -(-end // group.block_tokens)
        first = next((i for i in range(first, min(past, len(table))) if table[i] != NULL_BLOCK), first)
        yield GroupBlocks(first, tuple(int(i) for i in table[first:past]))
