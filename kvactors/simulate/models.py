"""The small models that simulated runs serve: one instance is one or more engines (TP ranks, PP stages) in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.layouts.resolve import find_layout

_K = GroupKind


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker of an instance: its stage's layout and its TP rank."""

    layout: KVLayout
    tp_rank: int


def _e(name: str, nbytes: int, stride: int | None = None) -> CacheEntry:
    return CacheEntry(name, nbytes, stride)


def _worked_example(model: str) -> list[KVLayout]:
    return [
        KVLayout(
            model,
            [
                Group(0, _K.FULL, 16, {0: [_e("kv", 8)], 2: [_e("kv", 8)]}),
                Group(1, _K.COMPRESSED, 32, {1: [_e("c", 10)], 2: [_e("c", 11)], 3: [_e("c", 11)]}),
                Group(2, _K.STATE, 16, {0: [_e("s", 18)], 3: [_e("s", 18)]}),
            ],
        )
    ]


def _windows(model: str) -> list[KVLayout]:
    return [
        KVLayout(
            model,
            [
                Group(0, _K.FULL, 32, {1: [_e("k", 6), _e("v", 6, 16)]}),
                Group(1, _K.SLIDING_WINDOW, 8, {0: [_e("kv", 5)], 2: [_e("kv", 5, 8)]}, window=16),
                Group(2, _K.CHUNKED_LOCAL, 16, {1: [_e("kv", 4)], 2: [_e("kv", 4)]}, chunk_tokens=32),
            ],
        )
    ]


def _latent(model: str) -> list[KVLayout]:
    return [
        KVLayout(
            model,
            [
                Group(0, _K.MLA, 16, {0: [_e("c", 9), _e("rope", 3)], 2: [_e("c", 9), _e("rope", 3)]}),
                Group(4, _K.INDEXER, 16, {0: [_e("i", 2)]}),
                Group(7, _K.STATE, 32, {1: [_e("conv", 6, 8), _e("ssm", 20)], 2: [_e("conv", 6, 8), _e("ssm", 20)]}),
            ],
        )
    ]


def _stages(model: str) -> list[KVLayout]:
    def groups(layers: Sequence[int], state: Sequence[int]) -> list[Group]:
        return [
            Group(0, _K.FULL, 16, {layer: [_e("kv", 7)] for layer in layers}),
            Group(1, _K.SLIDING_WINDOW, 16, {layer: [_e("kv", 4)] for layer in layers[:1]}, window=20),
            Group(2, _K.STATE, 32, {layer: [_e("s", 12)] for layer in state}),
        ]

    return [KVLayout(model, groups([0, 1], [1]), 1, 0, 2), KVLayout(model, groups([2, 3], [3]), 1, 1, 2)]


def _heads(model: str) -> list[KVLayout]:
    groups = [
        Group(0, _K.FULL, 16, {0: [_e("kv", 7)], 1: [_e("kv", 7)]}, kv_heads=2),
        Group(1, _K.MLA, 16, {0: [_e("c", 5)]}),
        Group(2, _K.STATE, 32, {1: [_e("s", 12)]}),
    ]
    return [KVLayout(model, groups, tp_size=2)]


_MODELS: Mapping[str, tuple[Callable[[str], list[KVLayout]], int]] = {
    "worked-example": (_worked_example, 1),
    "windows": (_windows, 1),
    "latent": (_latent, 1),
    "pp2": (_stages, 1),
    "tp2": (_heads, 2),
}
NAMES = tuple(_MODELS)
DRAWN = (*("worked-example", "windows", "latent") * 4, "pp2", "tp2")
"""What a seed draws its model from; several engines take longer to simulate, so they come less often."""


@lru_cache(maxsize=64)
def instance(name: str) -> tuple[Rank, ...]:
    """The ranks of one instance of a simulated model, or of a layout (built in, or a file) with its entries made small.

    Raises:
        LayoutError: there is no such model or layout.
    """
    if name not in _MODELS:
        layout, _ = find_layout(name)
        return (Rank(_small(layout), 0),)
    build, tp = _MODELS[name]
    return tuple(Rank(layout, rank) for layout in build(f"sim-{name}") for rank in range(tp))


def _small(layout: KVLayout) -> KVLayout:
    """The same groups, boundaries and layers, with entries of a few bytes: a simulated run checks every byte."""
    groups = []
    for g in layout.groups:
        layers = {
            layer: [CacheEntry(e.name, 3 + i % 6, 8) for i, e in enumerate(entries)] for layer, entries in g.layers.items()
        }
        groups.append(Group(g.id, g.kind, g.block_tokens, layers, g.window, g.chunk_tokens, g.speculative, g.kv_heads))
    return KVLayout(f"sim-{layout.model}", groups)
