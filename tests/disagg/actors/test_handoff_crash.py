"""What is posted while an actor crashes is answered: the post comes first, or is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from kvactors.actors.actor import Actor
from kvactors.disagg.messages import Cancelled, GiveUp, Prefilled, Receive, Source
from kvactors.disagg.receiver import ReceiverActor
from kvactors.disagg.sender import SenderActor
from kvactors.disagg.worker import HandoffConfig, HandoffWorker, OutcomeKind
from tests.disagg.actors.rig import HELD, Transport, blocks
from tests.disagg.shapes import gqa

PATIENCE_S = 10.0


class Bug(Exception):
    pass


def until(done: Callable[[], Any], of: HandoffWorker) -> None:
    for _ in range(int(PATIENCE_S / 0.05)):
        if done():
            return
        of.wait(0.05)
    raise AssertionError("it did not happen in time")


@pytest.fixture(params=["sends", "receives"])
def worker(request: pytest.FixtureRequest) -> Iterator[HandoffWorker]:
    config = HandoffConfig(bootstrap=("127.0.0.1", 0))
    roles = {role: role == request.param for role in ("sends", "receives")}
    made = HandoffWorker(config, gqa(2, 1), Transport(), engine_id="E", **roles)
    with closing(made):
        yield made


def test_a_post_beside_a_crash_is_answered(worker: HandoffWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    actor: Actor | None = worker._sender or worker._receiver
    assert actor is not None
    post = actor.mailbox.post
    posting, crashing = threading.Event(), threading.Event()

    def slow(message: Any) -> None:
        """vLLM's thread loses the interpreter's lock here, and the actor crashes meanwhile."""
        if isinstance(message, Prefilled | Receive):
            posting.set()
            crashing.wait(PATIENCE_S)
        post(message)

    async def crash(self: Actor, message: Any) -> None:  # noqa: ARG001 - a method
        crashing.set()
        raise Bug

    monkeypatch.setattr(actor.mailbox, "post", slow)
    monkeypatch.setattr(SenderActor, "handle", crash)
    monkeypatch.setattr(ReceiverActor, "handle", crash)

    def work() -> None:
        if worker._sender is not None:
            worker.prefilled("t", HELD)
        else:
            worker.receive("r", Source("t", "P", "http://127.0.0.1:1"), blocks(4, 5, 6))

    thread = threading.Thread(target=work)
    thread.start()
    posting.wait(PATIENCE_S)
    post(Cancelled("x", "no") if worker._sender is not None else GiveUp("x", "no"))
    thread.join(PATIENCE_S)
    if worker._sender is not None:
        until(lambda: worker.freed() == {"t"}, worker)
        worker.prefilled("later", HELD)
        assert worker.freed() == {"later"}
    else:
        until(lambda: worker._told, worker)
        assert [outcome.kind for outcome in worker.outcomes()] == [OutcomeKind.FAILED]
