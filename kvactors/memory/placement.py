"""All caches of a model, from what vLLM says of them: raw memory, and a view (or views) for each layer by name.

Two forms of configuration are known, told apart by what a tensor of it says:

* vLLM 0.32 and 0.33: one byte buffer for everything; a tensor places layers by `offset`, `layer_stride` and `block_stride`. A
  layer's cache is one view [block, head, token, content], a state layer's [block, 1, 1, bytes]: the views that vLLM's own
  runner makes.
* vLLM-Ascend's model runner V1: raw tensors by layer, K/V tuples included; layers that are `shared_by` one tensor share memory.
  A layer's caches are a tuple of views: K and V, or the states.

Nothing here imports vLLM: a cache specification is read by its attributes. Whether layers share a buffer comes from the
placement alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvactors.errors import LayoutError
from kvactors.memory.attention import (
    attention_views,
    contiguous_attention_views,
    kernel_blocks_per_block,
    lane_view,
    require_apart,
)
from kvactors.memory.observe import tell_attention, tell_states
from kvactors.memory.overlaps import block_runs, first_meeting
from kvactors.memory.states import contiguous_state_views, state_views
from kvactors.memory.strided import known, payload_bytes, raw_bytes, strided, typed

Views: TypeAlias = Tensor | tuple[Tensor, ...]
Raw: TypeAlias = Tensor | tuple[Tensor, ...]

AXES = "LBHNC"
"""Layer, block, head, token (or stored state), content: the letters of a layout's name, outermost first."""


def allocate_kv_cache(config: Any, device: torch.device | str = "cpu") -> Raw | dict[str, Raw]:
    """Zeroed raw memory for a configuration: one byte buffer, or (Ascend V1) tensors by layer, shared as it says.

    Raises:
        LayoutError: the configuration has no tensors, or places them in buffers of different sizes.
    """
    tensors = _tensors(config)
    if not _is_placed(tensors):
        memory: dict[str, Raw] = {}
        for tensor in tensors:
            raw = torch.zeros(tensor.size, dtype=torch.int8, device=device)
            memory.update(dict.fromkeys(tensor.shared_by, raw))
        return memory
    sizes = {tensor.size for tensor in tensors}
    if len(sizes) > 1:
        raise LayoutError(f"the cache's tensors are placed in buffers of different sizes: {sorted(sizes)}")
    return torch.zeros(sizes.pop(), dtype=torch.int8, device=device)


def cache_views(
    kv_cache_config: Any,
    raw_tensors: Raw | Mapping[str, Raw],
    *,
    layout: str | None = None,
    kernel_block_sizes: Sequence[int] | None = None,
    contiguous: bool = False,
    token_major: Collection[str] = (),
) -> dict[str, Views]:
    """Layer name -> its view, or views, over raw memory.

    Args:
        kv_cache_config: a `KVCacheConfig` of vLLM or of vLLM-Ascend.
        raw_tensors: what `allocate_kv_cache` made, or what a runner did: one buffer, or tensors (and K/V tuples) by layer.
        layout: order of the axes in a buffer, such as "LBHNC"; None = the configuration's own.
        kernel_block_sizes: tokens of a kernel block, by group; None = blocks are not split.
        contiguous: the compatible layout with dense states and padding in regions of its own (raw tensors by layer only).
        token_major: attention layers whose operators read [block, token, head, …] and not [block, head, token, …]; pages and
            payloads are the same, what is inside of a block is the operators' own affair (raw tensors by layer only).

    Raises:
        LayoutError: a specification or a placement that has no views; it names layer or group.
    """
    tensors = _tensors(kv_cache_config)
    if isinstance(raw_tensors, Tensor):
        if not _is_placed(tensors):
            raise LayoutError("the configuration says nothing of places in one buffer; give raw tensors by layer")
        if contiguous or token_major:
            what = "the contiguous layout" if contiguous else "the order of tokens and heads"
            raise LayoutError(f"{what} is said for raw tensors by layer only; a buffer's places and layout are its own")
        return _placed_views(kv_cache_config, tensors, raw_tensors, layout, kernel_block_sizes)
    if not isinstance(raw_tensors, Mapping):
        raise LayoutError(f"raw memory of type {type(raw_tensors).__name__}: give one buffer, or tensors by layer")
    if _is_placed(tensors):
        name = next(iter(raw_tensors), tensors[0].layers[0])
        raise LayoutError(f"{name}: the configuration places its layers in one buffer; give that buffer, not tensors by layer")
    return _layer_views(kv_cache_config, raw_tensors, kernel_block_sizes, contiguous, token_major)


