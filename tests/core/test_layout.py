"""Layouts: digest, keys, objects and ranges, commit layers, storing heads, pipeline stages, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout, finest_hash_tokens, group_hashes, namespace_pattern
from kvactors.core.reachability import Reachability
from kvactors.errors import LayoutError

KV = (CacheEntry("kv", 8, dtype="bf16"),)
HASH = bytes.fromhex("00ff10ab")


def group(gid: int, layers: Sequence[int], kind: GroupKind = GroupKind.FULL, block: int = 16, **more: Any) -> Group:
    return Group(gid, kind, block, dict.fromkeys(layers, KV), **more)


def full(layers: Mapping[int, Sequence[CacheEntry]], gid: int = 0) -> Group:
    return Group(gid, GroupKind.FULL, 16, layers)


def one_group(**more: int) -> KVLayout:
    return KVLayout("org/model", [group(0, [0, 1])], **more)


def two_groups(**more: int) -> KVLayout:
    return KVLayout("org/model", [group(0, [0, 1]), group(3, [1, 2], GroupKind.MLA, 64)], **more)


# -- the worked example ------------------------------------------------------------------------------------------------


def example() -> KVLayout:
    """Full attention on layers 0 and 2, compressed KV on 1, 2 and 3, state on 0 and 3."""

    def entries(**sizes: int) -> dict[int, list[CacheEntry]]:
        return {int(layer[1:]): [CacheEntry("c", nbytes)] for layer, nbytes in sizes.items()}

    return KVLayout(
        "m",
        [
            Group(0, GroupKind.FULL, 16, entries(l0=8, l2=8)),
            Group(1, GroupKind.COMPRESSED, 32, entries(l1=10, l2=11, l3=11)),
            Group(2, GroupKind.STATE, 16, entries(l0=18, l3=18)),
        ],
    )


@pytest.mark.parametrize(("gid", "nbytes", "commits_after"), [(0, 16, 2), (1, 32, 3), (2, 36, 3)])
def test_worked_example(gid: int, nbytes: int, commits_after: int) -> None:
    assert example().object_bytes(gid) == nbytes
    assert example().commit_layer(gid) == commits_after


def test_worked_example_ranges() -> None:
    layout = example()
    assert [layout.entry_ranges(1, layer) for layer in range(4)] == [[], [(0, 10)], [(10, 11)], [(21, 11)]]
    assert [layout.entry_ranges(2, layer) for layer in range(4)] == [[(0, 18)], [], [], [(18, 18)]]


def test_worked_example_objects_complete_over_the_layers() -> None:
    """64 tokens with the last of four states are 4 + 2 + 1 objects: none after layer 1, four after 2, all seven after 3."""
    layout = example()
    counts = {g.id: sum(mask) for g, mask in zip(layout.groups, Reachability(layout.groups, 16).load_mask(64), strict=True)}
    assert counts == {0: 4, 1: 2, 2: 1}
    complete = [sum(n for gid, n in counts.items() if layout.commit_layer(gid) <= layer) for layer in range(4)]
    assert complete == [0, 0, 4, 7]


# -- digest ------------------------------------------------------------------------------------------------------------


def test_digest_is_the_hash_of_canonical_json() -> None:
    layout = KVLayout(
        "m",
        [
            full({2: [CacheEntry("v", 7, 64, "bf16"), CacheEntry("k", 8, 64, "fp8_e4m3")], 0: [CacheEntry("ü", 3)]}, 5),
            Group(1, GroupKind.STATE, 32, {}),
        ],
        tp_size=4,
        pp_rank=1,
        pp_size=2,
        first_layer=0,
    )
    canonical = (
        '{"tp":4,"pp":2,"groups":[{"block_tokens":16,"layers":[[0,[["ü",3,""]]],[2,[["k",8,"fp8_e4m3"],["v",7,"bf16"]]]]},'
        '{"block_tokens":32,"layers":[]}]}'
    )
    assert layout.digest == hashlib.sha256(canonical.encode()).hexdigest()
    assert len(layout.digest) == 64


BASE = [group(0, [0, 1]), group(1, [1, 2], GroupKind.STATE)]
SAME_DIGEST = [
    ("model", lambda: KVLayout("other", BASE)),
    ("group ids", lambda: KVLayout("m", [group(7, [0, 1]), group(2, [1, 2], GroupKind.STATE)])),
    ("kind and wrapping", lambda: KVLayout("m", [group(0, [0, 1], GroupKind.MLA), group(1, [1, 2])])),
    ("order of layers and entries as given", lambda: KVLayout("m", [group(0, [1, 0]), group(1, [2, 1], GroupKind.STATE)])),
    ("stride", lambda: KVLayout("m", [full(dict.fromkeys([0, 1], (CacheEntry("kv", 8, 64, "bf16"),))), BASE[1]])),
    ("lists or tuples", lambda: KVLayout("m", tuple(BASE))),
    ("heads", lambda: KVLayout("m", [group(0, [0, 1], kv_heads=2), BASE[1]])),
]
OTHER_DIGEST = [
    ("TP size", lambda: KVLayout("m", BASE, tp_size=2)),
    ("PP size", lambda: KVLayout("m", BASE, pp_size=2)),
    ("order of groups", lambda: KVLayout("m", BASE[::-1])),
    ("block size", lambda: KVLayout("m", [group(0, [0, 1], block=32), BASE[1]])),
    ("layers", lambda: KVLayout("m", [group(0, [0, 2]), BASE[1]])),
    ("entry size", lambda: KVLayout("m", [full({0: KV, 1: [CacheEntry("kv", 9, dtype="bf16")]}), BASE[1]])),
    ("entry name", lambda: KVLayout("m", [full({0: KV, 1: [CacheEntry("k", 8, dtype="bf16")]}), BASE[1]])),
    ("element kind", lambda: KVLayout("m", [full({0: KV, 1: [CacheEntry("kv", 8, dtype="fp8_e4m3")]}), BASE[1]])),
]


@pytest.mark.parametrize("make", [r[1] for r in SAME_DIGEST], ids=[r[0] for r in SAME_DIGEST])
def test_digest_does_not_depend_on(make: Callable[[], KVLayout]) -> None:
    assert make().digest == KVLayout("m", BASE).digest


@pytest.mark.parametrize("make", [r[1] for r in OTHER_DIGEST], ids=[r[0] for r in OTHER_DIGEST])
def test_digest_depends_on(make: Callable[[], KVLayout]) -> None:
    assert make().digest != KVLayout("m", BASE).digest


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_digest_does_not_depend_on_the_process(seed: str) -> None:
    program = (
        "from kvactors.core.layout import *;"
        "print(KVLayout('m', [Group(0, GroupKind.FULL, 16, {1: [CacheEntry('v', 8), CacheEntry('k', 8)]})]).digest)"
    )
    path = json.dumps(sys.path)
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {path}; {program}"]
    out = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout.strip()
    here = KVLayout("m", [Group(0, GroupKind.FULL, 16, {1: [CacheEntry("k", 8), CacheEntry("v", 8)]})])
    assert out == here.digest


# -- keys --------------------------------------------------------------------------------------------------------------


def test_key_of_one_group() -> None:
    assert one_group().key(0, HASH) == "org/model@00ff10ab@0"
    assert one_group(tp_size=4).key(0, HASH, head=3) == "org/model@00ff10ab@3"


def test_key_of_one_group_with_pipeline_stages() -> None:
    layout = one_group(pp_size=2, pp_rank=1)
    assert layout.key(0, HASH) == f"org/model@mooncake_pp_v1:{layout.digest}@pp_rank:1@00ff10ab@0"


def test_key_of_several_groups() -> None:
    layout = two_groups()
    assert layout.key(0, HASH) == f"org/model@mooncake_hybrid_v1:{layout.digest}@group:0@block:16@00ff10ab@0"
    assert layout.key(3, HASH) == f"org/model@mooncake_hybrid_v1:{layout.digest}@group:3@block:64@00ff10ab@0"


def test_key_of_several_groups_with_pipeline_stages() -> None:
    layout = two_groups(tp_size=2, pp_size=3, pp_rank=2)
    key = layout.key(0, HASH, head=1)
    assert key == f"org/model@mooncake_hybrid_v1:{layout.digest}@pp_rank:2@group:0@block:16@00ff10ab@1"


@pytest.mark.parametrize("make", [one_group, two_groups])
@pytest.mark.parametrize("pp", [1, 2])
def test_key_parts_make_the_same_keys(make: Callable[..., KVLayout], pp: int) -> None:
    layout = make(pp_size=pp, tp_size=12)
    for head in (0, 11):
        before, after = layout.key_parts(0, head)
        assert before + HASH.hex() + after == layout.key(0, HASH, head)


@pytest.mark.parametrize("length", [1, 16, 32, 64])
def test_hashes_of_any_length_are_lower_case_hex(length: int) -> None:
    assert one_group().key(0, b"\xab" * length) == f"org/model@{'ab' * length}@0"


def test_keys_differ_by_group_head_stage_and_hash() -> None:
    keys = [
        KVLayout("m", [group(0, [rank]), group(1, [rank])], 2, rank, 2).key(gid, h, head)
        for rank in range(2)
        for gid in range(2)
        for head in range(2)
        for h in (b"a", b"b")
    ]
    assert len(set(keys)) == 16


def test_a_namespace_is_a_prefix_of_the_model() -> None:
    layout = two_groups(tp_size=2)
    moved = layout.with_model("epoch2/" + layout.model)
    assert moved.digest == layout.digest
    assert moved.key(3, HASH) == "epoch2/" + layout.key(3, HASH)


def test_hash_of_a_block_is_the_last_of_its_fine_hashes() -> None:
    fine = [bytes([i]) for i in range(10)]
    assert list(group_hashes(fine, 16, 16)) == fine
    assert list(group_hashes(fine, 64, 16)) == [b"\x03", b"\x07"]
    assert list(group_hashes(fine, 16384, 128)) == []
    assert finest_hash_tokens([group(0, [0], block=48), group(1, [0], block=64)]) == 16


# -- objects and ranges ------------------------------------------------------------------------------------------------


def test_entries_are_ordered_by_layer_then_name() -> None:
    layers = {7: [CacheEntry("v", 1), CacheEntry("k", 2)], 1: [CacheEntry("z", 4), CacheEntry("a", 8)]}
    layout = KVLayout("m", [full(layers)])
    assert [(r.layer, r.entry.name, r.offset) for r in layout.ranges(0)] == [
        (1, "a", 0),
        (1, "z", 8),
        (7, "k", 12),
        (7, "v", 14),
    ]
    assert layout.entry_ranges(0, 7) == [(12, 2), (14, 1)]


def test_padding_is_not_part_of_an_object() -> None:
    entry = CacheEntry("state", 68608, 98304)
    layout = KVLayout("m", [Group(0, GroupKind.STATE, 16, {0: [entry], 1: [entry]})])
    assert layout.object_bytes(0) == 2 * 68608
    assert layout.entry_ranges(0, 1) == [(68608, 68608)]


names = st.sampled_from(["k", "v", "conv", "ssm", "index"])
layer_entries = st.dictionaries(names, st.integers(1, 1 << 20), min_size=1).map(
    lambda sizes: [CacheEntry(name, nbytes) for name, nbytes in sizes.items()]
)
group_layers = st.dictionaries(st.integers(0, 60), layer_entries, min_size=1, max_size=8)


@given(st.lists(group_layers, min_size=1, max_size=4))
def test_ranges_tile_the_object_exactly(all_layers: list[dict[int, list[CacheEntry]]]) -> None:
    layout = KVLayout("m", [Group(gid, GroupKind.FULL, 16, layers) for gid, layers in enumerate(all_layers)])
    for gid, layers in enumerate(all_layers):
        end = 0
        for layer in range(61):
            ranges = layout.entry_ranges(gid, layer)
            assert [n for _, n in ranges] == [e.nbytes for e in sorted(layers.get(layer, []), key=lambda e: e.name)]
            for offset, nbytes in ranges:
                assert offset == end
                end += nbytes
        assert layout.object_bytes(gid) == end == sum(e.nbytes for entries in layers.values() for e in entries)
        assert layout.commit_layer(gid) == max(layers)


# -- storing heads -----------------------------------------------------------------------------------------------------

HEAD_ROWS = [
    # kind, kv_heads, tp, put_step, heads
    (GroupKind.FULL, None, 1, 1, 1),
    (GroupKind.FULL, None, 8, 1, 8),
    (GroupKind.FULL, 8, 8, 1, 8),
    (GroupKind.FULL, 16, 8, 1, 8),
    (GroupKind.FULL, 2, 8, 4, 2),
    (GroupKind.FULL, 1, 8, 8, 1),
    (GroupKind.SLIDING_WINDOW, 4, 8, 2, 4),
    (GroupKind.MLA, None, 8, 8, 1),
    (GroupKind.MLA, 4, 8, 8, 1),
    (GroupKind.COMPRESSED, 1, 4, 4, 1),
    (GroupKind.STATE, None, 8, 1, 8),
    (GroupKind.STATE, 2, 8, 1, 8),
    (GroupKind.STATE, 1, 8, 8, 1),
]


@pytest.mark.parametrize(("kind", "kv_heads", "tp", "put_step", "heads"), HEAD_ROWS)
def test_storing_heads(kind: GroupKind, kv_heads: int | None, tp: int, put_step: int, heads: int) -> None:
    window = 64 if kind is GroupKind.SLIDING_WINDOW else None
    layout = KVLayout("m", [Group(0, kind, 16, {0: KV}, window=window, kv_heads=kv_heads)], tp_size=tp)
    assert (layout.put_step(0), layout.heads(0)) == (put_step, heads)
    writers = [rank for rank in range(tp) if layout.stores(0, rank)]
    assert [layout.head_of(0, rank) for rank in writers] == list(range(heads)), "every head has exactly one writer"
    assert [layout.head_of(0, rank) for rank in range(tp)] == [rank // put_step for rank in range(tp)]


def test_heads_are_per_group() -> None:
    layout = KVLayout("m", [group(0, [0], kv_heads=2), group(1, [0], GroupKind.MLA), group(2, [0], GroupKind.STATE)], tp_size=4)
    assert [layout.heads(gid) for gid in range(3)] == [2, 1, 4]


# -- pipeline stages ---------------------------------------------------------------------------------------------------


def cut(rank: int, layers: range, tp: int = 1, **more: Any) -> KVLayout:
    return KVLayout("m", [group(0, list(layers), **more)], tp, rank, 2)


def test_uneven_stages_44_layers_cut_21_23() -> None:
    """vllm-ascend#15507: the second stage starts where the first ends, not at rank x its own number of layers."""
    first, second = cut(0, range(21)), cut(1, range(21, 44))
    assert (first.commit_layer(0), second.commit_layer(0)) == (20, 43)
    assert second.entry_ranges(0, 21) == [(0, 8)]
    assert second.entry_ranges(0, 22) == [(8, 8)]
    assert second.entry_ranges(0, 23) == [(16, 8)]
    assert second.entry_ranges(0, 20) == []
    assert (second.stage_layer(21), second.stage_layer(43), second.model_layer(0)) == (0, 22, 21)
    assert (first.stage_layers, second.stage_layers) == (21, 23)
    assert first.digest != second.digest


