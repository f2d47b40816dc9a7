"""How a load is made: inside the forward pass or between steps, and of which blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvactors.core.layout import GroupKind
from kvactors.core.steps import NULL_BLOCK, GroupBlocks
from kvactors.log import get_logger
from kvactors.vllm.settings import ConnectorSettings

log = get_logger("kvactors.vllm.loads")


def load_blocks(tables: Mapping[int, Sequence[int]], wanted: Mapping[int, Sequence[int]]) -> tuple[dict[int, GroupBlocks], str]:
    """The blocks to load, and what is wrong with them: a hit needs every one, so a block without memory fails it all."""
    problems = []
    for group_id, indices in wanted.items():
        table = tables.get(group_id, ())
        without = [i for i in indices if i >= len(table) or table[i] == NULL_BLOCK]
        if without:
            problems.append(f"group {group_id}: blocks {without} are to be loaded, and vLLM has no memory for them")
    if problems:
        return {}, "; ".join(problems)
    return {g: GroupBlocks(tables[g], load=tuple(indices)) for g, indices in wanted.items()}, ""


def may_load_layerwise(
    kinds: Sequence[GroupKind],
    settings: ConnectorSettings,
    *,
    groups: int,
    stages: int = 1,
    ahead: bool = False,
    drafts: bool = False,
) -> bool:
    """Whether loads run inside the forward pass.

    Args:
        kinds: of the groups that are stored.
        groups: how many cache groups vLLM has.
        stages: pipeline stages; a failure on one of them would be computed with on the next.
        ahead: vLLM plans a step before it knows what came of the one before (async scheduling): requests would run on with what
            was not loaded.
        drafts: speculative decoding: vLLM asks what failed before the step is over.

    A synchronous load of recurrent state is silently wrong (vLLM copies the state before it is there). Several groups only by
    explicit wish: vLLM has no way to be told that such a load failed.
    """
    against = {
        "recurrent state": GroupKind.STATE in kinds,
        "pipeline stages": stages > 1,
        "async scheduling (start with --no-async-scheduling)": ahead,
        "speculative decoding": drafts,
        "load_async": bool(settings.load_async),
    }
    because = [what for what, holds in against.items() if holds]
    if because and settings.use_layerwise:
        log.warning("use_layerwise has no effect: loads run between steps", because=because)
    if because:
        return False
    return groups == 1 if settings.use_layerwise is None else settings.use_layerwise
