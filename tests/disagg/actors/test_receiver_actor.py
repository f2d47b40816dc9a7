"""The receiver alone: deadlines, links that end, prefill workers that are gone, started again or refuse, and fences."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.disagg.messages import GiveUp, Heard, Receive, Source
from kvactors.disagg.receiver import GRACE_S, MOST_GRACE_S
from kvactors.disagg.wire import Failed, Message, Pull, Refused, Sent, Stopped, Welcome
from kvactors.simulate.loop import VirtualLoop
from tests.disagg.actors.rig import NOTHING, ReceiverRig, blocks, hello, on_virtual_time, sends

# -- deadlines ---------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_the_deadline_is_kept_with_a_silent_prefill(loop: VirtualLoop) -> None:
    """Late bytes of one that was not heard for 25 s are waited for as long again."""
    d = ReceiverRig(loop)
    d.prefill()
    d.receive(1)
    await asyncio.sleep(25.0)
    assert [(round(at, 1), outcome.kind.value, outcome.fenced) for at, outcome in d.told] == [(20.0, "failed", True)]
    d.network.kill("p0")
    await asyncio.sleep(30.0)
    assert d.kinds == ["failed", "returned"]
    assert 50.0 <= d.told[1][0] <= 51.0


@on_virtual_time
async def test_the_deadline_is_kept_where_nobody_can_be_reached(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.unreachable = {"p0"}
    d.receive(1)
    await asyncio.sleep(25.0)
    assert [(round(at, 1), outcome.kind.value, outcome.fenced) for at, outcome in d.told] == [(20.0, "failed", False)]
    assert d.actor.under_way == 0


# -- the grace for late bytes ------------------------------------------------------------------------------------------

SILENCES: dict[str, tuple[float, float]] = {
    "short: the least": (0.3, GRACE_S),
    "grows": (25.0, 25.0),
    "long: the most": (400.0, MOST_GRACE_S),
}
"""seconds that prefill was not heard before it was killed, and the grace"""


@pytest.mark.parametrize("silence", SILENCES)
@on_virtual_time
async def test_the_grace_is_as_long_as_the_silence_was(loop: VirtualLoop, silence: str) -> None:
    silent_s, grace_s = SILENCES[silence]
    d = ReceiverRig(loop, deadline_s=1000.0)
    d.prefill()
    d.receive(1)
    await asyncio.sleep(silent_s)
    d.network.kill("p0")
    await asyncio.sleep(2 * MOST_GRACE_S)
    assert d.kinds == ["failed", "returned"]
    assert grace_s <= d.told[1][0] - d.told[0][0] <= grace_s + 0.5


@on_virtual_time
async def test_an_outage_counts_also_when_a_new_link_has_ended_it(loop: VirtualLoop) -> None:
    """TCP may send again what it kept during the outage, though the new link's first word comes at once."""
    d = ReceiverRig(loop, deadline_s=1000.0)
    d.prefill(lambda message: None if isinstance(message, Pull) else Stopped("t1"))
    d.receive(1)
    await asyncio.sleep(1.0)
    d.unreachable = {"p0"}
    d.network.cut(d.network.links("d")[0])
    await asyncio.sleep(60.0)
    d.unreachable = set()
    await asyncio.sleep(2 * MOST_GRACE_S)
    assert d.kinds == ["failed", "returned"]
    assert 118.0 <= d.told[1][0] - d.told[0][0] <= 135.0, "60 s of outage, and as long again"


@on_virtual_time
async def test_an_acknowledgement_after_a_silence_is_graced_too(loop: VirtualLoop) -> None:
    """Prefill was frozen, and says all at once what it has to say."""
    answers: list[Message] = []
    d = ReceiverRig(loop)
    d.prefill(lambda m: answers.append(m))
    d.receive(1)
    await asyncio.sleep(30.0)
    link = d.remote.link
    assert link is not None
    d.actor.mailbox.post(Heard(d.remote, link, Stopped("t1")))
    await asyncio.sleep(29.0)
    assert d.kinds == ["failed"]
    await asyncio.sleep(2.0)
    assert d.kinds == ["failed", "returned"]


