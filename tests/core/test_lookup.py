"""KeySpace: a block counts only if every storing head and every stage of it is readable."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.lookup import KeySpace
from kvactors.core.reachability import Reachability
from kvactors.errors import LayoutError, StoreError

ENTRY = (CacheEntry("kv", 8),)


def full(gid: int, layers: Sequence[int], **more: object) -> Group:
    return Group(gid, GroupKind.FULL, 16, dict.fromkeys(layers, ENTRY), **more)  # type: ignore[arg-type]


def mla(gid: int, layers: Sequence[int], block: int = 16) -> Group:
    return Group(gid, GroupKind.MLA, block, dict.fromkeys(layers, ENTRY))


def state(gid: int, layers: Sequence[int], **more: object) -> Group:
    return Group(gid, GroupKind.STATE, 16, dict.fromkeys(layers, ENTRY), **more)  # type: ignore[arg-type]


def local(gid: int, layers: Sequence[int], **more: int) -> Group:
    kind = GroupKind.SLIDING_WINDOW if "window" in more else GroupKind.CHUNKED_LOCAL
    return Group(gid, kind, 16, dict.fromkeys(layers, ENTRY), **more)


def stages(*groups: Sequence[Group], tp: int = 1, model: str = "m") -> list[KVLayout]:
    return [KVLayout(model, list(g), tp, rank, len(groups)) for rank, g in enumerate(groups)]


KEY_COUNTS = [
    ("one rank", stages([full(0, [0, 1])]), 0, 1),
    ("TP4, every rank its own head", stages([full(0, [0])], tp=4), 0, 4),
    ("TP4, 2 KV heads", stages([full(0, [0], kv_heads=2)], tp=4), 0, 2),
    ("TP4, 8 KV heads", stages([full(0, [0], kv_heads=8)], tp=4), 0, 4),
    ("TP8, MLA: one writer", stages([mla(0, [0])], tp=8), 0, 1),
    ("TP4, state: every rank", stages([state(0, [0], kv_heads=2)], tp=4), 0, 4),
    ("TP4, replicated state: one writer", stages([state(0, [0], kv_heads=1)], tp=4), 0, 1),
    ("vllm-ascend#4761: TP4, 2 KV heads, PP2", stages([full(0, [0], kv_heads=2)], [full(0, [1], kv_heads=2)], tp=4), 0, 4),
    ("PP3, layers on two", stages([mla(7, [1])], [mla(7, []), full(0, [2])], [full(0, [3]), mla(7, [4])]), 7, 2),
    ("PP2, the group is listed on one", stages([full(0, [0])], [full(0, [1]), mla(7, [2])]), 7, 1),
]


@pytest.mark.parametrize(("layouts", "group", "count"), [r[1:] for r in KEY_COUNTS], ids=[r[0] for r in KEY_COUNTS])
def test_keys_of_a_block(layouts: list[KVLayout], group: int, count: int) -> None:
    space = KeySpace(layouts)
    keys = space.keys(group, b"\xab\x01")
    assert len(set(keys)) == len(keys) == space.keys_per_block(group) == count
    with_layers = [s for s in layouts if any(g.id == group and g.layers for g in s.groups)]
    assert keys == [s.key(group, b"\xab\x01", head) for s in with_layers for head in range(s.heads(group))]


def test_stages_may_come_in_any_order() -> None:
    layouts = stages([full(0, [0])], [full(0, [1])], [full(0, [2])])
    assert KeySpace(layouts[::-1]).keys(0, b"h") == KeySpace(layouts).keys(0, b"h")


PP2 = stages([full(0, [0], kv_heads=2)], [full(0, [1], kv_heads=2)], tp=4)


@pytest.mark.parametrize("gone", range(4))
def test_a_block_without_one_of_its_objects_is_a_miss(gone: int) -> None:
    """vllm-ascend#4761: partial eviction must not look like a hit."""
    space = KeySpace(PP2)
    evicted = space.keys(0, b"first")[gone]
    held = lambda keys: [key != evicted for key in keys]  # noqa: E731
    assert space.readable_many(0, [b"first", b"second"], held) == [False, True]
    r = Reachability(PP2[0].groups, 16)
    hit = r.longest_hit([b"first", b"second"], 33, readable_many=lambda gid, hashes: space.readable_many(gid, hashes, held))
    assert hit.tokens == 0


