"""TP sizes that differ: every decode rank gets each of its heads exactly once, or the handshake is refused."""

from __future__ import annotations

import pytest

from kvactors.core.layout import GroupKind
from kvactors.disagg import HeadPart, SharedGroup, TpMap, expected_pulls, layers_by_stage, rank_heads
from kvactors.errors import PeerMismatchError, TransferPlanError

FULL, MLA, STATE = GroupKind.FULL, GroupKind.MLA, GroupKind.STATE


@pytest.mark.parametrize(
    ("heads", "tp", "shares"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
    ],
)
def test_the_heads_of_each_rank(heads: int, tp: int, shares: list[list[int]]) -> None:
    assert [list(rank_heads(heads, tp, rank)) for rank in range(tp)] == shares


@pytest.mark.parametrize(
    ("heads", "tp", "rank", "says"), [(6, 4, 0, "6 KV heads"), (4, 6, 0, "by 6 ranks"), (4, 2, 2, "TP rank 2")]
)
def test_heads_that_no_rank_has(heads: int, tp: int, rank: int, says: str) -> None:
    with pytest.raises(TransferPlanError, match=says):
        rank_heads(heads, tp, rank)


Row = tuple[str, GroupKind, int | None, int, int, list[list[tuple[int, int, int, int]]]]
SENDS: list[Row] = [
    # what, kind, heads, prefill's TP, decode's TP; for each decode rank: prefill rank, heads, first at prefill, first at decode
    ("equal", FULL, 4, 2, 2, [[(0, 1, 0, 0)], [(1, 1, 0, 0)]]),
    ("equal, heads not known", FULL, None, 2, 2, [[(0, 1, 0, 0)], [(1, 1, 0, 0)]]),
    ("equal, heads uneven", FULL, 3, 2, 2, [[(0, 1, 0, 0)], [(1, 1, 0, 0)]]),
    ("P > D", FULL, 4, 4, 2, [[(0, 1, 0, 0), (1, 1, 0, 1)], [(2, 1, 0, 0), (3, 1, 0, 1)]]),
    ("P < D", FULL, 4, 2, 4, [[(0, 1, 0, 0)], [(0, 1, 1, 0)], [(1, 1, 0, 0)], [(1, 1, 1, 0)]]),
    ("neither divides the other", FULL, 6, 2, 3, [[(0, 2, 0, 0)], [(0, 1, 2, 0), (1, 1, 0, 1)], [(1, 2, 1, 0)]]),
    ("copies at prefill", FULL, 2, 4, 2, [[(0, 1, 0, 0)], [(2, 1, 0, 0)]]),
    ("copies at prefill, all heads at decode", FULL, 2, 4, 1, [[(0, 1, 0, 0), (2, 1, 0, 1)]]),
    ("copies at decode", FULL, 2, 2, 4, [[(0, 1, 0, 0)], [(0, 1, 0, 0)], [(1, 1, 0, 0)], [(1, 1, 0, 0)]]),
    ("copies at decode, all heads at prefill", FULL, 2, 1, 4, [[(0, 1, 0, 0)], [(0, 1, 0, 0)], [(0, 1, 1, 0)], [(0, 1, 1, 0)]]),
    ("copies on both sides, spread", FULL, 2, 8, 4, [[(0, 1, 0, 0)], [(1, 1, 0, 0)], [(4, 1, 0, 0)], [(5, 1, 0, 0)]]),
    ("copies on both sides, more at decode", FULL, 1, 2, 4, [[(0, 1, 0, 0)], [(1, 1, 0, 0)], [(0, 1, 0, 0)], [(1, 1, 0, 0)]]),
    ("MLA, P > D", MLA, None, 4, 2, [[(0, 1, 0, 0)], [(1, 1, 0, 0)]]),
    ("MLA, P < D", MLA, None, 2, 4, [[(0, 1, 0, 0)], [(1, 1, 0, 0)], [(0, 1, 0, 0)], [(1, 1, 0, 0)]]),
    ("MLA, neither divides the other", MLA, 1, 3, 2, [[(0, 1, 0, 0)], [(1, 1, 0, 0)]]),
    ("state, equal", STATE, None, 2, 2, [[(0, 1, 0, 0)], [(1, 1, 0, 0)]]),
    ("state, replicated", STATE, 1, 2, 3, [[(0, 1, 0, 0)], [(1, 1, 0, 0)], [(0, 1, 0, 0)]]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "heads", "p_tp", "d_tp", "expected"), [row[1:] for row in SENDS], ids=[row[0] for row in SENDS]
)
def test_who_sends_what(
    kind: GroupKind, heads: int | None, p_tp: int, d_tp: int, expected: list[list[tuple[int, int, int, int]]]
) -> None:
    tp = TpMap([SharedGroup(kind, heads)], p_tp, d_tp)
    parts = [tp.parts(0, rank) for rank in range(d_tp)]
    assert [[(p.prefill_rank, p.heads, p.src_first, p.dst_first) for p in of_rank] for of_rank in parts] == expected


