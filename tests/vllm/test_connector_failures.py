"""What goes wrong in a store costs time, never a token: requests end as they would without a connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.connector_cases import Request, alone, check, loaded, of_all_lengths, summed
from tests.vllm.connector_engines import Model, no_mooncake, pool
from tests.vllm.led import Led

needs_mooncake = pytest.mark.skipif(bool(no_mooncake()), reason=no_mooncake())


@pytest.fixture(scope="module", params=["qwen3", "gptoss", "qwen3next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """One with a single group, one with windows, one with states."""
    made = Model(request.param, tmp_path_factory.mktemp("models"))
    try:
        made.start(None)
        made.run_cold([*of_all_lengths(made.block), long(made), *others(made)])
        yield made
    finally:
        made.close()


def long(model: Model) -> Request:
    return alone("long", 3 * model.block + 7)


def others(model: Model) -> list[Request]:
    return [alone(f"other {i}", model.block + 20, made=30) for i in range(3)]


def saved(model: Model, requests: list[Request], **extra: object) -> Led:
    """An engine whose store holds these requests and whose own cache is empty."""
    led = model.start({"backend": "memory", **extra})
    led.release()
    led.forget()
    check(model.cold, led.one_by_one(requests), requests)
    led.reset()
    led.counts()
    return led


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_what_is_lost_between_lookup_and_load_is_computed(model: Model, times: int, load_async: bool) -> None:
    requests = [long(model), *others(model)]
    led = saved(model, requests, load_async=load_async)
    free = led.free_blocks()
    led.lose_reads(times)
    check(model.cold, led.generate(requests), requests)
    lost = summed(led.counts()["connector"], "failed_loads")
    led.release()
    led.reset()
    assert led.free_blocks() == free
    outcomes = led.one_by_one(requests)
    check(model.cold, outcomes, requests)
    assert lost or loaded(outcomes) != {}


def test_a_load_past_its_deadline_is_given_up(model: Model) -> None:
    """The store holds a read for as long as the test wants; its request is computed, and the others load."""
    requests = [long(model), *others(model)]
    led = saved(model, requests, load_async=True, load_deadline_s=0.3)
    free = led.free_blocks()
    led.hold_reads(1)
    led.add(requests[:1])
    led.steps(1)
    led.add(requests[1:])
    outcomes = led.finish()
    check(model.cold, outcomes, requests)
    found = loaded(outcomes)
    assert found["long"] == 0
    counts = led.counts()["connector"]
    assert summed(counts, "load_deadlines") == 1
    assert summed(counts, "hit_tokens") == sum(found.values())
    assert led.free_blocks() < free, "the late read may still write into its blocks"
    led.release()
    check(model.cold, led.one_by_one(requests), requests)
    led.reset()
    assert led.free_blocks() == free


def test_a_slow_read_inside_a_step_is_given_up(model: Model) -> None:
    requests = [long(model), *others(model)]
    led = saved(model, requests, load_deadline_s=0.3)
    led.hold_reads(1, wait_s=1.0)
    check(model.cold, led.generate(requests), requests)
    assert summed(led.counts()["connector"], "failed_loads") > 0
    led.release()
    check(model.cold, led.one_by_one(requests), requests)


def test_a_hit_counts_once_and_when_its_bytes_are_there(model: Model) -> None:
    led = saved(model, [long(model)], load_async=True)
    led.hold_reads(1)
    led.add([long(model)])
    led.steps(3)
    assert led.waits() == ["long"]
    assert summed(led.counts()["connector"], "hit_tokens") == 0
    led.release()
    outcomes = led.finish()
    check(model.cold, outcomes, [long(model)])
    assert loaded(outcomes) == {"long": 3 * model.block}
    assert summed(led.counts()["connector"], "hit_tokens") == 3 * model.block


def test_an_abort_while_the_store_holds_a_read(model: Model) -> None:
    requests = others(model)
    led = saved(model, [long(model)], load_async=True, load_deadline_s=1.0)
    free = led.free_blocks()
    led.hold_reads(1)
    led.add([long(model), *requests])
    led.steps(2)
    assert "long" in led.waits()
    led.abort(["long"])
    check(model.cold, led.finish(), requests)
    led.release()
    check(model.cold, led.one_by_one([long(model)]), [long(model)])
    led.reset()
    assert led.free_blocks() == free


def test_short_loads_are_not_worth_it(model: Model) -> None:
    requests = of_all_lengths(model.block)
    led = saved(model, requests, load_min_tokens=model.block + 1)
    outcomes = led.one_by_one(requests)
    check(model.cold, outcomes, requests)
    found = {name: tokens // model.block for name, tokens in loaded(outcomes).items() if tokens}
    assert found == {"3 blocks + 7": 3, "twin a": 3, "twin b": 2, "twin c": 2}


def test_what_decoding_fills_is_saved_where_that_is_wanted(model: Model) -> None:
    """Of full attention: vLLM keeps no window and no state at a boundary that decoding passes."""
    first = alone("decoded", 2 * model.block - 3, made=8)
    model.start(None)
    made = model.run_cold([first])["decoded"]["tokens"]
    second = ("went on", [*first[1], *made, 5, 6, 7], 4)
    model.run_cold([second])
    for wanted in (False, True):
        led = saved(model, [first], save_decode_cache=wanted)
        outcomes = led.one_by_one([second])
        # The prompt's end is computed in a chunk where the cold run of states had another one.
        check(model.cold, outcomes, [second], exact_until={"went on": 0} if model.name == "qwen3next" else None)
        assert loaded(outcomes) == {"went on": (2 if wanted and model.name == "qwen3" else 1) * model.block}


@needs_mooncake
@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_the_master_dies_in_the_middle(name: str, tmp_path: Path) -> None:
    """While some decode, one is in its prefill and one has still to load; all end right, and so do later ones."""
    with pool(tmp_path) as mooncake:
        model = Model(name, tmp_path, mooncake.environment)
        try:
            model.start(None)
            requests = [long(model), *others(model)]
            model.run_cold([*requests, alone("fresh", 3 * model.block + 7)])
            led = model.start({"backend": "mooncake"})
            check(model.cold, led.one_by_one(requests), requests)
            led.reset()
            led.add([alone("fresh", 3 * model.block + 7), *requests[1:3]])
            led.steps(2)
            mooncake.master.kill()
            led.add([requests[0], requests[3]])
            check(model.cold, led.finish(), [alone("fresh", 3 * model.block + 7), *requests])
            led.reset()
            check(model.cold, led.generate(requests), requests)
        finally:
            model.close()
