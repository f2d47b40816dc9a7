"""Ids that stand for whole prefixes, made from ids of single blocks or from tokens.

Prefix id k of a prompt is a mixed sum over the pairs (position, block) up to block k, modulo 2^64, without its highest bit.
Equal prefixes have equal ids in every run and on every machine, and two different ones have the same id by chance alone: 1 in
2^63, or 1 in 180,000 that any two of ten million different blocks agree. It is no defence against somebody who looks for
collisions. All numbers fit a signed 64-bit integer, which is what most readers of JSON have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvactors.replay.content import mix64

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_TOKENS, _BLOCKS, _PARTS = np.uint64(0x746F6B656E73), np.uint64(0x626C6F636B73), np.uint64(0x7061727473)
_LOW_63 = np.uint64((1 << 63) - 1)


def chained_ids(blocks: Sequence[int] | Words) -> tuple[int, ...]:
    """The prefix id at the end of each block, from ids that stand for single blocks (or for prefixes: that does no harm)."""
    words = np.asarray(blocks, np.uint64)
    sums = np.cumsum(mix64(words + _salts(len(words), _BLOCKS)), dtype=np.uint64)
    return tuple((mix64(sums) & _LOW_63).tolist())


def token_blocks(tokens: Sequence[int], block_tokens: int) -> Words:
    """An id for each block of tokens; the last block may be partial, and differs from every complete one."""
    count = -(-len(tokens) // block_tokens)
    padded = np.zeros(count * block_tokens, np.uint64)
    padded[: len(tokens)] = mix64(np.asarray(tokens, np.uint64) + np.tile(_salts(block_tokens, _TOKENS), count)[: len(tokens)])
    sums = padded.reshape(count, block_tokens).sum(axis=1, dtype=np.uint64)
    lengths = np.full(count, block_tokens, np.uint64)
    lengths[-1] = len(tokens) - (count - 1) * block_tokens
    return mix64(sums + mix64(lengths))


def text_ids(texts: Sequence[str]) -> Words:
    """An id for each text."""
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, "<u8").astype(np.uint64, copy=False)


def part_ids(blocks: Words, tokens: Ints) -> Words:
    """The id of the first `tokens[k]` tokens of block k, as far as its own id can tell: it holds where the block does."""
    return mix64(blocks + mix64(tokens.astype(np.uint64) + _PARTS)) & _LOW_63


def _salts(count: int, kind: np.uint64) -> Words:
    return mix64(np.arange(count, dtype=np.uint64) + kind)
