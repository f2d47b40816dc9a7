"""The boundary rule, row by row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.disagg import backoff, boundary
from kvactors.errors import TransferPlanError


@pytest.mark.parametrize(
    ("has_state", "lookahead", "tokens"),
    [(False, 0, 0), (False, 1, 0), (False, 3, 2), (True, 0, 1), (True, 1, 1), (True, 2, 1), (True, 3, 2), (True, 5, 4)],
)
def test_backoff(has_state: bool, lookahead: int, tokens: int) -> None:
    assert backoff(has_state, lookahead) == tokens


ROWS: list[tuple[str, int, dict[str, Any], int, int]] = [
    # what, N, how, tokens handed over, tokens that prefill computes
    ("a state: N - 1", 10, {"has_state": True}, 9, 9),
    ("two tokens", 2, {"has_state": True}, 1, 1),
    ("N = 1: an empty pull, nothing cut", 1, {"has_state": True}, 0, 1),
    ("N = 0", 0, {"has_state": True}, 0, 0),
    ("lookahead 3: N - 2", 10, {"has_state": True, "lookahead": 3}, 8, 8),
    ("N = b", 2, {"has_state": True, "lookahead": 3}, 0, 2),
    ("N < b", 1, {"has_state": True, "lookahead": 3}, 0, 1),
    ("N = b + 1", 3, {"has_state": True, "lookahead": 3}, 1, 1),
    ("attention alone: all", 10, {"has_state": False}, 10, 10),
    ("attention alone, N = 1", 1, {"has_state": False}, 1, 1),
    ("attention alone, lookahead 3", 10, {"has_state": False, "lookahead": 3}, 8, 8),
    ("attention alone, N = b: not applied", 2, {"has_state": False, "lookahead": 3}, 2, 2),
    ("skips the prefix cache", 10, {"has_state": True, "skips_prefix_cache": True}, 0, 10),
    ("skips the prefix cache, attention alone", 10, {"has_state": False, "skips_prefix_cache": True}, 0, 10),
    ("embeddings without ids", 10, {"has_state": True, "has_ids": False}, 0, 10),
    ("embeddings without ids, attention alone", 10, {"has_state": False, "has_ids": False}, 0, 10),
]


@pytest.mark.parametrize(("prompt", "how", "handed", "computed"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_where_prefill_ends(prompt: int, how: dict[str, Any], handed: int, computed: int) -> None:
    b = boundary(prompt, **how)
    assert (b.handoff_tokens, b.prefill_tokens, b.truncated) == (handed, computed, computed < prompt)
    assert b.decode_tokens(0) == handed


@pytest.mark.parametrize(
    ("local", "asked"),
    [(0, 128), (16, 112), (127, 1), (128, 0), (129, 0)],
)
def test_decode_asks_for_what_it_does_not_hold(local: int, asked: int) -> None:
    assert boundary(129, has_state=True).decode_tokens(local) == asked


def test_prefill_runs_what_it_kept_also_after_a_preemption() -> None:
    """vllm#53663: N = 129, blocks of 128, prefill has the first block cached: it runs 128 tokens, not none."""
    ids = list(range(129))
    b = boundary(len(ids), has_state=True)
    kept = b.cut(ids)
    longest_local_match = (len(kept) - 1) // 128 * 128
    assert (longest_local_match, len(kept) - longest_local_match) == (0, 128)
    # the request waits again: the number it came with gives the same cut, of lists that were cut already
    again = boundary(129, has_state=True)
    assert again == b
    assert again.cut(kept) == kept == ids[:128]


@given(st.integers(0, 50), st.booleans(), st.integers(0, 8))
def test_both_roles_agree(prompt: int, has_state: bool, lookahead: int) -> None:
    b = boundary(prompt, has_state=has_state, lookahead=lookahead)
    assert b.handoff_tokens in (0, b.prefill_tokens)
    assert 0 <= b.handoff_tokens <= b.prompt_tokens
    assert b.cut(b.cut(range(prompt))) == b.cut(range(prompt))
    if has_state and prompt:
        assert b.handoff_tokens < prompt, "decode computes at least the last token"
    if b.truncated:
        assert b.prompt_tokens - b.prefill_tokens == backoff(has_state, lookahead)
        assert b.prefill_tokens > 0


@pytest.mark.parametrize(("prompt", "lookahead", "says"), [(-1, 0, "prompt_tokens = -1"), (1, -2, "lookahead = -2")])
def test_negative_numbers(prompt: int, lookahead: int, says: str) -> None:
    with pytest.raises(TransferPlanError, match=says):
        boundary(prompt, has_state=True, lookahead=lookahead)
