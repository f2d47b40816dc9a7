"""Lookups never hold the scheduler up for longer than their budget, and asking changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvactors.core.reachability import Hit
from kvactors.devices import ManualClock
from kvactors.engine import PendingHit
from kvactors.engine.intake import Answer
from kvactors.vllm.matching import FRESH_S, LOOKUP_DEADLINE_S, Matches
from tests.connector.rig import fine_hashes

BUDGET_S = 0.02
HASHES = fine_hashes(8)
NEVER = float("inf")


class Pending(PendingHit):
    """Waiting for it moves the clock: until its answer comes, or as long as one is willing to wait."""

    def __init__(self, clock: ManualClock, takes_s: float, hit_tokens: int) -> None:
        self.answer = Answer(Hit(0, ()))
        super().__init__(self.answer)
        self._clock, self._takes_s, self._hit_tokens = clock, takes_s, hit_tokens

    def arrive(self, tokens: int | None = None) -> None:
        self.answer.give(Hit(self._hit_tokens if tokens is None else tokens, ()))

    def wait(self, seconds: float) -> bool:
        waited = min(seconds, self._takes_s)
        self._clock.advance(waited)
        self._takes_s -= waited
        if not self._takes_s:
            self.arrive()
        return self.done


class Engine:
    """Answers after `takes_s` of waiting. `asked`: (hashes, prompt tokens, deadline) of every lookup."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.takes_s, self.hit_tokens = 0.0, 64
        self.asked: list[tuple[Sequence[bytes], int, float | None]] = []
        self.pending: list[Pending] = []

    def start_lookup(self, hashes: Sequence[bytes], prompt_tokens: int, deadline_s: float | None = None) -> PendingHit:
        self.asked.append((hashes, prompt_tokens, deadline_s))
        self.pending.append(Pending(self.clock, self.takes_s, self.hit_tokens))
        return self.pending[-1]


class World:
    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.engine = Engine(self.clock)
        self.matches = Matches(self.engine, self.clock, BUDGET_S)

    def ask(self, request: str = "a", limit: int = 128) -> int | None:
        return self.matches.tokens(request, HASHES, limit)

    def timed(self, request: str = "a") -> tuple[int | None, float]:
        """The answer, and for how long it held the scheduler up."""
        began = self.clock.now()
        answer = self.ask(request)
        return answer, pytest.approx(self.clock.now() - began)


@pytest.fixture
def world() -> World:
    return World()


# -- one question ------------------------------------------------------------------------------------------------------


def test_a_question_goes_to_the_engine_with_the_prompts_hashes_and_a_deadline(world: World) -> None:
    assert world.ask(limit=128) == 64
    assert world.engine.asked == [(HASHES, 128, LOOKUP_DEADLINE_S)]


def test_hashes_that_come_later_are_not_part_of_it(world: World) -> None:
    growing = list(HASHES)
    world.matches.tokens("a", growing, 128)
    growing.append(b"later")
    assert world.engine.asked[0][0] == HASHES


def test_asking_again_changes_nothing(world: World) -> None:
    """vLLM asks in every step while it has no blocks for a request (vllm#30522)."""
    answers = []
    for _ in range(4):
        world.matches.new_step()
        answers.append(world.ask())
    assert answers == [64] * 4
    assert (world.matches.asked, world.matches.deferred) == (1, 0)


def test_a_question_that_was_forgotten_is_asked_anew(world: World) -> None:
    world.ask()
    assert world.matches.forget("a") is True
    assert world.matches.forget("a") is False
    world.engine.hit_tokens = 96
    assert world.ask() == 96
    assert world.matches.asked == 2


def test_another_limit_is_another_question(world: World) -> None:
    """After a failed load less may be matched: an old answer must not count."""
    world.ask(limit=128)
    world.engine.hit_tokens = 32
    assert world.ask(limit=65) == 32
    assert [prompt for _, prompt, _ in world.engine.asked] == [128, 65]


def test_also_while_the_old_one_is_open(world: World) -> None:
    world.engine.takes_s = NEVER
    assert world.ask(limit=128) is None
    world.engine.takes_s = 0.0
    world.matches.new_step()
    assert world.ask(limit=65) == 64
    world.engine.pending[0].arrive(112)
    assert world.ask(limit=65) == 64


def test_questions_of_different_requests_are_kept_apart(world: World) -> None:
    assert world.ask("a") == 64
    world.engine.hit_tokens = 16
    assert world.ask("b") == 16
    world.matches.forget("b")
    assert world.ask("a") == 64


# -- the budget --------------------------------------------------------------------------------------------------------


def test_an_answer_within_the_budget_is_waited_for(world: World) -> None:
    world.engine.takes_s = 0.015
    assert world.timed() == (64, 0.015)
    assert world.matches.deferred == 0


def test_one_that_takes_longer_is_put_off_to_the_next_step(world: World) -> None:
    world.engine.takes_s = NEVER
    assert world.timed() == (None, BUDGET_S)
    assert world.matches.deferred == 1


def test_all_questions_of_a_step_share_one_budget(world: World) -> None:
    world.engine.takes_s = 0.015
    assert [world.timed(name) for name in "abc"] == [(64, 0.015), (None, 0.005), (None, 0.0)]
    assert world.matches.deferred == 2


def test_the_next_step_has_the_whole_budget_again(world: World) -> None:
    world.engine.takes_s = 0.035
    assert world.timed() == (None, BUDGET_S)
    assert world.timed() == (None, 0.0)
    world.matches.new_step()
    assert world.timed() == (64, 0.015)
    assert (world.matches.asked, world.matches.deferred) == (1, 2)


def test_without_any_budget_left_an_answer_that_is_there_is_used(world: World) -> None:
    world.engine.takes_s = NEVER
    assert world.ask("slow") is None
    world.engine.takes_s = 0.015
    assert world.ask("a") is None
    world.engine.pending[-1].arrive()
    assert world.timed("a") == (64, 0.0)


def test_an_answer_that_comes_between_steps_is_found_in_the_next(world: World) -> None:
    world.engine.takes_s = NEVER
    assert world.ask() is None
    world.clock.advance(1.0)
    world.engine.pending[0].arrive(48)
    world.matches.new_step()
    assert world.timed() == (48, 0.0)
    assert world.matches.asked == 1


def test_an_engine_that_answers_with_an_error_has_a_miss(world: World) -> None:
    world.engine.hit_tokens = 0
    assert world.ask() == 0


# -- old answers -------------------------------------------------------------------------------------------------------


def test_an_answer_is_used_while_it_is_fresh(world: World) -> None:
    world.ask()
    world.clock.advance(FRESH_S)
    assert world.ask() == 64
    assert world.matches.asked == 1


def test_an_old_answer_is_asked_for_anew(world: World) -> None:
    world.ask()
    world.clock.advance(FRESH_S + 0.1)
    world.engine.hit_tokens = 16
    assert world.ask() == 16
    assert world.matches.asked == 2


def test_a_store_that_never_answers_is_a_miss_and_not_asked_for_ever(world: World) -> None:
    """The engine answers at its deadline; the scheduler comes by a little later, and must not begin anew."""
    world.engine.takes_s = NEVER
    assert world.ask() is None
    world.clock.advance(LOOKUP_DEADLINE_S)
    world.engine.pending[0].arrive(0)
    world.clock.advance(0.01)
    world.matches.new_step()
    assert world.ask() == 0
    assert world.matches.asked == 1