SIZES = [(h, p, d) for h in (1, 2, 3, 4, 6, 8) for p in (1, 2, 3, 4, 6, 8) for d in (1, 2, 3, 4, 6, 8)]


def even(heads: int, tp: int) -> bool:
    return max(heads, tp) % min(heads, tp) == 0


@pytest.mark.parametrize(("heads", "p_tp", "d_tp"), [s for s in SIZES if even(s[0], s[1]) and even(s[0], s[2])])
def test_each_head_arrives_once_and_is_the_right_one(heads: int, p_tp: int, d_tp: int) -> None:
    tp = TpMap([SharedGroup(FULL, heads)], p_tp, d_tp)
    sent = [0] * p_tp
    for rank in range(d_tp):
        arrived: dict[int, int] = {}
        wanted = rank_heads(heads, d_tp, rank)
        parts = tp.parts(0, rank)
        assert len({part.prefill_rank for part in parts}) == len(parts), "one run of bytes for each sender"
        for part in parts:
            held = rank_heads(heads, p_tp, part.prefill_rank)
            if p_tp != d_tp:
                assert (part.src_heads, part.dst_heads) == (len(held), len(wanted))
                for i in range(part.heads):
                    assert part.dst_first + i not in arrived
                    arrived[part.dst_first + i] = held[part.src_first + i]
                sent[part.prefill_rank] += part.heads
        if p_tp != d_tp:
            assert [arrived[i] for i in range(len(wanted))] == list(wanted)
        else:
            assert parts == (HeadPart(rank),)
    if heads <= min(p_tp, d_tp):
        busy = [n for n in sent if n] or [0]
        assert max(busy) - min(busy) <= 1, "copies share the work"


@pytest.mark.parametrize(("heads", "p_tp", "d_tp"), [s for s in SIZES if even(s[0], s[1]) and even(s[0], s[2])])
def test_every_prefill_rank_is_pulled_from(heads: int, p_tp: int, d_tp: int) -> None:
    tp = TpMap([SharedGroup(FULL, heads), SharedGroup(MLA, None)], p_tp, d_tp)
    for p in range(p_tp):
        assert tp.pullers(p) == tuple(d for d in range(d_tp) if p in tp.pulls(d)) != ()
        assert expected_pulls(tp, p, 3) == 3 * len(tp.pullers(p))
    for d in range(d_tp):
        assert {part.prefill_rank for i in (0, 1) for part in tp.parts(i, d)} <= set(tp.pulls(d))


def test_a_rank_whose_copies_nobody_needs_gets_one_empty_pull() -> None:
    tp = TpMap([SharedGroup(MLA, None)], 4, 2)
    assert [tp.pulls(d) for d in range(2)] == [(0, 2), (1, 3)]
    assert [tp.pullers(p) for p in range(4)] == [(0,), (1,), (0,), (1,)]