def layer_specs(config: Any) -> dict[str, tuple[int, Any]]:
    """Layer name -> (group number, its own specification); wrappers of layers with different shapes are opened.

    Raises:
        LayoutError: such a wrapper lacks a layer of its group.
    """
    found: dict[str, tuple[int, Any]] = {}
    for number, group in enumerate(config.kv_cache_groups):
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            if inner is not None and name not in inner:
                raise LayoutError(f"{name}: group {number} has the layer and no specification of it")
            found[name] = (number, group.kv_cache_spec if inner is None else inner[name])
    return found


def is_state(spec: Any) -> bool:
    """Whether a specification is that of a recurrent state."""
    return hasattr(spec, "shapes")


def _tensors(config: Any) -> Sequence[Any]:
    tensors: Sequence[Any] = config.kv_cache_tensors
    if not tensors:
        raise LayoutError("the cache configuration has no tensors")
    return tensors


def _is_placed(tensors: Sequence[Any]) -> bool:
    return hasattr(tensors[0], "block_stride")


# -- one buffer ----------------------------------------------------------------------------------------------------------


def _placed_views(
    config: Any, tensors: Sequence[Any], buffer: Tensor, layout: str | None, kernel_block_sizes: Sequence[int] | None
) -> dict[str, Views]:
    order = layout or config.kv_cache_layout or AXES
    if sorted(order) != sorted(AXES):
        raise LayoutError(f"layout {order!r}: must name each of {AXES} once, outermost first")
    specs = layer_specs(config)
    hybrid = any(is_state(spec) for _, spec in specs.values())
    views: dict[str, Views] = {}
    laid: dict[tuple[int, bool], dict[str, Tensor]] = {}
    for tensor in tensors:
        for name in tensor.layers:
            if name not in specs:
                raise LayoutError(f"{name}: has a place in the buffer, and no group of the configuration has it; leave it out")
        group, spec = specs[tensor.layers[0]]
        if not getattr(spec, "has_layer_views", True):
            views.update(dict.fromkeys(tensor.layers, buffer))
            continue
        kernel = spec.block_size
        if kernel_block_sizes is not None and group < len(kernel_block_sizes) and not is_state(spec):
            kernel = kernel_block_sizes[group]
        for number, name in enumerate(tensor.layers):
            with _named(name):
                view = _placed_view(buffer, spec, tensor, number, _blocks(config, tensor), kernel, order)
            views[name] = view
            laid.setdefault((group, bool(getattr(tensor, "host_resident", False))), {})[name] = view
            if is_state(spec):
                tell_states(name, tensor.block_stride, [view])
            else:
                tell_attention(name, hybrid, [view])
    for of_group in laid.values():
        _require_places_apart(of_group, buffer)
    return views


def _require_places_apart(views: Mapping[str, Tensor], buffer: Tensor) -> None:
    """Layers of one group are in use at once, with the same block ids; those of different groups may share pages.

    Raises:
        LayoutError: blocks of a layer, or two layers, share bytes.
    """
    runs = [(name, run) for name, view in views.items() for run in block_runs(view, name)]
    if (pair := first_meeting([run for _, run in runs], [name for name, _ in runs])) is not None:
        (one, a), (other, b) = (runs[i] for i in pair)
        start = buffer.data_ptr()
        raise LayoutError(
            f"{one}: {a.nbytes} bytes at {a.address - start}, every {a.stride}, share bytes with {other} of the same group: "
            f"{b.nbytes} at {b.address - start}, every {b.stride}; place them apart"
        )


def _blocks(config: Any, tensor: Any) -> int:
    ask = getattr(config, "num_blocks_of", None)
    return int(config.num_blocks if ask is None else ask(tensor))


@contextmanager
def _named(layer: str) -> Iterator[None]:
    """Errors within begin with the layer's name."""
    try:
        yield
    except LayoutError as error:
        if str(error).startswith(f"{layer}: "):
            raise
        raise LayoutError(f"{layer}: {error}") from None


