"""Triton's state rows against torch's index operations on the same device, the whole raw buffer compared.

The interpreter case runs Triton's own interpreter on a CPU, in a process of its own; the others need their hardware.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvactors.memory.state_moves import IndexMoves, Moves

HAS_TRITON = importlib.util.find_spec("triton") is not None
PAGES, OFFSET = 5, 7


def has(device: str) -> bool:
    there = getattr(torch, device, None)
    return there is not None and bool(there.is_available())


def needs(device: str) -> Any:
    return pytest.mark.skipif(not (HAS_TRITON and has(device)), reason=f"needs Triton and a device of type {device}")


DEVICES = [
    pytest.param("cuda", marks=[pytest.mark.cuda, needs("cuda")]),
    pytest.param("npu", marks=[pytest.mark.npu, needs("npu")]),
]


def every_call(moves: Moves, device: str, dtype: Any, row: int, padding: int, index_dtype: Any) -> list[Any]:
    """What gathers give, and the raw buffer after each write."""
    torch.manual_seed(0)
    raw = torch.randn(OFFSET + PAGES * (row + padding)).to(dtype).to(device)
    pages = raw.as_strided((PAGES, row), (row + padding, 1), OFFSET)
    indices = torch.tensor([3, 0, 4], dtype=index_dtype, device=device)
    flags = torch.tensor([True, False, True], device=device)
    rows = torch.randn(3, row + padding).to(dtype).to(device)[:, :row]
    whole, some = torch.empty(3, row, dtype=dtype, device=device), torch.empty(3, row, dtype=dtype, device=device)
    moves.gather(whole, pages, indices, None)
    moves.gather(some, pages, indices, flags)
    moves.scatter_(pages, indices, rows)
    scattered = raw.clone()
    moves.clear_(pages, torch.where(flags, 99, indices), flags)
    return [whole, some, scattered, raw]


def compare(device: str) -> None:
    from kvactors.memory.state_kernels import TritonMoves

    for dtype in (torch.float32, torch.float16) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16):
        for row in (1023, 1024, 1025) if device == "cpu" else (1023, 1024, 1025, 131072):
            for padding in (0, 13):
                for index_dtype in (torch.int32, torch.int64):
                    case = (device, dtype, row, padding, index_dtype)
                    both = zip(every_call(TritonMoves(), *case), every_call(IndexMoves(), *case), strict=True)
                    assert all(torch.equal(found, expected) for found, expected in both), case


@pytest.mark.parametrize("device", DEVICES)
def test_triton_moves_what_index_operations_move(device: str) -> None:
    compare(device)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_triton_in_its_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    program = "from tests.memory.test_state_rows_device import compare; compare('cpu')"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=100)
