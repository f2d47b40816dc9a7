"""The gated delta rule: token by token and in chunks, against float64 loops and against each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kvactors.errors import StateError
from kvactors.memory import gather_state_rows, scatter_state_rows_
from kvactors.memory.fla import chunked_gated_delta_rule, recurrent_gated_delta_rule
from tests.fla import oracle
from tests.fla.padded import a_rounding, close, exact, padded_pages

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6
ROW = (HEADS, VALUE_DIM, KEY_DIM)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Inputs(NamedTuple):
    q: Any
    k: Any
    v: Any
    beta: Any
    g: Any

    def part(self, begin: int, end: int) -> Inputs:
        return Inputs(*(each[begin:end] for each in self))


def inputs(tokens: int, dtype: Any) -> Inputs:
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, KEY_HEADS, KEY_DIM), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(tokens, HEADS, VALUE_DIM).to(dtype)
    return Inputs(q, k, v, torch.rand(tokens, HEADS).to(dtype), -torch.rand(tokens, HEADS))


def expected(given: Inputs, state: Any, scale: float, gk: Any = None) -> tuple[Any, list[Any]]:
    q, k, v, beta, g = (exact(each) for each in given)
    return oracle.delta_rule(q, k, v, state, beta, g, scale, None if gk is None else exact(gk))


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leading_zero", [True, False])
def test_decode_of_a_padded_batch(dtype: Any, state_dtype: Any, leading_zero: bool) -> None:
    pages = padded_pages(6, ROW, state_dtype)
    given = inputs(6, dtype)
    slots = ints(4, 1, -1, 3, -1, -1)  # the last two rows are behind the last sequence
    lengths = ints(0, 1, 1, 1, 1) if leading_zero else ints(1, 1, 1, 1)
    before, states = pages.raw.clone(), exact(pages.state)
    q, k, v, beta, g = given
    out = recurrent_gated_delta_rule(
        q, k, v, pages.state, beta=beta, scale=0.3, actual_seq_lengths=lengths, ssm_state_indices=slots, g=g
    )
    assert out.dtype == dtype
    for t, slot in ((0, 4), (1, 1), (3, 3)):
        y, after = expected(given.part(t, t + 1), states[slot], 0.3)
        close(out[t : t + 1], y)
        close(pages.state[slot], after[-1])
    assert not out[[2, 4, 5]].any()
    assert pages.rows_changed(before) == [1, 3, 4]


@pytest.mark.parametrize("table", [True, False])
def test_drafts_begin_from_the_last_accepted_token(table: bool) -> None:
    """Each token leaves its state in a page; the next round begins from the page of the last token that was accepted."""
    pages, width, rows = padded_pages(9, ROW, torch.float32), 4, ((5, 1, 7, 2), (3, 8, 4, 6))
    first, second = inputs(2 * width, torch.float32), inputs(2 * width, torch.float32)
    before, states = pages.raw.clone(), exact(pages.state)
    indices = ints(*rows) if table else ints(*rows).flatten()
    lengths = ints(0, width, width)
    accepted = (2, 4)
    for given, counts in ((first, ints(1, 1)), (second, ints(*accepted))):
        q, k, v, beta, g = given
        out = recurrent_gated_delta_rule(
            q, k, v, pages.state, beta=beta, scale=1.0, actual_seq_lengths=lengths, ssm_state_indices=indices,
            num_accepted_tokens=counts, g=g,
        )  # fmt: skip
    for i, slots in enumerate(rows):
        part = slice(i * width, (i + 1) * width)
        _, kept = expected(first.part(part.start, part.stop), states[slots[0]], 1.0)
        y, after = expected(second.part(part.start, part.stop), kept[accepted[i] - 1], 1.0)
        close(out[part], y)
        for slot, state in zip(slots, after, strict=True):
            close(pages.state[slot], state)
    assert pages.rows_changed(before) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_table_keeps_each_sequence_to_its_own_pages() -> None:
    """Shorter than the table's rows, and shorter than what was accepted before: no neighbour's page is read or written."""
    pages = padded_pages(10, ROW, torch.float32)
    table, lengths, accepted = ((1, 2, 3), (4, 5, 6), (7, 8, 9)), (2, 0, 1), (3, 1, 2)
    given, states, before = inputs(3, torch.float32), exact(pages.state), pages.raw.clone()
    q, k, v, beta, g = given
    out = recurrent_gated_delta_rule(
        q, k, v, pages.state, beta=beta, cu_seqlens=ints(0, 2, 2, 3), ssm_state_indices=ints(*table),
        num_accepted_tokens=ints(*accepted), g=g,
    )  # fmt: skip
    begin = 0
    for slots, length, count in zip(table, lengths, accepted, strict=True):
        y, after = expected(given.part(begin, begin + length), states[slots[count - 1]], 1.0)
        close(out[begin : begin + length], y)
        for slot, state in zip(slots, after, strict=False):
            close(pages.state[slot], state)
        begin += length
    assert pages.rows_changed(before) == [1, 2, 7]


def test_gates_are_optional_and_may_decay_each_key_channel() -> None:
    given, gk = inputs(3, torch.float32), -torch.rand(3, HEADS, KEY_DIM)
    free = given._replace(beta=torch.ones(3, HEADS), g=torch.zeros(3, HEADS))
    slots, lengths = torch.zeros(3, dtype=torch.int32), ints(3)
    for gates in ({}, {"gk": gk}):
        state = torch.randn(1, *ROW)
        y, after = expected(free, exact(state[0]), 1.0, gates.get("gk"))
        q, k, v = given[:3]
        out = recurrent_gated_delta_rule(q, k, v, state, actual_seq_lengths=lengths, ssm_state_indices=slots, **gates)
        close(out, y)
        close(state[0], after[-1])


def test_normalized_in_the_kernel() -> None:
    given, state = inputs(3, torch.float32), torch.randn(1, *ROW)
    long = given._replace(q=given.q * 5, k=given.k * 0.1)
    unit = [torch.from_numpy(oracle.normalized(exact(each))) for each in (long.q, long.k)]
    y, after = expected(given._replace(q=unit[0], k=unit[1]), exact(state[0]), 1.0)
    slots = torch.zeros(3, dtype=torch.int32)
    out = recurrent_gated_delta_rule(
        long.q, long.k, long.v, state, beta=long.beta, g=long.g, cu_seqlens=ints(0, 3), ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    close(out, y)
    close(state[0], after[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunked", [True, False])
def test_queries_and_keys_are_normalized_without_rounding(dtype: Any, chunked: bool) -> None:
    """Half queries and keys, float32 values: a norm rounded to halves would be off by thousands of float32's steps."""
    given, state = inputs(3, dtype), torch.randn(1, *ROW)
    long = given._replace(q=given.q * 5, k=given.k * 3, v=given.v.float())
    unit = [torch.from_numpy(oracle.normalized(exact(each))) for each in (long.q, long.k)]
    y, after = expected(long._replace(q=unit[0], k=unit[1]), exact(state[0]), 1.0)
    q, k, v, beta, g = long
    if chunked:
        out, final = chunked_gated_delta_rule(
            q, k, v, state, beta=beta, g=g, cu_seqlens=ints(0, 3), scale=1.0, use_qk_l2norm_in_kernel=True
        )
    else:
        out = recurrent_gated_delta_rule(
            q, k, v, state, beta=beta, g=g, cu_seqlens=ints(0, 3), ssm_state_indices=ints(0, 0, 0),
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        final = state
    close(out, y)
    close(final[0], after[-1])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("chunked", [True, False])
def test_the_state_stays_in_float32_from_token_to_token(dtype: Any, chunked: bool) -> None:
    """A change of a quarter of the last place, which the next token reads beside a value that cancels the rest."""
    e = torch.finfo(dtype).eps / 4
    state = torch.tensor([1.0, -1.0], dtype=dtype).view(1, 1, 1, 2)
    k = torch.tensor([[1.0, 0.0]] * 2, dtype=dtype).view(2, 1, 2)
    q, v = torch.ones(2, 1, 2, dtype=dtype), torch.full((2, 1, 1), 2.0, dtype=dtype)
    beta, g = torch.tensor([[e], [0.0]], dtype=dtype), torch.zeros(2, 1)
    if chunked:
        out, _ = chunked_gated_delta_rule(q, k, v, state, beta=beta, g=g, cu_seqlens=ints(0, 2), scale=1.0)
    else:
        slots = ints(0, 0)
        out = recurrent_gated_delta_rule(q, k, v, state, beta=beta, g=g, cu_seqlens=ints(0, 2), ssm_state_indices=slots)
        assert state.flatten().tolist() == [1.0, -1.0], "stored in its type"
    assert out.flatten().tolist() == [e, e]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_outputs_are_rounded_once(dtype: Any) -> None:
    given, state = inputs(40, dtype), torch.randn(1, *ROW)
    y, after = expected(given, exact(state[0]), 0.3)
    q, k, v, beta, g = given
    slots = torch.zeros(40, dtype=torch.int32)
    out = recurrent_gated_delta_rule(q, k, v, state, beta=beta, scale=0.3, g=g, cu_seqlens=ints(0, 40), ssm_state_indices=slots)
    a_rounding(out, y)
    close(state[0], after[-1])


def test_page_0_is_a_page_like_any_other() -> None:
    given, state = inputs(1, torch.float32), torch.randn(2, *ROW)
    y, after = expected(given, exact(state[0]), 1.0)
    q, k, v, beta, g = given
    slots = ints(0)
    close(recurrent_gated_delta_rule(q, k, v, state, beta=beta, g=g, cu_seqlens=ints(0, 1), ssm_state_indices=slots), y)
    close(state[0], after[-1])


LENGTHS = (5, 1, 0, 130, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 64, 200])
@pytest.mark.parametrize("initial", [True, False])
def test_chunks_equal_the_recurrence(dtype: Any, chunk_tokens: int, initial: bool) -> None:
    total = sum(LENGTHS)
    given, places = inputs(total + 1, dtype), ints(0, *np.cumsum(LENGTHS))
    begun = torch.randn(len(LENGTHS), *ROW)
    q, k, v, beta, g = given
    out, final = chunked_gated_delta_rule(
        q, k, v, begun if initial else None, beta=beta, g=g, cu_seqlens=places, chunk_tokens=chunk_tokens
    )
    assert (out.dtype, final.dtype) == (dtype, torch.float32)
    state = begun.clone() if initial else torch.zeros_like(begun)
    slots = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).int()
    stepped = recurrent_gated_delta_rule(
        q, k, v, state, beta=beta, scale=KEY_DIM**-0.5, cu_seqlens=places, ssm_state_indices=slots, g=g
    )
    close(out, exact(stepped))
    close(final, exact(state), torch.float32)
    begin = 0
    for i, length in enumerate(LENGTHS):
        y, after = expected(given.part(begin, begin + length), exact(begun[i]) * initial, KEY_DIM**-0.5)
        close(out[begin : begin + length], y)
        close(final[i], after[-1] if after else exact(begun[i]) * initial)
        begin += length
    assert not out[total:].any()