def test_an_mtp_layer_commits_last() -> None:
    assert cut(1, range(21, 45)).commit_layer(0) == 44


def test_four_keys_per_block_with_two_heads_and_two_stages() -> None:
    """vllm-ascend#4761: TP4, 2 KV heads, PP2."""
    keys = {
        s.key(0, HASH, head) for s in (cut(r, range(r, r + 1), 4, kv_heads=2) for r in range(2)) for head in range(s.heads(0))
    }
    assert len(keys) == 4


def test_groups_that_are_local_to_a_stage() -> None:
    layout = KVLayout("m", [group(0, [21, 22]), group(1, [])], pp_rank=1, pp_size=2)
    assert layout.object_bytes(1) == 0
    assert layout.ranges(1) == ()
    with pytest.raises(LayoutError, match="group 1 has no layer on this stage"):
        layout.commit_layer(1)


def test_a_stage_may_start_with_layers_that_have_no_cache() -> None:
    layout = KVLayout("m", [group(0, [24, 27])], pp_rank=1, pp_size=2, first_layer=21)
    assert (layout.stage_layer(24), layout.stage_layers) == (3, 7)
    assert KVLayout("m", [group(0, [3])]).stage_layer(3) == 3, "the first stage starts at layer 0"


# -- what is refused ---------------------------------------------------------------------------------------------------

