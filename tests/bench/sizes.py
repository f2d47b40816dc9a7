"""Every benchmark on so few bytes that it says nothing, and takes a moment."""

from __future__ import annotations

from typing import Any

from kvactors.bench import copy, groups, hooks, layered, memory, overlap, replay, step

SEED = replay.Model("seed-example", 0, 1, 1, 3.0)

TINY: dict[str, tuple[Any, Any]] = {
    "copy": (copy, copy.Sizes(2, 8, (16, 256), (1, 5), 2, 1 << 30)),
    "hooks": (hooks, hooks.Sizes(3, 16, 2, 2, 1e-4)),
    "step": (step, step.Sizes(4, 2, (1, 5), (1, 3), (1, 2), 2)),
    "overlap": (overlap, overlap.Sizes(3, 4, 16, 2)),
    "replay": (replay, replay.Sizes(8 << 20, 3, 2, models=(SEED,))),
    "layered": (layered, layered.Sizes(3, 4, 2, 16, 2)),
    "groups": (groups, groups.Sizes(10, (16,), 3)),
    "memory": (memory, memory.Sizes(160)),
}
"""Name -> its module, and sizes."""

CASES = {
    "copy": 16,
    "hooks": 7,
    "step": 4 * (2 + 3),
    "overlap": 12,
    "replay": 1,
    "layered": 21,
    "groups": 1,
    "memory": 4,
}
"""Name -> figures with these sizes."""
