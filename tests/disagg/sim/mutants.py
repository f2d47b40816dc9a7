"""Seeded bugs of the hand-off: each breaks one rule, and the simulation or one of the actors' tests must notice.

A mutant is one function with some of its text replaced; its name says what it breaks. Where the text is not there exactly once,
the product has changed, and the mutant has to be written anew.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvactors.disagg import receiver
from kvactors.disagg.receiver import ReceiverActor
from kvactors.disagg.remotes import Remote
from kvactors.disagg.sender import SenderActor
from kvactors.disagg.sending import Sending
from kvactors.disagg.sends import Send, Sends
from tests.disagg.actors import test_receiver_actor as of_receiver
from tests.disagg.actors import test_sender_actor as of_sender


@dataclass(frozen=True)
class Mutant:
    """
    Attributes:
        owner, name: the class or module, and its function.
        old, new: the text.
        test: the test that notices, and its arguments; None: the simulation does.
    """

    owner: Any
    name: str
    old: str
    new: str
    test: Callable[..., None] | None = None
    given: dict[str, Any] = field(default_factory=dict)

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        static = isinstance(inspect.getattr_static(self.owner, self.name), staticmethod)
        function = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.name} has {source.count(self.old)} times {self.old!r}: adapt the mutant"
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        made: dict[str, Any] = {}
        exec(code, function.__globals__, made)
        mutated = made[self.name]
        patch.setattr(self.owner, self.name, staticmethod(mutated) if static else mutated)


RECEIVER: dict[str, Mutant] = {
    "no grace after an acknowledgement": Mutant(
        ReceiverActor, "_heard", "if record.peers[worker] in PEER_MAY_WRITE and not record.empty:", "if False:"
    ),
    "no grace for one that is gone": Mutant(
        ReceiverActor,
        "_gone",
        "self._wait_grace(handoff, remote.worker, dead=True)",
        "self._do(handoff, record.dead(remote.worker, reason))",
        of_receiver.test_the_grace_is_as_long_as_the_silence_was,
        {"silence": "short: the least"},
    ),
    "the grace does not grow": Mutant(
        ReceiverActor,
        "_wait_grace",
        "min(max(GRACE_S, min(silent_s, now - handoff.asked_at.get(worker, now))), MOST_GRACE_S)",
        "GRACE_S",
        of_receiver.test_the_grace_is_as_long_as_the_silence_was,
        {"silence": "grows"},
    ),
    "the grace has no bound": Mutant(
        ReceiverActor,
        "_wait_grace",
        ", MOST_GRACE_S)",
        ", 1e9)",
        of_receiver.test_the_grace_is_as_long_as_the_silence_was,
        {"silence": "long: the most"},
    ),
    "a link that ends fails nothing": Mutant(
        ReceiverActor,
        "_link_down",
        "if state is PeerState.ASKED:",
        "if False:",
        of_receiver.test_a_link_that_ends_fails_at_once_what_was_asked_over_it,
    ),
    "no abort over a new link": Mutant(ReceiverActor, "_link_up", "elif state in PEER_MAY_WRITE:", "elif False:"),
    "an abort opens no link": Mutant(
        ReceiverActor,
        "_say_abort",
        "if not handoff.remotes[worker].retrying:",
        "if False:",
        of_receiver.test_an_abort_opens_its_link,
    ),
    "an abort without a link is lost": Mutant(
        Remote,
        "say",
        "elif isinstance(message, Abort) and len(self.unsaid) < UNSAID:",
        "elif False:",
        of_receiver.test_an_abort_waits_for_its_link,
    ),
    "a restart is not noticed": Mutant(
        ReceiverActor,
        "_link_up",
        'if remote.process not in ("", up.welcome.process):',
        "if False:",
        of_receiver.test_a_prefill_that_was_started_again_at_its_address,
    ),
    "no deadline": Mutant(ReceiverActor, "_receive", "handoff.timer = self.later(self._deadline_s, TimeUp(handoff))", "pass"),
    "a twin is pulled too": Mutant(ReceiverActor, "_receive", "if source.transfer_id in self._used:", "if False:"),
    "an instance that is gone is not looked for": Mutant(
        ReceiverActor,
        "_link_down",
        "self._instances.pop((remote.instance.bootstrap, remote.instance.engine_id), None)",
        "pass",
        of_receiver.test_an_instance_that_is_gone_is_looked_for_again,
    ),
    "an instance is looked for once": Mutant(
        receiver, "locate", "(*LOCATE_PAUSES_S, None)", "(None,)", of_receiver.test_an_instance_that_starts_is_waited_for
    ),
    "no second try at a link": Mutant(ReceiverActor, "_link_down", "self.later(remote.pause_s, Reconnect(remote))", "pass"),
    "a request given up early is not told": Mutant(
        ReceiverActor, "_give_up", "self._end(handoff, OutcomeKind.ABORTED, reason)", "pass"
    ),
    "a refusal is forgotten": Mutant(
        ReceiverActor,
        "_begin",
        "if remote.refused and self.clock.now() < remote.refused_until:",
        "if False:",
        of_receiver.test_a_refusal_stands_for_a_while,
    ),
    "an earlier link is heard at decode": Mutant(
        ReceiverActor, "handle", "if remote.link is link:", "if True:", of_receiver.test_what_an_earlier_link_said_died_with_it
    ),
    "another worker is taken for its own": Mutant(
        receiver,
        "greet",
        "elif answer.engine_id != remote.instance.engine_id or answer.worker != remote.worker:",
        "elif False:",
        of_receiver.test_another_worker_at_its_address_is_asked_nothing,
    ),
    "nonsense only drops its link": Mutant(
        ReceiverActor,
        "_heard",
        "remote.outbox.close()",
        "remote.closed()",
        of_receiver.test_nonsense_ends_the_link_and_fails_what_was_asked_over_it,
        {"nonsense": "a pull"},
    ),
    "an id that cannot be written is pulled": Mutant(
        ReceiverActor,
        "_receive",
        "if not is_name(source.transfer_id):",
        "if False:",
        of_receiver.test_an_id_that_cannot_be_written_fails_alone,
        {"transfer_id": "t\ud800"},
    ),
}

SENDER: dict[str, Mutant] = {
    "freed twice": Mutant(SenderActor, "_do", "self._freed(transfer_id)", "self._freed(transfer_id); self._freed(transfer_id)"),
    "a late abort is not answered": Mutant(
        Sending,
        "abort",
        "known in PULL_TERMINAL:\n        return [SendInstruction(SendAction.ACKNOWLEDGE, worker)]",
        "known in PULL_TERMINAL:\n        return []",
    ),
    "an abort is answered under its send": Mutant(
        Sending,
        "abort",
        "is PullState.STOPPING:\n        return []\n    return",
        "is PullState.STOPPING:\n        return [SendInstruction(SendAction.ACKNOWLEDGE, worker)]\n    return",
    ),
    "the end of a link gives nothing up": Mutant(
        SenderActor,
        "_link_down",
        "if request.record.pulls.get(puller.worker) not in PULL_TERMINAL:",
        "if False:",
        of_sender.test_a_link_that_ends_stops_its_send_after_the_batch_in_hand,
    ),
    "a send goes on without its link": Mutant(
        SenderActor,
        "_link_down",
        "self._stop(request, puller.worker)",
        "pass",
        of_sender.test_a_link_that_ends_stops_its_send_after_the_batch_in_hand,
    ),
    "what all have settled waits for its expiry": Mutant(
        Sending, "_settle", "self.state is not SendState.HELD or", "self.expected or"
    ),
    "an orphan never expires": Mutant(
        SenderActor, "_orphan", "request.timer = self.later(self._limits.orphan_s, TimeUp(request))", "pass"
    ),
    "held blocks never expire": Mutant(
        SenderActor, "_prefilled", "request.timer = self.later(self._limits.abort_timeout_s, TimeUp(request))", "pass"
    ),
    "an expiry under a send is lost": Mutant(
        SenderActor,
        "_time_up",
        "request.timer = self.later(min(self._limits.abort_timeout_s, 1.0), TimeUp(request))",
        "pass",
        of_sender.test_an_expiry_that_falls_into_a_send_comes_after_it,
    ),
    "what waits for its turn never expires": Mutant(
        SenderActor,
        "_time_up",
        "if send.waiting:",
        "if False:",
        of_sender.test_a_frozen_peer_does_not_hold_blocks_that_only_wait_for_their_turn,
    ),
    "a late timer counts": Mutant(
        SenderActor,
        "_time_up",
        "if record.state is SendState.PREFILLING:",
        "if False:",
        of_sender.test_a_timer_that_is_late_does_nothing,
    ),
    "an earlier link is heard at prefill": Mutant(
        SenderActor,
        "_current",
        "return puller.outbox is not None and puller.outbox.link is link",
        "return True",
        of_sender.test_a_new_link_takes_the_place_of_the_earlier,
    ),
    "an earlier link stays": Mutant(
        SenderActor,
        "_link_up",
        'self._link_down(earlier, earlier.outbox.link, "the worker opened another link")',
        "pass",
        of_sender.test_a_new_link_takes_the_place_of_the_earlier,
    ),
    "a twin gets the report of the first": Mutant(
        SenderActor,
        "_stranger",
        "before.hash != hash(pull.blocks)",
        "False",
        of_sender.test_what_was_written_for_one_is_not_reported_to_another,
        {"second": "a twin", "pullers": 1},
    ),
    "a worker started again gets the report of the earlier": Mutant(
        SenderActor,
        "_stranger",
        "before.puller is not puller or",
        "",
        of_sender.test_what_was_written_for_one_is_not_reported_to_another,
        {"second": "the same worker, started again, and the same blocks", "pullers": 1},
    ),
    "two instances pull one request": Mutant(
        SenderActor,
        "_stranger",
        "if request.engine_id not in (None, puller.engine_id):",
        "if False:",
        of_sender.test_what_was_written_for_one_is_not_reported_to_another,
        {"second": "another worker of another instance", "pullers": 2},
    ),
    "an id used again is not a new request": Mutant(
        SenderActor, "_requested", "request = None", "pass", of_sender.test_an_id_that_is_used_again
    ),
    "orphans are not counted down": Mutant(
        SenderActor, "_no_orphan", "self._orphans -= 1", "pass", of_sender.test_orphans_are_bounded_and_make_room
    ),
    "orphans of one are not counted down": Mutant(
        SenderActor,
        "_no_orphan",
        "request.orphan_of.orphans.discard(request.record.transfer_id)",
        "pass",
        of_sender.test_orphans_of_one_peer_are_counted_across_its_links,
    ),
    "orphans of one are not bounded": Mutant(
        SenderActor,
        "_orphan",
        "len(puller.orphans) >= self._limits.orphans_of_one",
        "False",
        of_sender.test_orphans_of_one_peer_are_bounded,
    ),
    "what ended is never forgotten": Mutant(
        SenderActor,
        "_over",
        "if len(self._ended) > REMEMBERED:",
        "if False:",
        of_sender.test_what_has_ended_is_known_up_to_a_number,
    ),
    "what ended keeps its blocks": Mutant(
        SenderActor, "_over", "asked.blocks = None", "pass", of_sender.test_what_has_ended_keeps_no_blocks
    ),
    "a link fills the mailbox": Mutant(
        SenderActor, "serve", "await room.acquire()", "pass", of_sender.test_links_do_not_fill_the_mailbox
    ),
    "a slot is not given back": Mutant(
        SenderActor, "handle", "self.mailbox.replied()", "pass", of_sender.test_sends_are_bounded_in_all_and_to_one
    ),
    "the transport forgets nobody": Mutant(
        SenderActor,
        "_link_down",
        "self._transport.forget(puller.memory)",
        "asyncio.sleep(0)",
        of_sender.test_the_transport_forgets_a_worker_that_was_started_again,
    ),
    "a stop between batches is ignored": Mutant(
        Sends,
        "_write",
        'if send.stopped():\n                return "stopped by the decode worker"',
        "pass",
        of_sender.test_an_abort_stops_its_send_after_the_batch_in_hand,
    ),
    "a send that waits is not cancelled": Mutant(
        Send,
        "stop",
        "if self.waiting and self.task is not None:",
        "if False:",
        of_sender.test_a_send_that_waits_for_its_turn_is_stopped_at_once,
    ),
    "no bound on sends to one": Mutant(
        Sends, "_write", "async with puller.at_once, self._at_once:", "async with self._at_once:"
    ),
    "no bound on sends": Mutant(
        Sends,
        "_write",
        "async with puller.at_once, self._at_once:",
        "async with puller.at_once:",
        of_sender.test_sends_are_bounded_in_all_and_to_one,
    ),
    "a pull of too many blocks is planned": Mutant(
        Sends,
        "_write",
        "if len(of.ids) > group.blocks:",
        "if False:",
        of_sender.test_a_pull_of_more_blocks_than_there_are_is_refused_unplanned,
    ),
    "closing waits for no send": Mutant(
        SenderActor,
        "close",
        "while sends := [s for r in self._requests.values() for s in r.sends.values()]:",
        "while sends := []:",
    ),
    "closing takes pulls": Mutant(
        SenderActor, "_pull", "if self._closing:", "if False:", of_sender.test_closing_waits_for_sends_and_begins_none
    ),
    "closing says nothing": Mutant(
        SenderActor,
        "close",
        "if outboxes:",
        "if False:",
        of_sender.test_closing_waits_a_moment_for_what_it_says,
    ),
}

MUTANTS = {**RECEIVER, **SENDER}
