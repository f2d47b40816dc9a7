"""The causal depthwise convolution with a cached state, in PyTorch: what the operators compute, not how.

y[t] = activation(sum over j of weight[j] * window[t + j] + bias), where the window is the last width-1 inputs before the call
followed by the call's own, all in float32. A page of the state keeps those inputs, oldest first, in its first width-1 rows; for
speculative decoding it is longer, and holds the drafts of the last call behind them (see `update`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kvactors.errors import StateError
from kvactors.memory.state_rows import gather_state_rows, scatter_state_rows_

_ACTIVATIONS = {None: False, "none": False, "silu": True, "swish": True}


def prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor | None,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    activation: str | None,
    padded_slots: Sequence[int],
    head_num: int,
) -> Tensor:
    """`operators.causal_conv1d_fn` on any device. `padded_slots`: cache indices that mark a sequence as padding."""
    tokens, bounds = _sequences(x, query_start_loc)
    width, silu = _check_kernel(tokens, weight, bias, activation)
    slots = _slots(cache_indices, len(bounds))
    live = _live(bounds, slots, padded_slots if cache_indices is not None else ())
    if head_num < 0 or (head_num and x.shape[-1] % head_num):
        raise StateError(f"head_num {head_num} does not divide {x.shape[-1]} channels")
    weights, offset = weight.float(), None if bias is None else bias.float()
    history = torch.zeros((len(live), width - 1, tokens.shape[1]), dtype=torch.float32, device=x.device)
    keep = at = None
    if conv_states is not None:
        _check_states(conv_states, tokens, width - 1)
        keep = conv_states.narrow(1, 0, width - 1)
        at = torch.tensor([slots[i] for i in live], dtype=torch.int64, device=x.device)
        flags = _flags(has_initial_state, len(bounds))[live].to(x.device)
        if width > 1:
            history = gather_state_rows(keep, at, flags, torch.float32)
    out = torch.zeros_like(tokens, memory_format=torch.contiguous_format)
    for j, i in enumerate(live):
        begin, end = bounds[i]
        window = torch.cat([history[j], tokens[begin:end].float()])
        out[begin:end] = _convolve(window, weights, offset, silu).to(out.dtype)
        history[j] = window[len(window) - (width - 1) :]
    if keep is not None and at is not None and width > 1:
        scatter_state_rows_(keep, at, history)
    out = out.view(x.shape)
    return out.reshape(*x.shape[:-1], head_num, -1).transpose(-3, -2).contiguous() if head_num else out


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    query_start_loc: Tensor | None,
    max_query_len: int,
    padded_slots: Sequence[int],
    out: Tensor | None,
) -> Tensor:
    """`operators.causal_conv1d_update` on any device.

    Without `num_accepted_tokens` a page then holds the last width-1 inputs. With it, a page is a window that slides over the
    drafts: the last call left [h1 … h(width-2), draft 1, draft 2 …]; a drafts accepted means that this call's history begins at
    row a-1; and this call leaves [history without its oldest, all its own tokens].
    """
    tokens, bounds = _sequences(x, query_start_loc, one_token_each=True)
    width, silu = _check_kernel(tokens, weight, bias, activation)
    slots = _slots(conv_state_indices, len(bounds))
    live = _live(bounds, slots, padded_slots if conv_state_indices is not None else ())
    longest = max((end - begin for begin, end in bounds), default=0)
    if 0 <= max_query_len < longest:
        raise StateError(f"max_query_len {max_query_len}, but a sequence has {longest} tokens")
    _check_states(conv_state, tokens, width - 1)
    offsets = _accepted_offsets(num_accepted_tokens, len(bounds))
    length = conv_state.shape[1]
    for i in live:
        begin, end = bounds[i]
        needed = offsets[i] + width - 1
        if num_accepted_tokens is not None:
            needed = max(needed, width - 2 + end - begin)
        if needed > length:
            raise StateError(
                f"sequence {i} needs {needed} rows of convolution state, a page has {length}: it must hold the width - 2 "
                "newest accepted inputs and all drafts"
            )
    result = x if out is None else out
    if result.shape != x.shape or result.dtype != x.dtype:
        raise StateError(f"out of shape {tuple(result.shape)} and {result.dtype}: must be {tuple(x.shape)} of {x.dtype}")
    weights, offset = weight.float(), None if bias is None else bias.float()
    at = torch.tensor([slots[i] for i in live], dtype=torch.int64, device=x.device)
    pages = gather_state_rows(conv_state, at)
    results = []
    for j, i in enumerate(live):
        begin, end = bounds[i]
        history = pages[j, offsets[i] : offsets[i] + width - 1]
        window = torch.cat([history.float(), tokens[begin:end].float()])
        results.append(_convolve(window, weights, offset, silu).to(x.dtype))
        kept = window[1:] if num_accepted_tokens is not None else window[len(window) - (width - 1) :]
        pages[j, : len(kept)] = kept
    scatter_state_rows_(conv_state, at, pages)
    for i, y in zip(live, results, strict=True):
        result[i if x.dim() == 3 else slice(*bounds[i])] = y
    return result


def _convolve(window: Tensor, weights: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """(tokens, channels) from a window (width-1 + tokens, channels), all float32."""
    windows = window.unfold(0, len(weights), 1)
    y = (windows * weights.T).sum(-1)
    if bias is not None:
        y = y + bias
    return functional.silu(y) if silu else y


def _sequences(x: Tensor, starts: Tensor | None, one_token_each: bool = False) -> tuple[Tensor, list[tuple[int, int]]]:
    """All tokens in one dimension, and where each sequence begins and ends."""
    if x.dim() == 3:
        if starts is not None:
            raise StateError("x of three dimensions is one sequence a row already: give query_start_loc only with two")
        batch, steps = x.shape[:2]
        return x.reshape(batch * steps, x.shape[2]), [(i * steps, (i + 1) * steps) for i in range(batch)]
    if x.dim() != 2:
        raise StateError(f"x of shape {tuple(x.shape)}: must be (tokens, channels) or (sequences, tokens, channels)")
    if starts is None:
        return x, [(i, i + 1) for i in range(len(x))] if one_token_each else [(0, len(x))]
    places = starts.tolist()
    if starts.dim() != 1 or not places or places[0] < 0 or places[-1] > len(x) or places != sorted(places):
        raise StateError(f"query_start_loc {places[:8]} for {len(x)} tokens: must rise from 0 to at most their number")
    return x, list(pairwise(places))


def _check_kernel(tokens: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> tuple[int, bool]:
    """The width of the convolution, and whether SiLU follows."""
    channels = tokens.shape[1]
    if weight.dim() != 2 or weight.shape[1] != channels or len(weight) < 1:
        raise StateError(f"weight of shape {tuple(weight.shape)}: must be (width, {channels})")
    if bias is not None and tuple(bias.shape) != (channels,):
        raise StateError(f"bias of shape {tuple(bias.shape)}: must be ({channels},)")
    if activation not in _ACTIVATIONS:
        raise StateError(f"activation {activation!r}: must be None, 'silu' or 'swish'")
    return len(weight), _ACTIVATIONS[activation]


def _check_states(states: Tensor, tokens: Tensor, rows: int) -> None:
    if states.dim() != 3 or states.shape[2] != tokens.shape[1] or states.shape[1] < rows:
        raise StateError(
            f"convolution states of shape {tuple(states.shape)}: must be (pages, {rows} or more, {tokens.shape[1]})"
        )


def _slots(indices: Tensor | None, sequences: int) -> list[int]:
    if indices is None:
        return list(range(sequences))
    if tuple(indices.shape) != (sequences,):
        raise StateError(f"cache indices of shape {tuple(indices.shape)} for {sequences} sequences: must be one each")
    return [int(slot) for slot in indices.tolist()]


def _live(bounds: Sequence[tuple[int, int]], slots: Sequence[int], padded: Sequence[int]) -> list[int]:
    """Sequences that have tokens and a slot of their own."""
    return [i for i, (begin, end) in enumerate(bounds) if end > begin and slots[i] not in padded]


def _flags(has_initial_state: Tensor | None, sequences: int) -> Tensor:
    if has_initial_state is None:
        return torch.zeros(sequences, dtype=torch.bool)
    if tuple(has_initial_state.shape) != (sequences,):
        raise StateError(f"has_initial_state of shape {tuple(has_initial_state.shape)} for {sequences} sequences: one each")
    return has_initial_state.bool()


def _accepted_offsets(accepted: Tensor | None, sequences: int) -> list[int]:
    """Where each sequence's history begins in its page."""
    if accepted is None:
        return [0] * sequences
    if tuple(accepted.shape) != (sequences,):
        raise StateError(f"num_accepted_tokens of shape {tuple(accepted.shape)} for {sequences} sequences: must be one each")
    return [max(int(count) - 1, 0) for count in accepted.tolist()]
