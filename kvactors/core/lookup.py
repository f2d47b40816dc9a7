"""From a block to the store keys that must all be readable for it to count.

A block of a group is spread over objects: one per storing head and per pipeline stage that has layers of the group. It
counts as stored only if every one of them is readable. Asking for fewer of them takes a partly evicted block for a hit
(vllm-ascend#4761 asked for all heads of stage 0 and head 0 of all stages).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvactors.core.layout import Group, KVLayout
from kvactors.errors import LayoutError, StoreError

_BATCH_KEYS = 1024
"""Most keys in one call to the store."""


class KeySpace:
    """The keys of one model instance.

    Args:
        layouts: the layouts of all its pipeline stages, in any order; usually one.

    Raises:
        LayoutError: a stage is missing or given twice, the stages are not of one instance, or a group has no layer on any.
    """

    def __init__(self, layouts: Sequence[KVLayout]) -> None:
        self.layouts = _check_stages(layouts)
        """By stage."""
        self._parts: dict[int, tuple[tuple[str, str], ...]] = {}
        for gid in dict.fromkeys(g.id for layout in self.layouts for g in layout.groups):
            stages = [s for s in self.layouts if any(g.id == gid and g.layers for g in s.groups)]
            if not stages:
                raise LayoutError(f"group {gid} has no layers on any stage, so it has no keys; leave it out of the layouts")
            self._parts[gid] = tuple(stage.key_parts(gid, head) for stage in stages for head in range(stage.heads(gid)))

    def keys_per_block(self, group_id: int) -> int:
        """How many objects hold one block of the group: heads x stages that have layers of it."""
        return len(self._of(group_id))

    def keys(self, group_id: int, block_hash: bytes) -> list[str]:
        """The keys that must all be readable for the block to count, by stage, then by head."""
        digits = block_hash.hex()
        return [f"{before}{digits}{after}" for before, after in self._of(group_id)]

    def readable_many(
        self, group_id: int, hashes: Sequence[bytes], readable: Callable[[Sequence[str]], Sequence[bool]]
    ) -> list[bool]:
        """Whether each block can be read, whole.

        Args:
            hashes: one per block of the group, as in its keys.
            readable: `Store.readable`; called with at most 1024 keys, all those of a block in one call if they fit.

        Raises:
            LayoutError: no such group.
            StoreError: the store answered with a list of the wrong length.
        """
        parts = self._of(group_id)
        found: list[bool] = []
        step = max(1, _BATCH_KEYS // len(parts))  # whole blocks, unless one alone has more keys than fit
        for start in range(0, len(hashes), step):
            digits = [h.hex() for h in hashes[start : start + step]]
            keys = [f"{before}{d}{after}" for d in digits for before, after in parts]
            answers: list[bool] = []
            for first in range(0, len(keys), _BATCH_KEYS):
                answers.extend(_ask(readable, keys[first : first + _BATCH_KEYS]))
            found.extend(all(answers[i : i + len(parts)]) for i in range(0, len(answers), len(parts)))
        return found

    def _of(self, group_id: int) -> tuple[tuple[str, str], ...]:
        try:
            return self._parts[group_id]
        except KeyError:
            raise LayoutError(f"there is no group {group_id}; this instance has {sorted(self._parts)}") from None


def _ask(readable: Callable[[Sequence[str]], Sequence[bool]], keys: Sequence[str]) -> Sequence[bool]:
    answers = readable(keys)
    if len(answers) != len(keys):
        raise StoreError(f"readable answered {len(answers)} values for {len(keys)} keys; take the whole lookup for a miss")
    return answers


def _check_stages(layouts: Sequence[KVLayout]) -> tuple[KVLayout, ...]:
    if not layouts:
        raise LayoutError("a key space needs the layout of at least one pipeline stage")
    stages = sorted(layouts, key=lambda layout: layout.pp_rank)
    first = stages[0]
    for stage in stages[1:]:
        for what in ("model", "tp_size", "pp_size"):
            a, b = getattr(first, what), getattr(stage, what)
            if a != b:
                raise LayoutError(
                    f"{what}: {a!r} on stage {first.pp_rank}, {b!r} on stage {stage.pp_rank}; stages of one instance must agree"
                )
    ranks = [stage.pp_rank for stage in stages]
    if ranks != list(range(first.pp_size)):
        raise LayoutError(
            f"got the layouts of pipeline stages {ranks} of pp_size {first.pp_size}; give each stage from 0 to "
            f"{first.pp_size - 1} once"
        )
    known: dict[int, tuple[int, Group]] = {}
    for stage in stages:
        for group in stage.groups:
            rank, other = known.setdefault(group.id, (stage.pp_rank, group))
            for what in ("kind", "block_tokens", "window", "chunk_tokens"):
                a, b = getattr(other, what), getattr(group, what)
                if a != b:
                    raise LayoutError(
                        f"group {group.id}: {what} is {_shown(a)} on stage {rank} and {_shown(b)} on stage {stage.pp_rank}; "
                        "a group must be the same on all stages"
                    )
    return tuple(stages)


def _shown(value: object) -> object:
    return getattr(value, "value", value)
