"""Sender and receivers over a network that reorders: no write lands in blocks that went back, and all is freed once."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.disagg import ReceiveAction, ReceiveInstruction, Receiving, SendAction, Sending, Worker
from kvactors.disagg.states import RECEIVE_FENCED, RECEIVE_TERMINAL, SEND_TERMINAL, SendState

PREFILL = Worker(0, 0)


def heard(record: Receiving, answer: SendAction, reason: str) -> list[ReceiveInstruction]:
    if answer is SendAction.REPORT:
        return record.reported(PREFILL)
    if answer is SendAction.ACKNOWLEDGE:
        return record.acknowledged(PREFILL)
    return record.failed(PREFILL, reason) if answer is SendAction.FAIL else record.refused(PREFILL, reason)


class World:
    """One prefill worker, some decode workers, and the messages under way between them."""

    def __init__(self, decoders: int) -> None:
        self.sender = Sending("t")
        self.workers = [Worker(0, rank) for rank in range(decoders)]
        self.receivers = {worker: Receiving("r", [PREFILL]) for worker in self.workers}
        self.wire: list[tuple[Worker, str, str]] = []
        self.writing: set[Worker] = set()
        self.returned: list[Worker] = []
        self.prefilled = False
        self.freed = 0

    def prefill(self, instructions: Any) -> None:
        for action, worker, reason in instructions:
            if action is SendAction.SEND:
                self.writing.add(worker)
            elif action is SendAction.FREE:
                assert not self.writing, "a source is freed under a send"
                self.freed += 1
            else:
                self.wire.append((worker, action.value, reason))
        assert not self.writing & set(self.returned), "a write into blocks that went back"

    def decode(self, worker: Worker, instructions: Any) -> None:
        for action, _ in instructions:
            if action is ReceiveAction.RETURN:
                assert worker not in self.writing, "blocks went back under a write"
                self.returned.append(worker)
            elif action is ReceiveAction.ABORT:
                self.wire.append((worker, "abort", ""))

    def deliver(self, index: int) -> None:
        worker, what, reason = self.wire.pop(index)
        if what == "pull":
            self.prefill(self.sender.pull(worker, len(self.workers)))
        elif what == "abort":
            self.prefill(self.sender.abort(worker, len(self.workers)))
        else:
            self.decode(worker, heard(self.receivers[worker], SendAction(what), reason))

    def moves(self) -> list[tuple[str, Any]]:
        """All that can happen next."""
        s = self.sender
        out: list[tuple[str, Any]] = [("deliver", i) for i in range(len(self.wire))]
        if s.state is SendState.AWAITED:
            out.append(("request", None))
        elif s.state is SendState.PREFILLING:
            out += [("prefilled", None), ("cancel", None)]
        if s.may_expire:
            out.append(("expire", None))
        for worker in sorted(self.writing):
            out += [("sent", worker), ("failed", worker), ("refused", worker)]
        for worker, r in self.receivers.items():
            if r.state.value == "connecting":
                out.append(("ask", worker))
            if r.state not in RECEIVE_TERMINAL:
                out += [("time out", worker), ("give up", worker)]
        return out

    def move(self, what: str, arg: Any) -> None:
        s = self.sender
        if what == "deliver":
            self.deliver(arg)
        elif what == "ask":
            self.receivers[arg].ask(PREFILL)
            self.wire.append((arg, "pull", ""))
        elif what == "time out":
            self.decode(arg, self.receivers[arg].fail("late"))
        elif what == "give up":
            self.decode(arg, self.receivers[arg].abort("client"))
        elif what in ("sent", "failed", "refused"):
            self.writing.discard(arg)
            self.prefill(s.sent(arg) if what == "sent" else getattr(s, what)(arg, "why"))
        elif what in ("cancel", "expire"):
            self.prefill(getattr(s, what)("why"))
        else:
            self.prefilled = self.prefilled or what == "prefilled"
            self.prefill(getattr(s, what)())

    def settle(self) -> None:
        """Everything under way arrives, sends return, and only then do deadlines pass: decode's, then prefill's."""
        order = ["deliver", "request", "prefilled", "sent", "time out", "expire"]
        while moves := [m for m in self.moves() if m[0] in order and not self._told(*m)]:
            self.move(*min(moves, key=lambda m: order.index(m[0])))

    def _told(self, what: str, arg: Any) -> bool:
        """A deadline that passed already."""
        return what == "time out" and self.receivers[arg].state in RECEIVE_FENCED


@settings(max_examples=300)
@given(st.data(), st.integers(1, 3))
def test_whatever_the_order(data: st.DataObject, decoders: int) -> None:
    world = World(decoders)
    for _ in range(data.draw(st.integers(0, 30), "moves")):
        moves = world.moves()
        if not moves:
            break
        world.move(*data.draw(st.sampled_from(moves)))
    world.settle()
    assert world.sender.state in SEND_TERMINAL
    assert world.freed == world.prefilled
    assert {r.state in RECEIVE_TERMINAL for r in world.receivers.values()} == {True}
    assert sorted(world.returned) == world.workers
