"""The bytes that a KV block must hold, derived from what it stands for.

Word i of an entry's payload is mix(i) xor seed, where the seed is a 64-bit hash of (model, group, block hash, layer, entry)
and `mix` is splitmix64's finaliser over a counter. Two payloads of different blocks, groups, layers or entries differ in
every word; a shifted or swapped word shows too, because mix(i) differs at every i. The last word is cut where a payload is
no multiple of 8 bytes. Nothing depends on the process, its hash seed or the platform (words are little-endian).

Filling and comparing are one or two passes of numpy over memory, which release the GIL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)

BATCH_BYTES = 1 << 20
"""Most bytes handled at a time, so that a batch stays in the processor's cache."""


def mix64(words: Words) -> Words:
    """splitmix64's output function, element by element (Steele, Lea, Flood: "Fast splittable pseudorandom generators")."""
    z = words + _GOLDEN
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


def block_seeds(model: str, group_id: int, block_hashes: Iterable[bytes]) -> Words:
    """A 64-bit seed for each block of a group."""
    start = hashlib.blake2b(f"{model}\0{group_id}\0".encode(), digest_size=8)
    digests = []
    for h in block_hashes:
        state = start.copy()
        state.update(h)
        digests.append(state.digest())
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64, copy=False)


def entry_salt(layer: int, entry: str) -> np.uint64:
    """A 64-bit number for an entry of a layer; combined with a block's seed."""
    return np.uint64(int.from_bytes(hashlib.blake2b(f"{layer}\0{entry}".encode(), digest_size=8).digest(), "little"))


@dataclass(slots=True)
class EntryContent:
    """Writes and checks one entry's payload in local block memory.

    Args:
        memory: uint8 of shape (blocks, stride): the local blocks of this entry; rows may be apart in memory.
        nbytes: payload bytes of a block; the rest of a row is padding, neither written nor compared.
        salt: see `entry_salt`.
    """

    memory: Bytes
    nbytes: int
    salt: np.uint64
    _pattern: Words = field(init=False, repr=False)
    _rows: npt.NDArray[np.uint64] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        words = -(-self.nbytes // 8)
        self._pattern = mix64(np.arange(words, dtype=np.uint64))
        whole = self.nbytes % 8 == 0 and self.memory.shape[1] % 8 == 0 and self.memory.ctypes.data % 8 == 0
        self._rows = self.memory.view(np.uint64)[:, :words] if whole else None

    def _seeds(self, blocks: Words) -> Words:
        return mix64(blocks ^ self.salt)

    def expected(self, blocks: Words) -> Bytes:
        """What the payloads of blocks with these seeds must be: uint8 of shape (blocks, nbytes)."""
        words = self._pattern[None, :] ^ self._seeds(blocks)[:, None]
        return np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)[:, : self.nbytes]

    def fill(self, ids: Ids, blocks: Words) -> None:
        """Writes the payload of each block to its local block `ids[i]`."""
        step = max(1, BATCH_BYTES // max(1, self.nbytes))
        for at in range(0, len(ids), step):
            part, seeds = ids[at : at + step], blocks[at : at + step]
            rows = _span(part)
            if self._rows is None:
                self.memory[rows if rows is not None else part, : self.nbytes] = self.expected(seeds)
            elif rows is not None:
                np.bitwise_xor(self._pattern[None, :], self._seeds(seeds)[:, None], out=self._rows[rows])
            else:
                self._rows[part] = self._pattern[None, :] ^ self._seeds(seeds)[:, None]

    def mismatched(self, ids: Ids, blocks: Words) -> int:
        """How many payload bytes of local blocks `ids` differ from what blocks with these seeds must hold."""
        step = max(1, BATCH_BYTES // max(1, self.nbytes))
        bad = 0
        for at in range(0, len(ids), step):
            part, seeds = ids[at : at + step], blocks[at : at + step]
            rows = _span(part)
            index = rows if rows is not None else part
            if self._rows is not None:
                found = self._rows[index] ^ self._pattern[None, :]
                if bool((found == self._seeds(seeds)[:, None]).all()):
                    continue
            bad += int(np.count_nonzero(self.memory[index, : self.nbytes] != self.expected(seeds)))
        return bad


def _span(ids: Ids) -> slice | None:
    """The slice that ids are, when they count up by one."""
    n = len(ids)
    if n and int(ids[-1]) - int(ids[0]) == n - 1 and (n < 3 or bool((np.diff(ids) == 1).all())):
        return slice(int(ids[0]), int(ids[0]) + n)
    return None
