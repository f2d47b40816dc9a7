"""Which blocks of a request are sent: planned for each group by position, never by count.

Both sides state the index of the first block of each list, so that position `first_index + i` of one list meets the same
position of the other. (Counting from the end writes wrong blocks when a proxy changed the prompt, or decode holds a prefix.)
In this order: a sliding window is clipped to its last blocks, null blocks are dropped, and what decode still wants is matched.
A state group sends one block, its last real one. Source: docs/design/disagg.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvactors.core.layout import GroupKind
from kvactors.core.store import Addresses
from kvactors.disagg.descriptors import BlockPairs
from kvactors.disagg.geometry import GroupGeometry
from kvactors.errors import HandoffBlocksError

NULL_BLOCK = 0
"""The id that stands for no block (vLLM); skipped on both sides."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """A request's blocks of one group on one worker.

    Attributes:
        first_index: position of the first id, counted in blocks of the group from token 0.
        ids: logical block ids (state slots for a state group), one for each position from there.
    """

    first_index: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """A request's blocks on one worker.

    Attributes:
        tokens: prompt tokens from the start that prefill has computed, or that decode wants the hand-off to reach
            (`Boundary.handoff_tokens`).
        groups: in order; none, or all without ids, for an empty pull.
    """

    tokens: int
    groups: tuple[GroupBlocks, ...] = ()

    @property
    def empty(self) -> bool:
        return not any(group.ids for group in self.groups)


def plan_blocks(
    prefill_groups: Sequence[GroupGeometry],
    decode_groups: Sequence[GroupGeometry],
    prefill: RequestBlocks,
    decode: RequestBlocks,
) -> tuple[BlockPairs, ...]:
    """The pairs of blocks to send for each group, in kernel blocks for attention and in slots for states.

    Decode computes positions that begin at or after its `tokens` itself; of all others it needs what its list names. An empty
    pull sends nothing, whatever prefill holds, and is a success.

    Raises:
        HandoffBlocksError: this request cannot be handed over: the numbers of groups differ, prefill computed fewer tokens
            (with a state: another number), it lacks a position that decode wants, or an id is none of its worker's blocks.
    """
    if decode.empty:
        return tuple(_pairs([], []) for _ in prefill_groups)
    if not len(prefill_groups) == len(decode_groups) == len(prefill.groups) == len(decode.groups):
        raise HandoffBlocksError(
            f"prefill sends blocks of {len(prefill.groups)} groups (it has {len(prefill_groups)}) and decode wants blocks of "
            f"{len(decode.groups)} (it has {len(decode_groups)}); both must name all groups"
        )
    if prefill.tokens < decode.tokens:
        raise HandoffBlocksError(
            f"prefill computed {prefill.tokens} tokens and decode wants {decode.tokens}; the two were given different prompts"
        )
    plan: list[BlockPairs] = []
    for i, (p_group, d_group) in enumerate(zip(prefill_groups, decode_groups, strict=True)):
        if d_group.kind is GroupKind.STATE:
            plan.append(_state(i, p_group, d_group, prefill, decode))
        else:
            src, dst = _attention(i, (p_group, d_group), (prefill.groups[i], decode.groups[i]), decode.tokens)
            plan.append(BlockPairs(kernel_ids(src, p_group.kernel_blocks), kernel_ids(dst, d_group.kernel_blocks)))
    return tuple(plan)


def kernel_ids(ids: Addresses, kernel_blocks: int) -> Addresses:
    """Kernel blocks of logical attention blocks: id b becomes b·k … b·k + k - 1. State ids are never expanded."""
    return (ids[:, None] * kernel_blocks + np.arange(kernel_blocks, dtype=np.int64)).reshape(-1)


def _attention(
    index: int, groups: tuple[GroupGeometry, GroupGeometry], lists: tuple[GroupBlocks, GroupBlocks], tokens: int
) -> tuple[Addresses, Addresses]:
    """Logical blocks to send, from (prefill's, decode's) group and list."""
    (p_group, d_group), (prefill, decode) = groups, lists
    dst = _ids("decode", index, d_group, decode)
    positions = decode.first_index + np.arange(len(dst), dtype=np.int64)
    end = -(-tokens // d_group.block_tokens)
    begin = 0 if d_group.window is None else end - (-(-d_group.window // d_group.block_tokens) + 1)
    wanted = (positions >= begin) & (positions < end) & (dst != NULL_BLOCK)
    dst, positions = dst[wanted], positions[wanted]
    held = _ids("prefill", index, p_group, prefill)
    at = positions - prefill.first_index
    there = (at >= 0) & (at < len(held))
    there[there] = held[at[there]] != NULL_BLOCK
    if not there.all():
        missing = positions[~there]
        raise HandoffBlocksError(
            f"group {index}: decode wants block {missing[0]} of the prompt ({len(missing)} such in all) and prefill does not "
            f"hold it; its {len(held)} blocks begin at {prefill.first_index}"
        )
    return held[at], dst


def _state(
    index: int, p_group: GroupGeometry, d_group: GroupGeometry, prefill: RequestBlocks, decode: RequestBlocks
) -> BlockPairs:
    """The last real slot of each side: the states there belong together because both counted the same tokens."""
    dst = _last_real(_ids("decode", index, d_group, decode.groups[index]), d_group.scratch_slots)
    if dst is None:
        return _pairs([], [])
    if prefill.tokens != decode.tokens:
        raise HandoffBlocksError(
            f"group {index}: prefill's state is that after {prefill.tokens} tokens and decode wants the one after "
            f"{decode.tokens}; a state cannot be cut"
        )
    src = _last_real(_ids("prefill", index, p_group, prefill.groups[index]), p_group.scratch_slots)
    if src is None:
        raise HandoffBlocksError(
            f"group {index}: decode wants a state for slot {dst} and prefill holds none among "
            f"{len(prefill.groups[index].ids)} slots"
        )
    return _pairs([src], [dst])


def _last_real(ids: Addresses, scratch_slots: int) -> int | None:
    kept = ids[: max(0, len(ids) - scratch_slots)]
    real = kept[kept != NULL_BLOCK]
    return int(real[-1]) if len(real) else None


def _ids(side: str, index: int, group: GroupGeometry, blocks: GroupBlocks) -> Addresses:
    """The ids of a list that came from another process: one that is out of range would be a write to foreign memory."""
    try:
        ids = np.fromiter(blocks.ids, np.int64, len(blocks.ids))
        least, most = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    except OverflowError:  # it is more than 64 bits long
        ids = np.empty(0, dtype=np.int64)
        least, most = min(blocks.ids), max(blocks.ids)
    if least < 0 or most >= group.blocks:
        raise HandoffBlocksError(
            f"group {index}: {side} names block {least if least < 0 else most} and has {group.blocks} blocks, from 0"
        )
    if not 0 <= blocks.first_index < 1 << 31:
        raise HandoffBlocksError(f"group {index}: {side} says that its list begins at block {blocks.first_index}")
    return ids


def _pairs(src: list[int], dst: list[int]) -> BlockPairs:
    return BlockPairs(np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64))
