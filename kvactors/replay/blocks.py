"""Which blocks of a prompt a worker holds, computes, saves and loads.

Groups that keep everything (full attention, MLA, compressed, indexer, chunked local) hold a block for every started block
of the prompt. Window and state groups hold only the blocks that the masks name: what the store mask keeps, and what the hit
loads; the others are null placeholders, as in a worker that drops them once the window or the state has moved on. A state
group has a state at every boundary B of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvactors.core.layout import Group, GroupKind, KVLayout
from kvactors.core.reachability import Hit, Reachability

Indices = npt.NDArray[np.int64]

_SPARSE = (GroupKind.SLIDING_WINDOW, GroupKind.STATE)


class BlockRules:
    """Block indices by group, for prompts of one layout.

    Args:
        layout: its groups.
        hash_tokens: the fine hash unit, tokens.
        retention: see `Reachability.store_mask`; None = dense.
    """

    def __init__(self, layout: KVLayout, hash_tokens: int, retention: int | None = None) -> None:
        self.layout = layout
        self.groups: tuple[Group, ...] = tuple(layout.groups)
        self.hash_tokens = hash_tokens
        self.retention = retention
        self.reach = Reachability(self.groups, hash_tokens=hash_tokens)
        self.boundary_tokens = self.reach.boundary_tokens
        self._looked_up: dict[int, tuple[int, ...]] = {}

    def aligned(self, tokens: int) -> int:
        return tokens // self.boundary_tokens * self.boundary_tokens

    def kept(self, prompt_tokens: int) -> dict[int, Indices]:
        """Per group, the indices of the blocks to save of a whole prompt: complete, aligned, by the store mask."""
        end = self.aligned(prompt_tokens)
        if end == 0:
            return {g.id: np.empty(0, np.int64) for g in self.groups}
        masks = self.reach.store_mask(end, prompt_tokens=prompt_tokens, retention=self.retention)
        out = {}
        for group, mask in zip(self.groups, masks, strict=True):
            kept = np.flatnonzero(np.asarray(mask, dtype=bool))
            if group.kind is GroupKind.STATE:
                kept = kept[(kept + 1) * group.block_tokens % self.boundary_tokens == 0]
            out[group.id] = kept
        return out

    def completed(self, group: Group, kept: Indices, start: int, end: int) -> Indices:
        """Indices whose bytes become complete while tokens [start, end) are computed, and which the worker holds."""
        first, last = start // group.block_tokens, end // group.block_tokens
        if group.kind in _SPARSE:
            return kept[np.searchsorted(kept, first) : np.searchsorted(kept, last)]
        return np.arange(first, last)

    def saved(self, group: Group, kept: Indices, start: int, end: int) -> Indices:
        """Of those, the ones to save."""
        return kept[np.searchsorted(kept, start // group.block_tokens) : np.searchsorted(kept, end // group.block_tokens)]

    def held(self, group: Group, kept: Indices, start: int, end: int) -> Indices:
        """Indices that need a local block from `start` on until tokens up to `end` are computed; `start` ends a block,
        or its block is held already."""
        if group.kind in _SPARSE:
            return self.completed(group, kept, start, end)
        return np.arange(-(-start // group.block_tokens), -(-end // group.block_tokens))

    def most_blocks(self, prompt_tokens: int) -> dict[int, int]:
        """The most local blocks of each group that a prompt can ever hold, whatever its hit."""
        kept = self.kept(prompt_tokens)
        out = {}
        for group in self.groups:
            n = len(self.held(group, kept[group.id], 0, prompt_tokens))
            if self.retention is not None and group.kind is GroupKind.SLIDING_WINDOW:
                assert group.window is not None
                n += -(-(group.window - 1) // group.block_tokens) + 1
            elif self.retention is not None and group.kind is GroupKind.STATE:
                n += 1
            out[group.id] = min(n, -(-prompt_tokens // group.block_tokens)) if group.kind in _SPARSE else n
        return out

    def enough_blocks(self, prompt_tokens: int) -> dict[int, int]:
        """Per group, no fewer than the `most_blocks` of any prompt up to this length.

        Under retention a shorter prompt may hold more: its own end is kept beside the regular ones, and may coincide with
        one of them in the longer prompt.
        """
        if self.retention is None:
            return self.most_blocks(prompt_tokens)
        end = self.aligned(prompt_tokens)
        masks = self.reach.store_mask(end, retention=self.retention)
        out = {}
        for group, mask in zip(self.groups, masks, strict=True):
            started = -(-prompt_tokens // group.block_tokens)
            if group.kind is GroupKind.SLIDING_WINDOW:
                assert group.window is not None
                run = -(-(group.window - 1) // group.block_tokens) + 1
            elif group.kind is GroupKind.STATE:
                run = 1
            else:
                out[group.id] = started
                continue
            out[group.id] = min(started, sum(mask) + 2 * run)  # the prompt's end, and the end of a hit
        return out

    def looked_up(self, prompt_tokens: int) -> tuple[int, ...]:
        """Per group, how many of the prompt's complete blocks a lookup asks for."""
        end = self.aligned(prompt_tokens - 1)
        found = self._looked_up.get(end)
        if found is None:
            masks = self.reach.lookup_mask(end) if end else tuple(() for _ in self.groups)
            found = tuple(sum(mask) for mask in masks)
            if len(self._looked_up) > 1024:
                self._looked_up.clear()
            self._looked_up[end] = found
        return found

    def loaded(self, hit: Hit) -> dict[int, Indices]:
        """Per group, the indices that a hit loads."""
        return {
            group.id: np.flatnonzero(np.asarray(mask, dtype=bool)) for group, mask in zip(self.groups, hit.masks, strict=True)
        }

    def hashes_of(self, group: Group, indices: Indices, fine: Sequence[bytes]) -> list[bytes]:
        """The hash of each block: the last fine hash that it spans."""
        k = group.block_tokens // self.hash_tokens
        return [fine[i] for i in ((indices + 1) * k - 1).tolist()]
