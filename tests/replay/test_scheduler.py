"""Admission, growth, preemption and parking over a bounded pool."""

from __future__ import annotations

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.reachability import Hit
from kvactors.core.steps import NULL_BLOCK
from kvactors.replay.blocks import BlockRules
from kvactors.replay.local_pool import LocalPool
from kvactors.replay.prompt import Prompt
from kvactors.replay.scheduler import Scheduler
from kvactors.replay.trace import TraceRequest

LAYOUT = KVLayout("m", [Group(0, GroupKind.FULL, 16, {0: (CacheEntry("k", 16),)})])
RULES = BlockRules(LAYOUT, 16)
MISS = Hit(0, ((),))


def scheduler(blocks: int, concurrency: int = 4, chunk: int = 32) -> Scheduler:
    return Scheduler(RULES, LocalPool(LAYOUT, {0: blocks}), concurrency, chunk)


def prompt(line: int, tokens: int) -> Prompt:
    request = TraceRequest(line, 0.0, tokens, tuple(range(-(-tokens // 512))))
    return Prompt(f"r{line}", request, [bytes([i]) for i in range(tokens // 16)], RULES.kept(tokens))


def hit(tokens: int) -> Hit:
    return Hit(tokens, ((True,) * (tokens // 16),))


def step(s: Scheduler) -> None:
    for p in list(s.running):
        p.computed = p.end
        if p.done:
            s.finish(p)


def test_a_prompt_takes_blocks_chunk_by_chunk() -> None:
    s, p = scheduler(10), prompt(1, 100)
    assert s.admit(p, MISS)
    assert (p.computed, p.end, p.tables[0]) == (0, 32, [0, 1])
    step(s)
    assert s.grow() == []
    assert (p.end, p.tables[0]) == (64, [0, 1, 2, 3])
    step(s), s.grow(), step(s), s.grow()
    assert (p.end, len(p.tables[0])) == (100, 7)
    step(s)
    assert (s.running, s.pool.used) == ([], 0)


def test_an_odd_chunk_does_not_take_its_shared_block_twice() -> None:
    s, p = scheduler(10, chunk=24), prompt(1, 100)
    s.admit(p, MISS)
    ends = []
    while s.running:
        ends.append(p.end)
        step(s)
        s.grow()
    assert ends == [24, 48, 72, 96, 100]
    assert s.pool.used == 0
    assert s.pool.peak == 7


def test_a_hit_is_loaded_and_the_next_chunk_computed_in_one_step() -> None:
    s, p = scheduler(10), prompt(1, 100)
    s.admit(p, hit(48))
    assert (p.computed, p.end) == (48, 80)
    assert p.loading[0].tolist() == [0, 1, 2]
    assert NULL_BLOCK not in p.tables[0]
    assert len(p.tables[0]) == 5


def test_the_youngest_is_preempted_and_waits_in_front() -> None:
    s = scheduler(6)
    a, b, c = prompt(1, 96), prompt(2, 96), prompt(3, 96)
    later = prompt(4, 16)
    s.waiting.append(later)
    assert all(s.admit(p, MISS) for p in (a, b, c))
    assert s.pool.free == 0
    step(s)
    assert s.grow() == [c, b]
    assert s.running == [a]
    assert list(s.waiting) == [b, c, later]
    assert c.tables == {}
    assert c.computed == 0


def test_two_prompts_that_exceed_the_pool_together_both_finish() -> None:
    s = scheduler(7, concurrency=2, chunk=16)
    s.waiting.extend([prompt(1, 96), prompt(2, 90)])
    for _ in range(100):
        s.grow()
        while s.waiting and s.has_room and s.worth_trying(s.waiting[0]) and s.admit(s.waiting[0], MISS):
            s.waiting.popleft()
        if not s.running:
            break
        step(s)
    assert not s.running
    assert not s.waiting
    assert s.preempted_in_all > 0
    assert s.pool.used == 0


def test_two_parked_loads_do_not_hold_the_pool() -> None:  # vllm#57104
    s = scheduler(511, concurrency=2, chunk=8192)
    a, b = prompt(1, 4096), prompt(2, 4080)
    assert s.admit(a, hit(4080))
    assert s.admit(b, hit(4064))
    assert s.pool.free == 0
    s.grow()
    step(s)
    assert s.pool.used == 0


def test_a_parked_prompt_holds_nothing_and_is_tried_when_blocks_come_free() -> None:
    s = scheduler(5)
    a, b = prompt(1, 64), prompt(2, 80)
    s.admit(a, hit(48))
    assert not s.admit(b, hit(64))
    assert (b.tables, s.pool.used) == ({}, 4)
    assert not s.worth_trying(b)
    step(s)
    assert s.worth_trying(b)
    assert s.admit(b, hit(64))


def test_a_prompt_that_never_fits_is_told_with_both_numbers() -> None:
    why = scheduler(5).why_never(prompt(1, 96))
    assert why is not None
    assert "6" in why
    assert "5" in why
    assert scheduler(6).why_never(prompt(1, 96)) is None
