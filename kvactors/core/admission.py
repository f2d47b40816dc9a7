"""Which requests of a step make sense. One that does not is left out with its reason; the others go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from kvactors.core.answers import shown
from kvactors.core.layout import KVLayout
from kvactors.core.steps import NULL_BLOCK, GroupBlocks, StepRequest

MOST_BLOCK_ID = (1 << 31) - 1


def problem_of(request: StepRequest, layout: KVLayout, hash_tokens: int) -> str:
    """Why a request cannot take part in a step; empty if it can."""
    given: Any = request  # whatever the annotations say
    if not isinstance(given.request_id, str):
        return f"request_id is {shown(given.request_id)}; give a text"
    at = given.restarted_at
    if at is not None and (not isinstance(at, int) or isinstance(at, bool) or at < 0):
        return f"restarted_at is {shown(at)}; give a number of tokens, or None"
    problem = hashes_problem(request.hashes)
    if problem:
        return problem
    if not isinstance(given.groups, Mapping):
        return f"groups is {shown(given.groups)}; give a mapping of group id to GroupBlocks"
    known = {g.id: g for g in layout.groups}
    for group_id, blocks in given.groups.items():
        if group_id not in known:
            return f"group {group_id} does not exist; the layout has {', '.join(map(str, sorted(known)))}"
        if not isinstance(blocks, GroupBlocks):
            return f"group {group_id} is {shown(blocks)}; give a GroupBlocks"
        hashed = len(request.hashes) * hash_tokens // known[group_id].block_tokens
        by_memory = not len(request.hashes)
        problem = _list_problem("load", blocks.load, blocks, None if by_memory else hashed)
        problem = problem or _list_problem("save", blocks.save, blocks, hashed)
        if problem:
            return f"group {group_id}: {problem}"
    return ""


class LocalBlocks:
    """The local blocks of a step's requests: each is loaded once, and holds one block, or its bytes would get two names."""

    def __init__(self, block_tokens: Mapping[int, int], hash_tokens: int) -> None:
        self._block_tokens, self._hash_tokens = block_tokens, hash_tokens
        self._loaded: dict[int, set[int]] = {}
        self._held: dict[int, dict[int, bytes]] = {}
        """group id -> local block -> hash of what it holds, or will hold"""

    def take(self, request: StepRequest) -> str:
        """Why the request's local blocks contradict those of the step's earlier requests, or each other; empty if they do not,
        and then they are taken in. The request makes sense otherwise."""
        loaded = {g: {int(b.block_ids[i]) for i in b.load} - {NULL_BLOCK} for g, b in request.groups.items() if len(b.load)}
        for group_id, ids in loaded.items():
            shared = ids & self._loaded.get(group_id, set())
            if shared:
                return f"group {group_id}: local block {min(shared)} is loaded by another request of the step too"
        held: dict[int, dict[int, bytes]] = {}
        for group_id, blocks in request.groups.items() if len(request.hashes) else ():
            here, others = held.setdefault(group_id, {}), self._held.get(group_id, {})
            for local, block_hash in self._named(group_id, blocks, request.hashes):
                if here.setdefault(local, block_hash) != block_hash:
                    return f"group {group_id}: local block {local} is named for two blocks of the request"
                if others.get(local, block_hash) != block_hash:
                    return f"group {group_id}: local block {local} is another block of an earlier request of the step"
        for group_id, ids in loaded.items():
            self._loaded.setdefault(group_id, set()).update(ids)
        for group_id, here in held.items():
            self._held.setdefault(group_id, {}).update(here)
        return ""

    def _named(self, group_id: int, blocks: GroupBlocks, hashes: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        """Each local block that is loaded or saved, with its hash."""
        units = self._block_tokens[group_id] // self._hash_tokens
        for i in chain(blocks.load, blocks.save):
            local = int(blocks.block_ids[i])
            if local != NULL_BLOCK:
                yield local, hashes[(i + 1) * units - 1]


def hashes_problem(hashes: Any) -> str:
    """Why these are no block hashes; empty if they are."""
    if isinstance(hashes, str | bytes) or not isinstance(hashes, Sequence):
        return f"hashes is {shown(hashes)}; give a sequence of bytes, one per hash unit"
    wrong = {type(h).__name__ for h in hashes} - {"bytes"} if set(map(type, hashes)) != {bytes} else set()
    return f"hashes holds {', '.join(sorted(wrong))}; every block hash is bytes" if wrong else ""


def _list_problem(what: str, indices: Any, blocks: GroupBlocks, hashed: int | None) -> str:
    """`hashed`: how many blocks the hashes cover; None = the keys come from the engine's memory of the request."""
    table: Any = blocks.block_ids
    if isinstance(table, str | bytes | Mapping) or not hasattr(table, "__getitem__") or not hasattr(table, "__len__"):
        return f"block_ids is {shown(table)}; give the local block id of each block index"
    if isinstance(indices, str | bytes) or not hasattr(indices, "__len__"):
        return f"the {what} list is {shown(indices)}; give block indices"
    if not len(indices):
        return ""
    if not _whole_numbers(indices):
        return f"the {what} list holds something else than block indices"
    low, high = int(min(indices)), int(max(indices))
    if low < 0:
        return f"{what} of block {low}: block indices start at 0"
    if high >= len(blocks.block_ids):
        return f"{what} of block {high}, but there are only {len(blocks.block_ids)} block ids"
    if hashed is not None and high >= hashed:
        return f"{what} of block {high}, but the hashes cover only {hashed} blocks"
    if len(set(indices)) != len(indices):
        return f"the {what} list names a block twice"
    ids = [table[i] for i in indices]
    if not _whole_numbers(ids):
        return f"the {what} list names a block whose local id is no whole number"
    if min(ids) < NULL_BLOCK or max(ids) > MOST_BLOCK_ID:
        bad = next(int(i) for i in ids if not NULL_BLOCK <= i <= MOST_BLOCK_ID)
        return f"the {what} list names local block {bad}; ids start at 0, and {NULL_BLOCK} stands for no block"
    if what == "load" and len(set(ids)) + max(0, ids.count(NULL_BLOCK) - 1) != len(ids):
        return "two blocks are to be loaded into one local block"
    return ""


def _whole_numbers(values: Any) -> bool:
    kinds = set(map(type, values))
    return kinds <= {int} or all(issubclass(k, int | np.integer) and k is not bool for k in kinds)
