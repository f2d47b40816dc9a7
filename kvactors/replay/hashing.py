"""Fine block hashes of a traced prompt.

A trace id stands for all tokens up to the end of its 512-token block, so hashes derived from it are already chained. With
hash unit u = gcd(512, every group's block size), fine hash j of id h is SHA-256(h ‖ j), both as 8-byte big-endian numbers,
and exists only where the row holds all its tokens; with u = 512 it is the id itself (8 bytes).
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvactors.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest


def trace_hash_tokens(block_tokens: Iterable[int]) -> int:
    """The hash unit u in tokens: the greatest that divides 512 and every group's block size."""
    return math.gcd(TRACE_BLOCK_TOKENS, *block_tokens)


class PromptHasher:
    """Makes the fine hashes of prompts; remembers those of recent ids, at most `cache_hashes` of them.

    Args:
        hash_tokens: the hash unit in tokens; must divide 512.
        cache_hashes: bound of the memory, in hashes (about 70 bytes each).
    """

    def __init__(self, hash_tokens: int, *, cache_hashes: int = 1 << 20) -> None:
        if hash_tokens < 1 or TRACE_BLOCK_TOKENS % hash_tokens:
            raise ValueError(f"hash unit {hash_tokens}: must divide {TRACE_BLOCK_TOKENS}")
        self.hash_tokens = hash_tokens
        self.hashes_per_id = TRACE_BLOCK_TOKENS // hash_tokens
        self._suffixes = [j.to_bytes(8, "big") for j in range(self.hashes_per_id)]
        self._cache: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()
        self._cache_ids = max(1, cache_hashes // self.hashes_per_id)

    def hashes(self, request: TraceRequest) -> Sequence[bytes]:
        """One hash per complete hash unit of the prompt, from token 0."""
        complete = request.input_length // self.hash_tokens
        if self.hashes_per_id == 1:
            return [h.to_bytes(8, "big") for h in request.hash_ids[:complete]]
        out: list[bytes] = []
        for h in request.hash_ids:
            out += self._of_id(h)
        del out[complete:]
        return out

    def _of_id(self, h: int) -> tuple[bytes, ...]:
        found = self._cache.get(h)
        if found is not None:
            self._cache.move_to_end(h)
            return found
        start = hashlib.sha256(h.to_bytes(8, "big"))
        made = []
        for suffix in self._suffixes:
            state = start.copy()
            state.update(suffix)
            made.append(state.digest())
        self._cache[h] = hashes = tuple(made)
        if len(self._cache) > self._cache_ids:
            self._cache.popitem(last=False)
        return hashes
