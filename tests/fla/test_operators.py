"""Which operators run: the AscendC library when it is given, the references else; and what a padded state becomes for it."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvactors.errors import StateError
from kvactors.memory.fla import (
    causal_conv1d_fn,
    causal_conv1d_update,
    chunked_gated_delta_rule,
    operators,
    recurrent_gated_delta_rule,
    using_operators,
)
from tests.fla.padded import padded_pages

CHANNELS = 8
ROW = (2, 4, 4)


class Library:
    """Has AscendC's signatures and the references' results, refuses what AscendC would misread, and notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def causal_conv1d_fn(self, x: Any, weight: Any, bias: Any, conv_states: Any = None, **options: Any) -> Any:
        return self._run("causal_conv1d_fn", causal_conv1d_fn, conv_states, (x, weight, bias, conv_states), options)

    def causal_conv1d_update(self, x: Any, conv_state: Any, weight: Any, **options: Any) -> Any:
        return self._run("causal_conv1d_update", causal_conv1d_update, conv_state, (x, conv_state, weight), options)

    def recurrent_gated_delta_rule(self, query: Any, key: Any, value: Any, state: Any, **options: Any) -> Any:
        assert options["g"] is not None or options["gk"] is not None
        assert options["beta"] is not None
        return self._run("recurrent_gated_delta_rule", recurrent_gated_delta_rule, state, (query, key, value, state), options)

    def _run(self, name: str, reference: Any, state: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        assert state is None or state.is_contiguous()
        self.calls.append((name, options | {"state": state}))
        with using_operators(None):
            return reference(*given, **options)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def both(act: Any, shape: tuple[int, ...], dense: bool) -> tuple[Any, Library]:
    """The same call on the references and on a library, from equal states; results and raw memory must be equal."""
    results, library = [], Library()
    for given in (None, library):
        torch.manual_seed(1)
        pages = padded_pages(6, shape, torch.float32)
        state = pages.state.contiguous() if dense else pages.state
        with using_operators(given):
            results.append((act(state), state.clone(), pages.raw))
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)
    return results[0][0], library


@pytest.mark.parametrize("dense", [True, False])
def test_prefill_convolution(dense: bool) -> None:
    x, weight, bias = torch.randn(9, CHANNELS), torch.randn(4, CHANNELS), torch.randn(CHANNELS)

    def act(state: Any) -> Any:
        flags = torch.tensor([True, True, False, True])
        places, slots = ints(0, 2, 5, 9, 9), ints(3, 0, 5, -1)
        return causal_conv1d_fn(x, weight, bias, state, places, slots, flags, head_num=2)

    _, library = both(act, (4, CHANNELS), dense)
    ((name, options),) = library.calls
    assert (name, options["head_num"], options["activation"]) == ("causal_conv1d_fn", 2, "silu")
    assert len(options["state"]) == (6 if dense else 3), "padding and two live pages"
    assert options["cache_indices"].tolist() == ([3, 0, 5, -1] if dense else [1, 0, 2, 0])


@pytest.mark.parametrize("dense", [True, False])
def test_decode_convolution(dense: bool) -> None:
    weight = torch.randn(4, CHANNELS)
    x = torch.randn(3, 2, CHANNELS)

    def act(state: Any) -> Any:
        out = torch.zeros_like(x)
        return causal_conv1d_update(x.clone(), state, weight, None, "silu", ints(4, 0, 2), ints(1, 1, 2), out=out)

    _, library = both(act, (4, CHANNELS), dense)
    ((name, options),) = library.calls
    assert (name, options["bias"], options["null_block_id"]) == ("causal_conv1d_update", None, 0)
    assert options["conv_state_indices"].tolist() == ([4, 0, 2] if dense else [1, 0, 2])


@pytest.mark.parametrize("dense", [True, False])
def test_the_sequences_number_is_its_page_without_indices(dense: bool) -> None:
    weight, x = torch.randn(4, CHANNELS), torch.randn(3, CHANNELS)
    both(lambda state: causal_conv1d_update(x.clone(), state, weight), (3, CHANNELS), dense)
    both(lambda state: causal_conv1d_fn(x, weight, None, state, ints(0, 1, 3)), (3, CHANNELS), dense)
    both(lambda state: causal_conv1d_fn(x[None], weight, None, state), (3, CHANNELS), dense)


