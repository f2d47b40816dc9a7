"""Plays one step of a batch of prompts through the engine, layer by layer, and checks every byte that was loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvactors.core.answers import said
from kvactors.core.clock import Clock
from kvactors.core.observe import Observer, Span
from kvactors.core.steps import FailedLoad, GroupBlocks, StepRequest
from kvactors.replay.blocks import BlockRules, Indices
from kvactors.replay.compute import Compute
from kvactors.replay.content import Ids, Words, block_seeds
from kvactors.replay.local_pool import LayerContent, LocalPool
from kvactors.replay.prompt import Prompt
from kvactors.replay.tally import Tally

MOST_IDS = 8
"""Requests that the span of a step names."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Local blocks of one group and the seeds of what they must hold."""

    ids: Ids
    seeds: Words

    def __len__(self) -> int:
        return len(self.ids)


_NO_BLOCKS = _Blocks(np.empty(0, np.int64), np.empty(0, np.uint64))


@dataclass(frozen=True, slots=True)
class _Part:
    """What one prompt does in a step: per group, the blocks to compare after their load and the blocks to compute."""

    prompt: Prompt
    request: StepRequest
    check: Mapping[int, _Blocks]
    fill: Mapping[int, _Blocks]


@dataclass(slots=True)
class StepResult:
    """How a step ended. `problems`: requests that the engine left out, and why."""

    failures: Mapping[str, FailedLoad] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


