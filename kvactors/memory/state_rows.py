"""Rows of a recurrent state whose pages may be padded: gathered for a kernel, scattered back, cleared.

A state is a tensor (pages, *row) as `state_views` makes it: its first dimension steps over whole pages, its inner dimensions
are dense. Only the rows that were asked for are read or written, and never the padding between them. Rules, after the document
on non-contiguous KV caches, section 5:

* a row whose flag in `has_initial_state` is False is zeros, and its index means nothing: it may be -1, or a page full of NaN.
* a gather may repeat an index. A scatter may not: which of two rows would win is not defined on a device.
* no rows asked for is nothing done, but a state without pages or without elements is an error whatever is asked for.
* everything is checked before the first byte is written.
* gradients are not followed: tensors that require one are read and written as if they did not.

How the bytes move was measured (2 cores, torch 2.13, numpy 2.3, 64 MiB in random rows; parts of the rate of one memcpy of as
many bytes):

|                                                  | 4 KiB | 64 KiB | 1 MiB | 1 MiB, cores busy |
|--------------------------------------------------|-------|--------|-------|-------------------|
| gather: index_select of half floats              |  0.68 |   0.85 |  1.02 |              0.11 |
| gather: index_select of the same as int64        |  0.94 |   1.02 |  1.07 |              0.10 |
| gather: concatenate of the rows' bytes           |  0.26 |   0.88 |  0.95 |              0.74 |
| scatter: index_copy_ of half floats              |  0.25 |   0.33 |  0.19 |                   |
| scatter: index_copy_ of the same as int64        |  0.39 |   0.57 |  0.62 |                   |
| scatter: numpy's assignment by index, bytes      |  0.75 |   1.08 |  1.00 |              1.05 |

index_select shares every row of 32,768 elements and more among the threads, and waits for all of them after each row. Hence on
a CPU rows below 64 KiB are gathered as the widest integers that fit, larger ones concatenated, and all are scattered through
numpy; `kvactors bench state-rows` shows it. A gather without `out` pays for fresh memory as well, as any copy into fresh memory
does (2.5 GB/s there): give `out` where rows are large. On CUDA and NPU a Triton kernel moves rows where Triton is installed,
torch's own index operations elsewhere; neither is verified on hardware.
"""

from __future__ import annotations

from math import prod
from typing import overload

import torch
from torch import Tensor

from kvactors.errors import StateError
from kvactors.memory.state_moves import moves_for

_INDEX_DTYPES = (torch.int32, torch.int64)


def gather_state_rows(
    state: Tensor,
    indices: Tensor,
    has_initial_state: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    check_range: bool = True,
) -> Tensor:
    """Rows of a state, dense: out[i] = state[indices[i]], or zeros where has_initial_state[i] is False.

    Args:
        state: (pages, *row); only its first dimension may be padded.
        indices: (n,), int32 or int64, any order, repeats allowed, on the state's device.
        has_initial_state: (n,) of bool, on the same device; None = every row is read.
        out_dtype: of the result; None = the state's.
        out: dense (n, *row) of that type, apart from the state's memory, to be filled and returned.
        check_range: False leaves out the check of the indices' values. On a device it is the only one that waits for the
            device; indices are the same for all layers of a step, so one layer may check for all.

    Returns:
        (n, *row), dense.

    Raises:
        StateError: shapes, types or devices do not fit, pages overlap, the state is empty (whatever is asked for), or an
            index of a row that is read is outside 0 … pages-1. `out` is unchanged.
    """
    matrix = _pages_of(state)
    _check_indices(state, indices)
    if has_initial_state is not None:
        _check_flags(indices, has_initial_state)
    dtype = state.dtype if out_dtype is None else out_dtype
    _check_cast(state.dtype, dtype)
    shape = (indices.numel(), *state.shape[1:])
    if out is not None:
        _check_out(state, out, shape, dtype)
    read = indices if has_initial_state is None else torch.where(has_initial_state, indices, 0)
    if check_range:
        _check_range(state, read)
    result = torch.empty(shape, dtype=dtype, device=state.device) if out is None else out
    if result.numel() == 0:
        return result
    rows = result if dtype == state.dtype else torch.empty(shape, dtype=state.dtype, device=state.device)
    dense = rows.detach().view(len(read), -1)
    moves_for(state.device).gather(dense, matrix, read, has_initial_state)
    if rows is not result:
        result.detach().copy_(rows)
    return result


