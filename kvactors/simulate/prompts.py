"""Prompts of a simulated run: trees of shared prefixes, so that requests hit each other's blocks."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

MOST_SHARED = 2
MOST_NEW = 2
"""Scheduler boundaries of a prompt that are shared with an earlier one, and that are its own."""


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request.

    Attributes:
        hashes: fine hashes of its prompt.
        tokens: prompt length; not always a multiple of anything.
        computed: tokens that are done.
        hit: tokens to load in the next step; `masks` says which blocks.
        tables: per rank and group: block index -> local block id.
        wrong: ranks that computed from missing KV; what follows there is garbage until a restart.
        restarted_at: set in the first step after a restart.
        dead: aborted.
        first_wrong: first token of its last failed load.
        bad_restart: its next restart is one that the engine must not believe.
    """

    id: str
    hashes: list[bytes]
    tokens: int
    computed: int = 0
    hit: int = 0
    masks: tuple[tuple[bool, ...], ...] = ()
    tables: list[dict[int, dict[int, int]]] = field(default_factory=list)
    wrong: set[int] = field(default_factory=set)
    restarted_at: int | None = None
    failures: int = 0
    dead: bool = False
    loading: bool = False
    bad_restart: bool = False
    first_wrong: int = -1


def prompts(count: int, hash_tokens: int, boundary: int, rng: random.Random, prefix: str) -> list[SimRequest]:
    """Requests whose prompts share prefixes: each continues the prompt of an earlier one at a random place, or starts anew."""
    trails: list[list[bytes]] = []
    out = []
    unit = boundary // hash_tokens
    for n in range(count):
        trail: list[bytes] = []
        if trails and rng.random() < 0.75:
            parent = trails[rng.randrange(len(trails))]
            trail = parent[: min(rng.randrange(MOST_SHARED + 1) * unit + rng.randrange(2) * (unit // 2), len(parent))]
        new = rng.randrange(0 if trail else 1, MOST_NEW) * unit + rng.choice((0, 0, unit - 1))
        for i in range(new):
            trail = [*trail, hashlib.sha256(f"{prefix}/{n}/{i}/{len(trail)}".encode()).digest()]
        trails.append(trail)
        out.append(SimRequest(f"{prefix}{n}", trail, len(trail) * hash_tokens + rng.choice((0, rng.randrange(hash_tokens)))))
    return out
