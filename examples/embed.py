"""The engine inside a program of your own: save a prompt, look it up, load it into other blocks, compare.

Run it with `python examples/embed.py`; it needs nothing but the base install.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.steps import GroupBlocks, StepRequest
from kvactors.engine import BlockingEngine
from kvactors.stores import MemoryStore

LOCAL_BLOCKS = 32

# Two layers of full attention with 16 tokens a block, one layer of recurrent state with 32.
layout = KVLayout(
    "my-model",
    [
        Group(0, GroupKind.FULL, 16, {0: [CacheEntry("k", 4096), CacheEntry("v", 4096)], 2: [CacheEntry("kv", 8192)]}),
        Group(1, GroupKind.STATE, 32, {1: [CacheEntry("conv", 96, stride_bytes=128), CacheEntry("ssm", 2048)]}),
    ],
)

# The worker's KV memory: one array per entry, a row per local block, registered with the store.
store = MemoryStore()
memory = {}
for group in layout.groups:
    for layer, entry, _ in layout.ranges(group.id):
        memory[group.id, layer, entry.name] = np.zeros((LOCAL_BLOCKS, entry.stride), np.uint8)
for array in memory.values():
    store.register(array.ctypes.data, array.nbytes)
bases = {where: array.ctypes.data for where, array in memory.items()}

# A prompt of 65 tokens: four chained block hashes of 16 tokens each (a real caller takes vLLM's).
hashes = [hashlib.sha256(f"prompt up to block {i}".encode()).digest() for i in range(4)]


def forward(engine: BlockingEngine, request: StepRequest, fill: bool) -> None:
    """One forward pass; with `fill`, "computes" random bytes into the blocks that are saved."""
    step = engine.begin_step([request])
    for layer in range(layout.stage_layers):
        failed = step.wait_layer(layer)
        if failed:
            raise SystemExit(f"loads failed: {step.failures}")
        if fill:
            for (group_id, of_layer, _), array in memory.items():
                blocks = request.groups.get(group_id)
                if of_layer == layer and blocks is not None:
                    rows = [blocks.block_ids[i] for i in blocks.save]
                    array[rows] = np.random.default_rng(layer).integers(0, 256, (len(rows), array.shape[1]), np.uint8)
        step.layer_ready(layer)
        step.checkpoint(layer)
    step.end()  # the local blocks may be reused now
    step.settled()  # and everything is published


with BlockingEngine(layout, store, bases) as engine:
    engine.keep_stories()  # for the last lines below
    save = {0: GroupBlocks([1, 2, 3, 4], save=[0, 1, 2, 3]), 1: GroupBlocks([5, 6], save=[0, 1])}
    forward(engine, StepRequest("first", hashes, save), fill=True)
    engine.release("first")
    engine.forget("first")

    hit = engine.lookup(hashes, prompt_tokens=65)
    print(f"hit: {hit.tokens} of 65 tokens; blocks needed per group: {[sum(mask) for mask in hit.masks]}")

    # Full attention needs all four blocks, the state only the last one (-1 stands for "no local block").
    load = {0: GroupBlocks([11, 12, 13, 14], load=[0, 1, 2, 3]), 1: GroupBlocks([-1, 16], load=[1])}
    forward(engine, StepRequest("second", hashes, load), fill=False)
    same = all(
        (memory[w][src][: entry.nbytes] == memory[w][dst][: entry.nbytes]).all()
        for g, pairs in ((0, [(1, 11), (2, 12), (3, 13), (4, 14)]), (1, [(6, 16)]))
        for layer, entry, _ in layout.ranges(g)
        for w in [(g, layer, entry.name)]
        for src, dst in pairs
    )
    print(f"loaded bytes equal the saved ones: {same}")
    engine.drain()
    for line in engine.story("second")[:3]:
        print(line)