REFUSED = [
    (STATE, None, 2, 1, "group 1: recurrent state is not cut by head: prefill has TP 2, decode has TP 1"),
    (STATE, 4, 2, 4, "group 1: recurrent state is not cut by head: prefill has TP 2, decode has TP 4"),
    (FULL, None, 2, 4, "group 1: its KV heads are not known: prefill has TP 2, decode has TP 4"),
    (FULL, 6, 4, 2, "group 1: 6 KV heads cannot be shared evenly: prefill has TP 4, decode has TP 2"),
    (FULL, 4, 2, 3, "group 1: 4 KV heads cannot be shared evenly: prefill has TP 2, decode has TP 3"),
]


@pytest.mark.parametrize(("kind", "heads", "p_tp", "d_tp", "says"), REFUSED)
def test_what_cannot_be_mapped_is_refused_with_both_sizes(
    kind: GroupKind, heads: int | None, p_tp: int, d_tp: int, says: str
) -> None:
    with pytest.raises(PeerMismatchError) as info:
        TpMap([SharedGroup(MLA, None), SharedGroup(kind, heads)], p_tp, d_tp)
    assert str(info.value).startswith(says)
    assert (info.value.prefill, info.value.decode) == (f"TP {p_tp}", f"TP {d_tp}")


@pytest.mark.parametrize(
    ("part", "src", "dst", "cut"),
    [
        (HeadPart(0), 24, 24, (0, 0, 24)),
        (HeadPart(0, 1, 1, 2, 0, 1), 24, 12, (12, 0, 12)),
        (HeadPart(0, 1, 0, 1, 3, 4), 6, 24, (0, 18, 6)),
        (HeadPart(0, 2, 2, 4, 2, 6), 40, 60, (20, 20, 20)),
    ],
)
def test_a_part_in_bytes(part: HeadPart, src: int, dst: int, cut: tuple[int, int, int]) -> None:
    assert part.cut(src, dst, "k") == cut


@pytest.mark.parametrize(
    ("part", "src", "dst", "says"),
    [
        (HeadPart(0), 24, 23, "k: bytes of a block: prefill has 24 (1 share(s)), decode has 23 (1 share(s))"),
        (HeadPart(0, 1, 1, 2, 0, 1), 24, 13, "k: bytes of a block: prefill has 24 (2 share(s)), decode has 13 (1 share(s))"),
        (HeadPart(0, 1, 1, 2, 0, 1), 25, 12, "k: payload is no whole number of heads: prefill has 25 bytes for 2"),
    ],
)
def test_payloads_that_do_not_fit(part: HeadPart, src: int, dst: int, says: str) -> None:
    with pytest.raises(PeerMismatchError) as info:
        part.cut(src, dst, "k")
    assert str(info.value).startswith(says)


@pytest.mark.parametrize(
    ("stages", "decode", "shares"),
    [
        ([["a", "b", "c"]], ["a", "b", "c"], [["a", "b", "c"]]),
        ([["a"], ["b", "c"]], ["a", "b", "c"], [["a"], ["b", "c"]]),
        ([["a", "b"], ["c"], ["d"]], ["b", "c"], [["b"], ["c"], []]),
        ([["a"], ["b"]], [], [[], []]),
    ],
)
def test_each_stage_sends_its_own_layers(stages: list[list[str]], decode: list[str], shares: list[list[str]]) -> None:
    assert layers_by_stage(stages, decode) == shares


@pytest.mark.parametrize(
    ("stages", "says"), [([["a"], ["c"]], r"layer b: prefill has stages \[\]"), ([["a", "b"], ["b"]], r"stages \[0, 1\]")]
)
def test_a_layer_has_one_stage(stages: list[list[str]], says: str) -> None:
    with pytest.raises(PeerMismatchError, match=says):
        layers_by_stage(stages, ["a", "b"])
