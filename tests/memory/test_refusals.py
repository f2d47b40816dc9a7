"""What cannot be right is refused before anything is read: the error says what, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvactors.errors import LayoutError
from kvactors.memory import (
    KVOrder,
    allocate_kv_cache,
    attention_views,
    cache_views,
    combined_attention_view,
    contiguous_attention_views,
    contiguous_state_views,
    group_memory,
    kernel_block_ids,
    placed_entries,
    registered_regions,
    state_views,
)
from tests.memory.model import raw
from tests.memory.runner import attention_spec, by_layer, placed, placed_attention_spec, state_spec

HALF, FLOAT, BYTE = torch.float16, torch.float32, torch.int8
BLOCK: dict[str, Any] = {"blocks": 5, "block_tokens": 4, "kv_heads": 2, "head_dim": 3, "dtype": HALF}  # 48 bytes a lane
LANES = KVOrder.LANES_FIRST


def attention(memory: Any, **change: Any) -> Any:
    return attention_views(memory, **{**BLOCK, **change})


def combined(memory: Any, **change: Any) -> Any:
    return combined_attention_view(memory, **{**BLOCK, **change})


def overlapping() -> torch.Tensor:
    """Two runs of 2 in a block, 3 apart, and blocks 4 apart: the second run of a block meets the first of the next."""
    return torch.as_strided(torch.zeros(40), (4, 2, 2), (4, 3, 1))


VIEWS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a third allocation": (
        lambda: attention([raw(240)] * 3), ["attention: 3 allocations", "give one for both, or one each"]),
    "raw memory with gaps": (
        lambda: attention(raw(960)[::2]), ["stride (2,)", "must be dense"]),
    "raw memory that begins within an element": (
        lambda: attention(raw(481)[1:]), ["byte 65 of its storage", "multiple of 2", "float16", "begin"]),
    "K and V larger than their page": (
        lambda: attention(raw(480), page_bytes=90), ["attention: 96 bytes of K and V", "page of 90", "at least 96"]),
    "a lane larger than its page": (
        lambda: attention([raw(240), raw(240)], page_bytes=40), ["K: 48 bytes", "page of 40", "at least 48"]),
    "a page of nothing": (
        lambda: attention(raw(480), page_bytes=0), ["attention: 96 bytes of K and V", "page of 0"]),
    "a page that is no whole number of elements": (
        lambda: attention(raw(640), page_bytes=101), ["K: stride of 101 bytes", "multiple of the 2 bytes", "pad"]),
    "too little memory for K and V": (
        lambda: attention(raw(479)), ["V: ends at byte 480", "allocation of 479", "fewer blocks or more memory"]),
    "too little memory for K": (
        lambda: attention([raw(239), raw(240)]), ["K: ends at byte 240", "allocation of 239"]),
    "lanes of unlike size as halves": (
        lambda: attention(raw(400), order=LANES, head_dim_v=2), ["attention:", "[48, 32]", "two halves", "each"]),
    "an odd allocation as halves": (
        lambda: attention(raw(481), order=LANES), ["attention:", "481 bytes", "two halves", "even"]),
    "lanes that are too short": (
        lambda: attention(raw(472), order=LANES), ["V: ends at byte 476", "allocation of 472"]),
    "no blocks": (
        lambda: attention(raw(480), blocks=0), ["K: shape (0, 2, 4, 3)", "below 1"]),
    "an unknown order": (
        lambda: attention(raw(480), order="heads_first"), ["heads_first", "blocks_first", "lanes_first"]),
    "kernel blocks that do not divide a block": (
        lambda: attention([raw(240)] * 2, kernel_tokens=3), ["kernel blocks of 3 tokens", "blocks of 4", "divides"]),
    "kernel blocks of no tokens": (
        lambda: attention([raw(240)] * 2, kernel_tokens=0), ["kernel blocks of 0 tokens"]),
    "kernel blocks of padded pages": (
        lambda: attention([raw(320)] * 2, page_bytes=64, kernel_tokens=2),
        ["K: a block of 48 bytes in pages of 64", "2 kernel blocks of 2 tokens", "use blocks of 2 tokens"]),
    "kernel blocks with V between them": (
        lambda: attention(raw(480), kernel_tokens=2), ["K: a block of 48 bytes in pages of 96", "use blocks of 2 tokens"]),
    "combined: larger than the page": (
        lambda: combined(raw(480), order="blocks_first", page_bytes=90),
        ["combined K/V: 96 bytes", "page of 90", "at least 96"]),
    "combined: a page of nothing": (
        lambda: combined(raw(480), page_bytes=0), ["combined K/V: 48 bytes", "page of 0"]),
    "combined: no halves": (
        lambda: combined(raw(481)), ["combined K/V: 481 bytes", "two halves", "even"]),
    "combined: a lane that runs into the other": (
        lambda: combined(raw(640), page_bytes=80), ["combined K/V: 5 blocks", "lane of 320", "fewer blocks or more memory"]),
    "combined: a lane that begins within an element": (
        lambda: combined(raw(482)), ["combined K/V: stride of 241 bytes", "multiple of the 2 bytes"]),
    "contiguous: too little memory": (
        lambda: contiguous_attention_views(raw(550), **BLOCK, lead_bytes=16), ["V: ends at byte 560", "of 550"]),
    "no number of blocks, and no whole pages": (
        lambda: attention(raw(470), blocks=None), ["attention: 470 bytes of memory", "pages of 96", "number of blocks"]),
    "no number of blocks, and lanes of no whole pages": (
        lambda: attention(raw(490), blocks=None, order=LANES), ["attention: 245 bytes of a lane", "pages of 48"]),
    "no number of blocks, and lanes for unlike numbers": (
        lambda: attention([raw(240), raw(192)], blocks=None), ["5 blocks of K and 4 of V", "give the number of blocks"]),
    "combined: no number of blocks, and no whole pages": (
        lambda: combined(raw(490), blocks=None), ["245 bytes of a lane", "pages of 48"]),
    "contiguous: no number of blocks, and no whole pages": (
        lambda: contiguous_attention_views(raw(550), **{**BLOCK, "blocks": None}), ["attention: 550 bytes", "pages of 96"]),
    "contiguous: larger than the page": (
        lambda: contiguous_attention_views(raw(550), **BLOCK, page_bytes=90), ["attention: 96 bytes", "page of 90"]),
    "raw memory that begins within an element of its address": (
        lambda: attention(torch.frombuffer(bytearray(500), dtype=BYTE, offset=1)), ["address 0x", "multiple of 2", "move it"]),
    "K and V in one place": (
        lambda: attention([raw(240)] * 2), ["attention: K (48 of every 48 bytes", "and V (48", "share bytes"]),
    "K and V in slices that meet": (lambda: sliced(40), ["attention: K (48 of every 128 bytes", "share bytes"]),
    "block ids that are no integers": (lambda: kernel_block_ids([1.5], 2), ["type float64", "integers"]),
    "block ids that are truths": (lambda: kernel_block_ids([True], 2), ["type bool", "integers"]),
    "a split of nothing": (
        lambda: kernel_block_ids([1], 0), ["0 kernel blocks", "at least 1"]),
    "states: an offset within an element": (
        lambda: state_views(raw(400), ((3,), (4,)), (HALF, FLOAT), 100),
        ["state 1: offset of 6 bytes", "multiple of the 4 bytes", "float32", "pad"]),
    "states: a page that is no whole number of elements": (
        lambda: state_views(raw(102), ((4,),), (FLOAT,), 34), ["state 0: stride of 34 bytes", "multiple of the 4 bytes"]),
    "states: larger than their page": (
        lambda: state_views(raw(400), ((30,),), (FLOAT,), 100), ["states: 120 bytes", "page of 100", "at least 120"]),
    "states: no whole number of pages": (
        lambda: state_views(raw(450), ((20,),), (FLOAT,), 100), ["states: 450 bytes", "pages of 100", "blocks"]),
    "states: no page": (
        lambda: state_views(raw(0), ((20,),), (FLOAT,), 100), ["states: 0 bytes", "pages of 100"]),
    "states: too many blocks": (
        lambda: state_views(raw(450), ((20,),), (FLOAT,), 100, blocks=5), ["state 0: ends at byte 480", "of 450"]),
    "states: none": (
        lambda: state_views(raw(100), (), (), 100), ["states: 0 shapes and 0 types", "one type for each shape"]),
    "states: a type is missing": (
        lambda: state_views(raw(100), ((1,), (1,)), (FLOAT,), 100), ["states: 2 shapes and 1 types"]),
    "contiguous states: larger than their page": (
        lambda: contiguous_state_views(raw(192), ((4,), (8,)), (FLOAT, FLOAT), 40), ["states: 48 bytes", "page of 40"]),
    "contiguous states: no whole number of pages": (
        lambda: contiguous_state_views(raw(200), ((4,), (8,)), (FLOAT, FLOAT)), ["states: 200 bytes", "pages of 48"]),
    "contiguous states: too little memory": (
        lambda: contiguous_state_views(raw(190), ((4,), (8,)), (FLOAT, FLOAT), blocks=4),
        ["state 1: ends at byte 192", "of 190"]),
}  # fmt: skip

ENTRIES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "an element type without a name": (
        lambda: placed_entries("k", torch.zeros(4, 2, dtype=torch.complex64), 4),
        ["k: element type torch.complex64", "fp8_e4m3"]),
    "other blocks than the view has": (
        lambda: placed_entries("k", torch.zeros(5, 2), 4), ["k: a view of shape (5, 2)", "4 blocks", "group"]),
    "no blocks": (lambda: placed_entries("k", torch.zeros(5, 2), 0), ["k:", "0 blocks"]),
    "one number": (lambda: placed_entries("k", torch.zeros(()), 1), ["k:", "shape ()"]),
    "blocks that overlap": (
        lambda: placed_entries("k", torch.zeros(40).as_strided((4, 3), (2, 1)), 4), ["k: blocks of 12 bytes", "8 bytes apart"]),
    "runs of blocks that overlap": (lambda: placed_entries("k", overlapping(), 4), ["k: blocks", "16 bytes apart", "overlap"]),
    "a block that overlaps itself": (
        lambda: placed_entries("k", torch.zeros(40).as_strided((2, 3, 3), (20, 2, 1)), 2),
        ["k:", "(20, 2, 1)", "overlaps itself"]),
    "a repeated row": (
        lambda: placed_entries("k", torch.zeros(4, 1, 3).expand(4, 2, 3), 4), ["k:", "(3, 0, 1)", "overlaps itself"]),
    "padded kernel blocks": (
        lambda: placed_entries("k", torch.zeros(8, 4)[:, :3], 4),
        ["k: kernel blocks", "16 apart", "one dense page", "unsplit"]),
    "a view of another group": (
        lambda: group_memory(3, {7: {"k": torch.zeros(5, 2)}}, 4), ["group 3, layer 7", "k: a view of shape (5, 2)"]),
    "no elements": (lambda: placed_entries("k", torch.zeros(4, 0, 2), 4), ["k: a view of shape (4, 0, 2)", "no elements"]),
    "no blocks at all": (lambda: placed_entries("k", torch.zeros(0, 2), 4), ["k: a view of shape (0, 2)", "no elements"]),
    "nothing to register": (
        lambda: registered_regions([torch.zeros(4), torch.zeros(0, 2)]), ["shape (0, 2)", "no elements", "leave it out"]),
    "two names for the same bytes": (
        lambda: group_memory(3, {7: dict.fromkeys("kv", torch.zeros(4, 2))}, 4),
        ["group 3, layer 7: k (8 of every 8 bytes", "v (8", "share bytes"]),
    "a part of another view": (
        lambda: group_memory(3, {7: halves(torch.zeros(4, 6), 4)}, 4), ["group 3, layer 7: a (16 of every 24", "share bytes"]),
    "a run with the name of a view": (
        lambda: group_memory(3, {7: {"k": torch.zeros(4, 2, 6)[..., :3], "k.1": torch.zeros(4, 2)}}, 4),
        ["group 3, layer 7: two entries are named k.1"]),
    "an alignment of nothing": (lambda: registered_regions([], 0), ["align_bytes = 0", "at least 1"]),
}  # fmt: skip


def sliced(apart: int) -> Any:
    """K and V in slices of one allocation, as many bytes apart, in pages of 128."""
    memory = raw(640)
    return attention([memory, memory[apart:]], page_bytes=128)


def halves(view: torch.Tensor, cut: int) -> dict[str, torch.Tensor]:
    """Two parts of each block; the second begins one before the first ends."""
    return {"a": view[:, :cut], "b": view[:, cut - 1 :]}


PAGED = attention_spec(page=128)
STATES = state_spec(((3, 4), (2, 2, 3)), (torch.bfloat16, FLOAT), 128)
PLACED = placed_attention_spec()
BUFFER = placed(5, 640, [{"a.1": PLACED}], {"a.1": (0, 128)})
CONFIGS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "no tensors": (
        lambda: cache_views(placed(5, 0, [{"a.1": PLACED}], {}), raw(640)), ["no tensors"]),
    "buffers of unlike size": (
        lambda: allocate_kv_cache(by_size(640, 1280)), ["different sizes", "[640, 1280]"]),
    "a buffer without places": (
        lambda: cache_views(by_layer(5, [{"a.1": PAGED}]), raw(640)), ["places in one buffer", "give raw tensors by layer"]),
    "the contiguous layout in a buffer": (
        lambda: cache_views(BUFFER, raw(640), contiguous=True), ["contiguous", "raw tensors by layer"]),
    "a list": (
        lambda: cache_views(BUFFER, [raw(640)]), ["type list", "give one buffer, or tensors by layer"]),
    "a layout that lacks an axis": (
        lambda: cache_views(BUFFER, raw(640), layout="LBHN"), ["layout 'LBHN'", "LBHNC"]),
    "a place outside the buffer": (
        lambda: cache_views(BUFFER, raw(600)), ["a.1: ends at byte 608", "of 600"]),
    "blocks that overlap": (
        lambda: cache_views(placed(5, 640, [{"a.1": PLACED}], {"a.1": (0, 64)}), raw(640)),
        ["a.1: blocks of 96 bytes, 64 bytes apart, overlap"]),
    "layers of one group that meet": (
        lambda: cache_views(placed(5, 1280, [{"a.1": PLACED, "a.2": PLACED}], {"a.1": (0, 256), "a.2": (94, 256)}), raw(1280)),
        ["a.1: 96 bytes at 0, every 256, share bytes with a.2", "96 at 94, every 256", "apart"]),
    "layers of one group that meet, with other pages": (
        lambda: cache_views(placed(5, 1280, [{"a.1": PLACED, "a.2": PLACED}], {"a.1": (0, 256), "a.2": (448, 128)}), raw(1280)),
        ["a.1: 96 bytes at 0, every 256", "a.2", "96 at 448, every 128"]),
    "a place for a layer that no group has": (
        lambda: cache_views(placed(5, 640, [{"a.1": PLACED}], {"a.1": (0, 128), "a.9": (0, 128)}), raw(640)),
        ["a.9: ", "no group"]),
    "tensors by layer where places are said": (
        lambda: cache_views(BUFFER, {"a.1": raw(640)}), ["a.1: ", "one buffer", "not tensors by layer"]),
    "blocks and heads that do not lie apart": (
        lambda: cache_views(placed(5, 640, [{"a.1": PLACED}], {"a.1": (0, 0)}), raw(640)), ["a.1: ", "they must lie apart"]),
    "content of no whole elements": (
        lambda: cache_views(placed(5, 640, [{"a.1": placed_attention_spec(content=11)}], {"a.1": (0, 128)}), raw(640)),
        ["a.1: content of 11 bytes", "float16"]),
    "kernel blocks of no whole bytes": (
        lambda: cache_views(placed(5, 640, [{"a.1": halved()}], {"a.1": (0, 6)}), raw(640), kernel_block_sizes=[1]),
        ["a.1: a block of 6 bytes does not divide into 4 kernel blocks"]),
    "a layer without memory": (
        lambda: cache_views(by_layer(5, [{"a.1": PAGED, "a.2": PAGED}]), {"a.1": raw(640)}), ["a.2: ", "no raw memory"]),
    "a layer without a specification": (
        lambda: cache_views(unspecified(), {"a.1": raw(640)}), ["a.2: group 0", "no specification"]),
    "an unknown layer whose tokens come first": (
        lambda: cache_views(by_layer(5, [{"a.1": PAGED}]), {"a.1": raw(640)}, token_major={"a.2"}), ["a.2: ", "token_major"]),
    "states whose tokens come first": (
        lambda: cache_views(by_layer(5, [{"s.1": STATES}]), {"s.1": raw(640)}, token_major={"s.1"}), ["s.1: ", "token_major"]),
    "kernel block sizes for fewer groups": (
        lambda: cache_views(
            by_layer(5, [{"a.1": PAGED}, {"a.2": PAGED}]), {"a.1": raw(640), "a.2": raw(640)}, kernel_block_sizes=[4]),
        ["a.2: in group 1", "kernel_block_sizes has 1"]),
    "halves of K and V as K and V": (
        lambda: cache_views(
            by_layer(5, [{"a.1": attention_spec(head=4, page=64)}]), {"a.1": (raw(160), raw(160))}),
        ["a.1: ", "heads of [2, 2] elements, 4 and 4"]),
    "a third tensor and no scales": (
        lambda: cache_views(by_layer(5, [{"a.1": attention_spec(page=96)}]), {"a.1": (raw(240), raw(240), raw(80))}),
        ["a.1: 3 allocations", "without scales", "scale_dim"]),
    "a fourth tensor": (
        lambda: cache_views(by_layer(5, [{"a.1": attention_spec(scale_dim=1)}]), {"a.1": tuple(raw(240) for _ in "1234")}),
        ["a.1: 4 allocations", "with scales"]),
    "one tensor for K and for V": (
        lambda: cache_views(by_layer(5, [{"a.1": attention_spec()}]), {"a.1": (raw(240),) * 2}), ["a.1: ", "share bytes"]),
    "a layer that no group has": (
        lambda: cache_views(by_layer(5, [{"a.1": PAGED}]), {"a.2": raw(640)}), ["a.2", "no group"]),
    "too little memory for attention": (
        lambda: cache_views(by_layer(5, [{"a.1": PAGED}]), {"a.1": raw(512)}), ["a.1: 4 blocks", "5 in the configuration"]),
    "too little memory for states": (
        lambda: cache_views(by_layer(5, [{"s.1": STATES}]), {"s.1": raw(512)}), ["s.1: 4 blocks", "5 in the configuration"]),
    "states in a tuple": (
        lambda: cache_views(by_layer(5, [{"s.1": STATES}]), {"s.1": (raw(640), raw(640))}),
        ["s.1", "one allocation", "not in 2"]),
    "states within elements": (
        lambda: cache_views(by_layer(5, [{"s.1": state_spec(((3,), (4,)), (HALF, FLOAT), 128)}]), {"s.1": raw(640)}),
        ["s.1: state 1: offset of 6 bytes"]),
    "a payload larger than the page": (
        lambda: cache_views(by_layer(5, [{"a.1": attention_spec(page=64)}]), {"a.1": raw(640)}),
        ["a.1: ", "96 bytes", "page of 64"]),
    "kernel blocks of padded pages": (
        lambda: cache_views(by_layer(5, [{"a.1": PAGED}]), {"a.1": raw(640)}, kernel_block_sizes=[2]),
        ["a.1: ", "K: a block of 48 bytes in pages of 128", "use blocks of 2 tokens"]),
    "kernel blocks in a tuple that do not divide": (
        lambda: cache_views(by_layer(5, [{"a.1": PAGED}]), {"a.1": (raw(320), raw(320))}, kernel_block_sizes=[3]),
        ["a.1: ", "kernel blocks of 3 tokens"]),
    "a lane of no whole rows": (
        lambda: cache_views(by_layer(5, [{"a.1": attention_spec()}]), {"a.1": (raw(250), raw(240))}),
        ["a.1: 250 bytes", "5 blocks of 4", "elements"]),
    "padded lanes in a tuple": (
        lambda: cache_views(by_layer(5, [{"a.1": PAGED}]), {"a.1": (raw(320), raw(320))}),
        ["a.1: ", "heads of [4, 4] elements, 3 and 3", "need one allocation"]),
    "contiguous layers with pages of unlike size": (
        lambda: contiguous_hybrid(state_spec(((3, 4), (2, 2, 3)), (torch.bfloat16, FLOAT), 160)),
        ["a.1: s.1 has pages of 160 bytes", "pages of 128", "use the strided views"]),
    "a last state that is no K block": (
        lambda: contiguous_hybrid(state_spec(((4, 4), (2, 2, 3)), (FLOAT, HALF), 128)),
        ["a.1: ", "24 bytes over a K block of 48", "use the strided views"]),
}  # fmt: skip


def by_size(*sizes: int) -> Any:
    config = placed(5, 0, [{"a.1": PLACED, "a.2": PLACED}], {"a.1": (0, 128), "a.2": (0, 128)})
    for tensor, size in zip(config.kv_cache_tensors, sizes, strict=True):
        tensor.size = size
    return config


def halved() -> Any:
    """One head with 3 states of 2 bytes for 4 tokens."""
    spec = placed_attention_spec(heads=1, content=2)
    spec.get_num_kernel_states = lambda tokens: -(-tokens * 3 // 4)
    return spec


def unspecified() -> Any:
    config = by_layer(5, [{"a.1": PAGED}])
    config.kv_cache_groups[0].layer_names.append("a.2")
    return config


def contiguous_hybrid(states: Any) -> Any:
    config = by_layer(5, [{"a.1": PAGED}, {"s.1": states}], shared=[("a.1", "s.1")])
    return cache_views(config, allocate_kv_cache(config), contiguous=True)


CASES = {
    f"{where}: {name}": case
    for where, cases in (("views", VIEWS), ("entries", ENTRIES), ("configs", CONFIGS))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_what_where_and_how(name: str) -> None:
    call, parts = CASES[name]
    with pytest.raises(LayoutError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


def test_the_layer_is_named_once() -> None:
    with pytest.raises(LayoutError) as caught:
        cache_views(BUFFER, raw(600))
    assert str(caught.value).count("a.1") == 1
