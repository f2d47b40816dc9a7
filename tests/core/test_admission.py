"""What is said of requests that make no sense: what is wrong, where, and what to give, however large it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvactors.core.admission import LocalBlocks, problem_of
from kvactors.core.answers import listed, shown
from kvactors.core.steps import NULL_BLOCK, GroupBlocks, StepRequest
from kvactors.core.store import Outcome
from tests.engine.rig import full_layout, hashes

HUGE = list(range(100_000))


def request(**odd: Any) -> StepRequest:
    return StepRequest(**{"request_id": "a", "hashes": hashes(2), "groups": {0: GroupBlocks([1, 2], (0,), (1,))}, **odd})


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        ({}, ""),
        ({"request_id": 7}, "request_id is the number 7; give a text"),
        ({"restarted_at": -1}, "restarted_at is the number -1; give a number of tokens, or None"),
        ({"restarted_at": "x" * 99}, f"restarted_at is the text '{'x' * 40}'; give a number of tokens, or None"),
        ({"hashes": hashes(1)[0]}, "hashes is 32 bytes; give a sequence of bytes, one per hash unit"),
        ({"hashes": ["ab", b"x"]}, "hashes holds str; every block hash is bytes"),
        ({"groups": HUGE}, "groups is a list of 100000; give a mapping of group id to GroupBlocks"),
        ({"groups": {3: GroupBlocks([])}}, "group 3 does not exist; the layout has 0"),
        ({"groups": {0: HUGE}}, "group 0 is a list of 100000; give a GroupBlocks"),
        ({"groups": {0: GroupBlocks(7)}}, "group 0: block_ids is the number 7; give the local block id of each block index"),
        ({"groups": {0: GroupBlocks([1], "0")}}, "group 0: the load list is the text '0'; give block indices"),
        ({"groups": {0: GroupBlocks([1, 2, 3], (2,))}}, "group 0: load of block 2, but the hashes cover only 2 blocks"),
        ({"groups": {0: GroupBlocks([1], (), 0)}}, "group 0: the save list is the number 0; give block indices"),
    ],
)
def test_a_problem_says_what_came_and_what_to_give(odd: dict[str, Any], problem: str) -> None:
    assert problem_of(request(**odd), full_layout(), 16) == problem


def taken(*groups: tuple[str, GroupBlocks]) -> list[str]:
    """What is said of requests of one step, one after another; those with the same letter have the same prompt."""
    blocks = LocalBlocks({0: 16, 1: 32}, 16)
    return [blocks.take(StepRequest(str(n), hashes(4, name), {0: given})) for n, (name, given) in enumerate(groups)]


def test_a_local_block_holds_one_block() -> None:
    """Else one of two keys would get the other's bytes."""
    save = (0, 1)
    assert taken(("a", GroupBlocks([3, 3], (), save)))[0] == "group 0: local block 3 is named for two blocks of the request"
    assert taken(("a", GroupBlocks([3, 3], (0,), (1,))))[0] == "group 0: local block 3 is named for two blocks of the request"
    assert taken(
        ("a", GroupBlocks([3, 4], (), save)), ("b", GroupBlocks([5, 4], (), save)), ("b", GroupBlocks([5, 6], (), save))
    ) == [
        "",
        "group 0: local block 4 is another block of an earlier request of the step",
        "",
    ]
    assert taken(("a", GroupBlocks([3], (0,))), ("b", GroupBlocks([3], (), (0,))))[1].startswith(
        "group 0: local block 3 is another"
    )
    assert taken(("a", GroupBlocks([3], (0,))), ("a", GroupBlocks([3], (0,))))[1].endswith(
        "loaded by another request of the step too"
    )


def test_a_request_that_is_left_out_holds_no_block() -> None:
    said = taken(("a", GroupBlocks([3], (0,))), ("a", GroupBlocks([3, 4], (0, 1))), ("a", GroupBlocks([9, 4], (), (1,))))
    assert [bool(problem) for problem in said] == [False, True, False]
    said = taken(("a", GroupBlocks([3], (0,))), ("a", GroupBlocks([3, 4], (0, 1))), ("a", GroupBlocks([9, 4], (1,))))
    assert [bool(problem) for problem in said] == [False, True, False], "nor one that it was to load"


def test_a_block_of_several_hash_units_is_told_by_its_last() -> None:
    blocks, first = LocalBlocks({1: 32}, 16), hashes(1)
    prompts = [[*first, *hashes(1, name)] for name in ("a", "b")]
    said = [blocks.take(StepRequest(str(n), prompt, {1: GroupBlocks([4], (), (0,))})) for n, prompt in enumerate(prompts)]
    assert said == ["", "group 1: local block 4 is another block of an earlier request of the step"]


def test_a_place_without_a_block_may_be_loaded_by_several() -> None:
    nothing = GroupBlocks([NULL_BLOCK], (0,))
    assert taken(("a", nothing), ("b", nothing)) == ["", ""]


def test_what_is_shared_or_absent_contradicts_nothing() -> None:
    assert taken(("a", GroupBlocks([3, 4], (), (0, 1))), ("a", GroupBlocks([3, 9], (), (0, 1)))) == ["", ""], "one prefix"
    assert taken(("a", GroupBlocks([-1, -1], (0, 1))), ("b", GroupBlocks([-1, -1], (), (0, 1)))) == ["", ""], "null blocks"
    assert taken(("a", GroupBlocks([3], (0,), (0,)))) == [""]
    blocks = LocalBlocks({0: 16, 1: 32}, 16)
    request = StepRequest("a", hashes(4), {0: GroupBlocks([3, 4], (), (0, 1)), 1: GroupBlocks([3, 4], (), (0, 1))})
    assert blocks.take(request) == "", "groups have local blocks of their own"
    by_memory = StepRequest("b", [], {0: GroupBlocks([3], (0,))})
    assert blocks.take(by_memory) == "", "its hashes are the engine's to know"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        pytest.param(10**5000, "a number of more than 20 digits", id="huge"),
        (b"abc", "3 bytes"),
        ("a\nb", r"the text 'a\nb'"),
        ({1: 2}, "a dict of 1"),
        (np.zeros(9), "an object of type ndarray"),
        (Outcome.OK, "the Outcome OK"),
        (ValueError("x"), "the exception ValueError: x"),
    ],
)
def test_what_came_is_said_in_few_words(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "'a'"),
        (list("abcde"), "'a', 'b', 'c', 'd', 'e'"),
        (list("abc") * 9, "'a', 'b', 'c', 'a', 'b' and 22 more"),
    ],
)
def test_names_are_listed_as_far_as_they_can_be_read(names: list[str], text: str) -> None:
    assert listed(names) == text