class StepPlayer:
    """Drives steps.

    Args:
        engine: a started `kvactors.engine.Engine`.
        pool: the local blocks.
        rules: which blocks a prompt needs.
        compute: where filling and comparing run.
        clock: for the times in the report.
        tally: counts bytes, mismatches and times.
        observer: takes a span for each compute window and step, or None.
        settle: wait for the commits of a step before it ends.
    """

    def __init__(
        self,
        engine: Any,
        pool: LocalPool,
        rules: BlockRules,
        compute: Compute,
        clock: Clock,
        tally: Tally,
        observer: Observer | None = None,
        *,
        settle: bool = True,
    ) -> None:
        self._engine, self._pool, self._rules = engine, pool, rules
        self._compute, self._clock, self._tally = compute, clock, tally
        self._observer, self._settle = observer, settle
        layout = pool.layout
        self._layers = sorted({layer for g in layout.groups for layer in g.layers})
        self._stage_layer = layout.stage_layer
        self._steps = 0

    async def play(self, prompts: Sequence[Prompt]) -> StepResult:
        """Computes each prompt's tokens from `computed` to `end`, loading its hit before and saving what becomes complete.

        `computed` is not moved here. After the return, every transfer of the step has ended.
        """
        parts = [self._part(p) for p in prompts]
        clock, tally = self._clock, self._tally
        tally.steps += 1
        self._steps += 1
        began = clock.now()
        step = self._engine.begin_step([part.request for part in parts], event=None)
        try:
            live, failed = parts, frozenset[str]()
            check, fill = _merged(live, self._rules)
            for model_layer in self._layers:
                layer = self._stage_layer(model_layer)
                t = clock.now()
                now_failed = await step.wait_layer(layer)
                tally.exposed_load_s += clock.now() - t
                if now_failed and now_failed != failed:
                    failed = frozenset(now_failed)
                    live = [part for part in parts if part.prompt.id not in failed]
                    check, fill = _merged(live, self._rules)
                await self._run_layer(model_layer, check, fill, live)
                step.layer_ready(layer)
                t = clock.now()
                await step.checkpoint(layer)
                tally.exposed_save_s += clock.now() - t
            t = clock.now()
            await step.end()
            tally.exposed_save_s += clock.now() - t
            if self._settle:
                await step.settled()
        except BaseException as error:
            await step.abort(f"the replay stopped in this step: {said(error)}")
            raise
        if self._observer is not None:
            self._observer.span(Span("harness", f"step {self._steps}", began, clock.now(), self._span_args(prompts)))
        return StepResult(dict(step.failures), dict(step.problems))

    async def _run_layer(
        self, layer: int, check: Mapping[int, _Blocks], fill: Mapping[int, _Blocks], live: Sequence[_Part]
    ) -> None:
        contents = self._pool.layer(layer)
        to_check = sum(len(check[c.group_id]) * c.nbytes for c in contents)
        to_fill = sum(len(fill[c.group_id]) for c in contents)
        if not to_check and not to_fill and not self._compute.every_layer:
            return
        done = await self._compute.run(lambda: _work(contents, check, fill))
        self._tally.compute_s += done.end_s - done.start_s
        self._tally.verified_bytes += to_check
        if done.mismatched_bytes:
            self._tally.mismatched_bytes += done.mismatched_bytes
            names = ", ".join(part.prompt.id for part in live if part.check)
            self._tally.event(f"layer {layer}: {done.mismatched_bytes} loaded bytes are wrong (requests {names})")
        if self._observer is not None:
            args = {"step": self._steps, "checked_bytes": to_check, "computed_blocks": to_fill}
            self._observer.span(Span("compute", f"layer {layer}", done.start_s, done.end_s, args))

    def _span_args(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What a step's span says, with the ids of its first requests and how many more there are."""
        args = {"requests": len(prompts), "step": self._steps, "ids": ",".join(p.id for p in prompts[:MOST_IDS])}
        return args | {"more": len(prompts) - MOST_IDS} if len(prompts) > MOST_IDS else args

    def _part(self, prompt: Prompt) -> _Part:
        groups: dict[int, GroupBlocks] = {}
        check: dict[int, _Blocks] = {}
        fill: dict[int, _Blocks] = {}
        start, end = prompt.computed, prompt.end
        for group in self._rules.groups:
            g, kept, table = group.id, prompt.kept[group.id], prompt.tables[group.id]
            load: Indices = prompt.loading.get(g, _NO_BLOCKS.ids)
            made = self._rules.completed(group, kept, start, end)
            save = self._rules.saved(group, kept, start, end)
            if len(load):
                check[g] = self._blocks(prompt, g, load)
            if len(made):
                fill[g] = self._blocks(prompt, g, made)
            groups[g] = GroupBlocks(list(table), load.tolist(), save.tolist())
        return _Part(prompt, StepRequest(prompt.id, prompt.hashes, groups, prompt.restarted_at), check, fill)

    def _blocks(self, prompt: Prompt, group_id: int, indices: Indices) -> _Blocks:
        table = prompt.tables[group_id]
        hashes = self._rules.hashes_of(self._pool.layout.group(group_id), indices, prompt.hashes)
        ids = np.fromiter((table[i] for i in indices.tolist()), np.int64, len(indices))
        return _Blocks(ids, block_seeds(self._pool.layout.model, group_id, hashes))


def _merged(parts: Sequence[_Part], rules: BlockRules) -> tuple[dict[int, _Blocks], dict[int, _Blocks]]:
    return (
        {g.id: _joined([p.check[g.id] for p in parts if g.id in p.check]) for g in rules.groups},
        {g.id: _joined([p.fill[g.id] for p in parts if g.id in p.fill]) for g in rules.groups},
    )


def _joined(blocks: Sequence[_Blocks]) -> _Blocks:
    if len(blocks) <= 1:
        return blocks[0] if blocks else _NO_BLOCKS
    return _Blocks(np.concatenate([b.ids for b in blocks]), np.concatenate([b.seeds for b in blocks]))


def _work(contents: Sequence[LayerContent], check: Mapping[int, _Blocks], fill: Mapping[int, _Blocks]) -> int:
    bad = 0
    for content in contents:
        loaded, made = check[content.group_id], fill[content.group_id]
        if len(loaded):
            bad += sum(entry.mismatched(loaded.ids, loaded.seeds) for entry in content.entries)
        if len(made):
            for entry in content.entries:
                entry.fill(made.ids, made.seeds)
    return bad