def scatter_state_rows_(state: Tensor, indices: Tensor, rows: Tensor, *, check_range: bool = True) -> Tensor:
    """Write rows back in place: state[indices[i]] = rows[i], cast to the state's type.

    Padding and every other row keep their bytes. Rows may be strided in any way, and may lie in the state itself: they are read
    before the first write.

    Args:
        state: (pages, *row); only its first dimension may be padded.
        indices: (n,), int32 or int64, any order, no repeats, on the state's device.
        rows: (n, *row) on the same device, of a type that casts to the state's.
        check_range: False leaves out the check of the indices' values, as in `gather_state_rows`; with repeats, which row wins
            is then undefined.

    Returns:
        The state.

    Raises:
        StateError: as `gather_state_rows`, or an index repeats. The state is unchanged.
    """
    matrix = _pages_of(state)
    _check_indices(state, indices)
    expected = (indices.numel(), *state.shape[1:])
    if tuple(rows.shape) != expected:
        raise StateError(
            f"rows of shape {tuple(rows.shape)} for {len(indices)} indices into {_named(state)}: must be {expected}"
        )
    if rows.device != state.device:
        raise StateError(f"rows on {rows.device}, state on {state.device}: must be the same device")
    _check_cast(rows.dtype, state.dtype)
    if check_range:
        _check_range(state, indices, repeats=False)
    if rows.numel() == 0:
        return state
    source = rows.detach().to(state.dtype)
    if source.untyped_storage().data_ptr() == state.untyped_storage().data_ptr():
        source = source.clone(memory_format=torch.contiguous_format)
    if not _dense_inside(source):
        source = source.contiguous()
    moves_for(state.device).scatter_(matrix, indices, _as_matrix(source))
    return state


@overload
def clear_state_rows_(state: Tensor, has_initial_state: Tensor, /, *, check_range: bool = True) -> Tensor: ...


@overload
def clear_state_rows_(
    state: Tensor, indices: Tensor | None = None, *, has_initial_state: Tensor, check_range: bool = True
) -> Tensor: ...


@overload
def clear_state_rows_(
    state: Tensor, indices: Tensor | None, has_initial_state: Tensor, *, check_range: bool = True
) -> Tensor: ...


def clear_state_rows_(
    state: Tensor, indices: Tensor | None = None, has_initial_state: Tensor | None = None, *, check_range: bool = True
) -> Tensor:
    """Write zeros in place over state[indices[i]] where has_initial_state[i] is False; all other bytes stay.

    `clear_state_rows_(state, has_initial_state)` is the form for rows already gathered: flag i speaks of row i.

    Args:
        state: (pages, *row); only its first dimension may be padded.
        indices: (n,), int32 or int64, on the state's device; left out or None = flag i speaks of page i. Where a flag is True
            the index means nothing.
        has_initial_state: (n,) of bool, on the same device.
        check_range: as in `gather_state_rows`.

    Returns:
        The state.

    Raises:
        StateError: as `gather_state_rows`. The state is unchanged.
    """
    matrix = _pages_of(state)
    if has_initial_state is None:
        indices, has_initial_state = None, indices
    if has_initial_state is None:
        raise StateError("has_initial_state is missing: one bool for each row")
    if indices is None:
        indices = torch.arange(len(state), device=state.device)
        check_range = False
    _check_indices(state, indices)
    _check_flags(indices, has_initial_state)
    if check_range:
        _check_range(state, torch.where(has_initial_state, 0, indices))
    if indices.numel():
        moves_for(state.device).clear_(matrix, indices, has_initial_state)
    return state