BAD = [
    ("no model", lambda: KVLayout("", [group(0, [0])]), "model name ''"),
    ("no groups", lambda: KVLayout("m", []), "at least one group with layers"),
    ("no layers", lambda: KVLayout("m", [group(0, [])]), "at least one group with layers"),
    ("an id twice", lambda: KVLayout("m", [group(0, [0]), group(0, [1])]), "group id 0 is given twice"),
    ("tp_size 0", lambda: KVLayout("m", [group(0, [0])], tp_size=0), "tp_size = 0"),
    ("tp_size True", lambda: KVLayout("m", [group(0, [0])], tp_size=True), "tp_size = True"),
    ("rank past the size", lambda: one_group(pp_rank=2, pp_size=2), "pp_rank 2: must be less than pp_size 2"),
    ("negative rank", lambda: KVLayout("m", [group(0, [0])], pp_rank=-1), "pp_rank = -1"),
    (
        "heads that do not divide TP",
        lambda: KVLayout("m", [group(0, [0], kv_heads=3)], 8),
        "3 KV heads do not divide tp_size 8",
    ),
    ("first layer too high", lambda: KVLayout("m", [group(0, [4])], first_layer=5), "first_layer 5"),
    ("negative group id", lambda: group(-1, [0]), "group id = -1"),
    ("unknown kind", lambda: Group(0, cast(Any, "ring"), 16, {0: KV}), "group 0: unknown kind 'ring'; one of full, "),
    ("block of 0 tokens", lambda: group(0, [0], block=0), "group 0: block_tokens = 0"),
    ("block of 1.5 tokens", lambda: group(0, [0], block=cast(Any, 1.5)), "group 0: block_tokens = 1.5"),
    ("window missing", lambda: group(0, [0], GroupKind.SLIDING_WINDOW), "needs a window"),
    ("window of 1", lambda: group(0, [0], GroupKind.SLIDING_WINDOW, window=1), "group 0: window = 1: .* >= 2"),
    ("window on full attention", lambda: group(0, [0], window=64), "only for kind sliding_window, not for full"),
    ("chunk missing", lambda: group(0, [0], GroupKind.CHUNKED_LOCAL), "needs chunk_tokens"),
    ("chunk on state", lambda: group(0, [0], GroupKind.STATE, chunk_tokens=8), "only for kind chunked_local, not for state"),
    ("negative layer", lambda: group(0, [-1]), "group 0: layer number = -1"),
    ("layer beyond any model", lambda: group(0, [65_536]), "group 0: layer number = 65536: must be less than 65536"),
    ("layer without entries", lambda: Group(0, GroupKind.FULL, 16, {0: []}), "group 0, layer 0: has no entries"),
    ("entry twice", lambda: Group(0, GroupKind.FULL, 16, {3: [*KV, *KV]}), "group 0, layer 3: entry 'kv' is given twice"),
    ("entry without a name", lambda: CacheEntry("", 8), "entry name ''"),
    ("entry of 0 bytes", lambda: CacheEntry("k", 0), "entry 'k': nbytes = 0"),
    ("stride below the payload", lambda: CacheEntry("k", 96, 64), "96 bytes per block are larger than the stride of 64"),
    ("unknown group", lambda: one_group().object_bytes(4), r"there is no group 4; this layout has \[0\]"),
    ("unknown head", lambda: one_group(tp_size=2).key(0, HASH, 2), "head 2 does not exist; it has 2"),
    ("unknown rank", lambda: one_group(tp_size=2).head_of(0, 2), "tp_rank 2: must be from 0 to 1"),
]


