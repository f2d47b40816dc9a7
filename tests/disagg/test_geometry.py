"""The handshake: what differs and may, what is refused, and that both values are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.disagg import EntryGeometry, TransferRegion, WorkerGeometry, compatible, route, worker_geometry
from kvactors.errors import PeerMismatchError, TransferPlanError
from tests.disagg.shapes import attention, gqa, group, lanes, state, state_region, worker


def hybrid(**more: Any) -> WorkerGeometry:
    return worker([attention(4, 4), state()], [*lanes(4), state_region()], **more)


def test_a_geometry_survives_the_wire() -> None:
    sent = hybrid(tp=2, rank=1, pp_rank=1, pp_size=3)
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=WorkerGeometry)
    assert got == sent
    assert [r.split_kv for r in got.regions] == [r.split_kv for r in sent.regions] == [True, False]


@pytest.mark.parametrize(
    "changes", [{"tp_size": 0}, {"tp_size": 5000}, {"tp_rank": -1}, {"pp_size": "1"}, {"groups": [{"kind": "novel"}]}]
)
def test_a_malformed_geometry_is_not_read(changes: dict[str, Any]) -> None:
    sent = {**msgspec.to_builtins(hybrid()), **changes}
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=WorkerGeometry)


MAY_DIFFER: list[tuple[str, WorkerGeometry, WorkerGeometry]] = [
    ("nothing", hybrid(), hybrid()),
    ("digest", hybrid(layout_digest="a"), hybrid(layout_digest="b")),
    ("PP", hybrid(pp_size=2), hybrid()),
    ("TP", gqa(4, 4, 1), gqa(4, 2, 0)),
    ("TP, of ranks that share nothing", gqa(4, 4, 3), gqa(4, 2, 0)),
    ("blocks", gqa(4, 1, blocks=50), gqa(4, 1, blocks=70)),
    ("scratch slots", worker([state(scratch_slots=2)], []), worker([state()], [])),
]


@pytest.mark.parametrize(("prefill", "decode"), [row[1:] for row in MAY_DIFFER], ids=[row[0] for row in MAY_DIFFER])
def test_what_may_differ(prefill: WorkerGeometry, decode: WorkerGeometry) -> None:
    compatible(prefill, decode)


def change(g: WorkerGeometry, index: int, **changes: Any) -> WorkerGeometry:
    groups = list(g.groups)
    groups[index] = msgspec.structs.replace(groups[index], **changes)
    return msgspec.structs.replace(g, groups=tuple(groups))


K8, V8, V8_FP8 = EntryGeometry("k", "bf16", 32), EntryGeometry("v", "bf16", 32), EntryGeometry("v", "fp8_e4m3", 32)
REFUSED: list[tuple[str, Callable[[WorkerGeometry], WorkerGeometry], str]] = [
    ("protocol", lambda g: msgspec.structs.replace(g, protocol=9), "protocol version: prefill has 1, decode has 9"),
    ("groups", lambda g: msgspec.structs.replace(g, groups=g.groups[:1]), "number of KV groups: prefill has 2, decode has 1"),
    ("kind", lambda g: change(g, 0, kind=GroupKind.MLA), "group 0: kind: prefill has full, decode has mla"),
    ("block size", lambda g: change(g, 0, block_tokens=32), "group 0: block_tokens: prefill has 16, decode has 32"),
    ("window", lambda g: change(g, 0, window=64), "group 0: window: prefill has None, decode has 64"),
    ("chunk", lambda g: change(g, 0, chunk_tokens=64), "group 0: chunk_tokens: prefill has None, decode has 64"),
    ("heads", lambda g: change(g, 0, kv_heads=8), "group 0: kv_heads: prefill has 4, decode has 8"),
    (
        "kernel blocks",
        lambda g: change(g, 0, kernel_blocks=17),
        "group 0: kernel blocks in a block: prefill has 1, decode has 17",
    ),
    ("order", lambda g: change(g, 0, heads_first=False), "group 0: heads_first: prefill has True, decode has False"),
    (
        "element kind",
        lambda g: change(g, 0, layers={0: (K8, V8_FP8)}),
        "group 0, layer 0: entries: prefill has ['k:bf16', 'v:bf16'], decode has ['k:bf16', 'v:fp8_e4m3']",
    ),
    (
        "entries",
        lambda g: change(g, 0, layers={0: (K8,)}),
        "group 0, layer 0: entries: prefill has ['k:bf16', 'v:bf16'], decode has ['k:bf16']",
    ),
    (
        "payload",
        lambda g: change(g, 1, layers={1: (EntryGeometry("ssm", "fp32", 28),)}),
        "group 1, layer 1, entry ssm: bytes of a block: prefill has 24 (1 share(s)), decode has 28 (1 share(s))",
    ),
    (
        "TP of a state",
        lambda g: msgspec.structs.replace(g, tp_size=2),
        "group 1: recurrent state is not cut by head: prefill has TP 1, decode has TP 2",
    ),
]


@pytest.mark.parametrize(("changed", "says"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_is_refused_names_both_values(changed: Callable[[WorkerGeometry], WorkerGeometry], says: str) -> None:
    with pytest.raises(PeerMismatchError) as info:
        compatible(hybrid(), changed(hybrid()))
    assert str(info.value).startswith(says + "; ")
    assert all(f"has {value}" in says for value in (info.value.prefill, info.value.decode))


def test_a_padded_state_page_is_no_reason_between_equal_sizes_but_one_between_others() -> None:
    padded = TransferRegion("l1", 1, 0, 64, 24, 0)
    for size, refused in ((2, False), (4, True)):
        prefill, decode = worker([state()], [padded], 2), worker([state()], [padded], size)
        if refused:
            with pytest.raises(
                PeerMismatchError, match="recurrent state is not cut by head: prefill has TP 2, decode has TP 4"
            ):
                route(prefill, decode)
        else:
            assert [copy.part.nbytes for copy in route(prefill, decode)] == [24]


def test_heads_are_cut_only_where_they_are_outermost() -> None:
    with pytest.raises(PeerMismatchError, match="heads are not outermost in a block, so they cannot be cut: prefill has TP 2"):
        compatible(gqa(4, 2, heads_first=False), gqa(4, 4, heads_first=False))
    compatible(gqa(4, 2, heads_first=False), gqa(4, 2, heads_first=False))
    compatible(gqa(1, 2, heads_first=False), gqa(1, 4, heads_first=False))


# -- routes --------------------------------------------------------------------------------------------------------------


def test_a_route_has_every_region_and_its_part() -> None:
    prefill, decode = gqa(4, 2, 0), gqa(4, 4, 1)
    (copy,) = route(prefill, decode)
    assert (copy.src, copy.dst) == (prefill.regions[0], decode.regions[0])
    assert copy.part == (8, 0, 8)
    assert route(gqa(4, 2, 1), decode) == ()
    assert [c.part for c in route(hybrid(), hybrid())] == [(0, 0, 32), (0, 0, 24)]


def test_a_stage_sends_its_own_layers() -> None:
    first = worker([attention(4, 4), state(layers={})], lanes(4), pp_rank=0, pp_size=2)
    second = worker([attention(4, 4, layers={}), state()], [state_region()], pp_rank=1, pp_size=2)
    assert [[c.src.layer_name for c in route(stage, hybrid())] for stage in (first, second)] == [["l0"], ["l1"]]


WHOLE_PAGE = [TransferRegion("l0", 0, 0, 32, 32, 0)]


def test_pages_of_k_and_v_are_not_cut_unless_split() -> None:
    prefill = worker([attention(4, 2)], WHOLE_PAGE, 2)
    with pytest.raises(PeerMismatchError, match=r"layer l0: 1 piece\(s\) of a block for 2 cache entries"):
        route(prefill, worker([attention(4, 4)], [replace(r, block_bytes=64, payload_bytes=64) for r in WHOLE_PAGE], 1))
    assert [c.dense for c in route(prefill, prefill)] == [True]


def test_regions_of_another_size_are_refused_at_the_handshake() -> None:
    short = worker([attention(4, 2)], [replace(r, payload_bytes=24) for r in WHOLE_PAGE], 2)
    with pytest.raises(PeerMismatchError, match=r"layer l0: bytes of a block: prefill has 32 .* decode has 24"):
        route(worker([attention(4, 2)], WHOLE_PAGE, 2), short)


def test_a_region_that_leaves_the_address_space() -> None:
    far = worker([attention(4, 4)], [replace(lanes(4)[0], base_address=(1 << 63) - 100 * 64 + 1)])
    near = worker([attention(4, 4)], [replace(lanes(4)[0], base_address=(1 << 63) - 100 * 64)])
    with pytest.raises(TransferPlanError, match=r"layer l0: 100 blocks of 64 bytes from 0x.* leave the address space"):
        route(near, far)
    assert len(route(near, near)) == 1


@pytest.mark.parametrize("changes", [{"rank": 2}, {"pp_rank": 1}])
def test_a_worker_that_is_not_there(changes: dict[str, Any]) -> None:
    there, lost = worker([state()], [], 2), worker([state()], [], 2, **changes)
    for pair, side in (((lost, there), "prefill"), ((there, lost), "decode")):
        with pytest.raises(TransferPlanError, match=f"the {side} worker is TP rank"):
            route(*pair)


def test_a_region_of_no_group() -> None:
    lost = worker([group()], [replace(WHOLE_PAGE[0], group_index=1)])
    with pytest.raises(TransferPlanError, match="layer l0: group 1 does not exist; there are 1"):
        route(lost, lost)


# -- from a layout -------------------------------------------------------------------------------------------------------

LAYOUT = KVLayout(
    "m",
    [
        Group(
            3,
            GroupKind.SLIDING_WINDOW,
            16,
            {0: [CacheEntry("k", 8, 16, "bf16"), CacheEntry("v", 8, 16, "bf16")]},
            window=32,
            kv_heads=2,
        ),
        Group(7, GroupKind.STATE, 64, {1: [CacheEntry("ssm", 24, 64, "fp32")]}),
    ],
    tp_size=2,
)


def test_a_layout_s_geometry() -> None:
    g = worker_geometry(LAYOUT, 1, 50, [state_region()], kernel_blocks={3: 4}, heads_first=[3], scratch_slots=2)
    entries = (EntryGeometry("k", "bf16", 8), EntryGeometry("v", "bf16", 8))
    attends = group("sliding_window", blocks=50, layers={0: entries}, window=32, kv_heads=2, kernel_blocks=4, heads_first=True)
    states = group("state", 64, blocks=50, layers={1: (EntryGeometry("ssm", "fp32", 24),)}, scratch_slots=2)
    assert g == worker([attends, states], [state_region()], 2, 1, layout_digest=LAYOUT.digest)


@pytest.mark.parametrize(
    ("rank", "ratios", "region", "says"),
    [
        (2, {}, state_region(), "TP rank 2: there are 2 ranks"),
        (0, {7: 4}, state_region(), "group 7: a recurrent state has no kernel blocks, but 4 are given"),
        (0, {}, state_region(group_index=2), "layer l1: group 2 does not exist; 2 do"),
    ],
)
def test_what_a_worker_cannot_say(rank: int, ratios: dict[int, int], region: TransferRegion, says: str) -> None:
    with pytest.raises(TransferPlanError, match=says):
        worker_geometry(LAYOUT, rank, 50, [region], kernel_blocks=ratios)
