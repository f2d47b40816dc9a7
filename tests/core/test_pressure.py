"""When saves pause because the store stays full, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvactors.core.pressure import FIRST_PAUSE_S, FULL_STEPS, LONGEST_PAUSE_S, SpacePressure


def full(steps: int, pressure: SpacePressure | None = None, first: int = 0, now_s: float = 0.0) -> SpacePressure:
    pressure = SpacePressure() if pressure is None else pressure
    for step in range(first, first + steps):
        pressure.found_none(step, now_s)
    return pressure


def test_saves_pause_after_three_full_steps_in_a_row() -> None:
    assert not full(FULL_STEPS - 1).paused(0.0)
    pressure = full(FULL_STEPS)
    assert pressure.paused(0.0)
    assert not pressure.paused(FIRST_PAUSE_S)


def test_a_step_whose_keys_give_up_one_by_one_is_one_full_step() -> None:
    pressure = SpacePressure()
    for _ in range(9):
        pressure.found_none(7, 0.0)
    assert not pressure.paused(0.0)


def test_a_step_in_which_some_key_found_space_is_not_full() -> None:
    pressure = full(FULL_STEPS - 1)
    pressure.found(5)
    for step in (5, 6, 7):
        pressure.found_none(step, 0.0)
    assert not pressure.paused(0.0), "only two steps since were full"


def test_a_key_that_finds_space_later_in_a_full_step_ends_the_pressure() -> None:
    pressure = full(FULL_STEPS)
    pressure.found(FULL_STEPS - 1)
    assert not pressure.paused(0.0)


def test_pauses_double_while_the_store_stays_full_and_start_anew_after_it_was_not() -> None:
    pressure, now, pauses = full(FULL_STEPS - 1), 0.0, []
    for step in range(10, 17):
        pauses.append(pressure.found_none(step, now))
        now += pauses[-1]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    pressure.found(20)
    assert full(FULL_STEPS, pressure, first=21, now_s=now).paused(now + 0.4)
    assert not pressure.paused(now + 0.5)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 3)), max_size=60))
def test_no_pause_is_longer_than_the_longest_and_none_begins_before_three_full_steps(steps: list[tuple[bool, float]]) -> None:
    pressure, now, in_a_row = SpacePressure(), 0.0, 0
    for step, (finds, wait) in enumerate(steps):
        now += wait
        if pressure.paused(now):
            assert in_a_row >= FULL_STEPS
            assert not pressure.paused(now + LONGEST_PAUSE_S)
        elif finds:
            pressure.found(step)
            in_a_row = 0
        else:
            assert (pressure.found_none(step, now) > 0) == (in_a_row + 1 >= FULL_STEPS)
            in_a_row += 1
