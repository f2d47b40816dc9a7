"""Reachability: the rules as tables, then random groups and holes against a model written from the definitions.

The model (`valid`, `brute_force`) tries every multiple of B from the top and asks for every block by its definition; it
shares nothing with the code under test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvactors.core.layout import CacheEntry, Group, GroupKind
from kvactors.core.reachability import Hit, Reachability
from kvactors.errors import LayoutError, ReachabilityError

ENTRY = (CacheEntry("kv", 8),)
ALL = None  # every block of the group is stored


def full(block: int, gid: int = 0, **more: Any) -> Group:
    return Group(gid, GroupKind.FULL, block, {0: ENTRY}, **more)


def window(block: int, w: int, gid: int = 1, **more: Any) -> Group:
    return Group(gid, GroupKind.SLIDING_WINDOW, block, {0: ENTRY}, window=w, **more)


def state(block: int, gid: int = 2, **more: Any) -> Group:
    return Group(gid, GroupKind.STATE, block, {0: ENTRY}, **more)


def chunked(block: int, chunk: int, gid: int = 3, **more: Any) -> Group:
    return Group(gid, GroupKind.CHUNKED_LOCAL, block, {0: ENTRY}, chunk_tokens=chunk, **more)


def of_kind(kind: GroupKind, block: int, gid: int = 0, **more: Any) -> Group:
    return Group(gid, kind, block, {0: ENTRY}, **more)


def fine_hashes(tokens: int, unit: int) -> list[bytes]:
    return [i.to_bytes(4, "big") for i in range(tokens // unit)]


class Stored:
    """A store that holds, per group, some block indices (`ALL` = every one), and counts what it is asked."""

    def __init__(self, groups: Sequence[Group], unit: int, blocks: Mapping[int, Collection[int] | None]) -> None:
        self.units = {g.id: g.block_tokens // unit for g in groups}
        self.blocks = blocks
        self.asked: Counter[tuple[int, int]] = Counter()
        self.calls = 0

    def readable(self, group_id: int, block_hash: bytes) -> bool:
        index = int.from_bytes(block_hash, "big") + 1
        assert index % self.units[group_id] == 0, "the hash of a block is the last of the fine hashes that it spans"
        block = index // self.units[group_id] - 1
        self.asked[group_id, block] += 1
        held = self.blocks[group_id]
        return held is None or block in held

    def readable_many(self, group_id: int, hashes: Sequence[bytes]) -> list[bool]:
        self.calls += 1
        assert 0 < len(hashes) <= 4096
        return [self.readable(group_id, h) for h in hashes]


def hit(
    groups: Sequence[Group], unit: int, prompt: int, blocks: Mapping[int, Collection[int] | None], hashed: int | None = None
) -> Hit:
    """The hit, asked one by one and in batches; checks what must always hold."""
    r = Reachability(groups, unit)
    hashes = fine_hashes(prompt if hashed is None else hashed, unit)
    one, many = Stored(groups, unit, blocks), Stored(groups, unit, blocks)
    found = r.longest_hit(hashes, prompt, one.readable)
    assert found == r.longest_hit(hashes, prompt, readable_many=many.readable_many)
    assert found.masks == r.load_mask(found.tokens)
    worth_asking = r.lookup_mask(prompt)
    order = {g.id: i for i, g in enumerate(groups)}
    for store in (one, many):
        for (gid, block), times in store.asked.items():
            assert times == 1, f"block {block} of group {gid} was asked {times} times"
            mask = worth_asking[order[gid]]
            assert block >= len(mask) or mask[block], f"block {block} of group {gid} was asked, but is not worth it"
    return found


# -- hits: the rows of the specification and of public reports ---------------------------------------------------------

FULL_COMP_STATE = [full(16, 0), of_kind(GroupKind.COMPRESSED, 32, 1), state(16, 2)]
FULL_STATE_4096 = [full(1024, 0), state(4096, 1)]

HIT_ROWS = [
    # id, groups, hash unit, prompt tokens, stored blocks per group id, hit
    ("state blocks 1 and 3", FULL_COMP_STATE, 16, 65, {0: range(4), 1: range(2), 2: {1, 3}}, 64),
    ("state block 1 only", FULL_COMP_STATE, 16, 65, {0: range(4), 1: range(2), 2: {1}}, 32),
    ("no state", FULL_COMP_STATE, 16, 65, {0: range(4), 1: range(2), 2: ()}, 0),
    ("state off the boundary is no use", FULL_COMP_STATE, 16, 65, {0: range(4), 1: range(2), 2: {0, 2}}, 0),
    ("hole in block 1", [full(16)], 16, 65, {0: {0, 2, 3}}, 16),
    ("hole in block 0", [full(16)], 16, 65, {0: {1, 2, 3}}, 0),
    ("one token must be computed", [full(16)], 16, 64, {0: ALL}, 48),
    ("one token beyond", [full(16)], 16, 65, {0: ALL}, 64),
    ("empty prompt", [full(16)], 16, 0, {0: ALL}, 0),
    ("prompt of one token", [full(1)], 1, 1, {0: ALL}, 0),
    ("prompt of two tokens", [full(1)], 1, 2, {0: ALL}, 1),
    ("prompt of exactly one block", [full(16)], 16, 16, {0: ALL}, 0),
    ("compressed, ratio 128: the terminal hash", [of_kind(GroupKind.COMPRESSED, 16384)], 128, 16385, {0: {0}}, 16384),
    ("compressed, ratio 128: one token short", [of_kind(GroupKind.COMPRESSED, 16384)], 128, 16384, {0: {0}}, 0),
    ("vllm-ascend#16317, N=4096", FULL_STATE_4096, 1024, 4096, {0: ALL, 1: {0}}, 0),
    ("vllm-ascend#16317, N=4097", FULL_STATE_4096, 1024, 4097, {0: ALL, 1: {0}}, 4096),
    ("vllm-ascend#16317, N=5083", FULL_STATE_4096, 1024, 5083, {0: ALL, 1: {0}}, 4096),
    ("vllm-ascend#16317, N=8193", FULL_STATE_4096, 1024, 8193, {0: ALL, 1: {0}}, 4096),
    ("vllm#46453: the common hit, not the largest", [full(256, 0), state(256, 1)], 256, 1025, {0: {0, 1}, 1: {0, 3}}, 256),
    ("vllm#30522: hole at block 1 of 4", [full(16)], 16, 64, {0: {0, 2, 3}}, 16),
    ("maru#57: second pass of 18,000 tokens", [full(512)], 512, 18000, {0: range(35)}, 17920),
    ("vllm#53314: second pass of 24,576 tokens", [full(256)], 256, 24576, {0: range(96)}, 24320),
    ("vllm#53663: the producer runs 128 of 129", [full(128)], 128, 128, {0: {0}}, 0),
    # windows: w=17 needs ceil(16/16) = 1 block, w=18 needs 2
    ("window, the last block alone", [window(16, 17)], 16, 65, {1: {3}}, 64),
    ("window of two blocks, one is missing", [window(16, 18)], 16, 65, {1: {1, 3}}, 0),
    ("window of two blocks, further left", [window(16, 18)], 16, 65, {1: {1, 2}}, 48),
    ("window of w=2 needs one block", [window(16, 2)], 16, 65, {1: {2}}, 48),
    ("window, short run that reaches token 0", [window(16, 1000)], 16, 65, {1: {0, 1}}, 32),
    ("window, short run that does not", [window(16, 1000)], 16, 65, {1: {1, 2, 3}}, 0),
    ("window run must end on B", [full(32, 0), window(8, 9)], 8, 65, {0: ALL, 1: {6}}, 0),
    ("window run on B=32", [full(32, 0), window(8, 9)], 8, 65, {0: ALL, 1: {3, 6}}, 32),
    ("window is there, full attention is not", [full(16, 0), window(16, 17)], 16, 65, {0: {0}, 1: {3}}, 0),
    ("two windows disagree, then agree", [window(16, 17, 0), window(16, 33, 1)], 16, 81, {0: {1, 3}, 1: {0, 1, 3, 4}}, 32),
    ("two states that never agree", [state(16, 0), state(32, 1)], 16, 129, {0: {1, 5}, 1: {1, 3}}, 0),
    ("DeepSeek-V4 compressor state, block 4 w=8", [window(4, 8, 0), full(8, 1)], 4, 33, {0: {6, 7, 2, 3}, 1: range(2)}, 16),
    # chunked local: chunk 64 = four 16-blocks
    ("chunk edge needs nothing", [chunked(16, 64)], 16, 65, {3: ()}, 64),
    ("within a chunk", [chunked(16, 64)], 16, 113, {3: {4, 5, 6}}, 112),
    ("within a chunk, a hole", [chunked(16, 64)], 16, 113, {3: {4, 6}}, 80),
    ("falls back to the chunk edge", [chunked(16, 64)], 16, 113, {3: {5, 6}}, 64),
    ("first chunk is a prefix", [chunked(16, 64)], 16, 64, {3: {1, 2}}, 0),
    ("chunk 24 over 16-blocks: [24,32) lies in block 1", [chunked(16, 24)], 16, 33, {3: {1}}, 32),
    ("chunk 24: 16 tokens need block 0", [chunked(16, 24)], 16, 32, {3: {1}}, 0),
    ("chunk 40 over 16-blocks: 32 tokens need blocks 0 and 1", [chunked(16, 40)], 16, 46, {3: ()}, 0),
    ("chunk 40: [40,64) lies in blocks 2 and 3", [chunked(16, 40)], 16, 65, {3: {2, 3}}, 64),
    ("chunk smaller than the block", [chunked(16, 8)], 16, 49, {3: ()}, 48),
    ("chunked with full attention", [full(16, 0), chunked(16, 64)], 16, 113, {0: range(6), 3: {4}}, 80),
    # MLA and indexer are prefixes too
    ("MLA hole", [of_kind(GroupKind.MLA, 16)], 16, 65, {0: {0, 1, 3}}, 32),
    ("indexer hole", [of_kind(GroupKind.INDEXER, 16)], 16, 65, {0: {0, 3}}, 16),
    # equal specs: a block counts only if all of them have it
    ("equal specs, either has a hole", [full(16, 5), full(16, 9)], 16, 65, {5: {0, 1, 2}, 9: {0, 1, 3}}, 32),
    ("equal states", [state(16, 7), state(16, 2), full(16, 4)], 16, 65, {7: {1, 3}, 2: {1, 2}, 4: ALL}, 32),
    # speculative: one more block must match and is dropped
    ("speculative full", [full(16, speculative=True)], 16, 65, {0: ALL}, 48),
    ("speculative full, prompt ends on a block", [full(16, speculative=True)], 16, 64, {0: ALL}, 48),
    ("speculative full, one block stored", [full(16, speculative=True)], 16, 65, {0: {0}}, 0),
    ("speculative window", [window(16, 17, speculative=True)], 16, 65, {1: {1, 2}}, 32),
    ("speculative window, the next block is missing", [window(16, 17, speculative=True)], 16, 65, {1: {2}}, 0),
    ("speculative window from token 0", [window(16, 1000, speculative=True)], 16, 65, {1: {0, 1}}, 16),
    ("speculative state has no margin", [state(16, speculative=True)], 16, 65, {2: {3}}, 64),
    ("speculative MLA", [of_kind(GroupKind.MLA, 16, speculative=True)], 16, 65, {0: ALL}, 48),
    ("speculative and not", [full(16, 0), window(16, 17, speculative=True)], 16, 81, {0: ALL, 1: {1, 2, 4}}, 32),
    ("equal specs, one is speculative", [full(16, 0), full(16, 1, speculative=True)], 16, 65, {0: {0, 1}, 1: ALL}, 16),
    ("speculative, B is many blocks", [full(32, 0), window(8, 9, speculative=True)], 8, 97, {0: ALL, 1: {3, 4, 7}}, 32),
]


@pytest.mark.parametrize(
    ("groups", "unit", "prompt", "blocks", "tokens"), [r[1:] for r in HIT_ROWS], ids=[r[0] for r in HIT_ROWS]
)
def test_longest_hit(groups: list[Group], unit: int, prompt: int, blocks: Mapping[int, Collection[int]], tokens: int) -> None:
    assert hit(groups, unit, prompt, blocks).tokens == tokens


@pytest.mark.parametrize(
    ("hashed", "prompt", "tokens"),
    [(160, 65, 64), (160, 64, 48), (32, 65, 32), (0, 65, 0), (15, 65, 0), (64, 1000, 64)],
)
def test_hashes_may_be_longer_or_shorter_than_the_prompt(hashed: int, prompt: int, tokens: int) -> None:
    assert hit([full(16)], 16, prompt, {0: ALL}, hashed).tokens == tokens
    assert hit([full(16, 0), window(8, 9)], 8, prompt, {0: ALL, 1: ALL}, hashed).tokens == tokens
    assert hit([full(16, 0), state(16)], 16, prompt, {0: ALL, 2: ALL}, hashed).tokens == tokens


def test_a_hit_that_needs_no_block_still_ends_within_the_hashes() -> None:
    assert hit([chunked(16, 16)], 16, 65, {3: ()}, hashed=32).tokens == 32


def test_a_speculative_group_may_match_its_extra_block_past_the_prompt() -> None:
    assert hit([full(16, speculative=True)], 16, 65, {0: ALL}, hashed=80).tokens == 64


@pytest.mark.parametrize("length", [1, 8, 20, 32, 64])
def test_hashes_are_bytes_of_any_length(length: int) -> None:
    r = Reachability([full(16, 3), window(8, 9, 12)], 8)
    hashes = [bytes([i]) * length for i in range(16)]
    assert r.longest_hit(hashes, 129, lambda gid, h: gid in (3, 12) and h in hashes).tokens == 128


def test_hit_masks_tell_what_to_load() -> None:
    found = hit([full(16, 0), window(16, 33, 1), state(16, 2), chunked(16, 32, 3)], 16, 113, dict.fromkeys(range(4), ALL))
    assert found.tokens == 112
    t, f = True, False
    assert found.masks == ((t,) * 7, (f,) * 5 + (t, t), (f,) * 6 + (t,), (f,) * 6 + (t,))


# -- masks -------------------------------------------------------------------------------------------------------------


def true_indices(mask: Sequence[bool]) -> list[int]:
    return [i for i, keep in enumerate(mask) if keep]


STORE_ROWS = [
    # id, groups, num_tokens, prompt, retention, junctions, group, true indices
    ("w=8", [full(32, 0), window(8, 8)], 64, None, None, (), 1, [3, 7]),
    ("w=9 is still one block", [full(32, 0), window(8, 9)], 64, None, None, (), 1, [3, 7]),
    ("w=10 is two", [full(32, 0), window(8, 10)], 64, None, None, (), 1, [2, 3, 6, 7]),
    ("w=16", [full(32, 0), window(8, 16)], 64, None, None, (), 1, [2, 3, 6, 7]),
    ("w=26 needs every block", [full(32, 0), window(8, 26)], 64, None, None, (), 1, list(range(8))),
    ("8 of 256", [full(4096, 0), window(32, 128)], 8192, None, None, (), 1, [124, 125, 126, 127, 252, 253, 254, 255]),
    ("128-blocks, B=512", [full(512, 0), window(128, 128)], 512, None, None, (), 1, [3]),
    ("one window group alone keeps all", [window(16, 17)], 64, None, None, (), 0, [0, 1, 2, 3]),
    ("speculative", [full(32, 0), window(8, 8, speculative=True)], 128, None, None, (), 1, [3, 4, 7, 8, 11, 12, 15]),
    ("one of two equals", [full(32, 0), window(8, 8), window(8, 8, 2, speculative=True)], 64, None, None, (), 1, [3, 4, 7]),
    ("full-type groups: all", [full(32, 0), window(8, 8)], 64, None, 0, (), 0, [0, 1]),
    ("chunked local: all", [full(32, 0), chunked(8, 16)], 64, None, 0, (), 1, list(range(8))),
    ("no tokens", [full(32, 0), window(8, 8)], 0, None, None, (), 1, []),
    ("retention 0, replay at 96", [full(32, 0), window(8, 8)], 96, 100, 0, (), 1, [11]),
    ("retention 0, prompt on a boundary", [full(32, 0), window(8, 8)], 96, 96, 0, (), 1, [7]),
    ("retention 0, two-block window", [full(32, 0), window(8, 16)], 96, 100, 0, (), 1, [10, 11]),
    ("retention 0, replay not computed yet", [full(32, 0), window(8, 8)], 64, 100, 0, (), 1, []),
    ("retention 0, prompt within the first B", [full(32, 0), window(8, 8)], 32, 32, 0, (), 1, []),
    ("retention 0, empty prompt", [full(32, 0), window(8, 8)], 64, 0, 0, (), 1, []),
    ("retention 0, prompt unknown", [full(32, 0), window(8, 8)], 96, None, 0, (), 1, []),
    ("retention 0, junction", [full(32, 0), window(8, 8)], 96, 100, 0, (32,), 1, [3, 11]),
    ("retention 0, junction beyond what is computed", [full(32, 0), window(8, 8)], 32, None, 0, (64,), 1, []),
    ("retention 0, run as long as the prompt", [full(32, 0), window(8, 1000)], 96, 100, 0, (), 1, list(range(12))),
    ("retention 0, speculative", [full(32, 0), window(8, 8, speculative=True)], 128, 100, 0, (), 1, [11, 12]),
    ("retention B is dense", [full(32, 0), window(8, 8)], 96, 100, 32, (), 1, [3, 7, 11]),
    ("retention 64", [full(32, 0), window(8, 8)], 128, 100, 64, (), 1, [7, 11, 15]),
    ("retention 64, speculative", [full(32, 0), window(8, 8, speculative=True)], 128, 100, 64, (), 1, [7, 8, 11, 12, 15]),
    ("retention 64, w=57 needs the segment but a block", [full(32, 0), window(8, 57)], 64, None, 64, (), 1, list(range(1, 8))),
    ("retention 64, w=58 needs all of it", [full(32, 0), window(8, 58)], 64, None, 64, (), 1, list(range(8))),
    ("a cut segment keeps the part of its run", [full(32, 0), window(8, 49)], 96, None, 64, (), 1, [2, 3, 4, 5, 6, 7, 10, 11]),
    ("junctions only under retention", [full(32, 0), window(8, 8)], 64, 10, None, (32,), 1, [3, 7]),
    ("state, dense", [full(32, 0), state(16)], 64, None, None, (), 1, [0, 1, 2, 3]),
    ("state, retention 0", [full(32, 0), state(16)], 128, 100, 0, (), 1, [5]),
    ("state, retention 0 and a junction", [full(32, 0), state(16)], 128, 100, 0, (64, 128), 1, [3, 5, 7]),
    ("state, retention 64", [full(32, 0), state(16)], 128, 100, 64, (), 1, [3, 5, 7]),
    ("state, retention of its own block", [full(32, 0), state(32, 1)], 128, 100, 32, (), 1, [0, 1, 2, 3]),
    ("state, speculative has no margin", [full(32, 0), state(16, speculative=True)], 128, 100, 64, (), 1, [3, 5, 7]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "num_tokens", "prompt", "retention", "junctions", "group", "indices"),
    [r[1:] for r in STORE_ROWS],
    ids=[r[0] for r in STORE_ROWS],
)
def test_store_mask(
    groups: list[Group],
    num_tokens: int,
    prompt: int,
    retention: int,
    junctions: tuple[int, ...],
    group: int,
    indices: list[int],
) -> None:
    mask = Reachability(groups, 8).store_mask(num_tokens, prompt, retention, junctions)[group]
    assert len(mask) == num_tokens // groups[group].block_tokens
    assert true_indices(mask) == indices
    assert all(type(keep) is bool for keep in mask)


@pytest.mark.parametrize(
    ("asked", "covered"),
    [(0, 0), (1, 32), (31, 32), (32, 32), (33, 64), (65, 96)],
)
def test_lookup_mask_is_the_dense_store_mask_up_to_the_next_boundary(asked: int, covered: int) -> None:
    r = Reachability([full(32, 0), window(8, 8), state(16)], 8)
    assert r.lookup_mask(asked) == r.store_mask(covered)


LOAD_ROWS = [
    # id, group, tokens, true indices; beside a full group of 32 tokens
    ("window", window(8, 16), 64, [6, 7]),
    ("window, speculative: no extra block", window(8, 16, speculative=True), 64, [6, 7]),
    ("window at the start", window(8, 1000), 32, [0, 1, 2, 3]),
    ("state", state(16), 64, [3]),
    ("chunk edge", chunked(8, 32), 64, []),
    ("inside a chunk", chunked(8, 64), 96, [8, 9, 10, 11]),
    ("chunk edge inside a block", chunked(8, 20), 32, [2, 3]),
    ("compressed", of_kind(GroupKind.COMPRESSED, 16, 7), 64, [0, 1, 2, 3]),
    ("nothing", window(8, 16), 0, []),
]


@pytest.mark.parametrize(("group", "tokens", "indices"), [r[1:] for r in LOAD_ROWS], ids=[r[0] for r in LOAD_ROWS])
def test_load_mask(group: Group, tokens: int, indices: list[int]) -> None:
    masks = Reachability([full(32, 0), group], 4).load_mask(tokens)
    assert masks[0] == (True,) * (tokens // 32)
    assert len(masks[1]) == tokens // group.block_tokens
    assert true_indices(masks[1]) == indices


# -- boundaries and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "boundary"),
    [((16,), 16), ((16, 16), 16), ((16, 32), 32), ((48, 32), 96), ((1024, 4096, 128), 4096), ((384, 256), 768)],
)
def test_boundary_is_the_least_common_multiple(blocks: tuple[int, ...], boundary: int) -> None:
    assert Reachability([full(b, gid) for gid, b in enumerate(blocks)], math.gcd(*blocks)).boundary_tokens == boundary


@pytest.mark.parametrize(
    ("groups", "unit", "says"),
    [
        ([], 16, "at least one group"),
        ([full(16, 0), full(32, 0)], 16, "group id 0 is given twice"),
        ([full(16, 0), full(24, 4)], 16, "group 4: block_tokens 24 is not a multiple of the hash unit of 16"),
        ([full(16)], 32, "not a multiple of the hash unit of 32"),
        ([full(16)], 0, "hash_tokens = 0"),
        ([full(16)], -16, "hash_tokens = -16"),
        ([full(16)], 1.5, "hash_tokens = 1.5"),
    ],
)
def test_groups_that_do_not_fit(groups: list[Group], unit: int, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        Reachability(groups, unit)
    assert issubclass(LayoutError, ValueError)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: r.store_mask(33), "num_tokens = 33: must be a multiple of the boundary of 32"),
        (lambda r: r.store_mask(-32), "num_tokens = -32"),
        (lambda r: r.store_mask(32, retention=16), "retention = 16: must be a multiple"),
        (lambda r: r.store_mask(32, retention=-32), "retention = -32"),
        (lambda r: r.store_mask(32, retention=0, junctions=(16,)), "junction = 16"),
        (lambda r: r.store_mask(32, prompt_tokens=-1, retention=0), "prompt_tokens = -1"),
        (lambda r: r.load_mask(8), "num_tokens = 8: must be a multiple .* the next one below is 0"),
        (lambda r: r.lookup_mask(-1), "num_tokens = -1"),
        (lambda r: r.longest_hit([], -1, lambda *_: True), "prompt_tokens = -1"),
        (lambda r: r.longest_hit([], 10), "needs readable or readable_many"),
        (
            lambda r: r.longest_hit([b"h"] * 8, 65, readable_many=lambda _g, _h: [True]),
            "answered 1 values for 2 blocks of group 0",
        ),
    ],
)
def test_arguments_without_a_meaning(call: object, says: str) -> None:
    r = Reachability([full(32, 0), window(8, 8)], 8)
    with pytest.raises(ReachabilityError, match=says) as raised:
        call(r)  # type: ignore[operator]
    assert isinstance(raised.value, ValueError)


def test_an_error_of_the_store_is_passed_on() -> None:
    def broken(_gid: int, _hash: bytes) -> bool:
        raise ValueError("the store is gone")

    with pytest.raises(ValueError, match="the store is gone"):
        Reachability([full(16)], 16).longest_hit(fine_hashes(64, 16), 65, broken)


# -- cost --------------------------------------------------------------------------------------------------------------


def test_a_miss_in_the_prefix_asks_for_one_block() -> None:
    groups = [state(16, 4), window(16, 100, 5), full(16, 6)]
    store = Stored(groups, 16, {4: ALL, 5: ALL, 6: ()})
    assert Reachability(groups, 16).longest_hit(fine_hashes(1 << 16, 16), 1 << 16, store.readable).tokens == 0
    assert store.asked == {(6, 0): 1}


def test_a_full_hit_asks_the_prefix_and_the_tails_only() -> None:
    groups = [full(16, 0), window(16, 33, 1), state(16, 2)]
    store = Stored(groups, 16, {0: ALL, 1: ALL, 2: ALL})
    assert Reachability(groups, 16).longest_hit(fine_hashes(16016, 16), 16016, store.readable).tokens == 16000
    assert Counter(gid for gid, _ in store.asked) == {0: 1000, 1: 2, 2: 1}


def test_states_that_are_missing_everywhere_are_asked_in_few_calls() -> None:
    groups = [full(16, 0), state(16, 1)]
    store = Stored(groups, 16, {0: ALL, 1: ()})
    assert (
        Reachability(groups, 16).longest_hit(fine_hashes(1 << 20, 16), 1 << 20, readable_many=store.readable_many).tokens == 0
    )
    assert store.calls < 60


def test_a_missing_window_skips_by_its_width() -> None:
    groups = [window(16, 16 * 100 + 1)]
    store = Stored(groups, 16, {1: ()})
    assert Reachability(groups, 16).longest_hit(fine_hashes(16000, 16), 16001, store.readable).tokens == 0
    assert len(store.asked) == 10


# -- random groups and holes against the definitions -------------------------------------------------------------------


def needs(group: Group, speculative: bool, tokens: int) -> list[int]:
    """The blocks that a hit of `tokens` needs of a group: the definition of each kind, token by token."""
    block = group.block_tokens
    if tokens == 0:
        return []
    if group.kind is GroupKind.STATE:
        return [tokens // block - 1]
    if group.kind is GroupKind.SLIDING_WINDOW:
        assert group.window is not None
        reach = range(tokens - math.ceil((group.window - 1) / block) * block, tokens)
    elif group.kind is GroupKind.CHUNKED_LOCAL:
        assert group.chunk_tokens is not None
        reach = range(math.floor(tokens / group.chunk_tokens) * group.chunk_tokens, tokens)
    else:
        reach = range(tokens)
    blocks = {token // block for token in reach if token >= 0}
    if speculative:
        blocks.add(tokens // block)
    return sorted(blocks)


def is_speculative(group: Group, groups: Sequence[Group]) -> bool:
    """Groups with equal specs are one: if any of them is speculative, all are."""
    spec = replace(group, id=0, speculative=False)
    return any(g.speculative for g in groups if replace(g, id=0, speculative=False) == spec)


def brute_force(groups: Sequence[Group], unit: int, hashes: int, prompt: int, blocks: Mapping[int, set[int]]) -> int:
    boundary = math.lcm(*(g.block_tokens for g in groups))
    longest = min(max(prompt, 1) - 1, hashes * unit)  # a hit past the hashes could not be told from another prompt's
    for tokens in range(longest // boundary * boundary, 0, -boundary):
        wanted = [(g, b) for g in groups for b in needs(g, is_speculative(g, groups), tokens)]
        if all((b + 1) * g.block_tokens <= hashes * unit and b in blocks[g.id] for g, b in wanted):
            return tokens
    return 0


UNIT = 4


@st.composite
def group_sets(draw: st.DrawFn) -> list[Group]:
    ids = draw(st.lists(st.integers(0, 50), min_size=1, max_size=5, unique=True))
    groups = []
    for gid in ids:
        kind = draw(st.sampled_from(list(GroupKind)))
        more: dict[str, Any] = {"speculative": draw(st.booleans())}
        if kind is GroupKind.SLIDING_WINDOW:
            more["window"] = draw(st.integers(2, 60))
        if kind is GroupKind.CHUNKED_LOCAL:
            more["chunk_tokens"] = draw(st.integers(1, 60))
        groups.append(of_kind(kind, UNIT * draw(st.sampled_from([1, 1, 2, 2, 3, 4])), gid, **more))
    return groups


@st.composite
def lookups(draw: st.DrawFn) -> tuple[list[Group], int, int, dict[int, set[int]]]:
    groups = draw(group_sets())
    prompt = draw(st.integers(0, 200))
    hashes = draw(st.one_of(st.just(prompt // UNIT), st.integers(0, 60)))
    blocks = {}
    for g in groups:
        n = hashes * UNIT // g.block_tokens
        holes = draw(st.sets(st.integers(0, max(n - 1, 0)), max_size=draw(st.sampled_from([0, 1, 3, 12, 60]))))
        blocks[g.id] = set(range(n)) - holes
    return groups, prompt, hashes, blocks


@given(lookups())
@settings(max_examples=400, deadline=None)
def test_the_hit_is_the_greatest_length_that_is_valid_for_all_groups(
    lookup: tuple[list[Group], int, int, dict[int, set[int]]],
) -> None:
    groups, prompt, hashes, blocks = lookup
    assert hit(groups, UNIT, prompt, blocks, hashes * UNIT).tokens == brute_force(groups, UNIT, hashes, prompt, blocks)


@given(group_sets(), st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_load_masks_are_what_the_definitions_need(groups: list[Group], boundaries: int) -> None:
    r = Reachability(groups, UNIT)
    tokens = boundaries * r.boundary_tokens
    assert [true_indices(m) for m in r.load_mask(tokens)] == [needs(g, False, tokens) for g in groups]


@given(group_sets(), st.integers(1, 8), st.data())
@settings(max_examples=200, deadline=None)
def test_what_the_store_mask_keeps_serves_a_hit_at_every_boundary(
    groups: list[Group], boundaries: int, data: st.DataObject
) -> None:
    """Saved densely, a prompt is found again up to its last boundary, or one B below where a draft looks further."""
    r = Reachability(groups, UNIT)
    stored = boundaries * r.boundary_tokens
    saved = {g.id: set(true_indices(m)) for g, m in zip(groups, r.store_mask(stored), strict=True)}
    prompt = data.draw(st.integers(1, stored + 20))
    margin = max((g.block_tokens for g in groups if g.speculative and g.kind is not GroupKind.STATE), default=0)
    reach = min(prompt - 1, stored - margin)
    assert hit(groups, UNIT, prompt, saved, stored).tokens == reach // r.boundary_tokens * r.boundary_tokens


@given(group_sets(), st.integers(1, 8), st.integers(0, 4), st.lists(st.integers(0, 8), max_size=3))
@settings(max_examples=200, deadline=None)
def test_retention_keeps_its_segments_the_replay_and_the_junctions(
    groups: list[Group], boundaries: int, every: int, junctions: list[int]
) -> None:
    """What is kept is a part of the dense mask for windows, and enough for a hit at each place that is to be kept."""
    assume(not any(g.speculative for g in groups))
    r = Reachability(groups, UNIT)
    b = r.boundary_tokens
    stored, prompt = boundaries * b, boundaries * b + 1
    masks = r.store_mask(stored, prompt, every * b, [j * b for j in junctions])
    kept = {g.id: set(true_indices(m)) for g, m in zip(groups, masks, strict=True)}
    ends = {stored, *(j * b for j in junctions if j)} | (set(range(every * b, stored + 1, every * b)) if every else set())
    for end in (e for e in ends if e <= stored):
        assert all(set(needs(g, False, end)) <= kept[g.id] for g in groups)
    if every == 0:
        exact = {g.id: {n for e in ends for n in needs(g, False, e) if n < stored // g.block_tokens} for g in groups}
        for g in groups:
            if g.kind in (GroupKind.SLIDING_WINDOW, GroupKind.STATE):
                assert kept[g.id] == exact[g.id]
    for g, dense in zip(groups, r.store_mask(stored), strict=True):
        assert kept[g.id] <= set(true_indices(dense))


@given(group_sets(), st.integers(0, 6), st.integers(0, 6))
@example([full(UNIT)], 0, 0)
@settings(max_examples=100, deadline=None)
def test_masks_have_one_entry_per_block(groups: list[Group], boundaries: int, every: int) -> None:
    r = Reachability(groups, UNIT)
    tokens = boundaries * r.boundary_tokens
    lengths = [tokens // g.block_tokens for g in groups]
    for masks in (r.store_mask(tokens), r.store_mask(tokens, tokens + 5, every * r.boundary_tokens), r.load_mask(tokens)):
        assert [len(m) for m in masks] == lengths
