"""What a hit needs, written down once more from the definitions, to judge the engine's own masks by."""

from __future__ import annotations

from kvactors.core.layout import Group, GroupKind


def needed_blocks(group: Group, tokens: int) -> set[int]:
    """Block indices that must be there for the group to go on at token `tokens` (a multiple of its block size)."""
    size, last = group.block_tokens, tokens // group.block_tokens
    if tokens == 0:
        return set()
    match group.kind:
        case GroupKind.STATE:
            return {last - 1}
        case GroupKind.SLIDING_WINDOW:
            assert group.window is not None
            oldest = max(0, tokens - (group.window - 1))  # the next token sees itself and window - 1 before it
            return set(range(oldest // size, last))
        case GroupKind.CHUNKED_LOCAL:
            assert group.chunk_tokens is not None
            start = tokens // group.chunk_tokens * group.chunk_tokens
            return set(range(start // size, last))
        case _:
            return set(range(last))
