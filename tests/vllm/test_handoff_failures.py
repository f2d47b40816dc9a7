"""A peer dies, freezes, goes away or never comes: the other side ends the request in time, frees its blocks and goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.connector_cases import Request, alone, check
from tests.vllm.connector_engines import no_mooncake
from tests.vllm.handoff_pair import Pair, pair

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(no_mooncake()), reason=no_mooncake())]

DEADLINE_S = 3.0


@pytest.fixture(scope="module", params=["qwen3", "gptoss"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(request.param, tmp_path_factory.mktemp("models")) as made:
        made.decode.start(None)
        made.decode.cold.update(made.decode.led.parted([long(), *others()]))
        made.decode.led.stop()
        yield made


@pytest.fixture
def two(both: Pair) -> Pair:
    """Both run, hold nothing, and have empty caches; a new process where an earlier test killed one."""
    both.begin({"abort_timeout_s": 60.0}, {"handoff_deadline_s": DEADLINE_S})
    return both


def long() -> Request:
    return alone("long", 391)


def others() -> list[Request]:
    return [alone(f"other {i}", 148, made=20) for i in range(3)]


def compute(two: Pair, request: Request) -> dict[str, Any]:
    """Runs a request at prefill, which holds its blocks then; what decode is to be told of it."""
    name, prompt, _ = request
    at_prefill, at_decode = two.params(two.transfer_id())
    two.prefill.led.add([(name, prompt, 1)], {name: at_prefill})
    two.prefill.led.finish()
    return at_decode


def start_decode(two: Pair, request: Request) -> None:
    """Decode begins to pull the request, and the write stops in its middle; `receive` has what came of the request."""
    told = compute(two, request)
    two.prefill.led.hold_writes()
    two.decode.led.add([request], {request[0]: told})
    two.decode.led.send("finish")
    two.prefill.led.wait_held()


def served(two: Pair) -> None:
    """Both go on as if nothing had been."""
    _, at_decode, _ = two.run([long(), *others()])
    check(two.decode.cold, at_decode, [long(), *others()])


def test_prefill_is_killed_in_a_transfer(two: Pair) -> None:
    free = two.decode.led.free_blocks()
    start_decode(two, long())
    began = time.monotonic()
    two.prefill.led.signal(signal.SIGKILL)
    outcomes = two.decode.led.receive()
    assert time.monotonic() - began < DEADLINE_S
    check(two.decode.cold, outcomes, [long()])
    assert sum(outcomes["long"]["scheduled"]) > len(long()[1]), "it was computed again, whole"
    two.decode.led.until_pending(0)
    two.decode.led.reset()
    assert two.decode.led.free_blocks() == free
    two.begin({"abort_timeout_s": 60.0}, {"handoff_deadline_s": DEADLINE_S})
    served(two)


def test_decode_is_killed_in_a_transfer(two: Pair) -> None:
    free = two.prefill.led.free_blocks()
    start_decode(two, long())
    two.decode.led.signal(signal.SIGKILL)
    two.prefill.led.release_writes()
    began = time.monotonic()
    two.prefill.led.until_pending(0)
    assert time.monotonic() - began < 10.0
    two.prefill.led.reset()
    assert two.prefill.led.free_blocks() == free
    two.begin({"abort_timeout_s": 60.0}, {"handoff_deadline_s": DEADLINE_S})
    served(two)


def test_prefill_freezes_in_a_transfer(two: Pair) -> None:
    """Decode computes the request in other blocks, and those that may still be written serve nobody until prefill has woken."""
    free = two.decode.led.free_blocks()
    start_decode(two, long())
    two.prefill.led.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        outcomes = two.decode.led.receive()
        assert time.monotonic() - began < DEADLINE_S + 5
        check(two.decode.cold, outcomes, [long()])
        check(two.decode.cold, two.decode.led.generate(others()), others())
        assert two.decode.led.handoffs()["pending"] == 1
        assert two.decode.led.free_blocks() < free
        two.decode.led.send("finish")
    finally:
        two.prefill.led.signal(signal.SIGCONT)
    two.decode.led.receive()
    two.prefill.led.release_writes()  # the second half is written now
    check(two.decode.cold, two.decode.led.generate(others()), others())
    two.decode.led.until_pending(0)
    two.settle()
    assert two.decode.led.free_blocks() == free
    served(two)


def test_the_request_is_aborted_at_decode_in_its_transfer(two: Pair) -> None:
    free = two.prefill.led.free_blocks(), two.decode.led.free_blocks()
    told = compute(two, long())
    two.prefill.led.hold_writes()
    two.decode.led.add([long()], {"long": told})
    two.decode.led.steps(1)
    two.prefill.led.wait_held()
    (waiting,) = two.decode.led.waits()
    assert waiting == "long"
    two.decode.led.abort(["long"])
    check(two.decode.cold, two.decode.led.generate(others()), others())
    two.prefill.led.release_writes()
    two.decode.led.until_pending(0)
    two.prefill.led.until_pending(0)
    two.settle()
    assert (two.prefill.led.free_blocks(), two.decode.led.free_blocks()) == free
    served(two)


def test_decode_comes_first(two: Pair) -> None:
    at_prefill, at_decode = two.params(two.transfer_id())
    two.decode.led.add([long()], {"long": at_decode})
    two.decode.led.send("finish")
    two.prefill.led.add([(*long()[:2], 1)], {"long": at_prefill})
    two.prefill.led.finish()
    outcomes = two.decode.led.receive()
    check(two.decode.cold, outcomes, [long()])
    assert sum(outcomes["long"]["scheduled"]) < len(long()[1])


def test_decode_never_comes(two: Pair) -> None:
    two.begin({"abort_timeout_s": 0.5}, {"handoff_deadline_s": DEADLINE_S})
    free = two.prefill.led.free_blocks()
    failed = two.decode.led.handoffs()["failed"]
    told = compute(two, long())
    two.prefill.led.until_pending(0)
    two.prefill.led.reset()
    assert two.prefill.led.free_blocks() == free
    two.decode.led.add([long()], {"long": told})  # too late: refused, and computed
    outcomes = two.decode.led.finish()
    check(two.decode.cold, outcomes, [long()])
    assert two.prefill.led.handoffs()["expired"] == 1
    assert two.decode.led.handoffs()["failed"] == failed + 1


@pytest.mark.parametrize("wrong", ["remote_engine_id", "remote_bootstrap_addr", "transfer_id"])
def test_prefill_that_is_not_there(two: Pair, wrong: str) -> None:
    _, told = two.params(two.transfer_id())
    told[wrong] = "http://127.0.0.1:1" if wrong == "remote_bootstrap_addr" else "nobody"
    free = two.decode.led.free_blocks()
    two.decode.led.add([long()], {"long": told})
    check(two.decode.cold, two.decode.led.finish(), [long()])
    two.decode.led.until_pending(0)
    two.decode.led.reset()
    assert two.decode.led.free_blocks() == free


def test_two_requests_with_one_transfer(two: Pair) -> None:
    told = compute(two, long())
    name, prompt, made = long()
    two.decode.led.add([long(), ("twin", prompt, made)], {name: told, "twin": told})
    outcomes = two.decode.led.finish()
    twin = outcomes.pop("twin")
    check(two.decode.cold, outcomes, [long()])
    assert twin["tokens"] == outcomes["long"]["tokens"]
    served(two)


def test_the_failure_policy_fail(two: Pair) -> None:
    two.decode.policy = "fail"
    try:
        two.begin({"abort_timeout_s": 60.0}, {"handoff_deadline_s": DEADLINE_S})
        free = two.decode.led.free_blocks()
        start_decode(two, long())
        two.prefill.led.signal(signal.SIGKILL)
        assert two.decode.led.receive()["long"]["end"] == "error"
        two.decode.led.until_pending(0)
        two.decode.led.reset()
        assert two.decode.led.free_blocks() == free
    finally:
        two.decode.policy = "recompute"
