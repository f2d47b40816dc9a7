"""`cache_views`: by the kind of each layer, by where its memory is, and never by what a size seems to say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvactors.errors import LayoutError
from kvactors.memory import allocate_kv_cache, cache_views
from tests.memory.model import LEAD, bytes_of, geometry, raw
from tests.memory.runner import (
    attention_spec,
    by_layer,
    placed,
    placed_attention_spec,
    placed_state_spec,
    state_spec,
)

HALF = torch.float16
STATES = (((3, 4), (2, 2, 3)), (torch.bfloat16, torch.float32))  # 24 and 48 bytes


def test_only_gqa_layers_get_the_block_major_view() -> None:
    """No recurrent layer is needed for it."""
    config = by_layer(5, [{"a": attention_spec(page=128), "b": attention_spec(page=128)}])
    memory = allocate_kv_cache(config)
    views = cache_views(config, memory)
    assert list(views) == ["a", "b"]
    for name in ("a", "b"):
        assert geometry(views[name]) == [((5, 2, 4, 3), (64, 12, 3, 1), 0), ((5, 2, 4, 3), (64, 12, 3, 1), 24)]
        assert {v.untyped_storage().data_ptr() for v in views[name]} == {memory[name].untyped_storage().data_ptr()}
    assert memory["a"].data_ptr() != memory["b"].data_ptr()


def test_the_names_are_those_of_the_specification() -> None:
    config = by_layer(5, [{"a": attention_spec(page=128)}])
    memory = allocate_kv_cache(config=config, device=torch.device("cpu"))
    assert list(cache_views(kv_cache_config=config, raw_tensors=memory)) == ["a"]


def test_layers_of_two_groups_in_one_tensor_have_the_same_pages() -> None:
    """Which memory a layer has is the placement's word: `a` and `s` share a tensor, `b` has one of its own."""
    attention, states = attention_spec(page=128), state_spec(*STATES, 128)
    config = by_layer(5, [{"a": attention, "b": attention}, {"s": states}], shared=[("a", "s")])
    memory = allocate_kv_cache(config)
    views = cache_views(config, memory)
    starts = {name: {v.untyped_storage().data_ptr() for v in found} for name, found in views.items()}
    assert starts["a"] == starts["s"] != starts["b"]
    assert [v.stride(0) * v.element_size() for v in (*views["a"], *views["s"])] == [128] * 4
    assert [v.storage_offset() * v.element_size() for v in (*views["a"], *views["s"])] == [0, 48, 0, 24]


