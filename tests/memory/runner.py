"""Stand-ins for what a model runner passes: cache specifications and configurations, read by their attributes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch


def attention_spec(
    *,
    heads: int = 2,
    tokens: int = 4,
    head: int = 3,
    head_v: int | None = None,
    dtype: torch.dtype = torch.float16,
    page: int | None = None,
    **more: Any,
) -> SimpleNamespace:
    """An attention layer as vLLM-Ascend's runner describes it."""
    v = head if head_v is None else head_v
    size = heads * tokens * (head + v) * dtype.itemsize if page is None else page
    return SimpleNamespace(
        num_kv_heads=heads, block_size=tokens, head_size=head, head_size_v=v, dtype=dtype, page_size_bytes=size, **more
    )


def state_spec(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], page: int) -> SimpleNamespace:
    """A layer with recurrent states."""
    return SimpleNamespace(shapes=shapes, dtypes=dtypes, page_size_bytes=page, block_size=4)


def _group(specs: Mapping[str, SimpleNamespace]) -> SimpleNamespace:
    """Layers that share block ids, each with a specification of its own."""
    return SimpleNamespace(layer_names=list(specs), kv_cache_spec=SimpleNamespace(kv_cache_specs=dict(specs)))


def by_layer(
    blocks: int, groups: Sequence[Mapping[str, SimpleNamespace]], shared: Sequence[Sequence[str]] = ()
) -> SimpleNamespace:
    """A configuration of raw tensors by layer; the layers of each row of `shared` lie in one tensor."""
    specs = {name: spec for group in groups for name, spec in group.items()}
    rows = [tuple(row) for row in shared] + [(name,) for name in specs if not any(name in row for row in shared)]
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=[_group(group) for group in groups],
        kv_cache_tensors=[
            SimpleNamespace(size=blocks * max(specs[name].page_size_bytes for name in row), shared_by=list(row)) for row in rows
        ],
    )


def placed_attention_spec(*, heads: int = 2, tokens: int = 4, content: int = 12) -> SimpleNamespace:
    """An attention layer as vLLM places it in one buffer: K and V of a token and head are its content, in bytes."""
    return SimpleNamespace(
        num_heads=heads,
        block_size=tokens,
        state_content_size_bytes=content,
        dtype=torch.float16,
        get_num_kernel_states=lambda kernel_tokens: kernel_tokens,
    )


def placed_state_spec(nbytes: int) -> SimpleNamespace:
    """A state layer as vLLM places it in one buffer: one head with one state of so many bytes."""
    return SimpleNamespace(
        num_heads=1,
        block_size=4,
        state_content_size_bytes=nbytes,
        shapes=((nbytes,),),
        dtypes=(torch.int8,),
        get_num_kernel_states=lambda kernel_tokens: 1,  # noqa: ARG005 - as vLLM names it
    )


def placed(
    blocks: int, size: int, groups: Sequence[Mapping[str, SimpleNamespace]], places: Mapping[str, tuple[int, int]]
) -> SimpleNamespace:
    """A configuration of one buffer; `places`: layer -> (offset, block stride) in bytes."""
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_layout="LBHNC",
        kv_cache_groups=[_group(group) for group in groups],
        kv_cache_tensors=[
            SimpleNamespace(layers=[name], offset=offset, layer_stride=size, block_stride=stride, size=size)
            for name, (offset, stride) in places.items()
        ],
    )
