"""Which blocks are sent: clipped, freed of nulls, and matched by position."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.disagg import BlockPairs, GroupBlocks, GroupGeometry, RequestBlocks, plan_blocks
from kvactors.errors import HandoffBlocksError
from tests.disagg.shapes import BLOCKS, group

FULL = group()
WINDOW = group("sliding_window", window=32)  # its last 3 blocks
KERNEL = group(kernel_blocks=4)
STATE = group("state")
Lists = list[tuple[int, list[int]]]
"""(first index, ids) for each group."""


def request(tokens: int, lists: Lists) -> RequestBlocks:
    return RequestBlocks(tokens, tuple(GroupBlocks(first, tuple(ids)) for first, ids in lists))


def pairs(plan: tuple[BlockPairs, ...]) -> list[list[tuple[int, int]]]:
    return [list(zip(p.src.tolist(), p.dst.tolist(), strict=True)) for p in plan]


SENT: list[tuple[str, list[GroupGeometry], int, Lists, int, Lists, list[list[tuple[int, int]]]]] = [
    # what, groups, prefill's tokens and lists, decode's tokens and lists, pairs for each group
    ("all", [FULL], 48, [(0, [1, 2, 3])], 48, [(0, [7, 8, 9])], [[(1, 7), (2, 8), (3, 9)]]),
    ("decode holds a prefix", [FULL], 48, [(0, [1, 2, 3])], 48, [(2, [9])], [[(3, 9)]]),
    ("prefill's list begins later", [FULL], 48, [(1, [2, 3])], 48, [(2, [9])], [[(3, 9)]]),
    ("the proxy made the prompt longer", [FULL], 64, [(0, [1, 2, 3, 4])], 32, [(0, [7, 8])], [[(1, 7), (2, 8)]]),
    ("longer, and decode holds a prefix", [FULL], 64, [(0, [1, 2, 3, 4])], 32, [(1, [8])], [[(2, 8)]]),
    (
        "blocks that decode computes itself",
        [FULL],
        33,
        [(0, [1, 2, 3])],
        33,
        [(0, [7, 8, 9, 10, 11])],
        [[(1, 7), (2, 8), (3, 9)]],
    ),
    ("the last block is partly filled", [FULL], 17, [(0, [1, 2])], 17, [(1, [8])], [[(2, 8)]]),
    ("decode skips a null", [FULL], 48, [(0, [1, 2, 3])], 48, [(0, [7, 0, 9])], [[(1, 7), (3, 9)]]),
    ("a null that nobody wants", [FULL], 48, [(0, [0, 2, 3])], 48, [(1, [8, 9])], [[(2, 8), (3, 9)]]),
    (
        "a window: its last 3 of 5 blocks",
        [WINDOW],
        80,
        [(0, [1, 2, 3, 4, 5])],
        80,
        [(0, [6, 7, 8, 9, 10])],
        [[(3, 8), (4, 9), (5, 10)]],
    ),
    ("a window: nulls before it", [WINDOW], 80, [(0, [0, 0, 0, 4, 5])], 80, [(0, [0, 0, 0, 9, 10])], [[(4, 9), (5, 10)]]),
    ("a window: prefill clipped its list", [WINDOW], 80, [(2, [3, 4, 5])], 80, [(3, [9, 10])], [[(4, 9), (5, 10)]]),
    (
        "a window that is clipped before nulls are dropped",
        [WINDOW],
        80,
        [(0, [1, 2, 3, 0, 5])],
        80,
        [(0, [6, 7, 8, 0, 10])],
        [[(3, 8), (5, 10)]],
    ),
    ("a window longer than the prompt", [WINDOW], 16, [(0, [1])], 16, [(0, [7])], [[(1, 7)]]),
    (
        "kernel blocks",
        [KERNEL],
        32,
        [(0, [1, 5])],
        32,
        [(0, [7, 2])],
        [[(4, 28), (5, 29), (6, 30), (7, 31), (20, 8), (21, 9), (22, 10), (23, 11)]],
    ),
    ("a state: the last real slot", [STATE], 48, [(0, [0, 0, 4])], 48, [(0, [6])], [[(4, 6)]]),
    ("a state: older ones stay", [STATE], 48, [(0, [2, 3, 4])], 48, [(1, [0, 6])], [[(4, 6)]]),
    ("a state: ids end in nulls", [STATE], 48, [(0, [4, 0])], 48, [(0, [6, 0])], [[(4, 6)]]),
    ("a state that decode has no slot for", [FULL, STATE], 16, [(0, [1]), (0, [2])], 16, [(0, [7]), (0, [0])], [[(1, 7)], []]),
    (
        "groups keep their own ids",
        [KERNEL, STATE],
        16,
        [(0, [1]), (0, [1])],
        16,
        [(0, [2]), (0, [2])],
        [[(4, 8), (5, 9), (6, 10), (7, 11)], [(1, 2)]],
    ),
    ("an empty pull", [FULL, STATE], 48, [(0, [1, 2, 3]), (0, [4])], 0, [], [[], []]),
    ("an empty pull with lists", [FULL, STATE], 48, [(0, [1, 2, 3]), (0, [4])], 0, [(0, []), (0, [])], [[], []]),
    ("an empty pull of what prefill does not hold", [FULL], 0, [], 48, [(3, [])], [[]]),
    ("one group of two", [FULL, WINDOW], 16, [(0, [1]), (0, [2])], 16, [(0, []), (0, [7])], [[], [(2, 7)]]),
]


@pytest.mark.parametrize(
    ("groups", "p_tokens", "p_lists", "d_tokens", "d_lists", "sent"), [row[1:] for row in SENT], ids=[row[0] for row in SENT]
)
def test_what_is_sent(
    groups: list[GroupGeometry], p_tokens: int, p_lists: Lists, d_tokens: int, d_lists: Lists, sent: list[list[tuple[int, int]]]
) -> None:
    assert pairs(plan_blocks(groups, groups, request(p_tokens, p_lists), request(d_tokens, d_lists))) == sent


@pytest.mark.parametrize(
    ("p_scratch", "p_ids", "d_scratch", "d_ids", "sent"),
    [
        (0, [4], 2, [6, 7, 8], [(4, 6)]),
        (2, [0, 4, 5, 9], 0, [6], [(4, 6)]),
        (1, [0, 4, 5], 2, [0, 6, 7, 8], [(4, 6)]),
        (0, [4], 3, [6, 7], []),  # nothing but scratch: decode wants no state
    ],
)
def test_scratch_slots_are_dropped(
    p_scratch: int, p_ids: list[int], d_scratch: int, d_ids: list[int], sent: list[object]
) -> None:
    prefill, decode = group("state", scratch_slots=p_scratch), group("state", scratch_slots=d_scratch)
    assert pairs(plan_blocks([prefill], [decode], request(8, [(0, p_ids)]), request(8, [(0, d_ids)]))) == [sent]


REFUSED: list[tuple[str, list[GroupGeometry], int, Lists, int, Lists, str]] = [
    (
        "prefill is shorter by a block",
        [FULL],
        48,
        [(0, [1, 2, 3])],
        64,
        [(0, [6, 7, 8, 9])],
        "prefill computed 48 tokens and decode wants 64",
    ),
    (
        "prefill is shorter within the last block",
        [FULL],
        33,
        [(0, [1, 2, 3])],
        34,
        [(0, [6, 7, 8])],
        "computed 33 tokens and decode wants 34",
    ),
    (
        "a position before prefill's list",
        [FULL],
        48,
        [(1, [2, 3])],
        48,
        [(0, [7, 8, 9])],
        "wants block 0 of the prompt (1 such in all)",
    ),
    (
        "a position behind prefill's list",
        [FULL],
        48,
        [(0, [1])],
        48,
        [(0, [7, 8, 9])],
        "wants block 1 of the prompt (2 such in all)",
    ),
    (
        "a null where decode has a block",
        [WINDOW],
        80,
        [(0, [0, 0, 0, 4, 5])],
        80,
        [(0, [0, 0, 8, 9, 10])],
        "wants block 2 of the prompt",
    ),
    (
        "prefill holds nothing of the group",
        [FULL, FULL],
        16,
        [(0, [1]), (0, [])],
        16,
        [(0, [7]), (0, [8])],
        "group 1: decode wants block 0",
    ),
    (
        "another number of groups",
        [FULL],
        16,
        [(0, [1])],
        16,
        [(0, [7]), (0, [8])],
        "prefill sends blocks of 1 groups (it has 1) and decode wants blocks of 2",
    ),
    ("a group too few", [FULL, STATE], 16, [(0, [1])], 16, [(0, [7])], "prefill sends blocks of 1 groups (it has 2)"),
    ("no state", [STATE], 16, [(0, [0, 0])], 16, [(0, [7])], "wants a state for slot 7 and prefill holds none among 2 slots"),
    ("a state after more tokens", [STATE], 17, [(0, [4])], 16, [(0, [7])], "after 17 tokens and decode wants the one after 16"),
    (
        "prefill's id is out of range",
        [FULL],
        16,
        [(0, [BLOCKS])],
        16,
        [(0, [7])],
        f"prefill names block {BLOCKS} and has {BLOCKS} blocks",
    ),
    (
        "decode's id is out of range",
        [FULL],
        16,
        [(0, [1])],
        16,
        [(0, [BLOCKS])],
        f"decode names block {BLOCKS} and has {BLOCKS} blocks",
    ),
    ("an id of 64 bits", [FULL], 16, [(0, [1])], 16, [(0, [1 << 70])], f"decode names block {1 << 70} and has 100 blocks"),
    ("an id of -64 bits", [FULL], 16, [(0, [-1 << 70])], 16, [(0, [7])], f"prefill names block {-1 << 70} and has 100 blocks"),
    ("an id of 63 bits", [FULL], 16, [(0, [(1 << 63) - 1])], 16, [(0, [7])], f"names block {(1 << 63) - 1} and has 100"),
    ("a negative id", [STATE], 16, [(0, [1])], 16, [(0, [-7])], "decode names block -7"),
    ("a negative first block", [FULL], 16, [(0, [1])], 16, [(-1, [7])], "list begins at block -1"),
    ("a first block of 64 bits", [FULL], 16, [(1 << 70, [1])], 16, [(0, [7])], "prefill says that its list begins at block"),
]


@pytest.mark.parametrize(
    ("groups", "p_tokens", "p_lists", "d_tokens", "d_lists", "says"),
    [row[1:] for row in REFUSED],
    ids=[row[0] for row in REFUSED],
)
def test_what_fails_its_request(
    groups: list[GroupGeometry], p_tokens: int, p_lists: Lists, d_tokens: int, d_lists: Lists, says: str
) -> None:
    with pytest.raises(HandoffBlocksError) as info:
        plan_blocks(groups, groups, request(p_tokens, p_lists), request(d_tokens, d_lists))
    assert says in str(info.value)


def test_lists_survive_the_wire() -> None:
    sent = request(48, [(2, [7, 8]), (0, [])])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=RequestBlocks) == sent


@given(st.data())
def test_a_block_is_sent_to_its_own_position(data: st.DataObject) -> None:
    """Block ids are positions plus a constant for each side: whatever is sent, both ends name one position."""
    block = data.draw(st.integers(1, 5))
    window = data.draw(st.none() | st.integers(2, 20))
    g = group("full" if window is None else "sliding_window", block, window=window)
    p_tokens, d_tokens = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    p_first, d_first = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 12))
    p_end = -(-p_tokens // block) + data.draw(st.integers(0, 3))
    d_end = -(-d_tokens // block) + data.draw(st.integers(0, 3))
    p_ids = [data.draw(st.sampled_from([0, i + 1])) for i in range(p_first, p_end)]
    d_ids = [data.draw(st.sampled_from([0, i + 1])) for i in range(d_first, d_end)]
    held = {i for i, b in zip(range(p_first, p_end), p_ids, strict=True) if b}
    end = -(-d_tokens // block)
    low = 0 if window is None else end - (-(-window // block) + 1)
    wanted = {i for i, b in zip(range(d_first, d_end), d_ids, strict=True) if b and low <= i < end}
    prefill, decode = request(p_tokens, [(p_first, p_ids)]), request(d_tokens, [(d_first, d_ids)])
    if d_ids and (p_tokens < d_tokens or wanted - held):
        with pytest.raises(HandoffBlocksError):
            plan_blocks([g], [g], prefill, decode)
    else:
        (plan,) = pairs(plan_blocks([g], [g], prefill, decode))
        assert plan == [(i + 1, i + 1) for i in sorted(wanted)]
