"""Which operators run: the AscendC library when it is given, the references else; and what a padded state becomes for it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvactors.memory.fla import (
    causal_conv1d_fn,
    causal_conv1d_update,
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
    assert len(options["state"]) == (6 if dense else 5)
    assert options["cache_indices"].tolist() == ([3, 0, 5, -1] if dense else [1, 0, 3, 0])


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
    assert options["conv_state_indices"].tolist() == ([4, 0, 2] if dense else [1, 0, 3])


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
    assert options["ssm_state_indices"].tolist() == ([[5, 1], [-1, -1], [2, 4]] if dense else [[4, 1], [0, 0], [2, 3]])
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
