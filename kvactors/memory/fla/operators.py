"""The three operators: AscendC's where they are, the references elsewhere.

Names, order and defaults of the arguments are those of `fla_npu.ops.ascendc`, as vLLM-Ascend calls it. What differs between
versions of that package, or between it and a reference, is settled here:

* some address a state by its natural stride and ignore the padding of its pages, others copy the whole pool. A state with
  padded pages therefore goes through `gather_state_rows` and `scatter_state_rows_`, and they see dense rows: the pages of those
  sequences that have tokens, checked before the operator runs.
* what marks padding. For the convolutions page 0 does, unless `null_block_id` is None, and so does `pad_slot_id`, or -1. For
  the delta rule page 0 is a page like any other, and a negative one marks padding. A padded sequence reads and writes no state;
  its outputs are zeros, or what `out` held in `causal_conv1d_update`. A sequence without tokens has no page either.
* two sequences that write one page are refused, for which of them would win is not defined on a device. A dense state on the
  library is not looked at: that would wait for the device.
* a copy on the host, `…_cpu`, is taken to be equal to the tensor it copies, and stands in for it where that is None.
* `validate_data` is ignored: the references check all they use. Block scheduling and `metadata` are refused.
* gradients are not followed.

`fla_npu` must be imported before CANN loads its kernels, when the device is first used; vLLM-Ascend does so. It is looked for
at the first call with a tensor on an NPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvactors.errors import StateError
from kvactors.memory.fla import conv, delta_rule
from kvactors.memory.state_rows import gather_state_rows, scatter_state_rows_

Host = Tensor | Sequence[int] | None
"""A copy of an index tensor on the host."""

PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0

_given: ContextVar[tuple[Any] | None] = ContextVar("fla_operators", default=None)


@contextmanager
def using_operators(library: Any | None) -> Iterator[None]:
    """Within the block, calls go to this library whatever their device, or to the references if it is None."""
    token = _given.set((library,))
    try:
        yield
    finally:
        _given.reset(token)


@cache
def _installed() -> Any | None:
    try:
        return importlib.import_module("fla_npu.ops.ascendc")
    except ImportError:
        return None


def _library_for(tensor: Tensor) -> Any | None:
    given = _given.get()
    if given is not None:
        return given[0]
    return _installed() if tensor.device.type == "npu" else None


@torch.no_grad()
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int | None = PAD_SLOT_ID,
    null_block_id: int | None = NULL_BLOCK_ID,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    block_size_to_align: int | None = 0,
    metadata: object | None = None,
    validate_data: bool = False,  # noqa: ARG001 - the operator has it; see the module
    *,
    query_start_loc_cpu: Host = None,
    cache_indices_cpu: Host = None,
    has_initial_state_cpu: Host = None,
    head_num: int = 0,
) -> Tensor:
    """The causal convolution of whole sequences, which leaves their last width-1 inputs in `conv_states`.

    Args:
        x: (tokens, channels), or (sequences, tokens, channels).
        weight: (width, channels); the last row is for the newest input.
        bias: (channels,).
        conv_states: (pages, width-1 or more, channels), changed in place; rows from width-1 on stay. None = no states.
        query_start_loc: (sequences+1,), where each begins in x; None = x is one sequence, or one a row of three dimensions.
        cache_indices: (sequences,), each one's page; None = its number, and no sequence is padding.
        has_initial_state: (sequences,), whether the page is read; None = no.
        activation: None, "silu" or "swish".
        pad_slot_id, null_block_id: cache indices of padding.
        query_start_loc_cpu, cache_indices_cpu, has_initial_state_cpu: copies on the host.
        head_num: 0, or heads that the channels are split into: the result is then (…, heads, tokens, channels of a head).

    Returns:
        Like x. Zeros for padded sequences and behind the last one.

    Raises:
        StateError: shapes do not fit, two sequences share a page, or block scheduling or `metadata` is asked for.
    """
    _refuse(
        "causal_conv1d_fn",
        block_idx_first_scheduled_token=block_idx_first_scheduled_token,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        initial_state_idx=initial_state_idx,
        num_computed_tokens=num_computed_tokens,
        block_size_to_align=block_size_to_align or None,
        metadata=metadata,
    )
    library = _library_for(x)
    padding = _padding(pad_slot_id, null_block_id)
    starts = _on(x, query_start_loc, query_start_loc_cpu)
    slots = _on(x, cache_indices, cache_indices_cpu)
    if library is None:
        flags = _on(x, has_initial_state, has_initial_state_cpu)
        return conv.prefill(x, weight, bias, conv_states, starts, slots, flags, activation, padding, head_num)
    options: dict[str, Any] = {"head_num": head_num} if head_num else {}
    options |= {"activation": activation, "has_initial_state": has_initial_state, "query_start_loc": query_start_loc}
    options |= _given_only(query_start_loc_cpu=query_start_loc_cpu, has_initial_state_cpu=has_initial_state_cpu)
    if conv_states is None or conv_states.is_contiguous():
        options |= {"pad_slot_id": pad_slot_id, "null_block_id": null_block_id, "cache_indices": cache_indices}
        options |= _given_only(cache_indices_cpu=cache_indices_cpu)
        return _tensor(library.causal_conv1d_fn(x, weight, bias, conv_states, **options))
    sequences = len(x) if x.dim() == 3 else 1 if starts is None else len(starts) - 1
    with _dense_pages(conv_states, slots, starts, sequences, padding) as (pages, places):
        options |= {"pad_slot_id": PAD_SLOT_ID, "null_block_id": 0, "cache_indices": places}
        return _tensor(library.causal_conv1d_fn(x, weight, bias, pages, **options))


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = NULL_BLOCK_ID,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    validate_data: bool = False,  # noqa: ARG001 - the operator has it; see the module
    out: Tensor | None = None,
    *,
    conv_state_indices_cpu: Host = None,
    num_accepted_tokens_cpu: Host = None,
    query_start_loc_cpu: Host = None,
) -> Tensor:
    """The causal convolution of one or a few new tokens a sequence, which updates `conv_state` in place.

    Args:
        x: (sequences, channels): one token each; (sequences, tokens, channels); or (tokens, channels) with `query_start_loc`.
        conv_state: (pages, length, channels), changed in place. Length: width-1 or more; for speculative decoding
            width-2 + the most tokens of a call.
        weight, bias, activation: as in `causal_conv1d_fn`.
        conv_state_indices: (sequences,), each one's page; None = its number. -1 is padding, as is `null_block_id`.
        num_accepted_tokens: (sequences,), of the last call's tokens; given, the page is a window over drafts (`conv.update`).
        query_start_loc: (sequences+1,), for sequences of different lengths.
        max_query_len: at least the longest sequence; -1 = not said.
        out: like x, for the result; None = the result overwrites x.
        conv_state_indices_cpu, num_accepted_tokens_cpu, query_start_loc_cpu: copies on the host.

    Returns:
        `out`, or x. Rows of padded sequences are not written.

    Raises:
        StateError: as `causal_conv1d_fn`, or a page is too short for the tokens.
    """
    _refuse(
        "causal_conv1d_update",
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        initial_state_idx=initial_state_idx,
    )
    library = _library_for(x)
    padding = _padding(PAD_SLOT_ID, null_block_id)
    starts = _on(x, query_start_loc, query_start_loc_cpu)
    slots = _on(x, conv_state_indices, conv_state_indices_cpu)
    if library is None:
        accepted = _on(x, num_accepted_tokens, num_accepted_tokens_cpu)
        return conv.update(x, conv_state, weight, bias, activation, slots, accepted, starts, max_query_len, padding, out)
    options: dict[str, Any] = {"bias": bias, "activation": activation, "num_accepted_tokens": num_accepted_tokens}
    options |= {"query_start_loc": query_start_loc, "max_query_len": max_query_len, "out": out}
    options |= _given_only(query_start_loc_cpu=query_start_loc_cpu, num_accepted_tokens_cpu=num_accepted_tokens_cpu)
    if conv_state.is_contiguous():
        options |= {"conv_state_indices": conv_state_indices, "null_block_id": null_block_id}
        options |= _given_only(conv_state_indices_cpu=conv_state_indices_cpu)
        return _tensor(library.causal_conv1d_update(x, conv_state, weight, **options))
    sequences = len(x) if starts is None else len(starts) - 1
    with _dense_pages(conv_state, slots, starts, sequences, padding) as (pages, places):
        options |= {"conv_state_indices": places, "null_block_id": 0}
        return _tensor(library.causal_conv1d_update(x, pages, weight, **options))


@torch.no_grad()
def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float = 1.0,
    actual_seq_lengths: Tensor | None = None,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """The gated delta rule over one or a few new tokens a sequence; each token leaves its state in a page.

    Args:
        query, key: (tokens, key heads, key dim).
        value: (tokens, value heads, value dim).
        state: (pages, value heads, value dim, key dim), changed in place.
        beta: (tokens, value heads); None = 1.
        scale: of the query.
        actual_seq_lengths: (sequences,), tokens of each, or (sequences+1,) with a 0 before them, as vLLM-Ascend builds it.
        ssm_state_indices: (tokens,), or a table (sequences, most tokens): the page each token writes. A sequence begins from
            the page of its first token. Tokens of one sequence may share a page, where the last one's state stays; two
            sequences may not. Negative = the token's state is not kept; a sequence that would begin there is padding.
            AscendC's operator takes no negative page: there, padding is a sequence without tokens.
        num_accepted_tokens: (sequences,), of the last call's tokens: the sequence begins from that token's page instead.
        g, gk: logarithms of decays, (tokens, value heads) and (tokens, value heads, key dim); None = no decay.
        cu_seqlens: (sequences+1,), in place of `actual_seq_lengths`, as FLA's other operators have it.
        use_qk_l2norm_in_kernel: normalize query and key first, in float32; AscendC's operator gets them rounded to their type.

    Returns:
        (tokens, value heads, value dim) in value's type; zeros for padding, and behind the last sequence in the reference.

    Raises:
        StateError: shapes do not fit, two sequences write one page, or not exactly one of `actual_seq_lengths` and `cu_seqlens`
            is given.
    """
    if cu_seqlens is not None and actual_seq_lengths is None:
        actual_seq_lengths = torch.cat([cu_seqlens.new_zeros(1), cu_seqlens.diff()])
        cu_seqlens = None
    if actual_seq_lengths is None or cu_seqlens is not None:
        raise StateError("give either actual_seq_lengths or cu_seqlens")
    library = _library_for(query)
    if use_qk_l2norm_in_kernel:
        of_query, of_key = (torch.float32, torch.float32) if library is None else (query.dtype, key.dtype)
        query, key = delta_rule.l2_normalized(query).to(of_query), delta_rule.l2_normalized(key).to(of_key)
    if library is None:
        return delta_rule.recurrent(
            query, key, value, state, beta, scale, actual_seq_lengths, ssm_state_indices, num_accepted_tokens, g, gk
        )
    if g is None and gk is None:  # the operator refuses a call without a decay
        g = torch.zeros(value.shape[:2], dtype=torch.float32, device=value.device)
    options: dict[str, Any] = {"scale": scale, "num_accepted_tokens": num_accepted_tokens, "g": g, "gk": gk}
    options |= {"beta": torch.ones_like(value[..., 0]) if beta is None else beta}
    options |= {"actual_seq_lengths": actual_seq_lengths}
    if state.is_contiguous():
        return _tensor(
            library.recurrent_gated_delta_rule(query, key, value, state, ssm_state_indices=ssm_state_indices, **options)
        )
    slots = delta_rule.Slots(ssm_state_indices, actual_seq_lengths, num_accepted_tokens, len(value))
    used, places = slots.packed()
    at = torch.tensor(used, dtype=torch.int64, device=state.device)
    pages = state.new_zeros((len(used) + 1, *state.shape[1:]))
    kept = at >= 0
    gather_state_rows(state, at, kept, out=pages[1:])
    options["ssm_state_indices"] = ssm_state_indices.new_tensor(places).view(ssm_state_indices.shape)
    out = _tensor(library.recurrent_gated_delta_rule(query, key, value, pages, **options))
    for begin, length, page in zip(slots.starts, slots.lengths, slots.reads(), strict=True):
        if page < 0:
            out[begin : begin + length] = 0
    scatter_state_rows_(state, at[kept], pages[1:][kept], check_range=False)
    return out


@contextmanager
def _dense_pages(
    state: Tensor, indices: Tensor | None, starts: Tensor | None, sequences: int, padding: tuple[int, ...]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The pages of sequences with tokens, dense, behind an empty page 0 that stands for padding; written back at the end."""
    device = state.device
    live = torch.ones(sequences, dtype=torch.bool, device=device)
    if indices is None:
        indices = torch.arange(sequences, device=device)
    else:
        if tuple(indices.shape) != (sequences,):
            raise StateError(f"cache indices of shape {tuple(indices.shape)} for {sequences} sequences: must be one each")
        live = ~torch.isin(indices, torch.tensor(padding, dtype=indices.dtype, device=device))
    if starts is not None:
        live &= starts.diff() > 0
    at = indices[live]
    ordered = at.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise StateError("an index repeats: two sequences for one page; each page may have one writer")
    pages = state.new_zeros((len(at) + 1, *state.shape[1:]))
    gather_state_rows(state, at, out=pages[1:])
    places = torch.zeros(sequences, dtype=torch.int32, device=device)
    places[live] = torch.arange(1, len(at) + 1, dtype=torch.int32, device=device)
    yield pages, places
    scatter_state_rows_(state, at, pages[1:], check_range=False)


def _on(x: Tensor, given: Tensor | None, host: Host) -> Tensor | None:
    """An index tensor, or its copy on the host brought to x's device."""
    return given if given is not None or host is None else torch.as_tensor(host, device=x.device)


def _given_only(**options: Host) -> dict[str, Any]:
    """Copies on the host that were given: not every version of the library has arguments for them."""
    return {name: host for name, host in options.items() if host is not None}


def _padding(*ids: int | None) -> tuple[int, ...]:
    return tuple(number for number in ids if number is not None)


def _refuse(name: str, **arguments: object) -> None:
    asked = [argument for argument, value in arguments.items() if value is not None]
    if asked:
        raise StateError(
            f"{name}: {', '.join(asked)} not supported: like AscendC's operator, it has no block scheduling and takes no "
            "metadata object"
        )


def _tensor(found: Any) -> Tensor:
    result: Tensor = found
    return result
