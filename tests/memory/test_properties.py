"""Any mix of groups on one pool, against plain arithmetic: every view touches exactly its own bytes, and entries say which.

A pool is drawn as a row of areas. An area is memory of one group (or of several, interleaved page by page), and says for
each view where its blocks must lie, in numbers worked out here and not read from the view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvactors.core.layout import CacheEntry
from kvactors.errors import LayoutError
from kvactors.memory import (
    KVOrder,
    attention_views,
    combined_attention_view,
    contiguous_attention_views,
    contiguous_state_views,
    group_memory,
    kernel_block_ids,
    placed_entries,
    registered_regions,
    state_views,
)
from kvactors.memory.attention import lane_view
from tests.memory.model import LEAD, Rows, bytes_of, dense, patterns, raw, storage_bytes, write

State: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and element type of one state."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
UNIT = 16
"""Areas and slots of a page begin at multiples of it, as allocators do; padding is of any whole number of elements."""


@dataclass
class View:
    """A view as drawn: `make(pool)` lays it, `rows` is where its blocks must lie."""

    name: str
    blocks: int
    rows: Rows
    make: Callable[[Tensor], Tensor]
    kernel_blocks: int = 1
    shares: frozenset[str] = frozenset()
    """Views that lie over the same bytes by placement."""


@dataclass
class Pool:
    nbytes: int = 0
    views: list[View] = field(default_factory=list)

    def add(self, nbytes: int) -> int:
        """Where an area of so many bytes begins."""
        begin = self.nbytes
        self.nbytes += -(-nbytes // UNIT) * UNIT
        return begin


@dataclass(frozen=True)
class Heads:
    """Inner sizes of an attention layer."""

    heads: int
    tokens: int
    dim: int
    dtype: torch.dtype

    @property
    def payload(self) -> int:
        return self.heads * self.tokens * self.dim * self.dtype.itemsize


@st.composite
def heads(draw: st.DrawFn) -> Heads:
    return Heads(
        draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 6])), draw(st.integers(1, 5)), draw(st.sampled_from(DTYPES))
    )


def padding(draw: st.DrawFn, item: int) -> int:
    return draw(st.sampled_from([0, 0, 1, 3, 8])) * item


def args(h: Heads, blocks: int) -> dict[str, Any]:
    return {"blocks": blocks, "block_tokens": h.tokens, "kv_heads": h.heads, "head_dim": h.dim, "dtype": h.dtype}


def separate(draw: st.DrawFn, pool: Pool, name: str, blocks: int) -> None:
    """K and V in two tensors, perhaps as kernel blocks."""
    h = draw(heads())
    page = h.payload + padding(draw, h.dtype.itemsize)
    at = [pool.add(blocks * page) for _ in range(2)]
    kernel = draw(st.sampled_from([t for t in range(1, h.tokens + 1) if h.tokens % t == 0])) if page == h.payload else None

    def make(lane: int) -> Callable[[Tensor], Tensor]:
        return lambda memory: attention_views(
            [memory[a : a + blocks * page] for a in at], **args(h, blocks), page_bytes=page, kernel_tokens=kernel
        )[lane]

    split = 1 if kernel is None else h.tokens // kernel
    for lane, letter in enumerate("kv"):
        pool.views.append(View(f"{name}.{letter}", blocks, dense(at[lane], page, h.payload), make(lane), split))


def together(draw: st.DrawFn, pool: Pool, name: str, blocks: int) -> None:
    """K and V in one tensor, blocks first or lanes first, as two views or as one combined."""
    h = draw(heads())
    order = draw(st.sampled_from(KVOrder))
    if order is KVOrder.BLOCKS_FIRST:
        page = 2 * h.payload + padding(draw, h.dtype.itemsize)
        size, bases = blocks * page, (0, h.payload)
    else:
        page = h.payload + padding(draw, h.dtype.itemsize)
        lane_bytes = blocks * page + padding(draw, h.dtype.itemsize)
        size, bases = 2 * lane_bytes, (0, lane_bytes)
    at = pool.add(size)
    combined = draw(st.booleans())

    def make(lane: int) -> Callable[[Tensor], Tensor]:
        lay = combined_attention_view if combined else attention_views
        return lambda memory: lay(memory[at : at + size], **args(h, blocks), page_bytes=page, order=order)[lane]

    for lane, letter in enumerate("kv"):
        pool.views.append(View(f"{name}.{letter}", blocks, dense(at + bases[lane], page, h.payload), make(lane)))


@st.composite
def states(draw: st.DrawFn) -> list[State]:
    """Large elements first, so that every offset is a whole number of elements."""
    shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
    found = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=3))
    return sorted(found, key=lambda s: -s[1].itemsize)


def nbytes_of(of: list[State]) -> list[int]:
    return [prod(shape) * dtype.itemsize for shape, dtype in of]


def interleaved(draw: st.DrawFn, pool: Pool, name: str, blocks: int) -> None:
    """Layers of several groups page by page: slots of attention and of states, with gaps, each over the same pages.

    The last slot may be used by two layers of different groups: they share its pages by placement.
    """
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    slots: list[tuple[int, Heads | list[State]]] = []
    page = 0
    for attention in kinds:
        what = draw(heads()) if attention else draw(states())
        slots.append((page, what))
        payload = 2 * what.payload if isinstance(what, Heads) else sum(nbytes_of(what))
        page += -(-payload // UNIT) * UNIT + draw(st.sampled_from([0, 0, UNIT, 3 * UNIT]))
    twin = draw(states()) if draw(st.booleans()) else None
    if twin is not None:
        slots.append((slots[-1][0], twin))
        page = max(page, -(-(slots[-1][0] + sum(nbytes_of(twin))) // UNIT) * UNIT)
    at = pool.add(blocks * page)

    def make(slot: int, number: int) -> Callable[[Tensor], Tensor]:
        offset, what = slots[slot]

        def laid(memory: Tensor) -> Tensor:
            area = memory[at + offset : at + blocks * page]
            if isinstance(what, Heads):
                return attention_views(area, **args(what, blocks), page_bytes=page)[number]
            return state_views(area, [shape for shape, _ in what], [dtype for _, dtype in what], page, blocks=blocks)[number]

        return laid

    names: list[list[str]] = []
    for slot, (offset, what) in enumerate(slots):
        sizes = [what.payload] * 2 if isinstance(what, Heads) else nbytes_of(what)
        names.append([f"{name}.{slot}.{number}" for number in range(len(sizes))])
        for number, size in enumerate(sizes):
            rows = dense(at + offset + sum(sizes[:number]), page, size)
            pool.views.append(View(names[-1][number], blocks, rows, make(slot, number)))
    if twin is not None:
        for view in pool.views:
            if view.name in names[-1]:
                view.shares = frozenset(names[-2])
            elif view.name in names[-2]:
                view.shares = frozenset(names[-1])


def materialised(draw: st.DrawFn, pool: Pool, name: str, blocks: int) -> None:
    """The contiguous layouts: dense regions one after the other, after a lead that belongs to others."""
    what = draw(st.one_of(heads(), states()))
    if isinstance(what, Heads):
        lead, sizes = draw(st.integers(0, 3)) * what.dtype.itemsize, [what.payload] * 2
    else:
        lead, sizes = 0, nbytes_of(what)
    size = blocks * (lead + sum(sizes))
    at = pool.add(size)

    def make(number: int) -> Callable[[Tensor], Tensor]:
        def laid(memory: Tensor) -> Tensor:
            area = memory[at : at + size]
            if isinstance(what, Heads):
                return contiguous_attention_views(area, **args(what, blocks), lead_bytes=lead)[number]
            return contiguous_state_views(area, [shape for shape, _ in what], [dtype for _, dtype in what], blocks=blocks)[
                number
            ]

        return laid

    for number, nbytes in enumerate(sizes):
        rows = dense(at + blocks * (lead + sum(sizes[:number])), nbytes, nbytes)
        pool.views.append(View(f"{name}.{number}", blocks, rows, make(number)))


def parts(draw: st.DrawFn, pool: Pool, name: str, blocks: int) -> None:
    """A latent row whose parts are views of their own: each token of each part is a run."""
    h = draw(heads())
    item = h.dtype.itemsize
    row = (h.dim + 1) * item
    page = h.heads * h.tokens * row + padding(draw, item)
    at = pool.add(blocks * page)
    cut = draw(st.integers(1, h.dim))
    whole = replace(h, dim=h.dim + 1)

    def make(low: int, high: int) -> Callable[[Tensor], Tensor]:
        def laid(memory: Tensor) -> Tensor:
            shape = (whole.heads, whole.tokens, whole.dim)
            latent = lane_view(memory[at : at + blocks * page], whole.dtype, blocks, shape, page, 0, "latent")
            return latent[..., low:high]

        return laid

    for letter, low, high in (("nope", 0, cut), ("rope", cut, h.dim + 1)):
        spans = tuple((n * row + low * item, (high - low) * item) for n in range(h.heads * h.tokens))
        pool.views.append(View(f"{name}.{letter}", blocks, Rows(at, page, spans), make(low, high)))


AREAS = [separate, together, interleaved, materialised, parts]


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    pool = Pool()
    for number in range(draw(st.integers(1, 3))):
        draw(st.sampled_from(AREAS))(draw, pool, str(number), draw(st.integers(1, 5)))
        pool.add(draw(st.sampled_from([0, UNIT])))  # memory of nobody
    return pool


def of_block(drawn: View, view: Tensor, b: int) -> Tensor:
    """One block of a view: an element of it, or the kernel blocks that its id expands to."""
    if drawn.kernel_blocks == 1:
        return view[b]
    ids = kernel_block_ids([b], drawn.kernel_blocks)
    return view[int(ids[0]) : int(ids[-1]) + 1]


@settings(max_examples=150)
@given(pools())
def test_a_write_through_a_view_touches_exactly_its_own_bytes(pool: Pool) -> None:
    """After every single write the whole storage equals the model's, byte by byte, lead and tail included."""
    memory = raw(pool.nbytes)
    model = bytearray(storage_bytes(memory))
    pattern = patterns()
    for drawn in pool.views:
        view = drawn.make(memory)
        assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        for b in range(drawn.blocks):
            places = drawn.rows.of(b)
            content = next(pattern)[: len(places)]
            write(of_block(drawn, view, b), content)
            for at, byte in zip(places, content, strict=True):
                model[LEAD + at] = byte
            assert storage_bytes(memory) == model, f"{drawn.name}, block {b}"