@given(st.integers(1, 40), st.integers(0, 3000), st.sets(st.integers(0, 3000), max_size=5))
def test_batches_are_bounded_and_every_key_is_asked_once(tp: int, blocks: int, holes: set[int]) -> None:
    space = KeySpace(stages([full(0, [0])], tp=tp))
    hashes = [i.to_bytes(2, "big") for i in range(blocks)]
    gone = {space.keys(0, hashes[i])[i % tp] for i in holes if i < blocks}
    asked: list[str] = []

    def readable(keys: Sequence[str]) -> list[bool]:
        assert 0 < len(keys) <= 1024
        asked.extend(keys)
        return [key not in gone for key in keys]

    assert space.readable_many(0, hashes, readable) == [i not in holes for i in range(blocks)]
    assert asked == [key for h in hashes for key in space.keys(0, h)]


def test_more_keys_per_block_than_fit_a_call() -> None:
    space = KeySpace(stages([full(0, [0])], tp=1500))
    sizes: list[int] = []
    last = space.keys(0, b"a")[-1]

    def readable(keys: Sequence[str]) -> list[bool]:
        sizes.append(len(keys))
        return [key != last for key in keys]

    assert space.readable_many(0, [b"a", b"b"], readable) == [False, True]
    assert sizes == [1024, 476, 1024, 476]


@pytest.mark.parametrize("answer", [[], [True], [True] * 9])
def test_an_answer_of_the_wrong_length_is_no_answer(answer: list[bool]) -> None:
    with pytest.raises(StoreError, match=f"answered {len(answer)} values for 8 keys"):
        KeySpace(PP2).readable_many(0, [b"a", b"b"], lambda _keys: answer)


def layout(rank: int = 1, size: int = 2, tp: int = 4, model: str = "m", group: Group | None = None) -> KVLayout:
    return KVLayout(model, [group or full(0, [rank], kv_heads=2)], tp, rank, size)


BAD_STAGES = [
    ("none", [], "at least one pipeline stage"),
    ("a stage is missing", [PP2[0]], r"stages \[0\] of pp_size 2; give each stage from 0 to 1 once"),
    ("a stage is given twice", [PP2[0], PP2[0]], r"stages \[0, 0\] of pp_size 2"),
    ("too many", [*PP2, PP2[1]], r"stages \[0, 1, 1\] of pp_size 2"),
    ("models differ", [PP2[0], layout(model="n")], "model: 'm' on stage 0, 'n' on stage 1"),
    ("TP sizes differ", [PP2[0], layout(tp=8)], "tp_size: 4 on stage 0, 8 on stage 1"),
    ("PP sizes differ", [PP2[0], layout(size=3)], "pp_size: 2 on stage 0, 3 on stage 1"),
    ("kinds differ", [PP2[0], layout(group=mla(0, [1]))], "group 0: kind is full on stage 0 and mla on stage 1"),
    (
        "blocks differ",
        stages([mla(0, [0])], [mla(0, [1], block=32)]),
        "group 0: block_tokens is 16 on stage 0 and 32 on stage 1",
    ),
    (
        "windows differ",
        stages([local(0, [0], window=32)], [local(0, [1], window=48)]),
        "group 0: window is 32 on stage 0 and 48",
    ),
    (
        "chunks differ",
        stages([local(0, [0], chunk_tokens=32)], [local(0, [1], chunk_tokens=48)]),
        "group 0: chunk_tokens is 32 on stage 0 and 48 on stage 1",
    ),
    ("no layers anywhere", stages([full(0, [0]), mla(7, [])]), "group 7 has no layers on any stage"),
]


@pytest.mark.parametrize(("layouts", "says"), [r[1:] for r in BAD_STAGES], ids=[r[0] for r in BAD_STAGES])
def test_stages_that_are_no_instance(layouts: list[KVLayout], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        KeySpace(layouts)


def test_unknown_group() -> None:
    with pytest.raises(LayoutError, match=r"there is no group 9; this instance has \[0\]"):
        KeySpace(PP2).keys(9, b"h")
