"""The puts of one step in one group: what to send for a layer, and when a key is committed or revoked.

Pure: the group actor tells it what happened and carries out what it answers. A key is committed when all layers of the
group were signalled, no range call of it is under way, and its coverage is complete; a key that failed, or whose step
ended early, or whose request is tainted, is revoked as soon as no range call of it is under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvactors.core.answers import in_words
from kvactors.core.calls import Part, RangeCall, RowPlan
from kvactors.core.coverage import Coverage
from kvactors.core.ranges import GroupRanges
from kvactors.core.sessions import PutSession, PutState
from kvactors.core.store import Addresses, Outcome


class StepSaves:
    """The put sessions of one step in one group; a row is one session."""

    def __init__(self, ranges: GroupRanges) -> None:
        self.ranges = ranges
        self.sessions: list[PutSession] = []
        self.keys: list[str] = []
        self.block_ids: Addresses = np.empty(0, dtype=np.int64)
        self.signalled: set[int] = set()
        self.ended = False
        self._coverage = Coverage(0, ranges.pieces)
        self._alive = np.empty(0, dtype=bool)
        self._open = np.empty(0, dtype=bool)
        self._open_count = 0
        self._plan: RowPlan | None = None
        """of the rows that are alive and open; None after one dropped out or came in"""
        self._inflight = np.empty(0, dtype=np.int32)
        self._opened_at: npt.NDArray[np.float64] = np.empty(0)
        self._epochs: Addresses = np.empty(0, dtype=np.int64)
        self._causes: dict[int, str] = {}
        self._adopted: list[PutSession] = []
        self._unwanted: set[str] = set()
        """tainted requests whose keys were killed"""

    def admit(self, sessions: Sequence[PutSession], block_ids: Sequence[int]) -> None:
        """Takes in sessions that were just opened; only before the first layer is signalled."""
        assert not self.signalled, "a session opened after its first layer was signalled could never be complete"
        more = len(sessions)
        self._unwanted.clear()  # a tainted request may be among them
        self.sessions.extend(sessions)
        self.keys.extend(s.key for s in sessions)
        self.block_ids = np.concatenate([self.block_ids, np.asarray(block_ids, dtype=np.int64)])
        self._coverage.grow(more)
        self._alive = np.concatenate([self._alive, np.ones(more, dtype=bool)])
        self._open = np.concatenate([self._open, np.ones(more, dtype=bool)])
        self._rows_changed()
        self._inflight = np.concatenate([self._inflight, np.zeros(more, dtype=np.int32)])
        self._opened_at = np.concatenate([self._opened_at, [s.opened_at for s in sessions]])
        self._epochs = np.concatenate([self._epochs, np.array([s.epoch for s in sessions], dtype=np.int64)])

    def adopt(self, sessions: Sequence[PutSession]) -> None:
        """Sessions that take no part any more, but whose end the step waits for."""
        self._adopted.extend(sessions)

    @property
    def fully_signalled(self) -> bool:
        return len(self.signalled) == len(self.ranges.layers)

    def signal(self, layer: int) -> list[RangeCall]:
        """The layer's bytes are ready (or will be, when its event fires): the calls that put them."""
        if layer in self.signalled or layer not in self.ranges.layers or self.ended:
            return []
        self.signalled.add(layer)
        plan = self._plan
        if plan is None:
            rows = np.flatnonzero(self._alive & self._open)
            plan = self._plan = RowPlan(rows, self.keys, self.block_ids, self._note_age)
        of_layer = self.ranges.layers[layer]
        calls = plan.calls(of_layer)
        for call in calls:
            self._inflight[call.part.where] += 1
        return calls

    def _note_age(self, part: Part) -> None:
        part.oldest_s = float(self._opened_at[part.where].min())
        part.epoch = int(self._epochs[part.where].min())

    def _rows_changed(self) -> None:
        self._plan = None
        self._open_count = int(np.count_nonzero(self._open))

    def returned(self, call: RangeCall, outcomes: Sequence[Outcome], error: BaseException | None = None) -> None:
        """A call came back: covers the pieces that went well, kills the keys of those that did not. `error`: what it raised."""
        where = call.part.where
        self._inflight[where] -= 1
        if outcomes.count(Outcome.OK) == len(outcomes):
            self._coverage.add(where, call.first_piece, call.last_piece)
            return
        bad = [i for i, o in enumerate(outcomes) if o is not Outcome.OK]
        good = np.ones(len(call.rows), dtype=bool)
        good[bad] = False
        self._coverage.add(call.rows[good], call.first_piece, call.last_piece)
        for i in bad:
            self.kill(int(call.rows[i]), f"layer {call.layer}: {in_words(outcomes[i], error)}")

    def kill(self, row: int, cause: str) -> None:
        """The key of `row` will be revoked; later layers skip it."""
        self._alive[row] = False
        self._plan = None
        self._causes.setdefault(row, cause)

    def kill_where(self, unwanted: Mapping[str, int], cause: str) -> None:
        """Kills the keys of tainted requests (I12): request id -> the stage layer whose load failed.

        A group whose last layer lies before the failing one holds only bytes computed before it: those keys stay.
        """
        for request_id, layer in list(unwanted.items()):
            if layer <= self.ranges.last_layer and request_id not in self._unwanted:
                self._unwanted.add(request_id)
                for row, session in enumerate(self.sessions):
                    if session.owner.request_id == request_id and self._open[row] and self._alive[row]:
                        self.kill(row, cause)

    def kill_all(self, cause: str) -> None:
        for row in np.flatnonzero(self._alive & self._open).tolist():
            self.kill(row, cause)

    def end(self) -> None:
        """The step is over: keys whose layers were not all signalled cannot become complete any more."""
        self.ended = True
        if not self.fully_signalled:
            self.kill_all("the step ended before every layer was signalled")

    def close(self, row: int) -> None:
        """The session of `row` reached its end by itself (a lost call): neither committed nor revoked here."""
        self._alive[row] = False
        if self._open[row]:
            self._open[row] = False
            self._open_count -= 1
        self._plan = None

    def close_all(self) -> None:
        self._alive[:] = False
        self._open[:] = False
        self._rows_changed()

    @property
    def anything_due(self) -> bool:
        """Whether `due` may have something to give out: cheap, asked after every call."""
        return self.fully_signalled or bool(self._causes)

    def due(self) -> tuple[list[PutSession], list[tuple[PutSession, str]]]:
        """Sessions to commit, and sessions to revoke with their causes; each is given out once."""
        idle = self._open & (self._inflight == 0)
        done: list[int] = []
        dead = np.flatnonzero(idle & ~self._alive).tolist()
        revoke = [(self.sessions[row], self._causes[row]) for row in dead]
        done.extend(dead)
        commit: list[PutSession] = []
        if self.fully_signalled:
            rows = np.flatnonzero(idle & self._alive)
            complete = self._coverage.complete(rows)
            commit = [self.sessions[row] for row in rows[complete].tolist()]
            revoke += [(self.sessions[row], "not every byte was put") for row in rows[~complete].tolist()]
            done.extend(rows.tolist())
        if done:
            self._open[done] = False
            self._rows_changed()
        return commit, revoke

    @property
    def any_open(self) -> bool:
        """Whether a session is still `open`, so that neither commit nor revoke was asked for."""
        return self._open_count > 0

    @property
    def unsettled(self) -> bool:
        """Whether a session has not reached its end."""
        moving = (PutState.OPEN, PutState.COMMITTING, PutState.REVOKING)
        return any(s.state in moving for s in self.sessions) or any(s.state in moving for s in self._adopted)
