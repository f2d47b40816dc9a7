"""What is planned before a run: a pool that is always large enough, the seed in force, a trace that is read twice."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.errors import ConfigError, TraceError
from kvactors.layouts import FAMILIES, scale
from kvactors.replay.blocks import BlockRules
from kvactors.replay.hashing import trace_hash_tokens
from kvactors.replay.live import run_live
from kvactors.replay.plan import ReplayOptions, VirtualOptions, plan_replay
from kvactors.replay.report import Report
from kvactors.replay.trace import TraceReader, TraceSource, scan_trace
from kvactors.replay.virtual import run_on_virtual_time
from kvactors.stores import Fault, FaultPlan

SEED_EXAMPLE = FAMILIES["seed-example"].build()


def write(path: Path, prompts: Sequence[tuple[int, Sequence[int]]]) -> str:
    rows = [{"timestamp": 0, "input_length": tokens, "hash_ids": list(ids)} for tokens, ids in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def replay(options: ReplayOptions) -> Report:
    run = run_live if options.virtual is None else run_on_virtual_time
    return run(plan_replay(options)).report


@pytest.mark.parametrize("concurrency", [1, 2])
def test_the_default_pool_is_enough_under_retention(tmp_path: Path, concurrency: int) -> None:
    path = write(tmp_path / "t.jsonl", [(4097, range(9)), (4096, range(8)), (4097, range(9))])
    report = replay(ReplayOptions(path, SEED_EXAMPLE, retention=2048, concurrency=concurrency))
    assert (report.requests.completed, report.requests.failed) == (3, 0), report.events


LAYOUTS = [*(scale(family.build(), 1 << 20) for family in FAMILIES.values())]
LAYOUTS.append(
    KVLayout(
        "windows",
        [
            Group(0, GroupKind.FULL, 64, {0: [CacheEntry("k", 16)]}),
            Group(1, GroupKind.SLIDING_WINDOW, 16, {1: [CacheEntry("k", 16)]}, window=40, speculative=True),
            Group(2, GroupKind.CHUNKED_LOCAL, 32, {2: [CacheEntry("k", 16)]}, chunk_tokens=96),
            Group(3, GroupKind.STATE, 64, {3: [CacheEntry("s", 16)]}),
        ],
    )
)


def end_blocks(group: Group) -> int:
    """Blocks that the end of a prompt or of a hit may hold besides those that are kept regularly."""
    if group.kind is GroupKind.SLIDING_WINDOW:
        assert group.window is not None
        return -(-(group.window - 1) // group.block_tokens) + 1
    return int(group.kind is GroupKind.STATE)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.model)
@pytest.mark.parametrize("boundaries", [None, 0, 1, 2, 5])
def test_enough_is_what_any_shorter_prompt_can_hold_and_little_more(layout: KVLayout, boundaries: int | None) -> None:
    rng = random.Random(1)
    hash_tokens = trace_hash_tokens(g.block_tokens for g in layout.groups)
    b = BlockRules(layout, hash_tokens).boundary_tokens
    rules = BlockRules(layout, hash_tokens, None if boundaries is None else boundaries * b)
    ends = [n * b + d for n in range(1, 14) for d in (-1, 0, 1)]
    lengths = sorted({*ends, *(rng.randint(1, 14 * b) for _ in range(20))})
    most = {g.id: 0 for g in layout.groups}
    for length in lengths:
        for g, n in rules.most_blocks(length).items():
            most[g] = max(most[g], n)
        enough = rules.enough_blocks(length)
        for group in layout.groups:
            most_of, started = most[group.id], -(-length // group.block_tokens)
            assert most_of <= enough[group.id] <= min(started, most_of + 2 * end_blocks(group)), (group.id, length)


@pytest.mark.parametrize(("option", "own", "in_force"), [(5, None, 5), (5, 0, 0), (5, 7, 7), (0, None, 0)])
def test_the_seed_of_the_report_is_the_one_in_force(tmp_path: Path, option: int, own: int | None, in_force: int) -> None:
    path = write(tmp_path / "t.jsonl", [(2048, range(4))] * 12)
    plan = FaultPlan.from_mapping(
        {
            **({} if own is None else {"seed": own}),
            "faults": [{"what": "outcome", "call": "get_ranges", "probability": 0.3, "outcome": "transfer failed"}],
        }
    )
    virtual = VirtualOptions()
    report = replay(ReplayOptions(path, SEED_EXAMPLE, faults=plan, seed=option, virtual=virtual))
    assert report.seed == in_force
    again = replay(ReplayOptions(path, SEED_EXAMPLE, faults=FaultPlan(plan.faults, in_force), seed=99, virtual=virtual))
    assert again.to_json() == report.to_json()


def test_without_faults_the_option_is_in_force(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [(600, (1, 2))])
    assert replay(ReplayOptions(path, SEED_EXAMPLE, seed=3)).seed == 3


@pytest.mark.parametrize("local_blocks", [None, 40])
def test_blocks_hit_count_once_and_loads_each_time(tmp_path: Path, local_blocks: int | None) -> None:
    """A preempted request loads again when it goes on; what it was served with counts once."""
    prompts = [(6 * 1024 + 100, [*range(10), 100 + i, 200 + i, 300 + i]) for i in range(8)]
    path = write(tmp_path / "t.jsonl", prompts)
    report = replay(
        ReplayOptions(path, SEED_EXAMPLE, concurrency=4, chunk_tokens=1024, local_blocks=local_blocks, virtual=VirtualOptions())
    )
    assert report.requests.completed == 8
    assert (report.preemptions > 0) == (local_blocks is not None)
    for group in report.blocks.values():
        if local_blocks is None:
            assert group.loaded == group.hit
        else:
            assert group.loaded >= group.hit
    if local_blocks is not None:
        assert sum(g.loaded for g in report.blocks.values()) > sum(g.hit for g in report.blocks.values())
    assert report.tokens.hit + report.tokens.computed == report.tokens.input


# -- the trace is read twice -----------------------------------------------------------------------------------------------


def read_twice(source: TraceSource) -> list[int]:
    first = scan_trace(source)
    return [r.line for r in TraceReader(source, limit=first.requests, expected=first.checksum)]


def test_a_pipe_is_read_once_and_kept() -> None:
    read, write_end = os.pipe()
    with os.fdopen(write_end, "w") as file:
        file.write(json.dumps({"timestamp": 0, "input_length": 5, "hash_ids": [1]}) + "\n")
    try:
        assert read_twice(TraceSource(f"/dev/fd/{read}")) == [1]
    finally:
        os.close(read)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda text: text.replace('"input_length": 600', '"input_length": 601', 1), "was changed while it was replayed"),
        (lambda text: text.replace("[1", "[x", 1), "was changed while it was replayed: is not valid JSON"),
        (lambda text: text.splitlines()[0] + "\n", "was changed while it was replayed"),
        (lambda _: "", "was changed while it was replayed: the trace is empty"),
    ],
)
def test_another_text_at_the_second_reading(tmp_path: Path, edit: object, problem: str) -> None:
    path = tmp_path / "t.jsonl"
    write(path, [(600, (1, 2)), (600, (1, 3))])
    first = scan_trace(path)
    path.write_text(edit(path.read_text()))  # type: ignore[operator]
    with pytest.raises(TraceError, match=problem):
        list(TraceReader(path, limit=first.requests, expected=first.checksum))


def test_a_trace_that_only_grew_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write(path, [(600, (1, 2)), (600, (1, 3))])
    first = scan_trace(path)
    with path.open("a") as file:
        file.write("half a li")
    assert len(list(TraceReader(path, limit=first.requests, expected=first.checksum))) == 2


def test_a_freeze_needs_threads(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [(600, (1, 2))])
    plan = FaultPlan((Fault(what="freeze", call="get_open"),))
    with pytest.raises(ConfigError, match="freeze"):
        plan_replay(ReplayOptions(path, SEED_EXAMPLE, faults=plan, virtual=VirtualOptions()))
