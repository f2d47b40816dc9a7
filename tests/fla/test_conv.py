"""The causal convolution: prefill and update against float64 loops, states and padding byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvactors.errors import StateError
from kvactors.memory.fla import causal_conv1d_fn, causal_conv1d_update
from tests.fla import oracle
from tests.fla.padded import a_rounding, close, exact, padded_pages

CHANNELS, PAGES = 16, 7
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def starts(*lengths: int) -> Any:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def kernel(width: int, dtype: Any, bias: bool = True) -> tuple[Any, Any]:
    return torch.randn(width, CHANNELS).to(dtype), torch.randn(CHANNELS).to(dtype) if bias else None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_prefill_of_several_sequences(dtype: Any, width: int, bias: bool, activation: str | None) -> None:
    lengths, slots, flags = [5, 1, 0, 9, 2, 3], [3, 1, 5, 6, 0, 4], [True, True, True, False, True, False]
    pages = padded_pages(PAGES, (width + 1, CHANNELS), dtype)  # two rows more than the history
    weight, offset = kernel(width, dtype, bias)
    x = torch.randn(sum(lengths) + 2, CHANNELS).to(dtype)  # two tokens behind the last sequence
    before, states = pages.raw.clone(), exact(pages.state)
    out = causal_conv1d_fn(
        x, weight, offset, pages.state, starts(*lengths), ints(*slots), torch.tensor(flags), activation=activation
    )
    begin = 0
    for length, slot, flag in zip(lengths, slots, flags, strict=True):
        tokens, got = exact(x[begin : begin + length]), out[begin : begin + length]
        begin += length
        if slot == 0:
            assert torch.equal(got, torch.zeros_like(got)), "page 0 is the null block"
            continue
        history = states[slot][: width - 1] * (1.0 if flag else 0.0)
        close(got, oracle.convolution(history, tokens, exact(weight), exact(offset) if bias else None, bool(activation)))
        if length and width > 1:
            expected = states[slot].copy()
            expected[: width - 1] = [*history, *tokens][-(width - 1) :]
            assert np.array_equal(exact(pages.state[slot]), expected)
    assert torch.equal(out[begin:], torch.zeros(2, CHANNELS, dtype=dtype))
    assert pages.rows_changed(before) == ([] if width == 1 else [1, 3, 4, 6])


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 7, 11])
def test_a_prompt_in_chunks_and_token_by_token(cut: int) -> None:
    weight, bias = kernel(4, torch.float32)
    x = torch.randn(12, CHANNELS)
    whole = padded_pages(2, (3, CHANNELS), torch.float32)
    chunked = padded_pages(2, (3, CHANNELS), torch.float32)
    slot, end = ints(1), torch.tensor([False])
    expected = causal_conv1d_fn(x, weight, bias, whole.state, starts(12), slot, end)
    first = causal_conv1d_fn(x[:cut], weight, bias, chunked.state, starts(cut), slot, end)
    rest = causal_conv1d_fn(x[cut:], weight, bias, chunked.state, starts(12 - cut), slot, ~end)
    torch.testing.assert_close(torch.cat([first, rest]), expected)
    assert torch.equal(chunked.state[1], whole.state[1])
    chunked.state.zero_()
    steps = [causal_conv1d_update(t[None].clone(), chunked.state, weight, bias, "silu", slot) for t in x]
    torch.testing.assert_close(torch.cat(steps), expected)
    assert torch.equal(chunked.state[1], whole.state[1])


def test_prefill_without_states_and_in_three_dimensions() -> None:
    weight, bias = kernel(4, torch.float32)
    x = torch.randn(2, 6, CHANNELS)
    flat = causal_conv1d_fn(x.view(12, CHANNELS), weight, bias, query_start_loc=starts(6, 6))
    assert torch.equal(causal_conv1d_fn(x, weight, bias), flat.view(2, 6, CHANNELS))
    heads = causal_conv1d_fn(x.view(12, CHANNELS), weight, bias, query_start_loc=starts(6, 6), head_num=4)
    assert torch.equal(heads, flat.view(12, 4, 4).transpose(0, 1))
    assert torch.equal(causal_conv1d_fn(x[0], weight, bias), flat[:6])


def test_prefill_pages_are_the_sequences_without_cache_indices() -> None:
    weight, bias = kernel(3, torch.float32)
    pages = padded_pages(3, (2, CHANNELS), torch.float32)
    before = pages.raw.clone()
    x = torch.randn(6, CHANNELS)
    causal_conv1d_fn(x, weight, bias, pages.state, starts(3, 3))
    assert torch.equal(pages.state[0], x[1:3])
    assert torch.equal(pages.state[1], x[4:6])
    assert pages.rows_changed(before) == [0, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("tokens", [1, 3])
def test_update_of_padded_batches(dtype: Any, width: int, tokens: int) -> None:
    pages = padded_pages(PAGES, (width, CHANNELS), dtype)  # one row more than the history
    weight, bias = kernel(width, dtype)
    slots = [4, 0, 2, -1, 6]
    x = torch.randn(len(slots), tokens, CHANNELS).to(dtype)
    given, before, states = x.clone(), pages.raw.clone(), exact(pages.state)
    batch = x[:, 0] if tokens == 1 else x
    assert causal_conv1d_update(batch, pages.state, weight, bias, "silu", ints(*slots)) is batch
    for i, slot in enumerate(slots):
        if slot < 1:
            assert torch.equal(x[i], given[i]), "padding is not written"
            continue
        history = states[slot][: width - 1]
        close(x[i], oracle.convolution(history, exact(given[i]), exact(weight), exact(bias), True))
        expected = [*history, *exact(given[i])][-(width - 1) :]
        assert np.array_equal(exact(pages.state[slot]), [*expected, states[slot][width - 1]])
    assert pages.rows_changed(before) == [2, 4, 6]


def test_update_writes_into_strided_tokens() -> None:
    weight, bias = kernel(4, torch.float32)
    wide, states = torch.randn(3, 2, CHANNELS + 4), torch.zeros(2, 3, 3, CHANNELS)
    x, behind = wide[..., :CHANNELS], wide[..., CHANNELS:].clone()
    expected = causal_conv1d_update(x.clone(), states[0], weight, bias)
    assert causal_conv1d_update(x, states[1], weight, bias) is x
    assert torch.equal(x, expected)
    assert torch.equal(wide[..., CHANNELS:], behind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_speculative_rounds_equal_the_accepted_tokens_one_by_one(dtype: Any) -> None:
    """Drafts of 4 a round, of which some are accepted; the outputs are those of a prefill of the accepted tokens."""
    width, drafts = 4, 4
    weight, bias = kernel(width, dtype)
    pages = padded_pages(3, (width - 2 + drafts, CHANNELS), dtype)
    true = {1: torch.randn(20, CHANNELS).to(dtype), 2: torch.randn(20, CHANNELS).to(dtype)}
    expected = {slot: causal_conv1d_fn(tokens, weight, bias) for slot, tokens in true.items()}
    for slot in true:
        pages.state[slot, :3] = 0
    done, accepted = {1: 0, 2: 0}, {1: 1, 2: 1}
    before = pages.raw.clone()
    for rounds in ([3, 1], [4, 2], [1, 4], [2, 2]):
        x = torch.randn(2, drafts, CHANNELS).to(dtype)  # what is not accepted is anything
        for i, slot in enumerate((1, 2)):
            x[i, : rounds[i]] = true[slot][done[slot] : done[slot] + rounds[i]]
        out = torch.empty_like(x)
        counts = ints(accepted[1], accepted[2])
        assert causal_conv1d_update(x, pages.state, weight, bias, "silu", ints(1, 2), counts, out=out) is out
        for i, slot in enumerate((1, 2)):
            torch.testing.assert_close(out[i, : rounds[i]], expected[slot][done[slot] : done[slot] + rounds[i]])
            done[slot] += rounds[i]
            accepted[slot] = rounds[i]
    assert pages.rows_changed(before) == [1, 2]


def test_update_of_different_lengths() -> None:
    weight, bias = kernel(4, torch.float32)
    pages = padded_pages(4, (10, CHANNELS), torch.float32)
    before, states = pages.raw.clone(), exact(pages.state)
    x, accepted = torch.randn(9, CHANNELS), [6, 2, 3]
    out = torch.full_like(x, 7.0)
    causal_conv1d_update(x, pages.state, weight, bias, None, ints(3, 1, 2), ints(*accepted), starts(8, 0, 1), 8, out=out)
    for slot, count, begin, end in ((3, 6, 0, 8), (2, 3, 8, 9)):
        history = states[slot][count - 1 : count + 2]
        close(out[begin:end], oracle.convolution(history, exact(x[begin:end]), exact(weight), exact(bias), False))
        kept = [*history[1:], *exact(x[begin:end])]
        assert np.array_equal(exact(pages.state[slot]), [*kept, *states[slot][len(kept) :]])
    assert pages.rows_changed(before) == [2, 3]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("update", [True, False])
def test_products_that_cancel_are_summed_in_float32(dtype: Any, update: bool) -> None:
    """(1 + e)² - (1 + 2e) = e², which is lost where a product is rounded to the inputs' type."""
    e = torch.finfo(dtype).eps
    weight = torch.tensor([[1 + e], [1.0]], dtype=dtype).expand(2, CHANNELS)
    state = torch.full((2, 1, CHANNELS), 1 + e, dtype=dtype)
    x = torch.full((1, CHANNELS), -(1 + 2 * e), dtype=dtype)
    if update:
        out = causal_conv1d_update(x, state, weight, conv_state_indices=ints(1))
    else:
        out = causal_conv1d_fn(x, weight, None, state, None, ints(1), torch.tensor([True]), None)
    assert out.tolist() == [[e * e] * CHANNELS]


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["prefill", "update", "speculative"])
def test_only_what_is_stored_is_rounded_to_the_states_type(dtype: Any, state_dtype: Any, form: str) -> None:
    weight, bias = kernel(4, dtype)
    pages = padded_pages(3, (7, CHANNELS), state_dtype)
    states, x = exact(pages.state), torch.randn(5, CHANNELS).to(dtype)
    given = x.clone()
    if form == "prefill":
        out = causal_conv1d_fn(x, weight, bias, pages.state, starts(5), ints(1), torch.tensor([True]))
    else:
        accepted = ints(1) if form == "speculative" else None
        out = causal_conv1d_update(x, pages.state, weight, bias, "silu", ints(1), accepted, starts(5), 5)
    y = oracle.convolution(states[1][:3], exact(given), exact(weight), exact(bias), True)
    if dtype == torch.float32:
        close(out, y)
    else:
        a_rounding(out, y)
    window = [*states[1][:3], *exact(given.to(state_dtype))]
    kept = window[1:] if form == "speculative" else [*window[-3:], *states[1][3:]]
    assert np.array_equal(exact(pages.state[1]), kept)


