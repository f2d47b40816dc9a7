"""Which bytes of which objects were put: the proof behind a commit (I1).

A store's commit verifies nothing, so the engine proves coverage itself. The pieces of a group tile its object exactly
(`core/ranges.py`); a key is covered when every piece of it was put successfully.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvactors.core.calls import Rows


class Coverage:
    """One bit per (key, piece)."""

    __slots__ = ("_done",)

    def __init__(self, keys: int, pieces: int) -> None:
        self._done = np.zeros((keys, pieces), dtype=bool)

    def add(self, rows: slice | Rows, first_piece: int, last_piece: int) -> None:
        """Marks pieces [first_piece, last_piece) of the keys `rows` as put."""
        self._done[rows, first_piece:last_piece] = True

    def complete(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """For each of `rows`, whether every piece was put."""
        return np.asarray(self._done[rows].all(axis=1))

    def grow(self, keys: int) -> None:
        """Adds keys with nothing put."""
        self._done = np.vstack([self._done, np.zeros((keys, self._done.shape[1]), dtype=bool)])
