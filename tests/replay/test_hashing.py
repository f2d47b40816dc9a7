"""Fine hashes exist exactly where a row holds all their tokens."""

from __future__ import annotations

import hashlib

import pytest

from kvactors.errors import ConfigError
from kvactors.replay.hashing import PromptHasher, trace_hash_tokens
from kvactors.replay.trace import TraceRequest


def request(length: int, *ids: int) -> TraceRequest:
    return TraceRequest(1, 0.0, length, ids)


def sha(h: int, j: int) -> bytes:
    return hashlib.sha256(h.to_bytes(8, "big") + j.to_bytes(8, "big")).digest()


@pytest.mark.parametrize(
    ("block_tokens", "unit"),
    [
        ([512], 512),
        ([1024, 512], 512),
        ([16], 16),
        ([384], 128),
        ([256, 64, 4, 8], 4),
        ([500], 4),
        ([7], 1),
        ([2048, 768], 256),
    ],
)
def test_hash_unit(block_tokens: list[int], unit: int) -> None:
    assert trace_hash_tokens(block_tokens) == unit


@pytest.mark.parametrize(
    ("length", "ids", "unit", "want"),
    [
        (511, (9,), 512, []),
        (512, (9,), 512, [(9, None)]),
        (700, (1, 2), 512, [(1, None)]),
        (1024, (1, 2), 512, [(1, None), (2, None)]),
        (20, (7,), 16, [(7, 0)]),
        (15, (7,), 16, []),
        (512 + 31, (7, 8), 256, [(7, 0), (7, 1)]),
        (512 + 300, (7, 8), 256, [(7, 0), (7, 1), (8, 0)]),
        (400, (2**64 - 1,), 128, [(2**64 - 1, 0), (2**64 - 1, 1), (2**64 - 1, 2)]),
    ],
)
def test_hashes_of_a_prompt(length: int, ids: tuple[int, ...], unit: int, want: list[tuple[int, int | None]]) -> None:
    got = list(PromptHasher(unit).hashes(request(length, *ids)))
    assert got == [h.to_bytes(8, "big") if j is None else sha(h, j) for h, j in want]


def test_ids_that_share_their_low_32_bits_are_different_blocks() -> None:
    for unit in (512, 128):
        hasher = PromptHasher(unit)
        assert set(hasher.hashes(request(512, 5))).isdisjoint(hasher.hashes(request(512, 4294967301)))


def test_a_forgotten_id_gets_the_same_hashes_again() -> None:
    hasher = PromptHasher(64, cache_hashes=16)
    first = list(hasher.hashes(request(512, 1)))
    for other in range(2, 50):
        hasher.hashes(request(512, other))
    assert list(hasher.hashes(request(512, 1))) == first
    assert len(hasher._cache) <= 2


@pytest.mark.parametrize("unit", [0, 3, 1024])
def test_a_unit_that_does_not_divide_the_trace_block_is_refused(unit: int) -> None:
    with pytest.raises(ConfigError, match=f"hash unit {unit}: must"):
        PromptHasher(unit).hashes(request(512, 1))
