"""Puts running requests into steps and shares the local blocks among them.

Requests are served in order of arrival. A request enters with the blocks of its hit and its first chunk; each later step
takes the blocks of one more chunk. When they are not there, the youngest running request gives its blocks back and waits at
the front of the queue; the oldest one always goes on, so every request that fits the pool alone finishes. A request whose
blocks are not free yet is parked without holding any, and is tried again when more blocks are free.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvactors.core.reachability import Hit
from kvactors.replay.blocks import BlockRules, Indices
from kvactors.replay.local_pool import LocalPool
from kvactors.replay.prompt import Prompt


class Scheduler:
    """Admission, growth and preemption. Knows no engine and no time.

    Args:
        rules: which blocks a prompt needs.
        pool: where they are.
        concurrency: most requests in a step.
        chunk_tokens: most tokens a request computes in a step.
    """

    def __init__(self, rules: BlockRules, pool: LocalPool, concurrency: int, chunk_tokens: int) -> None:
        self.rules, self.pool = rules, pool
        self.concurrency, self.chunk_tokens = concurrency, chunk_tokens
        self.running: list[Prompt] = []
        self.waiting: deque[Prompt] = deque()
        self.preempted_in_all = 0

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.concurrency

    def why_never(self, prompt: Prompt) -> str | None:
        """Why a prompt can never run in this pool, with both numbers; None when it can."""
        most = self.rules.most_blocks(prompt.length)
        if sum(most.values()) > self.pool.limit:
            return f"needs {sum(most.values())} local blocks, the pool has {self.pool.limit}"
        for g, n in most.items():
            if n > self.pool.capacity[g]:
                return f"needs {n} local blocks of group {g}, the pool has {self.pool.capacity[g]}"
        return None

    def worth_trying(self, prompt: Prompt) -> bool:
        """False while a parked prompt would find no more free blocks than last time."""
        return prompt.parked_free is None or self.pool.free > prompt.parked_free or not self.running

    def admit(self, prompt: Prompt, hit: Hit) -> bool:
        """Takes the blocks of the hit and of the first chunk after it; False parks the prompt, holding none."""
        start = hit.tokens
        end = min(prompt.length, start + self.chunk_tokens)
        loading = self.rules.loaded(hit) if start else {}
        if not self._take(prompt, start, end, loading):
            prompt.parked_free = self.pool.free
            return False
        prompt.parked_free = None
        prompt.computed, prompt.end = start, end
        prompt.hit, prompt.loading = (hit, loading) if start else (None, {})
        self.running.append(prompt)
        return True

    def grow(self) -> list[Prompt]:
        """Takes the next chunk's blocks for every running prompt, oldest first; returns those it had to preempt."""
        preempted: list[Prompt] = []
        for prompt in list(self.running):
            if prompt not in self.running or prompt.end > prompt.computed:
                continue  # preempted a moment ago, or its step is still to be played
            end = min(prompt.length, prompt.computed + self.chunk_tokens)
            while not self._take(prompt, prompt.computed, end, {}):
                youngest = self.running[-1]
                self._preempt(youngest)
                preempted.append(youngest)
                if youngest is prompt:
                    break
            else:
                prompt.end = end
        return preempted

    def finish(self, prompt: Prompt) -> None:
        """Takes a prompt out of the running ones and its blocks back."""
        self.running.remove(prompt)
        self._free(prompt)

    def restart(self, prompt: Prompt) -> None:
        """As `finish`, but the prompt is tried again before all others."""
        self.finish(prompt)
        self.waiting.appendleft(prompt)

    def _preempt(self, prompt: Prompt) -> None:
        self.preempted_in_all += 1
        self.restart(prompt)

    def _free(self, prompt: Prompt) -> None:
        for g, ids in prompt.clear_blocks().items():
            self.pool.give_back(g, ids)

    def _take(self, prompt: Prompt, start: int, end: int, loading: dict[int, Indices]) -> bool:
        wanted: dict[int, Indices] = {}
        for group in self.rules.groups:
            held = self.rules.held(group, prompt.kept[group.id], start, end)
            load = loading.get(group.id)
            wanted[group.id] = held if load is None or not len(load) else _union(load, held)
        taken = self.pool.take({g: len(indices) for g, indices in wanted.items()})
        if taken is None:
            return False
        for group in self.rules.groups:
            prompt.put_blocks(group.id, wanted[group.id], taken[group.id], -(-end // group.block_tokens))
        return True


def _union(load: Indices, held: Indices) -> Indices:
    return np.concatenate([load, held]) if not len(held) or load[-1] < held[0] else np.union1d(load, held)