@pytest.mark.parametrize("dense", [True, False])
def test_delta_rule(dense: bool) -> None:
    q, k = torch.randn(4, 1, 4), torch.randn(4, 1, 4)
    v = torch.randn(4, 2, 4)

    def act(state: Any) -> Any:
        return recurrent_gated_delta_rule(
            q, k, v, state, cu_seqlens=ints(0, 2, 2, 4), ssm_state_indices=ints((5, 1), (-1, -1), (2, 4)),
            num_accepted_tokens=ints(2, 1, 1),
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    _, library = both(act, ROW, dense)
    ((name, options),) = library.calls
    assert name == "recurrent_gated_delta_rule"
    assert options["actual_seq_lengths"].tolist() == [0, 2, 0, 2], "as vLLM-Ascend builds it"
    assert options["ssm_state_indices"].tolist() == ([[5, 1], [-1, -1], [2, 4]] if dense else [[1, 2], [0, 0], [3, 4]])
    assert len(options["state"]) == (6 if dense else 5), "with one for all padding"
    assert not options["g"].any()


def test_without_states_the_library_gets_none() -> None:
    library = Library()
    x, weight = torch.randn(3, CHANNELS), torch.randn(2, CHANNELS)
    with using_operators(library):
        causal_conv1d_fn(x, weight, None)
    assert library.calls[0][1]["state"] is None


def test_the_library_is_looked_for_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("fla_npu.ops.ascendc")
    on_npu: Any = SimpleNamespace(device=SimpleNamespace(type="npu"))
    operators._installed.cache_clear()
    assert operators._library_for(on_npu) is None, "not installed"
    for parent in ("fla_npu", "fla_npu.ops"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    assert operators._library_for(on_npu) is None, "decided once"
    operators._installed.cache_clear()
    assert operators._library_for(on_npu) is library
    assert operators._library_for(torch.ones(1)) is None, "a CPU has no AscendC"
    with using_operators(None):
        assert operators._library_for(on_npu) is None
    operators._installed.cache_clear()


def test_sequences_without_tokens_have_no_page_on_the_library() -> None:
    """Their indices, and columns of a table behind the tokens, may say anything: 99 is no page, 3 is another's."""
    x, weight = torch.randn(5, CHANNELS), torch.randn(3, CHANNELS)
    places, slots, flags = ints(0, 2, 2, 2, 5), ints(3, 99, 3, 1), torch.tensor([True] * 4)
    both(lambda state: causal_conv1d_fn(x, weight, None, state, places, slots, flags), (2, CHANNELS), False)
    both(
        lambda state: causal_conv1d_update(
            x.clone(), state, weight, None, None, slots, query_start_loc=places, max_query_len=3
        ),
        (2, CHANNELS),
        False,
    )
    q, v = torch.randn(3, 1, 4), torch.randn(3, 2, 4)

    def act(state: Any) -> Any:
        table = ints((5, 99, 1), (99, 5, 5), (2, 1, -7))
        return recurrent_gated_delta_rule(q, q, v, state, actual_seq_lengths=ints(1, 0, 2), ssm_state_indices=table)

    _, library = both(act, ROW, False)
    ((_, options),) = library.calls
    assert options["ssm_state_indices"].tolist() == [[1, 0, 0], [0, 0, 0], [2, 3, 0]]
    assert len(options["state"]) == 4


def test_the_page_of_accepted_drafts_is_read_behind_the_tokens_too() -> None:
    q, v = torch.randn(2, 1, 4), torch.randn(2, 2, 4)

    def act(state: Any) -> Any:
        return recurrent_gated_delta_rule(
            q, q, v, state, actual_seq_lengths=ints(1, 1), ssm_state_indices=ints((5, 3, 1), (2, 4, 99)),
            num_accepted_tokens=ints(3, 2),
        )  # fmt: skip

    both(act, ROW, False)


def test_a_sequence_that_begins_nowhere_is_padding_on_a_padded_state() -> None:
    q, v = torch.randn(4, 1, 4), torch.randn(4, 2, 4)

    def act(state: Any) -> Any:
        lengths, table = ints(1, 1, 2), ints((-1, 9), (2, 9), (-1, 2))
        return recurrent_gated_delta_rule(q, q, v, state, actual_seq_lengths=lengths, ssm_state_indices=table)

    result, _ = both(act, ROW, False)
    assert not result[[0, 2, 3]].any()
    assert result[1].any()


def test_a_batch_of_padding_alone() -> None:
    x, weight, q, v = torch.randn(2, CHANNELS), torch.randn(3, CHANNELS), torch.randn(2, 1, 4), torch.randn(2, 2, 4)
    places, lengths, slots = ints(0, 1, 2), ints(1, 1), ints(-1, 0)
    both(lambda state: causal_conv1d_fn(x, weight, None, state, places, slots), (2, CHANNELS), False)
    both(lambda state: causal_conv1d_update(x.clone(), state, weight, conv_state_indices=slots), (2, CHANNELS), False)
    rule = recurrent_gated_delta_rule
    both(
        lambda state: rule(q, q, v, state, actual_seq_lengths=lengths, ssm_state_indices=ints(-1, -1)),
        ROW,
        False,
    )


def refused_before_the_library(says: str, shape: tuple[int, ...], act: Any) -> None:
    library, pages = Library(), padded_pages(6, shape, torch.float32)
    before = pages.raw.clone()
    with using_operators(library), pytest.raises(StateError, match=says):
        act(pages.state)
    assert not library.calls
    assert torch.equal(pages.raw, before)


def test_pages_are_checked_before_the_library_runs() -> None:
    x, weight, q, v = torch.randn(2, CHANNELS), torch.randn(3, CHANNELS), torch.randn(2, 1, 4), torch.randn(2, 2, 4)
    places, lengths = ints(0, 1, 2), ints(1, 1)
    for slots, says in ((ints(3, 3), "repeats"), (ints(3, 6), "outside"), (ints(3, -2), "outside"), (ints(1), "one each")):
        given = slots
        refused_before_the_library(says, (2, CHANNELS), lambda s, at=given: causal_conv1d_fn(x, weight, None, s, places, at))
        refused_before_the_library(
            says, (2, CHANNELS), lambda s, at=given: causal_conv1d_update(x, s, weight, conv_state_indices=at)
        )
    for slots, says in ((ints(3, 3), "both write page 3"), (ints(3, 6), "outside"), (ints(3), "1 ssm_state_indices")):
        refused_before_the_library(
            says,
            ROW,
            lambda s, at=slots: recurrent_gated_delta_rule(q, q, v, s, actual_seq_lengths=lengths, ssm_state_indices=at),
        )


def names(function: Any) -> str:
    return " ".join(inspect.signature(function).parameters)


def test_the_arguments_and_their_order_are_ascendcs() -> None:
    """As `fla_npu.ops.ascendc` has them; the delta rule takes two of FLA's other operators besides."""
    assert names(causal_conv1d_fn) == (
        "x weight bias conv_states query_start_loc cache_indices has_initial_state activation pad_slot_id null_block_id "
        "block_idx_first_scheduled_token block_idx_last_scheduled_token initial_state_idx num_computed_tokens "
        "block_size_to_align metadata validate_data query_start_loc_cpu cache_indices_cpu has_initial_state_cpu head_num"
    )
    assert names(causal_conv1d_update) == (
        "x conv_state weight bias activation conv_state_indices num_accepted_tokens query_start_loc max_query_len "
        "null_block_id block_idx_last_scheduled_token initial_state_idx validate_data out conv_state_indices_cpu "
        "num_accepted_tokens_cpu query_start_loc_cpu"
    )
    assert names(recurrent_gated_delta_rule) == (
        "query key value state beta scale actual_seq_lengths ssm_state_indices num_accepted_tokens g gk cu_seqlens "
        "use_qk_l2norm_in_kernel"
    )


@pytest.mark.parametrize("given", ["references", "dense", "padded"])
def test_copies_on_the_host_stand_in(given: str) -> None:
    x, weight, library = torch.randn(5, CHANNELS), torch.randn(3, CHANNELS), Library()
    places, slots, flags, accepted = ints(0, 2, 5), ints(3, 1), torch.tensor([True, False]), ints(1, 2)
    host = {"query_start_loc_cpu": places, "cache_indices_cpu": [3, 1], "has_initial_state_cpu": (1, 0)}
    state = padded_pages(6, (4, CHANNELS), torch.float32).state
    copy = padded_pages(6, (4, CHANNELS), torch.float32).state
    copy.copy_(state)
    if given == "dense":
        state, copy = state.contiguous(), copy.contiguous()
    expected = causal_conv1d_fn(x, weight, None, state, places, slots, flags)
    updated = causal_conv1d_update(x.clone(), state, weight, None, None, slots, accepted, places, 3)
    with using_operators(None if given == "references" else library):
        assert torch.equal(causal_conv1d_fn(x, weight, None, copy, validate_data=True, **host), expected)
        out = torch.empty_like(x)
        found = causal_conv1d_update(
            x, copy, weight, None, None, None, None, None, 3, 0, None, None, True, out,
            query_start_loc_cpu=[0, 2, 5], conv_state_indices_cpu=slots, num_accepted_tokens_cpu=[1, 2],
        )  # fmt: skip
    assert found is out
    assert torch.equal(found, updated)
    assert torch.equal(copy, state)


@pytest.mark.parametrize(
    "asked",
    [
        "block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx", "num_computed_tokens",
        "block_size_to_align", "metadata",
    ],
)  # fmt: skip
def test_block_scheduling_and_metadata_are_refused(asked: str) -> None:
    x, weight, state = torch.ones(2, CHANNELS), torch.ones(3, CHANNELS), torch.ones(2, 2, CHANNELS)
    wanted: dict[str, Any] = {asked: 16 if asked == "block_size_to_align" else ints(1)}
    with pytest.raises(StateError, match=f"causal_conv1d_fn: {asked} not supported"):
        causal_conv1d_fn(x, weight, None, state, **wanted)
    if asked in inspect.signature(causal_conv1d_update).parameters:
        with pytest.raises(StateError, match=f"causal_conv1d_update: {asked} not supported"):
            causal_conv1d_update(x, state, weight, **wanted)


def test_a_misspelt_argument_is_no_argument() -> None:
    x, weight, state = torch.ones(2, CHANNELS), torch.ones(3, CHANNELS), torch.ones(2, 2, CHANNELS)
    wrong: dict[str, Any] = {"has_inital_state": None}
    with pytest.raises(TypeError, match="has_inital_state"):
        causal_conv1d_fn(x, weight, None, state, **wrong)
    with pytest.raises(TypeError, match="has_inital_state"):
        causal_conv1d_update(x, state, weight, **wrong)


def test_weights_and_tokens_may_require_gradients() -> None:
    weight, x = (torch.randn(n, CHANNELS, requires_grad=True) for n in (3, 2))
    state = torch.zeros(2, 2, CHANNELS, requires_grad=True)
    out = causal_conv1d_fn(x, weight, weight[0], state, ints(0, 1, 2), null_block_id=None)
    assert torch.equal(state[:, 1], x)
    assert not out.requires_grad
    assert causal_conv1d_update(x, state, weight) is x, "in place, though it is a leaf"
    q, v = torch.randn(2, 1, 4, requires_grad=True), torch.randn(2, 2, 4, requires_grad=True)
    pages = torch.zeros(2, *ROW, requires_grad=True)
    step = recurrent_gated_delta_rule(q, q, v, pages, actual_seq_lengths=ints(1, 1), ssm_state_indices=ints(0, 1))
    assert pages.any()
    whole, _ = chunked_gated_delta_rule(q, q, v, None, beta=torch.ones(2, 2), g=torch.zeros(2, 2), cu_seqlens=ints(0, 1, 2))
    torch.testing.assert_close(whole, step * 0.5)
    assert not step.requires_grad
    assert not whole.requires_grad
