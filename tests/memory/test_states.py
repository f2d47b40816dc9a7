"""State views: a page is [conv | ssm | padding]; a state's view has the page's stride, and its place in ONE page as offset."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvactors.memory import contiguous_attention_views, contiguous_state_views, state_views
from tests.memory.model import LEAD, bytes_of, geometry, raw

CONV, SSM = (3, 4), (2, 2, 3)  # 24 bytes in bfloat16, 48 in float32
TYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("page", "conv_stride", "ssm_stride"), [(72, 36, 18), (96, 48, 24), (128, 64, 32)])
def test_a_page_of_two_states(page: int, conv_stride: int, ssm_stride: int) -> None:
    conv, ssm = state_views(raw(4 * page), (CONV, SSM), TYPES, page)
    assert geometry([conv, ssm]) == [
        ((4, 3, 4), (conv_stride, 4, 1), LEAD // 2),
        ((4, 2, 2, 3), (ssm_stride, 6, 3, 1), LEAD // 4 + 24 // 4),
    ]
    assert bytes_of(conv) == [LEAD + b * page + i for b in range(4) for i in range(24)]
    assert bytes_of(ssm) == [LEAD + b * page + 24 + i for b in range(4) for i in range(48)]


def test_the_page_is_the_payload_unless_said() -> None:
    conv, ssm = state_views(raw(4 * 72), (CONV, SSM), TYPES)
    assert (conv.stride(0), ssm.stride(0)) == (36, 18)


def test_fewer_blocks_than_the_memory_has() -> None:
    conv, _ = state_views(raw(4 * 96 + 5), (CONV, SSM), TYPES, 96, blocks=3)
    assert conv.shape[0] == 3


@pytest.mark.parametrize(
    ("shapes", "dtypes", "offsets"),
    [
        (((5,),), (torch.float32,), [0]),
        (((8,), (2,), (1, 1)), (torch.int8, torch.float32, torch.float64), [0, 8, 16]),
        (((2, 2),) * 4, (torch.float16,) * 4, [0, 8, 16, 24]),
        (((4,), (16,)), (torch.float32, torch.float8_e4m3fn), [0, 16]),
        (((6,), (4,)), (torch.int8, torch.bfloat16), [0, 6]),  # 6 is a multiple of bfloat16's 2 bytes
    ],
)
def test_other_states_in_their_order(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], offsets: list[int]
) -> None:
    memory = raw(3 * 64)
    views = state_views(memory, shapes, dtypes, 64)
    assert [v.data_ptr() - memory.data_ptr() for v in views] == offsets
    assert [v.dtype for v in views] == list(dtypes)
    assert [v.stride(0) * v.element_size() for v in views] == [64] * len(views)


def test_contiguous_states_are_dense_and_the_padding_comes_last() -> None:
    memory = raw(4 * 96)
    views = contiguous_state_views(memory, (CONV, SSM), TYPES, blocks=4)
    assert geometry(views) == [((4, 3, 4), (12, 4, 1), LEAD // 2), ((4, 2, 2, 3), (12, 6, 3, 1), (LEAD + 4 * 24) // 4)]
    assert all(v.is_contiguous() for v in views)
    assert [byte for v in views for byte in bytes_of(v)] == [LEAD + i for i in range(4 * 72)]


def test_contiguous_states_and_attention_share_memory_region_by_region() -> None:
    """[K padding | conv] … [K | ssm] … [V | padding] …: conv leads, the last state lies over K, V over the padding."""
    memory = raw(4 * (24 + 48 + 48))
    conv, ssm = contiguous_state_views(memory, (CONV, SSM), TYPES, blocks=4)
    k, v = contiguous_attention_views(
        memory, blocks=4, block_tokens=4, kv_heads=2, head_dim=3, dtype=torch.float16, lead_bytes=24
    )
    assert bytes_of(conv) == [LEAD + i for i in range(4 * 24)]
    assert bytes_of(k) == bytes_of(ssm)
    assert [bytes_of(k[b]) for b in range(4)] == [bytes_of(ssm[b]) for b in range(4)]
    assert bytes_of(v) == [LEAD + 4 * 72 + i for i in range(4 * 48)]


@pytest.mark.parametrize("how", [{"page_bytes": 96}, {"page_bytes": 96, "blocks": 4}, {"blocks": 4}])
def test_contiguous_states_take_the_page_as_the_strided_ones_do(how: dict[str, int]) -> None:
    views = contiguous_state_views(raw(4 * 96), (CONV, SSM), TYPES, **how)
    assert geometry(views) == [((4, 3, 4), (12, 4, 1), LEAD // 2), ((4, 2, 2, 3), (12, 6, 3, 1), (LEAD + 4 * 24) // 4)]


def test_raw_memory_of_any_dense_shape() -> None:
    memory = raw(4 * 96)
    for lay in (state_views, contiguous_state_views):
        flat, pages = lay(memory, (CONV, SSM), TYPES, 96), lay(memory.view(4, 96), (CONV, SSM), TYPES, 96)
        assert geometry(pages) == geometry(flat)
        assert [v.data_ptr() for v in pages] == [v.data_ptr() for v in flat]
