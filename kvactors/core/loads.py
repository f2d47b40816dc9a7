"""The gets of one step (or of one `LoadBlocks`) in one group: who wants which key where, and what arrived.

A row is one destination: a block of a request. Several rows may share a key, and so a get session. Once a load of a
request failed, its rows from there on are skipped: nothing of them counts as loaded (I5). Those before it go on, so that the
request can start again from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvactors.core.calls import Part, RangeCall, RowPlan, Rows
from kvactors.core.ranges import GroupRanges
from kvactors.core.sessions import GetSession
from kvactors.core.store import Addresses, Outcome


@dataclass(slots=True, eq=False)
class StepLoads:
    """Destinations of one group; fixed once `seal` was called, so that transfer workers may read the row tables."""

    ranges: GroupRanges
    requests: list[str] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    block_ids: Addresses = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    started: set[int] = field(default_factory=set)
    bytes_delivered: int = 0
    rows_of: dict[str, list[int]] = field(default_factory=dict)
    opened_at: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """per row, when its session was opened or renewed"""
    epoch: int = -1
    """earliest life of the store's master under which one of its sessions was opened"""
    _ids: list[int] = field(default_factory=list)
    _missed: Rows = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    """per row, how many of its layers did not arrive yet"""
    _plan: RowPlan | None = None
    """of the rows that are not lost; None before the first layer, and after a session was renewed"""
    _planned: tuple[Set[int], int] = (frozenset(), 0)
    """the lost rows, and the most rows in a call, that the plan is for"""

    def add(self, request_id: str, block_index: int, key: str, block_id: int) -> None:
        self.requests.append(request_id)
        self.blocks.append(block_index)
        self.rows_of.setdefault(key, []).append(len(self.keys))
        self.keys.append(key)
        self._ids.append(block_id)

    def seal(self) -> None:
        self.block_ids = np.asarray(self._ids, dtype=np.int64)
        self._missed = np.full(len(self.keys), self.ranges.pieces, dtype=np.intp)
        self.opened_at = np.zeros(len(self.keys))

    def note_opened(self, session: GetSession) -> None:
        """The session of a key is open: its rows are as old as it is."""
        self.opened_at[self.rows_of[session.key]] = session.opened_at
        self._plan = None
        self.epoch = session.epoch if self.epoch < 0 else min(self.epoch, session.epoch)

    def lost(self, first_wrong: Mapping[str, int], block_tokens: int) -> set[int]:
        """Rows that need not be loaded any more: those of failed requests from their first wrong token on.

        Args:
            first_wrong: request id -> tokens.
        """
        if not first_wrong:
            return set()
        rows = enumerate(zip(self.requests, self.blocks, strict=True))
        return {row for row, (r, block) in rows if r in first_wrong and block * block_tokens >= first_wrong[r]}

    def start(self, layer: int, lost: Set[int], most_rows: int = 0) -> list[RangeCall]:
        """The calls that load one layer, less the rows that are lost; `most_rows`: see `RowPlan`."""
        if layer in self.started or layer not in self.ranges.layers:
            return []
        self.started.add(layer)
        plan = self._plan
        if plan is None or self._planned != (lost, most_rows):
            rows = np.arange(len(self.keys), dtype=np.intp)
            if lost:
                rows = np.array([row for row in rows.tolist() if row not in lost], dtype=np.intp)
            plan = self._plan = RowPlan(rows, self.keys, self.block_ids, self._note_age, most_rows)
            self._planned = (lost, most_rows)
        return plan.calls(self.ranges.layers[layer])

    def _note_age(self, part: Part) -> None:
        part.oldest_s = float(self.opened_at[part.where].min())
        part.epoch = self.epoch

    def renewed(self, part: Part, opened_at: float) -> None:
        """The sessions of these rows were opened again, at that time."""
        self.opened_at[part.where] = opened_at
        self._plan = None

    def returned(self, call: RangeCall, outcomes: Sequence[Outcome]) -> None:
        good, count = call.part.where, len(outcomes)
        if outcomes.count(Outcome.OK) != count:
            good = call.rows[[o is Outcome.OK for o in outcomes]]
            count = len(good)
        self._missed[good] -= call.last_piece - call.first_piece
        self.bytes_delivered += count * call.batch.nbytes_per_key

    @property
    def all_started(self) -> bool:
        return len(self.started) == len(self.ranges.layers)

    def arrived(self) -> npt.NDArray[np.bool_]:
        """For each row, whether every piece of it arrived."""
        return np.asarray(self._missed == 0)