def test_strong_decay_does_not_overflow_in_chunks() -> None:
    given = inputs(64, torch.float32)._replace(g=torch.full((64, HEADS), -20.0))
    q, k, v, beta, g = given
    out, final = chunked_gated_delta_rule(q, k, v, torch.randn(1, *ROW), beta=beta, g=g, cu_seqlens=ints(0, 64))
    assert out.isfinite().all()
    assert final.isfinite().all()
    y, _ = expected(given, np.zeros(ROW), KEY_DIM**-0.5)
    close(out[2:], y[2:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_kernel_scatter_on_padded_pages(dtype: Any) -> None:
    """A prefill of three requests, one of them new, and then a decode step of all, as a model runner makes them."""
    pages, slots, flags = padded_pages(6, ROW, torch.bfloat16), ints(4, 1, 3), torch.tensor([True, False, True])
    pages.state[1] = float("nan")  # the page that the new request got
    lengths = (9, 70, 2)
    given, states, before = inputs(sum(lengths), dtype), exact(pages.state), pages.raw.clone()
    q, k, v, beta, g = given
    begun = gather_state_rows(pages.state, slots, flags, torch.float32)
    out, final = chunked_gated_delta_rule(q, k, v, begun, beta=beta, g=g, cu_seqlens=ints(0, *np.cumsum(lengths)))
    scatter_state_rows_(pages.state, slots, final)
    step = inputs(3, dtype)
    decoded = recurrent_gated_delta_rule(
        step.q, step.k, step.v, pages.state, beta=step.beta, scale=KEY_DIM**-0.5, actual_seq_lengths=ints(0, 1, 1, 1),
        ssm_state_indices=slots, g=step.g,
    )  # fmt: skip
    begin = 0
    for i, (length, slot) in enumerate(zip(lengths, slots.tolist(), strict=True)):
        initial = states[slot] if flags[i] else np.zeros(ROW)
        y, after = expected(given.part(begin, begin + length), initial, KEY_DIM**-0.5)
        close(out[begin : begin + length], y)
        rounded = exact(torch.from_numpy(after[-1]).bfloat16())
        y, after = expected(step.part(i, i + 1), rounded, KEY_DIM**-0.5)
        close(decoded[i : i + 1], y, torch.bfloat16)
        close(pages.state[slot], after[-1])
        begin += length
    assert pages.rows_changed(before) == [1, 3, 4]


GIVEN = inputs(2, torch.float32)
STATE = torch.zeros(3, *ROW)


def call(state: Any, **change: Any) -> Any:
    q, k, v, beta, g = GIVEN
    arguments = {"query": q, "key": k, "value": v, "state": state, "beta": beta, "g": g}
    return recurrent_gated_delta_rule(
        **{**arguments, "actual_seq_lengths": ints(1, 1), "ssm_state_indices": ints(1, 2), **change}
    )


BAD = {
    "no lengths": ({"actual_seq_lengths": None}, "either actual_seq_lengths or cu_seqlens"),
    "both": ({"cu_seqlens": ints(0, 1, 2)}, "either actual_seq_lengths or cu_seqlens"),
    "too long": ({"actual_seq_lengths": ints(2, 1)}, "for 2 tokens"),
    "negative": ({"actual_seq_lengths": ints(-1, 1)}, "must not be negative"),
    "too few pages": ({"ssm_state_indices": ints(1)}, "1 ssm_state_indices for 2 tokens"),
    "narrow table": ({"ssm_state_indices": ints((1,)), "actual_seq_lengths": ints(2)}, "2 tokens, its row of the table 1"),
    "table and lengths": ({"ssm_state_indices": ints((1, 2))}, "2 lengths for 1 sequences"),
    "shared page": ({"ssm_state_indices": ints(1, 1)}, "sequences 0 and 1 both write page 1"),
    "shared in a table": ({"ssm_state_indices": ints((2, 1), (2, 0))}, "sequences 0 and 1 both write page 2"),
    "page": ({"ssm_state_indices": ints(1, 3)}, "index 3 is outside"),
    "accepted": ({"num_accepted_tokens": ints(1, 2)}, "sequence 1 accepted 2 tokens of 1"),
    "state": ({"state": torch.zeros(3, HEADS, KEY_DIM, VALUE_DIM)}, "state of shape"),
    "beta": ({"beta": torch.ones(2, 1)}, "beta of shape"),
    "g": ({"g": torch.ones(1, HEADS)}, "g of shape"),
    "heads": ({"value": torch.ones(2, 3, VALUE_DIM), "state": torch.zeros(3, 3, VALUE_DIM, KEY_DIM)}, "3 value heads over 2"),
    "query": ({"query": torch.ones(2, 1, KEY_DIM)}, "query and key alike"),
}


@pytest.mark.parametrize(("change", "says"), BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    state = STATE.clone()
    with pytest.raises(StateError, match=says):
        call(**{"state": state, **change})
    assert torch.equal(state, STATE)
