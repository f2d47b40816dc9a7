"""Pieces tile the object exactly; cuts move every piece of every key once, within the limits. Coverage proves a commit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.core.calls import RowPlan
from kvactors.core.config import EngineConfig
from kvactors.core.coverage import Coverage
from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.ranges import MAX_RANGES, GroupRanges, group_ranges, most_keys, read_runs, whole_rows
from kvactors.core.saves import StepSaves
from kvactors.core.sessions import Owner, PutSession, PutState
from kvactors.errors import ConfigError, LayoutError

entries = st.lists(st.integers(1, 300), min_size=1, max_size=5)
layouts = st.lists(entries, min_size=1, max_size=5)
limits = st.builds(
    lambda blocks, nbytes: EngineConfig(max_transfer_blocks=blocks, max_transfer_bytes=nbytes),
    st.one_of(st.none(), st.integers(0, 7)),
    st.one_of(st.just(0), st.integers(1, 700)),
)


def ranges_of(sizes: list[list[int]], config: EngineConfig, good: int = 0) -> tuple[KVLayout, GroupRanges]:
    layers = {3 * n: [CacheEntry(f"e{i}", size, size + i) for i, size in enumerate(layer)] for n, layer in enumerate(sizes)}
    layout = KVLayout("m", [Group(0, GroupKind.FULL, 16, layers)])
    bases = {(0, int(r.layer), r.entry.name): 1_000_000 * (n + 1) for n, r in enumerate(layout.ranges(0))}
    return layout, group_ranges(layout, 0, bases, config, good)


@given(layouts, limits)
def test_pieces_tile_the_object_exactly(sizes: list[list[int]], config: EngineConfig) -> None:
    layout, ranges = ranges_of(sizes, config)
    at = 0
    number = 0
    for layer in ranges.layers.values():
        assert layer.first_piece == number
        for offset, size in zip(layer.offsets.tolist(), layer.sizes.tolist(), strict=True):
            assert offset == at
            assert size >= 1
            assert not config.max_transfer_bytes or size <= config.max_transfer_bytes
            at += size
            number += 1
    assert at == layout.object_bytes(0) == ranges.object_bytes
    assert number == ranges.pieces


@given(layouts, limits, st.integers(1, 40))
def test_calls_cover_every_key_once_within_the_limits(sizes: list[list[int]], config: EngineConfig, keys: int) -> None:
    layout, ranges = ranges_of(sizes, config)
    places = [(1_000_000 * (n + 1), r) for n, r in enumerate(layout.ranges(0))]
    block_ids = np.arange(keys, dtype=np.int64) * 3
    names = [f"k{i}" for i in range(keys)]
    rows = np.arange(keys)
    coverage = Coverage(keys, ranges.pieces)
    moved = np.zeros((keys, ranges.pieces), dtype=int)
    plan = RowPlan(rows, names, block_ids, lambda _: None)
    for layer in ranges.layers:
        assert not coverage.complete(rows).any()
        for call in plan.calls(ranges.layers[layer]):
            n, width = len(call.rows), call.last_piece - call.first_piece
            at = [next((base, r) for base, r in reversed(places) if r.offset <= o) for o in call.batch.offsets.tolist()]
            wanted = [
                [base + 3 * row * r.entry.stride + o - r.offset for o, (base, r) in zip(call.batch.offsets, at, strict=True)]
                for row in call.rows.tolist()
            ]
            assert call.batch.addresses.tolist() == wanted
            assert call.batch.addresses.shape == (n, width)
            keys_limit = most_keys(call.batch.nbytes_per_key, config)
            assert not keys_limit or n <= keys_limit
            assert n * width <= MAX_RANGES
            most = config.max_transfer_bytes
            assert not most or n * call.batch.nbytes_per_key <= most
            assert list(call.batch.keys) == [names[i] for i in call.rows]
            moved[call.rows, call.first_piece : call.last_piece] += 1
            coverage.add(call.rows, call.first_piece, call.last_piece)
    assert (moved == 1).all()
    assert coverage.complete(rows).all()


@given(st.data())
def test_a_key_is_covered_when_every_piece_of_it_is(data: st.DataObject) -> None:
    keys, pieces = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    coverage, model = Coverage(keys, pieces), [[False] * pieces for _ in range(keys)]
    for _ in range(data.draw(st.integers(0, 12))):
        rows = data.draw(st.lists(st.integers(0, keys - 1), unique=True))
        lo = data.draw(st.integers(0, pieces))
        hi = data.draw(st.integers(lo, pieces))
        coverage.add(np.array(rows, dtype=np.intp), lo, hi)
        for row in rows:
            model[row][lo:hi] = [True] * (hi - lo)
        assert coverage.complete(np.arange(keys)).tolist() == [all(row) for row in model]
    coverage.grow(1)
    assert coverage.complete(np.array([keys])).tolist() == [False]


def test_addresses_follow_base_and_stride() -> None:
    _, ranges = ranges_of([[10, 20]], EngineConfig())
    layer = ranges.layers[0]
    assert layer.nbytes == 30
    assert layer.addresses(np.array([0, 2]), 0, 2).tolist() == [[1_000_000, 2_000_000], [1_000_020, 2_000_042]]


def test_an_entry_larger_than_a_call_is_split() -> None:
    _, ranges = ranges_of([[25]], EngineConfig(max_transfer_bytes=10))
    assert ranges.layers[0].sizes.tolist() == [10, 10, 5]
    assert ranges.layers[0].addresses(np.array([1]), 0, 3).tolist() == [[1_000_025, 1_000_035, 1_000_045]]


@pytest.mark.parametrize(
    ("blocks", "sizes", "good", "most"),
    [
        (None, [16], 0, MAX_RANGES),
        (None, [16, 16], 0, MAX_RANGES // 2),
        (None, [4096, 4096], 0, 128),
        (None, [8192, 8192], 0, 64),
        (None, [8192, 8193], 0, 64),
        (None, [1 << 20], 0, 16),
        (None, [16, 16], 4096, 64),
        (64, [16, 16], 0, 64),
        (7, [16, 16], 0, 7),
        (0, [16, 16], 0, MAX_RANGES // 2),
        (0, [16, 16], 4096, MAX_RANGES // 2),
    ],
)
def test_small_calls_have_more_keys_unless_their_number_is_given(
    blocks: int | None, sizes: list[int], good: int, most: int
) -> None:
    _, ranges = ranges_of([sizes], EngineConfig(max_transfer_blocks=blocks), good)
    cuts = ranges.layers[0].cuts(3 * most)
    assert [cut.row_hi - cut.row_lo for cut in cuts] == [most] * 3


@pytest.mark.parametrize(("blocks", "most"), [(None, 64), (0, 1000), (7, 7)])
def test_whole_objects_in_a_call(blocks: int | None, most: int) -> None:
    config = EngineConfig(max_transfer_blocks=blocks)
    assert whole_rows(ranges_of([[16, 16]], config)[1], config) == most


def test_a_missing_base_is_named() -> None:
    layout = KVLayout("m", [Group(0, GroupKind.FULL, 16, {4: [CacheEntry("k", 8)]})])
    with pytest.raises(LayoutError, match=r"layer 4, entry 'k'.*\(0, 4, 'k'\)"):
        group_ranges(layout, 0, {}, EngineConfig())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": True}, "workers"),
        ({"max_transfer_blocks": -1}, "max_transfer_blocks"),
        ({"max_transfer_bytes": None}, "max_transfer_bytes"),
        ({"prefetch_layers": 1.5}, "prefetch_layers"),
        ({"call_deadline_s": 0}, "call_deadline_s"),
        ({"call_deadline_s": "soon"}, "call_deadline_s"),
        ({"step_deadline_s": float("inf")}, "step_deadline_s"),
        ({"strict": 1}, "strict"),
        ({"switch_interval_s": 0}, "switch_interval_s"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**options)  # type: ignore[arg-type]  # what is wrong with it is the point


@given(layouts, st.integers(1, 900))
def test_runs_double_from_one_layer_up_to_a_good_range(sizes: list[list[int]], good: int) -> None:
    _, ranges = ranges_of(sizes, EngineConfig())
    runs = read_runs(ranges, good)
    layers = list(ranges.layers)
    assert list(runs) == layers
    if ranges.object_bytes <= good:
        assert set(runs.values()) == {layers[-1]}
        return
    assert runs[layers[0]] == layers[0]
    most = 1
    for last in dict.fromkeys(runs.values()):
        members = [layer for layer in layers if runs[layer] == last]
        assert members == layers[layers.index(members[0]) : layers.index(last) + 1]
        if members[0] != layers[0]:
            shorter = sum(ranges.layers[layer].nbytes for layer in members[:-1])
            assert shorter < good
            enough = shorter + ranges.layers[last].nbytes >= good or len(members) == most
            assert last == layers[-1] or enough
        assert len(members) <= most
        most *= 2


def test_a_row_that_dropped_out_is_in_no_later_call() -> None:
    """The plan of a step's rows is kept from layer to layer, until one is killed or closed."""
    _, ranges = ranges_of([[16]] * 4, EngineConfig())
    saves = StepSaves(ranges)
    saves.admit([PutSession(f"k{i}", Owner("r", 0, i), 1, {}, PutState.OPEN) for i in range(4)], range(4))
    layers = list(ranges.layers)

    def keys(layer: int) -> list[str]:
        return [key for call in saves.signal(layer) for key in call.batch.keys]

    assert keys(layers[0]) == ["k0", "k1", "k2", "k3"]
    saves.kill(1, "it failed")
    assert keys(layers[1]) == ["k0", "k2", "k3"]
    saves.close(2)
    assert keys(layers[2]) == ["k0", "k3"]
    saves.close_all()
    assert keys(layers[3]) == []
