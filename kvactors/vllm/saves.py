"""Which blocks a step completes and is to save. Pure: it knows masks and numbers, no blocks of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvactors.core.layout import GroupKind
from kvactors.core.reachability import Reachability
from kvactors.core.steps import NULL_BLOCK

NULL_ID = 0
"""vLLM's id of the block that stands for "none"."""


def local_ids(block_ids: Sequence[int]) -> list[int]:
    """vLLM's block table, with the engine's mark for placeholders."""
    return [NULL_BLOCK if b == NULL_ID else b for b in block_ids]


@dataclass(frozen=True, slots=True)
class SavePlanner:
    """Attributes:
    retention: vLLM's `prefix_cache_retention_interval`: None = every boundary, 0 = the prompt's end and junctions only.
    """

    reachability: Reachability
    retention: int | None = None

    def aligned(self, tokens: int) -> int:
        """The greatest boundary at or below `tokens`: a hit ends on no other place."""
        boundary = self.reachability.boundary_tokens
        return tokens // boundary * boundary

    def completed(self, done: int, now: int, prompt_tokens: int, junction: int = 0) -> dict[int, list[int]]:
        """Group id -> indices of the blocks that lie in [done, now) and that a later request can reach.

        State groups are not in it: where their blocks lie is not a matter of position, vLLM names them one by one.

        Args:
            done, now: boundaries.
            junction: where a shared prefix is known to end; 0 = nowhere.
        """
        if now <= done:
            return {}
        junctions = (junction,) if junction and not junction % self.reachability.boundary_tokens else ()
        masks = self.reachability.store_mask(now, prompt_tokens, self.retention, junctions)
        found: dict[int, list[int]] = {}
        for group, mask in zip(self.reachability.groups, masks, strict=True):
            if group.kind is GroupKind.STATE:
                continue
            chosen = [i for i in range(done // group.block_tokens, len(mask)) if mask[i]]
            if chosen:
                found[group.id] = chosen
        return found

    def states(
        self, offers: Sequence[tuple[int, int, int]], after: int, until: int, hash_units: int
    ) -> dict[int, dict[int, int]]:
        """Group id -> block index -> block id, of the states that vLLM caches in this step.

        Args:
            offers: (group id, block id, tokens of the boundary).
            after: boundaries up to here came from the store.
            until: the prefill's end; other groups save nothing past it, so a state there could never be hit.
            hash_units: how many fine hashes the request has.
        """
        groups = {g.id: g for g in self.reachability.groups if g.kind is GroupKind.STATE}
        boundary = self.reachability.boundary_tokens
        found: dict[int, dict[int, int]] = {}
        for group_id, block_id, tokens in offers:
            group = groups.get(group_id)
            past = tokens <= after or tokens > until or tokens > hash_units * self.reachability.hash_tokens
            if group is None or block_id == NULL_ID or tokens % boundary or past:
                continue
            found.setdefault(group_id, {})[tokens // group.block_tokens - 1] = block_id
        return found


def sparse_table(blocks: Mapping[int, int]) -> list[int]:
    """A block table with nothing in it but the blocks named by index."""
    table = [NULL_BLOCK] * (max(blocks) + 1)
    for index, block_id in blocks.items():
        table[index] = block_id
    return table
