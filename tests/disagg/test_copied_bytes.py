"""From two geometries to bytes: every decode rank ends up with its own heads of every block, and nothing else changes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.core.layout import GroupKind
from kvactors.disagg import (
    EntryGeometry,
    GroupBlocks,
    GroupGeometry,
    RequestBlocks,
    TransferRegion,
    WorkerGeometry,
    batches,
    expand_transfer_regions,
    plan_blocks,
    rank_heads,
    request_descriptors,
    route,
    tp_map,
)
from tests.disagg.shapes import worker

Bytes = npt.NDArray[np.uint8]
SIZES = (1, 2, 3, 4, 6)
POSITIONS, BLOCKS, HEAD_BYTES = 5, 12, 3
MEMORY = 1 << 14


def geometry(heads: int, tp: int, rank: int, kernel: int, split: bool, padding: int, base: int) -> WorkerGeometry:
    """One attention layer; K and V in the halves of a block, or in tensors of their own with padding behind each block."""
    here = max(1, heads // tp)
    lane = here * HEAD_BYTES
    entries = tuple(EntryGeometry(name, "fp8_e4m3", lane * kernel) for name in "kv")
    group = GroupGeometry(
        kind=GroupKind.FULL,
        block_tokens=kernel,
        blocks=BLOCKS,
        layers={0: entries},
        kv_heads=heads,
        kernel_blocks=kernel,
        heads_first=True,
    )
    if split:
        regions = expand_transfer_regions([base], [2 * lane], [lane], ["l0"], [0], True)
    else:
        stride = lane + padding
        bases = [base, base + stride * BLOCKS * kernel]
        regions = expand_transfer_regions(bases, [stride] * 2, [lane] * 2, ["l0"] * 2, [0] * 2, False)
    return worker([group], regions, tp, rank)


def place(regions: tuple[TransferRegion, ...], lane: int, block: int) -> slice:
    """Where the K (0) or V (1) of a kernel block lies."""
    region, piece = (regions[0], lane) if len(regions) == 1 else (regions[lane], 0)
    at = region.base_address + block * region.block_bytes + piece * region.payload_bytes
    return slice(at, at + region.payload_bytes)


def write(memory: Bytes, g: WorkerGeometry, truth: Bytes, ids: list[int]) -> None:
    """Fills a worker's blocks; truth has the shape (lanes, positions, kernel blocks, heads, bytes)."""
    group = g.groups[0]
    held = rank_heads(group.kv_heads or 1, g.tp_size, g.tp_rank)
    for position, block in enumerate(ids):
        for k in range(group.kernel_blocks):
            for lane in (0, 1):
                heads = truth[lane, position, k, held.start : held.stop]
                memory[place(g.regions, lane, block * group.kernel_blocks + k)] = heads.reshape(-1)


@settings(max_examples=150)
@given(st.data())
def test_bytes(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from(SIZES), "heads")
    even = [size for size in SIZES if max(size, heads) % min(size, heads) == 0]
    p_tp, d_tp = data.draw(st.sampled_from(even), "prefill TP"), data.draw(st.sampled_from(even), "decode TP")
    kernel, split = data.draw(st.sampled_from([1, 2]), "kernel blocks"), data.draw(st.booleans(), "split")
    paddings = [data.draw(st.sampled_from([0, 4]), "padding") for _ in "pd"]
    p_ids = data.draw(st.permutations(range(1, BLOCKS)))[:POSITIONS]
    d_ids = data.draw(st.permutations(range(1, BLOCKS)))[:POSITIONS]
    first = data.draw(st.integers(0, POSITIONS), "blocks that decode holds")
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    truth = rng.integers(0, 256, (2, POSITIONS, kernel, heads, HEAD_BYTES), dtype=np.uint8)

    prefill = [geometry(heads, p_tp, r, kernel, split, paddings[0], 100) for r in range(p_tp)]
    sources = [rng.integers(0, 256, MEMORY, dtype=np.uint8) for _ in prefill]
    for memory, g in zip(sources, prefill, strict=True):
        write(memory, g, truth, p_ids)
    for rank in range(d_tp):
        decode = geometry(heads, d_tp, rank, kernel, split, paddings[1], 200)
        memory = rng.integers(0, 256, MEMORY, dtype=np.uint8)
        written = np.zeros(MEMORY, dtype=np.int64)
        expected = memory.copy()
        write(expected, decode, truth[:, first:], d_ids[first:])
        for sender in tp_map(prefill[0], decode).pulls(rank):
            blocks = plan_blocks(
                prefill[sender].groups,
                decode.groups,
                RequestBlocks(POSITIONS * kernel, (GroupBlocks(0, tuple(p_ids)),)),
                RequestBlocks(POSITIONS * kernel, (GroupBlocks(first, tuple(d_ids[first:])),)),
            )
            for batch in batches(request_descriptors(route(prefill[sender], decode), blocks), 3):
                for src, dst, n in zip(batch.src, batch.dst, batch.nbytes, strict=True):
                    memory[dst : dst + n] = sources[sender][src : src + n]
                    written[dst : dst + n] += 1
        assert (memory == expected).all()
        assert written.max() <= 1, "each head arrives once"
        assert written.sum() == (POSITIONS - first) * kernel * 2 * decode.regions[0].payload_bytes
