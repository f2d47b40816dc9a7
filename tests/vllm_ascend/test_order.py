"""Which layer an empty name means, and when an order is not believed."""

from __future__ import annotations

import pytest

from kvactors.errors import StepError
from kvactors.vllm.ascend_hooks import StateLayerOrder
from tests.vllm_ascend.stand_in import World

NAMES = ["s0", "s1", "a2", "s3", "s4", "a5", "s6"]
NAMED = {"a2", "a5"}


def report(order: StateLayerOrder, calls: str) -> list[str | None]:
    """`-` is an unnamed call, a letter and a digit a named one."""
    found: list[str | None] = []
    for call in calls.split():
        if call == "-":
            found.append(order.next_state())
        else:
            order.passed(call)
            found.append(call)
    order.end()
    return found


def test_unnamed_calls_are_the_state_layers_in_order_step_after_step() -> None:
    order = StateLayerOrder(NAMES, NAMED)
    for _ in range(2):
        order.begin()
        assert report(order, "- - a2 - - a5 -") == NAMES


def test_a_model_of_states_alone() -> None:
    assert report(StateLayerOrder(["s0", "s1"]), "- -") == ["s0", "s1"]
    assert report(StateLayerOrder([]), "") == []


def test_a_version_without_the_hook_is_in_order() -> None:
    assert report(StateLayerOrder(NAMES, NAMED), "a2 a5") == ["a2", "a5"]


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ("- a2", "layer a2 reported after 1 state layers, with 2 in front of it"),
        ("- - - a2", "layer a2 reported after 3 state layers, with 2 in front of it"),
        ("a2 -", "none in front of an earlier layer had"),
        ("- - a2 - - a5 - -", "after all 5 of this step had"),
        ("- - a2 - - a5", "only 4 of 5 state layers reported; s6 did not"),
        ("- - a2 a2", "layer a2 reported twice in one step"),
        ("- - a5", "layer a5 reported after 2 state layers, with 4 in front of it"),
        ("- - a2 - - a5 - a2", "layer a2 reported twice"),
    ],
)
def test_an_order_that_is_not_the_models_is_refused(calls: str, says: str) -> None:
    with pytest.raises(StepError, match=says):
        report(StateLayerOrder(NAMES, NAMED), calls)


def test_layers_that_are_not_the_models_own_are_passed_over() -> None:
    order = StateLayerOrder(NAMES, NAMED)
    assert order.next_state("draft.s") is None
    order.passed("draft.a")
    order.passed("draft.a")
    assert order.next_state("s0") == "s0"
    with pytest.raises(StepError, match="state layer s3 reported where s1 is next"):
        order.next_state("s3")


def test_a_step_out_of_order_raises_nothing_reports_no_more_and_is_aborted(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    layers = world.layers(NAMES, NAMED)
    layers.begin_step()
    for name in ("", "a2", "", "a5"):
        layers.wait_for_layer_load(name or "none")
        layers.on_kv_cache_written(name)
        layers.save_kv_layer(name)
    assert "exit(s0) after nothing" in world.told
    assert not any(line.startswith("exit(a") for line in world.told)
    assert "entry(a5) after nothing" not in world.told
    assert "wait(a5)" in world.told, "what a layer computes with must have arrived, whatever becomes of the step"
    assert "nothing of the step is published" in caplog.text
    assert "a2 reported after 1 state layers" in layers.end_step()
    layers.begin_step()
    assert layers.end_step() == "", "the next step begins anew"


def test_a_step_with_too_few_is_aborted_and_an_empty_one_is_not() -> None:
    world = World()
    layers = world.layers(NAMES, NAMED)
    layers.begin_step()
    layers.save_kv_layer("")
    assert "only 1 of 5 state layers reported" in layers.end_step()
    assert layers.end_step() != "", "the answer stays until the next step"
    layers.begin_step()
    assert layers.end_step() == ""
