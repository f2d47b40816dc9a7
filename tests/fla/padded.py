"""States that lie padded in a raw buffer, and what of the buffer a call changed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kvactors.memory import state_views

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}
"""Relative and absolute: float32 sums of tens of terms; else one rounding of the result, to 11 and to 8 bits."""

PADDING_BYTES = 208


class Pages(NamedTuple):
    raw: Any
    """Bytes."""
    state: Any
    """(pages, *row), padded."""

    def rows_changed(self, before: Any) -> list[int]:
        """Pages with a changed payload; fails if padding changed."""
        pages = len(self.state)
        now, then = self.raw.view(pages, -1), before.view(pages, -1)
        payload = self.state[0].numel() * self.state.element_size()
        assert torch.equal(now[:, payload:], then[:, payload:]), "padding changed"
        return [i for i in range(pages) if not torch.equal(now[i], then[i])]


def padded_pages(pages: int, row: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Pages:
    page_bytes = torch.Size(row).numel() * dtype.itemsize + PADDING_BYTES
    raw = torch.randint(-128, 128, (pages * page_bytes,), dtype=torch.int8)
    (state,) = state_views(raw, [row], [dtype], page_bytes)
    state.copy_(torch.randn(pages, *row) * scale)
    return Pages(raw, state)


def exact(tensor: Any) -> Any:
    """A tensor's values as float64 for the oracle."""
    return tensor.detach().double().numpy()


def close(found: Any, expected: Any, dtype: Any = None) -> None:
    tolerance = TOLERANCE[found.dtype if dtype is None else dtype]
    np.testing.assert_allclose(exact(found), expected, rtol=tolerance, atol=tolerance)


def a_rounding(found: Any, expected: Any) -> None:
    """Each value is the expected one rounded to found's type, or the next to it where float32 sums blur a tie."""
    rounded = torch.from_numpy(expected).to(found.dtype).double()
    step = np.maximum(np.abs(exact(rounded)), torch.finfo(found.dtype).tiny) * torch.finfo(found.dtype).eps
    off = np.abs(exact(found) - expected)
    assert (off <= 0.5 * step + 1e-6).all(), f"off by {(off / step).max():.2f} units in the last place"