STATES = torch.zeros(3, 3, 4)
X, W, B = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4)
BAD: dict[str, tuple[Any, str]] = {
    "weight": (lambda s: causal_conv1d_fn(X, torch.ones(4, 3), B, s), r"weight of shape \(4, 3\)"),
    "bias": (lambda s: causal_conv1d_fn(X, W, torch.ones(3), s), r"bias of shape \(3,\)"),
    "activation": (lambda s: causal_conv1d_fn(X, W, B, s, activation="relu"), "activation 'relu'"),
    "falling": (lambda s: causal_conv1d_fn(X, W, B, s, ints(0, 3, 2)), "must rise"),
    "too far": (lambda s: causal_conv1d_fn(X, W, B, s, ints(0, 5)), "must rise"),
    "indices": (lambda s: causal_conv1d_fn(X, W, B, s, ints(0, 4), ints(1, 2)), "for 1 sequences"),
    "flags": (lambda s: causal_conv1d_fn(X, W, B, s, ints(0, 4), ints(1), torch.tensor([True] * 2)), "for 1 sequences"),
    "slot": (lambda s: causal_conv1d_fn(X, W, B, s, ints(0, 4), ints(3), torch.tensor([True])), "index 3 is outside"),
    "shared page": (lambda s: causal_conv1d_fn(X, W, B, s, ints(0, 2, 4), ints(1, 1)), "an index repeats"),
    "short page": (lambda s: causal_conv1d_fn(X, W, B, s[:, :2], ints(0, 4)), "3 or more"),
    "heads": (lambda s: causal_conv1d_fn(X, W, B, s, ints(0, 4), head_num=3), "head_num 3"),
    "scheduling": (lambda s: causal_conv1d_fn(X, W, B, s, metadata=object()), "metadata not supported"),
    "drafts": (lambda s: causal_conv1d_update(X[None], s, W, B, None, ints(1), ints(1)), "needs 6 rows"),
    "accepted": (lambda s: causal_conv1d_update(X[None, :1], s, W, B, None, ints(1), ints(2)), "needs 4 rows"),
    "longest": (lambda s: causal_conv1d_update(X, s, W, B, None, ints(1), None, ints(0, 4), 3), "max_query_len 3"),
    "shared": (lambda s: causal_conv1d_update(X[:2], s, W, B, None, ints(1, 1)), "an index repeats"),
    "out": (lambda s: causal_conv1d_update(X[:1], s, W, B, None, ints(1), out=torch.ones(2, 4)), "out of shape"),
    "twice": (lambda s: causal_conv1d_update(X[None], s, W, query_start_loc=ints(0, 4)), "query_start_loc only with two"),
}


@pytest.mark.parametrize(("act", "says"), BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused(act: Any, says: str) -> None:
    states = STATES.clone()
    with pytest.raises(StateError, match=says):
        act(states)
    assert torch.equal(states, STATES)
    assert torch.equal(X, torch.ones(4, 4))