@on_virtual_time
async def test_the_grace_is_no_longer_than_the_request_was_under_way(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.prefill(lambda m: Failed("t2", "drawn") if isinstance(m, Pull) and m.transfer_id == "t2" else sends(m))
    d.receive(1)
    await asyncio.sleep(300.0)
    d.receive(2)
    await asyncio.sleep(5.0)
    assert d.kinds == ["loaded", "failed", "returned"]


# -- links -------------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_a_link_that_ends_fails_at_once_what_was_asked_over_it(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.prefill()
    d.receive(1)
    await asyncio.sleep(1.0)
    d.unreachable = {"p0"}
    d.network.cut(d.network.links("d")[0])
    await asyncio.sleep(0.1)
    assert [(outcome.kind.value, outcome.fenced) for _, outcome in d.told] == [("failed", True)]


@on_virtual_time
async def test_what_an_earlier_link_said_died_with_it(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.prefill()
    d.receive(1)
    await asyncio.sleep(1.0)
    earlier = d.remote.link
    assert earlier is not None
    d.network.cut(d.network.links("d")[0])
    await asyncio.sleep(1.0)
    d.actor.mailbox.post(Heard(d.remote, earlier, Stopped("t1")))
    await asyncio.sleep(3.0)
    assert d.kinds == ["failed"]  # the fence stands


@on_virtual_time
async def test_one_timer_tries_a_peer_again(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop, deadline_s=480.0)
    d.unreachable, d.slow = {"p0"}, {"p0": 0.001}
    for number in range(30):
        d.receive(number)
        await asyncio.sleep(0.11)
    await asyncio.sleep(60.0)
    before = len(d.opened)
    await asyncio.sleep(100.0)
    assert len(d.opened) - before <= 21


NONSENSE: dict[str, Message] = {
    "a pull": Pull("t1", 1, blocks(1)),
    "a hello": hello(),
    "a second welcome": Welcome(engine_id="P", process="p", pp_rank=0, tp_rank=0),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
@on_virtual_time
async def test_nonsense_ends_the_link_and_fails_what_was_asked_over_it(loop: VirtualLoop, nonsense: str) -> None:
    said = [NONSENSE[nonsense]]
    d = ReceiverRig(loop)
    d.prefill(lambda message: said.pop() if said else sends(message))
    d.receive(1)
    await asyncio.sleep(5.0)
    assert d.kinds == ["failed", "returned"]
    assert d.actor.under_way == 0


# -- prefill workers that come and go ----------------------------------------------------------------------------------


@on_virtual_time
async def test_a_prefill_that_was_started_again_at_its_address(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.prefill()
    d.receive(1)
    await asyncio.sleep(1.0)
    d.network.kill("p0")
    d.prefill(process="p, again")
    await asyncio.sleep(5.0)
    assert d.kinds == ["failed", "returned"]
    assert 1.0 + GRACE_S <= d.told[1][0] <= 3.0


@on_virtual_time
async def test_another_worker_at_its_address_is_asked_nothing(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.prefill(sends, engine="Q")
    d.receive(1)
    await asyncio.sleep(5.0)
    assert d.kinds == ["failed"]
    assert d.heard == []


@on_virtual_time
async def test_a_refusal_stands_for_a_while(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.prefill(refuses="another model")
    for number, wait_s, opened in ((1, 1.0, 1), (2, 61.0, 1), (3, 1.0, 2)):
        d.receive(number)
        await asyncio.sleep(wait_s)
        assert len(d.opened) == opened
    assert d.kinds == ["failed"] * 3


@on_virtual_time
async def test_an_instance_that_is_gone_is_looked_for_again(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.prefill(sends)
    d.receive(1)
    await asyncio.sleep(1.0)
    d.network.kill("p0")
    await asyncio.sleep(1.0)
    d.receive(2)
    await asyncio.sleep(1.0)
    d.prefill(sends, process="q")
    d.receive(3)
    await asyncio.sleep(1.0)
    assert d.asked >= 2
    assert d.kinds == ["loaded", "failed", "loaded"]


@on_virtual_time
async def test_an_instance_that_starts_is_waited_for(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.answers.insert(0, {})
    d.prefill(sends)
    d.receive(1)
    await asyncio.sleep(5.0)
    assert d.kinds == ["loaded"]


# -- aborts ------------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_an_abort_waits_for_its_link(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop, 2)
    d.slow = {"p1": 3.0}
    d.prefill(lambda message: Refused(message.transfer_id, "no") if isinstance(message, Pull) else None, process="p0")
    d.prefill(sends, stage=1, process="p1")
    d.receive(1)
    await asyncio.sleep(10.0)
    assert d.kinds[0] == "failed"
    assert ("p1", "Abort", "t1") in d.heard


@on_virtual_time
async def test_an_abort_opens_its_link(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop, 2)
    d.prefill(refuses="no")
    d.prefill(sends, stage=1, process="p1")
    d.receive(1)
    await asyncio.sleep(1.0)
    for link in d.network.links("p1"):
        d.network.cut(link)
    await asyncio.sleep(5.0)
    d.receive(2)
    await asyncio.sleep(50.0)
    assert ("p1", "Abort", "t2") in d.heard


# -- transfer ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer_id", ["t\ud800", "t" * 513], ids=["a surrogate", "513 characters"])
@on_virtual_time
async def test_an_id_that_cannot_be_written_fails_alone(loop: VirtualLoop, transfer_id: str) -> None:
    d = ReceiverRig(loop)
    d.prefill(sends)
    d.receive(1, transfer_id=transfer_id)
    for number in range(2, 6):
        d.receive(number)
    await asyncio.sleep(5.0)
    assert d.kinds == ["failed", *["loaded"] * 4]
    assert d.told[0][1].request_id == "r1"
    assert not d.told[0][1].fenced
    assert len(d.opened) == 1
    assert d.actor.under_way == 0


@on_virtual_time
async def test_an_id_of_512_characters_is_one(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.prefill(sends)
    d.receive(1, transfer_id="t" * 512)
    await asyncio.sleep(5.0)
    assert d.kinds == ["loaded"]


NO_BLOCKS: dict[str, list[Receive | GiveUp]] = {
    "of an id that was used": [Receive("r1", Source("t", "P", "b"), NOTHING), Receive("r2", Source("t", "P", "b"), NOTHING)],
    "of an id that cannot be written": [Receive("r1", Source("t\ud800", "P", "b"), NOTHING)],
    "that is given up": [Receive("r1", Source("t", "P", "b"), NOTHING), GiveUp("r1", "the client went away")],
}


@pytest.mark.parametrize("case", NO_BLOCKS)
@on_virtual_time
async def test_an_empty_pull_is_never_told(loop: VirtualLoop, case: str) -> None:
    d = ReceiverRig(loop)
    d.prefill(sends)
    for message in NO_BLOCKS[case]:
        d.actor.mailbox.post(message)
    await asyncio.sleep(5.0)
    assert d.told == []
    assert d.actor.under_way == 0


@on_virtual_time
async def test_a_report_of_nobody_changes_nothing(loop: VirtualLoop) -> None:
    d = ReceiverRig(loop)
    d.prefill(lambda message: Sent("another") if isinstance(message, Pull) else None)
    d.receive(1)
    await asyncio.sleep(5.0)
    assert d.told == []