@settings(max_examples=150)
@given(pools())
def test_views_overlap_only_by_placement(pool: Pool) -> None:
    """No two blocks of a view and no two views share a byte, but for layers that were placed on the same pages."""
    memory = raw(pool.nbytes)
    owner: dict[int, list[tuple[str, int]]] = {}
    by_name = {drawn.name: drawn for drawn in pool.views}
    for drawn in pool.views:
        view = drawn.make(memory)
        for b in range(drawn.blocks):
            for byte in bytes_of(of_block(drawn, view, b)):
                owner.setdefault(byte, []).append((drawn.name, b))
    for sharers in owner.values():
        names = [name for name, _ in sharers]
        assert len(set(names)) == len(names), f"{sharers}: two blocks of one view"
        for name in names:
            assert set(names) - {name} <= by_name[name].shares, sharers
        assert len({b for _, b in sharers}) == 1, "what is shared is a page: the same block id on both sides"


@settings(max_examples=150)
@given(pools())
def test_entries_and_bases_address_exactly_the_bytes_of_a_block(pool: Pool) -> None:
    memory = raw(pool.nbytes)
    for number, drawn in enumerate(pool.views):
        view = drawn.make(memory)
        group = group_memory(number, {4: {"c": view}}, drawn.blocks)
        entries: tuple[CacheEntry, ...] = group.layers[4]
        assert list(group.bases) == [(number, 4, e.name) for e in entries]
        for b in range(drawn.blocks):
            addressed = [
                group.bases[number, 4, e.name] - memory.data_ptr() + b * e.stride + i for e in entries for i in range(e.nbytes)
            ]
            assert sorted(addressed) == sorted(drawn.rows.of(b))
            assert len(set(addressed)) == len(addressed), "no byte twice"
        assert len(entries) <= len(drawn.rows.spans), "as few runs as there are"