@pytest.mark.parametrize(("make", "says"), [r[1:] for r in BAD], ids=[r[0] for r in BAD])
def test_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(LayoutError, match=says) as raised:
        make()
    assert isinstance(raised.value, ValueError)


def test_layouts_travel_between_processes() -> None:
    group = Group(3, GroupKind.SLIDING_WINDOW, 16, {1: [CacheEntry("k", 8, 16, "bf16")]}, window=32)
    layout = KVLayout("m", [group], tp_size=2, pp_rank=1, pp_size=2)
    for copied in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert copied == layout
        assert copied.digest == layout.digest
        assert copied.group(3) == group


def test_a_namespace_has_keys_of_its_own() -> None:
    plain = one_group()
    a, ab = plain.with_namespace("a.1"), plain.with_namespace("a.12")
    keys = [layout.key(0, b"\x01") for layout in (plain, a, ab)]
    assert keys[1] == f"a.1::{keys[0]}"
    assert [bool(re.fullmatch(namespace_pattern("a.1"), key)) for key in keys] == [False, True, False]
    assert re.fullmatch(namespace_pattern("org/model"), keys[0]) is None
    assert re.fullmatch(namespace_pattern("a.1"), keys[1].replace("a.1", "ax1")) is None
    assert [layout.digest for layout in (a, ab)] == [plain.digest] * 2


@pytest.mark.parametrize("name", ["", "a b", "a::b", "a@b", "a*", "\n"])
def test_a_namespace_that_would_be_confused_is_refused(name: str) -> None:
    for make in (one_group().with_namespace, namespace_pattern):
        with pytest.raises(LayoutError, match="namespace"):
            make(name)