def _placed_view(buffer: Tensor, spec: Any, tensor: Any, number: int, blocks: int, kernel_tokens: int, order: str) -> Tensor:
    """[block, head, token, content] of one of a tensor's layers; content in bytes where the specification has no type."""
    name, layer_stride, block_stride = tensor.layers[number], int(tensor.layer_stride), int(tensor.block_stride)
    per_block = kernel_blocks_per_block(spec.block_size, kernel_tokens)
    heads, content = int(spec.num_heads), int(spec.state_content_size_bytes)
    padded = getattr(spec, "page_size_padded", None) is not None
    if block_stride < 1 or (layer_stride < 1 and len(tensor.layers) > 1):
        raise LayoutError(f"{name}: layers {layer_stride} and blocks {block_stride} bytes apart; they must lie apart")
    if padded and heads > 1 and order.index("H") < max(order.index("L"), order.index("B")):
        raise LayoutError(f"{name}: layout {order} takes the {heads} heads of a page apart, so pages cannot have padding")
    if per_block > 1:
        dense = heads * int(spec.get_num_kernel_states(spec.block_size)) * content
        if block_stride != dense or padded:
            raise LayoutError(
                f"{name}: blocks of {dense} bytes, {block_stride} apart, are no dense pages, so they cannot be split into "
                f"{per_block} kernel blocks of {kernel_tokens} tokens; use blocks of {kernel_tokens} tokens, or a layout with "
                "the layers outermost"
            )
        if block_stride % per_block:
            raise LayoutError(f"{name}: a block of {block_stride} bytes does not divide into {per_block} kernel blocks")
        block_stride //= per_block
    dtype: torch.dtype = getattr(spec, "dtype", None) or torch.int8
    if content % dtype.itemsize:
        raise LayoutError(f"{name}: content of {content} bytes is no whole number of elements of {dtype}")
    states = int(spec.get_num_kernel_states(kernel_tokens))
    sizes = {"L": len(tensor.layers), "B": blocks * per_block, "H": heads, "N": states, "C": content}
    fixed = {"L": layer_stride, "B": block_stride}
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(order):  # heads that have layers or blocks inside of them step over all of these
        strides[axis] = fixed.get(axis) or step
        step = strides[axis] * sizes[axis]
    strides["C"], sizes["C"] = dtype.itemsize, content // dtype.itemsize
    axes = "BHNC"
    offset = int(tensor.offset) + number * layer_stride
    return strided(buffer, dtype, [sizes[a] for a in axes], [strides[a] for a in axes], offset, name)


# -- raw tensors by layer ------------------------------------------------------------------------------------------------


def _layer_views(
    config: Any,
    raw: Mapping[str, Raw],
    kernel_block_sizes: Sequence[int] | None,
    contiguous: bool,
    token_major: Collection[str],
) -> dict[str, Views]:
    specs = layer_specs(config)
    hybrid = any(is_state(spec) for _, spec in specs.values())
    shared = [name for tensor in config.kv_cache_tensors for name in tensor.shared_by if name in specs]
    if strange := [name for name in raw if name not in specs]:
        raise LayoutError(f"{', '.join(strange)}: raw memory of a layer that no group of the configuration has; leave it out")
    if missing := [name for name in dict.fromkeys(shared) if name not in raw]:
        raise LayoutError(f"{', '.join(missing)}: the configuration has a tensor for it, and no raw memory was given; give it")
    if unknown := [name for name in token_major if name not in specs or is_state(specs[name][1])]:
        raise LayoutError(f"{', '.join(unknown)}: named in token_major, and no attention layer of the configuration")
    views: dict[str, Views] = {}
    for name, memory in raw.items():
        group, spec = specs[name]
        with _named(name):
            blocks = sum(raw_bytes(part) for part in _parts(memory)) // int(spec.page_size_bytes)
            if blocks < config.num_blocks:
                raise LayoutError(f"{blocks} blocks of memory, {config.num_blocks} in the configuration; allocate them all")
            if is_state(spec):
                found: tuple[Tensor, ...] = _state_layer(name, spec, memory, blocks, contiguous)
            else:
                if kernel_block_sizes is not None and group >= len(kernel_block_sizes):
                    raise LayoutError(
                        f"in group {group}, and kernel_block_sizes has {len(kernel_block_sizes)} of them; one for each group"
                    )
                kernel = None if kernel_block_sizes is None else kernel_block_sizes[group]
                lead = _lead_bytes(specs, raw, memory, spec) if contiguous else 0
                found = _attention_layer(name, spec, memory, blocks, kernel, contiguous, lead)
                if name in token_major:
                    found = tuple(_in_token_order(view) for view in found)
        if is_state(spec):
            tell_states(name, spec.page_size_bytes, found)
        else:
            tell_attention(name, hybrid, found)
        views[name] = found
    return views


def _parts(memory: Raw) -> tuple[Tensor, ...]:
    return (memory,) if isinstance(memory, Tensor) else tuple(memory)