def test_k_and_v_in_a_tuple_have_tensors_of_their_own() -> None:
    config = by_layer(5, [{"a": attention_spec(head_v=2)}])
    views = cache_views(config, {"a": (raw(240), raw(160))})
    assert geometry(views["a"]) == [((5, 2, 4, 3), (24, 12, 3, 1), LEAD // 2), ((5, 2, 4, 2), (16, 8, 2, 1), LEAD // 2)]


# -- latents and scales ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "stride"), [(80, 40), (128, 64)])
def test_mla_in_one_tensor_is_one_latent_view(page: int, stride: int) -> None:
    """Heads of 10 without a V: 4 tokens are 80 bytes."""
    config = by_layer(5, [{"a": attention_spec(heads=1, head=10, head_v=0, page=page)}])
    (latent,) = cache_views(config, {"a": raw(5 * page)})["a"]
    assert geometry([latent]) == [((5, 1, 4, 10), (stride, 40, 10, 1), LEAD // 2)]


def test_a_dense_latent_is_split_into_kernel_blocks_and_a_padded_one_is_not() -> None:
    dense, padded = attention_spec(heads=1, head=10, head_v=0), attention_spec(heads=1, head=10, head_v=0, page=128)
    (latent,) = cache_views(by_layer(5, [{"a": dense}]), {"a": raw(5 * 80)}, kernel_block_sizes=[2])["a"]
    assert geometry([latent]) == [((10, 1, 2, 10), (20, 20, 10, 1), LEAD // 2)]
    with pytest.raises(LayoutError, match=r"^a: a block of 80 bytes in pages of 128 .* use blocks of 2 tokens"):
        cache_views(by_layer(5, [{"a": padded}]), {"a": raw(5 * 128)}, kernel_block_sizes=[2])


def test_mla_in_two_tensors_is_the_latent_and_the_rope_part() -> None:
    """8 of the 10 are the latent, 2 the part with positions; each lies in a tensor of its own."""
    config = by_layer(5, [{"a": attention_spec(heads=1, head=10, head_v=0)}])
    memory = {"a": (raw(5 * 64), raw(5 * 16))}
    assert geometry(cache_views(config, memory)["a"]) == [
        ((5, 1, 4, 8), (32, 32, 8, 1), LEAD // 2),
        ((5, 1, 4, 2), (8, 8, 2, 1), LEAD // 2),
    ]
    split = cache_views(config, memory, kernel_block_sizes=[2])["a"]
    assert [tuple(v.shape) for v in split] == [(10, 1, 2, 8), (10, 1, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_cache_has_a_scale_lane(dtype: torch.dtype) -> None:
    """K and V of one byte an element, and a float32 scale for each token and head."""
    spec = attention_spec(dtype=dtype, page=5 * 2 * 4 * 2, scale_dtype=torch.float32, scale_dim=1)
    memory = {"a": (raw(5 * 24), raw(5 * 24), raw(5 * 32))}
    k, v, scale = cache_views(by_layer(5, [{"a": spec}]), memory)["a"]
    assert [view.dtype for view in (k, v, scale)] == [dtype, dtype, torch.float32]
    assert geometry([k, v, scale]) == [
        ((5, 2, 4, 3), (24, 12, 3, 1), LEAD),
        ((5, 2, 4, 3), (24, 12, 3, 1), LEAD),
        ((5, 2, 4, 1), (8, 4, 1, 1), LEAD // 4),
    ]


# -- the layout with padding of its own ------------------------------------------------------------------------------------


def test_the_contiguous_layout_of_shared_memory() -> None:
    """[K padding | conv] [K | ssm] [V | padding]: what leads is the state layer's, which shares the memory."""
    attention, states = attention_spec(page=120), state_spec(*STATES, 120)
    config = by_layer(5, [{"a": attention}, {"s": states}], shared=[("a", "s")])
    views = cache_views(config, allocate_kv_cache(config), contiguous=True)
    assert all(v.is_contiguous() for found in views.values() for v in found)
    at = {name: [v.storage_offset() * v.element_size() for v in found] for name, found in views.items()}
    assert at == {"a": [5 * 24, 5 * 72], "s": [0, 5 * 24]}


# -- kernel blocks ---------------------------------------------------------------------------------------------------------


def test_kernel_blocks_split_attention_and_never_states() -> None:
    """Even if the runner has a kernel block size for the states' group too."""
    dense, states = attention_spec(), state_spec(*STATES, 96)
    config = by_layer(5, [{"a": dense}, {"s": states}])
    views = cache_views(config, {"a": (raw(240), raw(240)), "s": raw(480)}, kernel_block_sizes=[2, 2])
    assert [tuple(v.shape) for v in views["a"]] == [(10, 2, 2, 3)] * 2
    assert [v.shape[0] for v in views["s"]] == [5, 5]


# -- one buffer ------------------------------------------------------------------------------------------------------------


def hybrid_buffer() -> Any:
    """Two attention layers of 96 bytes a block, and a state layer over the pages of the first; pages of 128 bytes."""
    attention = placed_attention_spec()
    return placed(
        5, 5 * 256, [{"a": attention, "b": attention}, {"s": placed_state_spec(104)}],
        {"a": (0, 256), "b": (128, 256), "s": (0, 256)},
    )  # fmt: skip


def test_layers_placed_in_one_buffer() -> None:
    config = hybrid_buffer()
    buffer = allocate_kv_cache(config)
    assert buffer.numel() == 5 * 256
    views = cache_views(config, buffer)
    assert geometry([views[name] for name in "abs"]) == [
        ((5, 2, 4, 6), (128, 24, 6, 1), 0),
        ((5, 2, 4, 6), (128, 24, 6, 1), 64),
        ((5, 1, 1, 104), (256, 104, 104, 1), 0),
    ]


def test_a_tensor_may_have_a_number_of_blocks_of_its_own() -> None:
    """As one whose blocks lie in the memory of the host."""
    config = hybrid_buffer()
    config.num_blocks_of = lambda tensor: 3 if tensor.layers == ["b"] else 5
    views = cache_views(config, allocate_kv_cache(config))
    assert [views[name].shape[0] for name in "abs"] == [5, 3, 5]  # type: ignore[union-attr]  # one view each


@pytest.mark.parametrize("order", ["".join(p) for p in itertools.permutations("HNC") if p[2] == "C"])
def test_the_order_of_the_axes_is_the_layouts(order: str) -> None:
    config = hybrid_buffer()
    view = cache_views(config, allocate_kv_cache(config), layout=f"LB{order}")["b"]
    assert view.shape == (5, 2, 4, 6)
    assert view.stride() == {"HNC": (128, 24, 6, 1), "NHC": (128, 6, 12, 1)}[order]


def test_kernel_blocks_in_one_buffer() -> None:
    config = placed(5, 5 * 96 + 5 * 104, [{"a": placed_attention_spec()}, {"s": placed_state_spec(104)}],
                    {"a": (0, 96), "s": (480, 104)})  # fmt: skip
    views = cache_views(config, allocate_kv_cache(config), kernel_block_sizes=[2, 2])
    assert geometry([views["a"], views["s"]]) == [((10, 2, 2, 6), (24, 12, 6, 1), 0), ((5, 1, 1, 104), (104, 104, 104, 1), 480)]
    assert bytes_of(views["a"]) == list(range(480))
    with pytest.raises(LayoutError, match="a: blocks of 96 bytes, 256 apart, are no dense pages"):
        cache_views(hybrid_buffer(), torch.zeros(5 * 256, dtype=torch.int8), kernel_block_sizes=[2, 2])
