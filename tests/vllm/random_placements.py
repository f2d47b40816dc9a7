"""Random placements in one buffer, without an engine: what vLLM makes of each, and what we make of it.

vLLM lays views that share bytes without a word; where blocks of a layer or layers of one group do, we refuse.

`python -m tests.vllm.random_placements OUT` tries them all and stops with the smallest one on which the two differ; OUT gets
how often each kind came up, as JSON. In a process of its own, since vLLM changes the process that imports it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvactors import memory
from kvactors.errors import LayoutError
from tests.memory.model import bytes_of
from tests.vllm.view_record import Seen, seen, whole_buffer

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8)
TIMES: Counter[str] = Counter()


class Case(NamedTuple):
    config: Any
    layout: KVCacheLayout
    kernel_block_sizes: list[int] | None


@st.composite
def attention(draw: st.DrawFn, block_tokens: int) -> Any:
    """Attention of any kind: dense or packed content, several tokens a state or several states a token, padded pages."""
    kind = draw(st.sampled_from(["full", "window", "latent"]))
    dtype = draw(st.sampled_from(DTYPES))
    fields: dict[str, Any] = {
        "block_size": block_tokens,
        "num_kv_heads": draw(st.integers(1, 3)),
        "head_size": draw(st.integers(1, 6)),
        "dtype": dtype,
        "tokens_per_state": draw(st.sampled_from([1, 1, 1, 2, Fraction(1, 2)])),
    }
    if draw(st.integers(0, 4)) == 0:
        fields["num_head_slots"] = 1
        fields["state_content_bytes"] = draw(st.integers(1, 20))
    if kind == "full":
        return _padded(draw, vllm_specs.FullAttentionSpec(**fields, head_size_v=draw(st.integers(1, 6))))
    if kind == "window":
        return _padded(draw, vllm_specs.SlidingWindowSpec(**fields, sliding_window=draw(st.integers(1, 40))))
    return _padded(draw, vllm_specs.MLAAttentionSpec(**fields))


@st.composite
def states(draw: st.DrawFn, block_tokens: int) -> Any:
    shapes = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3))
    dtypes = tuple(draw(st.sampled_from(DTYPES)) for _ in shapes)
    return _padded(draw, vllm_specs.MambaSpec(block_size=block_tokens, shapes=tuple(shapes), dtypes=dtypes))


def _padded(draw: st.DrawFn, spec: Any) -> Any:
    if draw(st.integers(0, 2)):
        return spec
    return replace(spec, page_size_padded=spec.page_size_bytes + draw(st.sampled_from([0, 4, 8, 32, 3])))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(st.sampled_from(list(KVCacheLayout)))
    blocks = draw(st.integers(1, 4))
    groups, tensors, kernel = [], [], []
    for number in range(draw(st.integers(1, 3))):
        tokens = 4 * draw(st.integers(1, 4))
        names = [f"layers.{number}.{i}" for i in range(draw(st.integers(1, 3)))]
        spec, by_layer = _group(draw, names, tokens)
        groups.append(vllm_specs.KVCacheGroupSpec(names, spec))
        recurrent = isinstance(by_layer[names[0]], vllm_specs.MambaSpec)
        kernel.append(tokens if recurrent else draw(st.sampled_from([tokens, tokens, tokens // 2, 4, 2, 6])))
        alone = isinstance(spec, vllm_specs.UniformTypeKVCacheSpecs) or draw(st.booleans())
        parts = [[name] for name in names] if alone else [names]
        begin = 0
        for layers in parts:
            tensors.append(_place(draw, by_layer[layers[0]], layers, layout, blocks))
            tensors[-1].offset += begin if draw(st.integers(0, 3)) else 0
            begin = _end(tensors[-1], blocks) // 64 * 64
    size = max(_end(tensor, blocks) for tensor in tensors) - draw(st.sampled_from([0, 0, 0, 0, 1, 64]))
    for tensor in tensors:
        tensor.size = max(1, size)
    config = vllm_specs.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
    return Case(config, layout, draw(st.sampled_from([kernel, kernel, kernel[:-1], None])))


def _group(draw: st.DrawFn, names: list[str], tokens: int) -> tuple[Any, dict[str, Any]]:
    kind = draw(st.sampled_from(["attention", "attention", "states", "uniform", "raw"]))
    if kind == "uniform":
        by_layer = {name: draw(attention(tokens)) for name in names}
        return vllm_specs.UniformTypeKVCacheSpecs(block_size=tokens, kv_cache_specs=by_layer), by_layer
    if kind == "raw":
        spec = vllm_specs.HiSparseResidentSpec(block_size=tokens, page_size=64)
    else:
        spec = draw(attention(tokens) if kind == "attention" else states(tokens))
    return spec, dict.fromkeys(names, spec)


def _place(draw: st.DrawFn, spec: Any, layers: list[str], layout: KVCacheLayout, blocks: int) -> Any:
    """As vLLM does it, or with gaps, or too close together, or off by a byte."""
    page = spec.page_size_bytes + draw(st.sampled_from([0, 0, 0, 8, 64, 1, -4]))
    if layout.is_layer_compact:
        block_stride, layer_stride = page, page * blocks
    else:
        block_stride, layer_stride = page * len(layers), page
    if layout in (KVCacheLayout.LHBNC, KVCacheLayout.BHLNC) and spec.has_layer_views and draw(st.booleans()):
        inner = spec.get_num_kernel_states(spec.block_size) * spec.state_content_size_bytes  # of one head
        if layout is KVCacheLayout.LHBNC:
            block_stride, layer_stride = inner, inner * spec.num_heads * blocks
        else:
            layer_stride, block_stride = inner, inner * spec.num_heads * len(layers)
    return vllm_specs.KVCacheTensor(
        size=0,
        layers=layers,
        layer_stride=max(1, layer_stride + draw(st.sampled_from([0, 0, 0, 16]))),
        block_stride=max(0, block_stride),
        offset=draw(st.sampled_from([0, 0, 0, 4, 64, 3])),
    )


def _end(tensor: Any, blocks: int) -> int:
    """Room enough for most placements: layers, blocks and heads may be nested in any order."""
    layers, spread = len(tensor.layers) + 1, (blocks + 1) * max(1, tensor.block_stride)
    return 3 * int(tensor.offset + layers * tensor.layer_stride + spread)


def theirs(case: Case) -> dict[str, Any] | None:
    """Views by name, or None where vLLM refuses."""
    try:
        return dict(allocate_kv_cache(case.config, torch.device("cpu"), case.layout, case.kernel_block_sizes))
    except (AssertionError, ValueError, RuntimeError):
        return None


def bytes_met(case: Case, views: dict[str, Any]) -> bool:
    """Whether blocks of a layer or layers of one group share bytes, by counting."""
    for group in case.config.kv_cache_groups:
        if getattr(group.kv_cache_spec, "has_layer_views", True):
            used = [byte for name in group.layer_names for byte in bytes_of(views[name])]
            if len(set(used)) < len(used):
                return True
    return False


@settings(max_examples=1500, derandomize=True, deadline=None, database=None)
@given(cases())
def agree(case: Case) -> None:
    expected = theirs(case)
    met = expected is not None and bytes_met(case, expected)
    raw = memory.allocate_kv_cache(case.config) if expected is None else whole_buffer(expected.values())
    try:
        ours: dict[str, Seen] | None = {
            name: seen(view)
            for name, view in memory.cache_views(
                case.config, raw, layout=case.layout.name, kernel_block_sizes=case.kernel_block_sizes
            ).items()
        }
    except LayoutError:
        ours = None
    assert ours == (None if expected is None or met else {name: seen(view) for name, view in expected.items()})
    if ours is None:
        TIMES["met" if met else "refused"] += 1
        return
    TIMES[case.layout.name] += 1
    if case.kernel_block_sizes and any(view.shape[0] > case.config.num_blocks for view in ours.values() if len(view.shape) > 1):
        TIMES["split"] += 1
    if any(getattr(group.kv_cache_spec, "page_size_padded", None) for group in case.config.kv_cache_groups):
        TIMES["padded"] += 1
    if len(case.config.kv_cache_tensors) > 1:
        TIMES["several tensors"] += 1


if __name__ == "__main__":
    agree()
    Path(sys.argv[1]).write_text(json.dumps(TIMES))
