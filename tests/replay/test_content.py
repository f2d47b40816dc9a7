"""Block bytes follow from what the block stands for, and a wrong byte anywhere is found."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kvactors.replay.content import EntryContent, block_seeds, entry_salt

SHAPES = [  # (payload bytes, stride bytes)
    (8, 8),
    (10, 10),
    (11, 11),
    (18, 18),
    (1, 3),
    (16, 24),
    (256, 256),
    (100, 128),
    (4096, 4112),
    (40, 41),
]


def memory(nbytes: int, stride: int, blocks: int = 64) -> tuple[EntryContent, np.ndarray]:
    rows = np.full((blocks, stride), 0xEE, np.uint8)
    return EntryContent(rows, nbytes, entry_salt(3, "k")), rows


def seeds(n: int, group: int = 0, model: str = "m") -> np.ndarray:
    return block_seeds(model, group, [i.to_bytes(8, "big") for i in range(n)])


@pytest.mark.parametrize(("nbytes", "stride"), SHAPES)
@pytest.mark.parametrize("order", ["up", "scattered"])
def test_filled_blocks_compare_equal_and_padding_is_left_alone(nbytes: int, stride: int, order: str) -> None:
    entry, rows = memory(nbytes, stride)
    ids = np.arange(5, 25) if order == "up" else np.random.default_rng(1).permutation(60)[:20]
    entry.fill(ids, seeds(20))
    assert entry.mismatched(ids, seeds(20)) == 0
    assert (rows[:, nbytes:] == 0xEE).all()
    untouched = np.setdiff1d(np.arange(64), ids)
    assert (rows[untouched] == 0xEE).all()
    assert (rows[ids, :nbytes] == entry.expected(seeds(20))).all()


@pytest.mark.parametrize(("nbytes", "stride"), SHAPES)
def test_every_single_wrong_byte_is_counted(nbytes: int, stride: int) -> None:
    entry, rows = memory(nbytes, stride)
    ids = np.arange(20)
    entry.fill(ids, seeds(20))
    for at in {0, nbytes // 2, nbytes - 1}:
        rows[7, at] ^= 1
        assert entry.mismatched(ids, seeds(20)) == 1
        rows[7, at] ^= 1
    rows[3, 0] ^= 1
    rows[9, nbytes - 1] ^= 0xFF
    assert entry.mismatched(ids, seeds(20)) == 2


def test_group_layer_entry_block_and_model_all_change_the_bytes() -> None:
    rows = np.zeros((1, 64), np.uint8)
    texts = set()
    for model in ("m", "n"):
        for group in (0, 1):
            for h in (b"a", b"b"):
                for layer in (0, 1):
                    for name in ("k", "v"):
                        entry = EntryContent(rows, 64, entry_salt(layer, name))
                        texts.add(entry.expected(block_seeds(model, group, [h])).tobytes())
    assert len(texts) == 32


def test_swapped_or_shifted_words_are_found() -> None:
    entry, rows = memory(256, 256)
    ids = np.arange(4)
    entry.fill(ids, seeds(4))
    good = rows.copy()
    rows[[0, 1]] = rows[[1, 0]]
    assert entry.mismatched(ids, seeds(4)) > 400
    rows[:] = good
    rows[2, :248] = good[2, 8:]
    assert entry.mismatched(ids, seeds(4)) > 200


def test_big_blocks_go_in_batches() -> None:
    entry, rows = memory(1 << 19, 1 << 19, blocks=5)
    ids = np.array([4, 0, 2])
    entry.fill(ids, seeds(3))
    assert entry.mismatched(ids, seeds(3)) == 0
    rows[2, -1] ^= 1
    assert entry.mismatched(ids, seeds(3)) == 1


def test_bytes_do_not_depend_on_the_process() -> None:
    code = (
        "import numpy as np; from kvactors.replay.content import *;"
        "e = EntryContent(np.zeros((1, 40), np.uint8), 37, entry_salt(2, 'v'));"
        "print(e.expected(block_seeds('model', 1, [b'hash'])).tobytes().hex())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": s}, capture_output=True, text=True, check=True
        ).stdout
        for s in ("0", "1")
    }
    assert len(texts) == 1
    assert len(texts.pop().strip()) == 74
