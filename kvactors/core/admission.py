"""Which requests of a step make sense. One that does not is left out with its reason; the others go on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvactors.core.layout import KVLayout
from kvactors.core.steps import GroupBlocks, StepRequest


def problem_of(request: StepRequest, layout: KVLayout, hash_tokens: int) -> str:
    """Why a request cannot take part in a step; empty if it can."""
    known = {g.id: g for g in layout.groups}
    for group_id, blocks in request.groups.items():
        if group_id not in known:
            return f"group {group_id} does not exist; the layout has {sorted(known)}"
        hashed = len(request.hashes) * hash_tokens // known[group_id].block_tokens
        for what, indices in (("load", blocks.load), ("save", blocks.save)):
            problem = _list_problem(what, indices, blocks, hashed)
            if problem:
                return f"group {group_id}: {problem}"
    return ""


def _list_problem(what: str, indices: Sequence[int], blocks: GroupBlocks, hashed: int) -> str:
    if not len(indices):
        return ""
    array = np.asarray(indices)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        return f"the {what} list holds something else than block indices"
    low, high = int(array.min()), int(array.max())
    if low < 0:
        return f"{what} of block {low}: block indices start at 0"
    if high >= len(blocks.block_ids):
        return f"{what} of block {high}, but there are only {len(blocks.block_ids)} block ids"
    if high >= hashed:
        return f"{what} of block {high}, but the hashes cover only {hashed} blocks"
    if len(np.unique(array)) != len(array):
        return f"the {what} list names a block twice"
    return ""
