"""Every kind of model: what comes out of a store gives the tokens and log-probabilities of a run without a connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.connector_cases import (
    MODELS,
    Request,
    Stored,
    alone,
    check,
    differences,
    loaded,
    of_all_lengths,
    siblings,
    summed,
)
from tests.vllm.connector_engines import Model, Pool, has_amx, no_mooncake, pool
from tests.vllm.led import Led

needs_mooncake = pytest.mark.skipif(bool(no_mooncake()), reason=no_mooncake())

CROWDED: dict[str, dict[str, int]] = {
    "qwen3": {"num_gpu_blocks_override": 11},
    "gptoss": {"num_gpu_blocks_override": 9},
    "gemma3": {"num_gpu_blocks_override": 12},
    "qwen3next": {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 4 * 384, "long_prefill_token_threshold": 384},
    "granite": {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 256 + 4},
    "dsv3": {"num_gpu_blocks_override": 11},
}
"""So few blocks that four requests which decode into their third block cannot all go on."""


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool | None]:
    if no_mooncake():
        yield None
    else:
        with pool(tmp_path_factory.mktemp("mooncake")) as made:
            yield made


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, mooncake: Pool | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Model, Model]]:
    """Two processes with the same model; the first knows what it answers without a connector, the second computed nothing."""
    if request.param == "dsv3" and not has_amx():
        pytest.skip("without AMX, vLLM's kernel for latent vectors computes a prompt as if nothing were cached")
    folder = tmp_path_factory.mktemp("models")
    environment = mooncake.environment if mooncake else {}
    first, second = (Model(request.param, folder, environment) for _ in range(2))
    try:
        first.begin(None)
        if mooncake:
            second.begin({"backend": "mooncake", "namespace": "models"})
            second.begun()
        first.begun()
        first.run_cold(all_requests(first.block))
        yield first, second
    finally:
        first.close()
        second.close()


def test_latent_vectors_are_refused_where_vllm_would_not_use_what_is_loaded(tmp_path: Path) -> None:
    if has_amx():
        pytest.skip("this CPU has AMX, with which vLLM uses it")
    model = Model("dsv3", tmp_path)
    try:
        with pytest.raises(AssertionError, match="does not read what is cached"):
            model.start({"backend": "memory"})
    finally:
        model.close()


def all_requests(block: int) -> list[Request]:
    return [
        *of_all_lengths(block),
        *(request for name in ("fork", "swap", "both") for request in siblings(block, name, 4)),
        *growing(block),
        alone("aborted", 3 * block + 7),
        alone("other", block + 5),
    ]


def fresh(model: Model) -> Led:
    """An engine with an embedded store that is empty."""
    led = model.start({"backend": "memory"})
    led.forget()
    return led


def growing(block: int) -> list[Request]:
    """They begin to decode just before the end of their second block."""
    return [alone(f"growing {i}", 2 * block - 2, made=16) for i in range(4)]


def test_a_reload_after_a_reset_is_exact_and_as_long_as_it_can_be(pair: tuple[Model, Model]) -> None:
    model, _ = pair
    requests, stored = of_all_lengths(model.block), Stored(model.name, model.block)
    led = fresh(model)
    led.counts()
    for _ in range(2):  # the first pass saves, and already loads what prompts have in common
        expected = stored.expected(requests)
        outcomes = led.one_by_one(requests)
        check(model.cold, outcomes, requests)
        assert loaded(outcomes) == expected, led.told()
        counts = led.counts()
        assert counts["hits"] == sum(expected.values()), "vLLM's count of tokens that the connector offered"
        assert summed(counts["connector"], "hit_tokens") == sum(expected.values()), "the connector's own, of what arrived"


def test_other_content_in_the_store_shows(pair: tuple[Model, Model]) -> None:
    """The control for all the others: with other bytes the outcomes do differ, in each request that loads."""
    model, _ = pair
    requests = of_all_lengths(model.block)
    led = fresh(model)
    check(model.cold, led.one_by_one(requests), requests)
    assert led.corrupt() > 0
    outcomes = led.one_by_one(requests)
    loads = {name for name, tokens in loaded(outcomes).items() if tokens}
    assert len(loads) == 6
    assert set(differences(model.cold, outcomes)) == loads


def test_prompts_that_part_leave_the_place_where_they_do(pair: tuple[Model, Model]) -> None:
    """With a warm local cache vLLM sees the junction, also that of windows and states."""
    model, _ = pair
    *forks, last = siblings(model.block, "fork", 3)
    led = fresh(model)
    outcomes = led.one_by_one(forks, resets=False)
    check(model.cold, outcomes, forks)
    outcomes = led.one_by_one([last])
    check(model.cold, outcomes, [last])
    assert loaded(outcomes) == {"fork 2": 2 * model.block}


def test_many_at_once(pair: tuple[Model, Model]) -> None:
    model, _ = pair
    requests = of_all_lengths(model.block)
    led = fresh(model)
    check(model.cold, led.generate(requests), requests)
    led.reset()
    outcomes = led.generate(requests)
    check(model.cold, outcomes, requests)
    lengths = {name: len(prompt) for name, prompt, _ in requests}
    found = {name: outcome["local"] + outcome["external"] for name, outcome in outcomes.items()}
    assert found == {name: (length - 1) // model.block * model.block for name, length in lengths.items()}
    assert sum(loaded(outcomes).values()) > 0


def test_aborts_leave_no_trace(pair: tuple[Model, Model]) -> None:
    """In the middle of a prefill, before a load and while it is on its way; what runs beside them is not disturbed."""
    model, _ = pair
    aborted, other = alone("aborted", 3 * model.block + 7), alone("other", model.block + 5)
    led = fresh(model)
    free = led.free_blocks()
    led.add([aborted, other])
    led.steps(2)
    led.abort(["aborted"])
    check(model.cold, led.finish(), [other])
    led.reset()
    check(model.cold, led.generate([aborted]), [aborted])
    for steps in (0, 1, 2):
        led.reset()
        led.add([aborted, other])
        led.steps(steps)
        led.abort(["aborted"])
        check(model.cold, led.finish(), [other])
        outcomes = led.one_by_one([aborted])
        check(model.cold, outcomes, [aborted])
        assert loaded(outcomes) == {"aborted": 3 * model.block}
    led.reset()
    assert led.free_blocks() == free


def test_requests_that_give_way_to_others_come_back(pair: tuple[Model, Model]) -> None:
    model, _ = pair
    requests = growing(model.block)
    led = model.start({"backend": "memory", "namespace": "crowded"}, max_model_len=3 * model.block, **CROWDED[model.name])
    led.counts()
    for _ in range(2):
        outcomes = led.generate(requests)
        preempted = led.counts()["preempted"]
        assert preempted
        # What a recurrent layer had decoded is computed again as a chunk, which is not the same to the last bit.
        check(model.cold, outcomes, requests, exact_until=preempted if model.name in ("qwen3next", "granite") else None)
        led.reset()


@needs_mooncake
def test_a_new_process_reads_what_another_left(pair: tuple[Model, Model]) -> None:
    """And then the other way round: two processes share a pool."""
    first, second = pair
    requests, stored = of_all_lengths(first.block), Stored(first.name, first.block)
    stored.expected(requests)
    led = first.start({"backend": "mooncake", "namespace": "models"})
    check(first.cold, led.one_by_one(requests), requests)
    outcomes = second.led.one_by_one(requests)
    check(first.cold, outcomes, requests)
    assert loaded(outcomes) == stored.expected(requests)

    requests = siblings(first.block, "swap", 3)
    stored.expected(requests)
    check(first.cold, second.led.one_by_one(requests), requests)
    outcomes = led.one_by_one(requests)
    check(first.cold, outcomes, requests)
    assert loaded(outcomes) == stored.expected(requests)


@needs_mooncake
def test_two_processes_at_the_same_time(pair: tuple[Model, Model]) -> None:
    """Both save and load the same prompts at once; whoever comes first, all is right and complete."""
    first, _ = pair
    requests = siblings(first.block, "both", 4)
    leds = [model.start({"backend": "mooncake", "namespace": "models"}) for model in pair]
    for attempt in range(3):
        for led in leds:
            led.send("one_by_one", requests if attempt % 2 else requests[::-1])
        for led in leds:
            check(first.cold, led.receive(), requests)
    for led in leds:
        outcomes = led.one_by_one(requests)
        check(first.cold, outcomes, requests)
        assert set(loaded(outcomes).values()) == {2 * first.block}