def _named(state: Tensor) -> str:
    return f"a state of shape {tuple(state.shape)} and stride {state.stride()}"


def _dense_inside(tensor: Tensor) -> bool:
    """Whether all dimensions but the first are dense, in their order."""
    step = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _as_matrix(tensor: Tensor) -> Tensor:
    """(rows, elements of a row) on the same memory; the inner dimensions must be dense."""
    row = prod(tensor.shape[1:])
    return tensor.as_strided((len(tensor), row), (tensor.stride(0) if len(tensor) > 1 else row, 1), tensor.storage_offset())


def _pages_of(state: Tensor) -> Tensor:
    """The state as (pages, elements of a row), on the same memory, the padding left out by the stride."""
    if state.layout != torch.strided or state.dim() < 1:
        raise StateError(f"a state must be a strided tensor of one dimension or more, not {state.layout} of {state.dim()}")
    if not state.numel():
        raise StateError(f"{_named(state)} is empty: it must have a page, and rows of an element or more")
    if not _dense_inside(state):
        raise StateError(f"{_named(state)}: only the first dimension may be padded, all others must be dense")
    row = prod(state.shape[1:])
    if len(state) > 1 and state.stride(0) < row:
        raise StateError(f"{_named(state)}: pages overlap; the first stride must be at least the {row} elements of a row")
    return _as_matrix(state.detach())


def _check_indices(state: Tensor, indices: Tensor) -> None:
    if indices.dim() != 1 or indices.dtype not in _INDEX_DTYPES:
        raise StateError(
            f"indices of shape {tuple(indices.shape)} and {indices.dtype}: must be one dimension of int32 or int64"
        )
    if indices.device != state.device:
        raise StateError(f"indices on {indices.device}, state on {state.device}: must be the same device")


def _check_flags(indices: Tensor, flags: Tensor) -> None:
    if flags.shape != indices.shape or flags.dtype != torch.bool:
        raise StateError(
            f"has_initial_state of shape {tuple(flags.shape)} and {flags.dtype} for {len(indices)} rows: "
            "must be one bool for each"
        )
    if flags.device != indices.device:
        raise StateError(f"has_initial_state on {flags.device}, the rows' on {indices.device}: must be the same device")


def _check_cast(source: torch.dtype, target: torch.dtype) -> None:
    if not torch.can_cast(source, target):
        raise StateError(f"rows of {source} do not cast to {target}")


def _check_out(state: Tensor, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != state.device or not out.is_contiguous():
        raise StateError(
            f"out of shape {tuple(out.shape)}, stride {out.stride()} and {out.dtype} on {out.device}: "
            f"must be dense {shape} of {dtype} on {state.device}"
        )
    if out.numel() and out.untyped_storage().data_ptr() == state.untyped_storage().data_ptr():
        raise StateError("out shares its memory with the state: give a tensor of its own")


def _check_range(state: Tensor, indices: Tensor, *, repeats: bool = True) -> None:
    """Every index names a page; without `repeats`, no page twice. Waits for the device once."""
    if not indices.numel():
        return
    if repeats:
        low, high = torch.stack(torch.aminmax(indices)).tolist()
        twice = False
    else:
        ordered = indices.sort().values
        same = (ordered[1:] == ordered[:-1]).any()
        low, high, twice = torch.stack([ordered[0], ordered[-1], same.to(ordered.dtype)]).tolist()
    if low < 0 or high >= len(state):
        wrong = low if low < 0 else high
        raise StateError(f"index {wrong} is outside the {len(state)} pages of {_named(state)}")
    if twice:
        raise StateError("an index repeats: two rows for one page; scatter each page once")