def _state_layer(name: str, spec: Any, memory: Raw, blocks: int, contiguous: bool) -> tuple[Tensor, ...]:
    if not isinstance(memory, Tensor):
        raise LayoutError(f"{name}: the states of a layer lie in one allocation, not in {len(memory)}; give one tensor")
    if contiguous:
        return tuple(contiguous_state_views(memory, spec.shapes, spec.dtypes, blocks=blocks))
    return tuple(state_views(memory, spec.shapes, spec.dtypes, spec.page_size_bytes))


def _attention_layer(
    name: str, spec: Any, memory: Raw, blocks: int, kernel_tokens: int | None, contiguous: bool, lead_bytes: int
) -> tuple[Tensor, ...]:
    """K and V; in a tuple each lane's head comes from its own allocation (MLA's two parts differ), a scale last."""
    dtype: torch.dtype = spec.dtype
    heads, tokens = int(spec.num_kv_heads), int(spec.block_size)
    k_dim, v_dim = int(spec.head_size), int(known(getattr(spec, "head_size_v", None), spec.head_size))
    if isinstance(memory, Tensor):
        if not v_dim:  # one latent vector stands for K and V (MLA)
            page = int(spec.page_size_bytes)
            return (lane_view(memory, dtype, blocks, (heads, tokens, k_dim), page, 0, name, kernel_tokens),)
        lay = (
            partial(contiguous_attention_views, lead_bytes=lead_bytes)
            if contiguous
            else partial(attention_views, page_bytes=int(spec.page_size_bytes), kernel_tokens=kernel_tokens)
        )
        return lay(memory, blocks=blocks, block_tokens=tokens, kv_heads=heads, head_dim=k_dim, head_dim_v=v_dim, dtype=dtype)
    split = 1 if kernel_tokens is None else kernel_blocks_per_block(tokens, kernel_tokens)
    scaled = bool(getattr(spec, "scale_dim", 0))
    parts = len(memory) - scaled
    if parts not in (1, 2):
        has = "with" if scaled else "without"
        raise LayoutError(
            f"{name}: {len(memory)} allocations for a layer {has} scales; give K and V (or a latent vector and its rope part), "
            "and a third only where the specification has a scale_dim"
        )
    views: list[Tensor] = []
    dims: list[int] = []
    for number, lane in enumerate(memory):
        of_lane: torch.dtype = (getattr(spec, "scale_dtype", None) or dtype) if number == parts else dtype
        row = blocks * heads * tokens * of_lane.itemsize
        if blocks < 1 or raw_bytes(lane) % row:
            raise LayoutError(
                f"{name}: {raw_bytes(lane)} bytes are no whole number of elements for {blocks} blocks of {tokens}"
            )
        dims.append(raw_bytes(lane) // row)
        views.append(typed(lane, of_lane).view(blocks * split, heads, tokens // split, dims[-1]))
    fits = dims[:parts] == [k_dim, v_dim] if v_dim else sum(dims[:parts]) == k_dim  # without a V: parts of a latent vector
    if not fits or not min(dims):
        raise LayoutError(
            f"{name}: allocations with room for heads of {dims} elements, {k_dim} and {v_dim} in the configuration; padded "
            "pages need one allocation for all"
        )
    require_apart(views, [f"allocation {number}" for number in range(len(views))], name)
    return tuple(views)


def _in_token_order(view: Tensor) -> Tensor:
    blocks, heads, tokens, head = view.shape
    return view.as_strided((blocks, tokens, heads, head), (view.stride(0), heads * head, head, 1), view.storage_offset())


def _lead_bytes(specs: Mapping[str, tuple[int, Any]], raw: Mapping[str, Raw], memory: Raw, spec: Any) -> int:
    """Bytes a block that a state layer in the same memory uses in front of what lies over K."""
    for name, (_, other) in specs.items():
        if is_state(other) and raw.get(name) is memory:
            if other.page_size_bytes != spec.page_size_bytes:
                raise LayoutError(
                    f"{name} has pages of {other.page_size_bytes} bytes in memory that is shared with pages of "
                    f"{spec.page_size_bytes}: in the contiguous layout they must be equal; use the strided views"
                )
            sizes = [payload_bytes(shape, dtype) for shape, dtype in zip(other.shapes, other.dtypes, strict=True)]
            k_bytes = payload_bytes((spec.num_kv_heads, spec.block_size, spec.head_size), spec.dtype)
            if sizes[-1] != k_bytes:
                raise LayoutError(
                    f"{name} has a last state of {sizes[-1]} bytes over a K block of {k_bytes}: in the contiguous layout they "
                    "share memory block by block, so they must be equal; use the strided views"
                )
            return sum(sizes[:-1])
    return 0


__all__ = ["AXES", "Raw", "Views", "allocate_kv_cache", "cache_views", "is_state", "layer_specs"]
