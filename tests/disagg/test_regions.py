"""Regions: one for each registered tensor, halved where K and V share a block, and matched by layer between two workers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.disagg import TransferRegion, align_regions, expand_transfer_regions
from kvactors.errors import DisaggError, PeerMismatchError, TransferPlanError

FP16 = 2
ATTENTION, CONV, SSM = (2, 2, 11), (2, 22), (2, 4)
NAMES = ["model.layers.0.self_attn", "model.layers.1.linear_attn", "model.layers.1.linear_attn"]


def block_bytes(shape: tuple[int, ...]) -> int:
    size = FP16
    for n in shape[1:]:
        size *= n
    return size


def hybrid() -> list[TransferRegion]:
    blocks = [block_bytes(shape) for shape in (ATTENTION, CONV, SSM)]
    return expand_transfer_regions([1000, 2000, 3000], blocks, blocks, NAMES, [0, 1, 1], True, [0, 1, 1], [True, False, False])


def test_attention_and_states_of_fp16() -> None:
    regions = hybrid()
    assert [r.group_index for r in regions] == [0, 1, 1]
    assert [r.block_bytes for r in regions] == [44, 44, 8]
    assert [r.payload_bytes for r in regions] == [22, 44, 8]
    assert [r.pieces for r in regions] == [2, 1, 1]


@pytest.mark.parametrize(
    ("blocks_first", "split", "payloads"),
    [
        (True, None, [22, 22]),
        (False, None, [44, 40]),
        (True, [True, False], [22, 40]),
        (True, [False, False], [44, 40]),
        (False, [True, True], [44, 40]),
    ],
)
def test_a_region_is_split_only_when_both_say_so(blocks_first: bool, split: list[bool] | None, payloads: list[int]) -> None:
    regions = expand_transfer_regions([0, 0], [44, 44], [44, 40], ["a", "b"], [0, 1], blocks_first, split_kv=split)
    assert [r.payload_bytes for r in regions] == payloads
    assert [r.group_index for r in regions] == [0, 0]
    assert len(regions) == 2


@pytest.mark.parametrize("short", ["block_bytes", "payload_bytes", "layer_names", "layer_indices", "group_indices", "split_kv"])
def test_unequal_lengths_name_both_numbers(short: str) -> None:
    lists: dict[str, Any] = {
        "block_bytes": [8, 8, 8],
        "payload_bytes": [8, 8, 8],
        "layer_names": ["a", "b", "c"],
        "layer_indices": [0, 1, 2],
        "group_indices": [0, 0, 0],
        "split_kv": [True, True, True],
    }
    lists[short] = lists[short][:2]
    with pytest.raises(ValueError, match=rf"^{short} has 2 values and base_addresses has 3;") as info:
        expand_transfer_regions([1, 2, 3], blocks_first=True, **lists)
    assert isinstance(info.value, DisaggError)


@given(st.lists(st.tuples(st.integers(1, 99), st.booleans(), st.integers(0, 5)), max_size=5), st.booleans())
def test_expansion_against_its_rule(tensors: list[tuple[int, bool, int]], blocks_first: bool) -> None:
    regions = expand_transfer_regions(
        [i for i, _ in enumerate(tensors)],
        [n for n, _, _ in tensors],
        [n for n, _, _ in tensors],
        [f"l{i}" for i, _ in enumerate(tensors)],
        list(range(len(tensors))),
        blocks_first,
        [g for _, _, g in tensors],
        [s for _, s, _ in tensors],
    )
    assert regions == [
        TransferRegion(f"l{i}", i, i, n, n // 2 if blocks_first and split else n, g) for i, (n, split, g) in enumerate(tensors)
    ]


def test_a_region_is_frozen_and_slotted() -> None:
    region = TransferRegion("a", 0, 0, 8, 8, 0)
    with pytest.raises(FrozenInstanceError):
        region.payload_bytes = 4  # type: ignore[misc]
    assert not hasattr(region, "__dict__")


# -- alignment -----------------------------------------------------------------------------------------------------------


def layers(*names: str) -> list[TransferRegion]:
    """K and V of each layer; the layer's number is the end of its name."""
    return [TransferRegion(name, int(name[1:]), 0, 8, 8, 0) for name in names for _ in "kv"]


def names_of(pairs: list[tuple[TransferRegion, TransferRegion]]) -> list[str]:
    assert all(a.layer_name == b.layer_name for a, b in pairs)
    return [a.layer_name for a, _ in pairs]


ALIGNED = [
    # prefill's layers, stages, decode's layers, stages, what belongs together
    (("l0", "l1"), 1, ("l0", "l1"), 1, ["l0", "l0", "l1", "l1"]),
    (("l0", "l1"), 1, ("l1", "l0"), 1, ["l0", "l0", "l1", "l1"]),
    (("l1",), 2, ("l0", "l1"), 1, ["l1", "l1"]),
    (("l0", "l1"), 1, ("l1",), 2, ["l1", "l1"]),
    (("l0", "l1"), 3, ("l1", "l2"), 2, ["l1", "l1"]),
    (("l0",), 2, ("l1",), 2, []),
]


@pytest.mark.parametrize(("prefill", "prefill_stages", "decode", "decode_stages", "together"), ALIGNED)
def test_layers_meet_by_name(
    prefill: tuple[str, ...], prefill_stages: int, decode: tuple[str, ...], decode_stages: int, together: list[str]
) -> None:
    pairs = align_regions(layers(*prefill), layers(*decode), prefill_stages=prefill_stages, decode_stages=decode_stages)
    assert names_of(pairs) == together


def test_several_regions_of_a_layer_meet_in_their_order() -> None:
    decode = [replace(r, base_address=r.base_address + 500) for r in hybrid()]
    assert [(a.base_address, b.base_address) for a, b in align_regions(hybrid(), decode)] == [
        (1000, 1500),
        (2000, 2500),
        (3000, 3500),
    ]


APART = [
    (layers("l0", "l1"), layers("l0"), "layer l1: prefill has 2 layers with 'l1', decode has 1 without it"),
    (layers("l0"), layers("l0", "l1"), "layer l1: prefill has 1 without it, decode has 2 layers with 'l1'"),
    (layers("l0"), layers("l0")[:1], "layer l0: prefill has 2 regions, decode has 1"),
    (layers("l0"), [replace(r, layer_index=3) for r in layers("l0")], "layer l0: layer index: prefill has 0, decode has 3"),
    (layers("l0"), [replace(r, group_index=2) for r in layers("l0")], "layer l0: KV group: prefill has 0, decode has 2"),
    (
        layers("l0"),
        [replace(r, payload_bytes=4, split_kv=True) for r in layers("l0")],
        "layer l0: pieces of a block: prefill has 1, decode has 2",
    ),
]


@pytest.mark.parametrize(("prefill", "decode", "says"), APART)
def test_what_does_not_align_names_both_values(prefill: list[TransferRegion], decode: list[TransferRegion], says: str) -> None:
    with pytest.raises(PeerMismatchError) as info:
        align_regions(prefill, decode)
    assert str(info.value).startswith(says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"payload_bytes": 9}, "1 piece(s) of 9 bytes do not fit a block of 8"),
        ({"payload_bytes": 0}, "of 0 bytes"),
        ({"payload_bytes": 3, "split_kv": True}, "2 piece(s) of 3 bytes do not fit a block of 8"),
        ({"base_address": -1}, "-1 is no address"),
        ({"base_address": 1 << 63}, "is no address"),
    ],
)
def test_a_region_that_contradicts_itself(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TransferPlanError) as info:
        align_regions([replace(layers("l0")[0], **changes)], [])
    assert says in str(info.value)
