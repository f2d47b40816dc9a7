"""Fine block hashes of a traced prompt.

A trace id stands for all tokens up to the end of its block (512 tokens in Mooncake's traces, b in general), so hashes derived
from it are already chained. With hash unit u = gcd(b, every group's block size), fine hash j of id h is SHA-256(h ‖ j), both as
8-byte big-endian numbers, and exists only where the row holds all its tokens; with u = b it is the id itself (8 bytes).
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvactors.errors import ConfigError
from kvactors.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest


def trace_hash_tokens(block_tokens: Iterable[int], trace_block_tokens: int = TRACE_BLOCK_TOKENS) -> int:
    """The hash unit u in tokens: the greatest that divides a trace's block and every group's block size."""
    return math.gcd(trace_block_tokens, *block_tokens)


class PromptHasher:
    """Makes the fine hashes of prompts; remembers those of recent ids, at most `cache_hashes` of them.

    Args:
        hash_tokens: the hash unit in tokens; must divide the blocks of every prompt's trace.
        cache_hashes: bound of the memory, in hashes (about 70 bytes each).
    """

    def __init__(self, hash_tokens: int, *, cache_hashes: int = 1 << 20) -> None:
        if hash_tokens < 1:
            raise ConfigError(f"hash unit {hash_tokens}: must be at least 1 token")
        self.hash_tokens = hash_tokens
        self._suffixes: list[bytes] = []
        self._cache: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()
        self._cache_hashes = cache_hashes

    def hashes(self, request: TraceRequest) -> Sequence[bytes]:
        """One hash per complete hash unit of the prompt, from token 0.

        Raises:
            ConfigError: the trace's blocks are no whole number of hash units.
        """
        per_id, rest = divmod(request.block_tokens, self.hash_tokens)
        if rest:
            unit, block = self.hash_tokens, request.block_tokens
            raise ConfigError(f"hash unit {unit}: must divide the trace's blocks of {block} tokens")
        complete = request.input_length // self.hash_tokens
        if per_id == 1:
            return [h.to_bytes(8, "big") for h in request.hash_ids[:complete]]
        if per_id != len(self._suffixes):
            self._suffixes = [j.to_bytes(8, "big") for j in range(per_id)]
            self._cache.clear()
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
        if len(self._cache) > max(1, self._cache_hashes // len(made)):
            self._cache.popitem(last=False)
        return hashes