@settings(max_examples=100)
@given(pools(), st.sampled_from([1, 64, 4096, 2 << 20]))
def test_registered_memory_covers_every_view_and_no_more_than_the_storage(pool: Pool, align: int) -> None:
    memory = raw(pool.nbytes)
    views = [drawn.make(memory) for drawn in pool.views]
    ((address, nbytes),) = registered_regions(views, align)
    used = sorted(at for drawn in pool.views for b in range(drawn.blocks) for at in drawn.rows.of(b))
    first, end = memory.data_ptr() + used[0], memory.data_ptr() + used[-1] + 1
    storage = memory.untyped_storage()
    if align == 1:
        assert (address, nbytes) == (first, end - first)
    assert storage.data_ptr() <= address <= first
    assert end <= address + nbytes <= storage.data_ptr() + storage.nbytes()
    for view, drawn in zip(views, pool.views, strict=True):
        ((start, size),) = registered_regions([view])
        payload = drawn.rows.spans[-1][0] + drawn.rows.spans[-1][1] - drawn.rows.spans[0][0]
        assert size == (drawn.blocks - 1) * drawn.rows.page + payload, "(blocks - 1) * stride + payload"
        assert address <= start
        assert start + size <= address + nbytes


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), min_size=1, max_size=3), st.integers(1, 40), st.integers(1, 5)
)
def test_views_whose_blocks_overlap_are_refused_and_no_others(dims: list[tuple[int, int]], stride: int, blocks: int) -> None:
    """Against counting: strides of any kind, so that blocks, runs and heads meet in all the ways that there are."""
    shape, strides = (blocks, *(n for n, _ in dims)), (stride, *(s for _, s in dims))
    view = torch.as_strided(torch.zeros(1024, dtype=torch.int8), shape, strides)
    counted = bytes_of(view)
    if len(set(counted)) < len(counted):
        try:
            placed_entries("k", view, blocks)
        except LayoutError:
            return
        raise AssertionError("an overlap was not seen")
    placed = placed_entries("k", view, blocks)
    addressed = [
        p.address - view.data_ptr() + b * p.entry.stride + i
        for p in placed
        for b in range(blocks)
        for i in range(p.entry.nbytes)
    ]
    assert sorted(addressed) == sorted(counted)
