"""Judges what the engine answered, by the truth and by definitions of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvactors.core.layout import Group
from kvactors.core.reachability import Hit
from kvactors.core.steps import FailedLoad
from kvactors.simulate.local import LocalBlocks
from kvactors.simulate.needs import needed_blocks
from kvactors.simulate.prompts import SimRequest

if TYPE_CHECKING:
    from kvactors.simulate.world import World


class Judge:
    """Of one instance; whatever is wrong breaks the run off."""

    def __init__(self, world: World, blocks: Sequence[LocalBlocks], hash_tokens: int) -> None:
        self.world, self.blocks = world, blocks
        self._hash_tokens = hash_tokens

    def hash_of(self, g: Group, r: SimRequest, index: int) -> bytes:
        k = g.block_tokens // self._hash_tokens
        return r.hashes[(index + 1) * k - 1]

    def loaded(self, r: SimRequest, rank: int, g: Group, layer: int, before: int | None = None) -> None:
        """The layer's blocks hold their bytes; `before`: those that begin before this token, where a load failed."""
        layout, local = self.blocks[rank].layout, self.blocks[rank]
        if not g.layers or not r.hit:
            return
        n = [x.id for x in layout.groups].index(g.id)
        for i, needed in enumerate(r.masks[n]):
            if needed and (before is None or i * g.block_tokens < before):
                block_hash = self.hash_of(g, r, i)
                if local.key(g.id, block_hash) in self.world.pool.damaged:
                    continue
                right = local.holds(g.id, layer, r.tables[rank][g.id][i], block_hash)
                self.must(right, f"I5: layer {layer} of {local.key(g.id, block_hash)} was reported loaded with wrong bytes")

    def blame(self, r: SimRequest) -> None:
        """Without any fault that can hit every request, a load fails only if one of its own keys was touched (I8).

        The caller asks only in a run without aborts, which make loads fail too.
        """
        if self.world.trouble.whole_calls:
            return
        keys = {
            local.key(g.id, self.hash_of(g, r, i))
            for local in self.blocks
            for n, g in enumerate(local.layout.groups)
            if g.layers and n < len(r.masks)
            for i, needed in enumerate(r.masks[n])
            if needed
        }
        self.must(bool(keys & self.world.pool.touched), f"I8: {r.id} failed although nothing happened to its keys")

    def hit(self, r: SimRequest, hit: Hit) -> None:
        self.must(hit.tokens < r.tokens, f"a hit of {hit.tokens} tokens leaves nothing of {r.tokens} to compute")
        for n, g in enumerate(self.blocks[0].layout.groups):
            missing = needed_blocks(g, hit.tokens) - {i for i, m in enumerate(hit.masks[n]) if m}
            self.must(not missing, f"a hit of {hit.tokens} tokens needs blocks {sorted(missing)} of group {g.id}")

    def saved(self, published: set[str]) -> None:
        """Without faults but on single keys, every other block that was computed is published in the end.

        The caller asks only in a run without aborts: what an aborted writer took back stays unsaved for all (I10).
        """
        world = self.world
        harmless = {"event_late", "slow", "key"}
        if set(world.trouble.injected) - harmless or world.rates.space:
            return
        for key in published - world.pool.touched - world.excused:
            o = world.pool.objects.get(key)
            self.must(o is not None and o.committed, f"I8: {key} was computed and saved, nothing failed, and it is not there")

    def failure(self, failure: FailedLoad, rank: int, r: SimRequest) -> None:
        """A failed load names the blocks of all groups of the request that cover the same tokens (I8)."""
        groups = {g.id: g for g in self.blocks[rank].layout.groups}
        tokens = {g: groups[g].block_tokens for g in failure.blocks}
        spans = [(i * tokens[g], (i + 1) * tokens[g]) for g, blocks in failure.blocks.items() for i in blocks]
        first = [(lo, hi) for lo, hi in spans if lo == failure.first_token]
        for n, g in enumerate(self.blocks[rank].layout.groups):
            t = g.block_tokens
            for i, needed in enumerate(r.masks[n]) if g.layers and r.hit else ():
                covers = any(lo < (i + 1) * t and i * t < hi for lo, hi in first[:1])
                if needed and covers:
                    self.must(i in failure.blocks.get(g.id, ()), f"I8: block {i} of group {g.id} is not among the failed ones")

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            self.world.broke(what)
