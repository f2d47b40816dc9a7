"""The gated delta rule in PyTorch, token by token (decode) and chunk by chunk (prefill), accumulating in float32.

For each value head, with state S (value dim, key dim), decay a = exp(g), rate b = beta:

    S[t] = a S[t-1] + b (v - a S[t-1] k) k^T        o[t] = scale * S[t] q

`gk` decays each key channel besides. Value heads share key heads in order: with twice as many, heads 0 and 1 use key head 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvactors.errors import StateError
from kvactors.memory.state_rows import gather_state_rows, scatter_state_rows_

L2NORM_EPSILON = 1e-6
"""What FLA adds to the sum of squares."""


def l2_normalized(x: Tensor) -> Tensor:
    """x over the root of its last dimension's sum of squares, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2NORM_EPSILON)


def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    beta: Tensor | None,
    scale: float,
    actual_seq_lengths: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None,
    g: Tensor | None,
    gk: Tensor | None,
) -> Tensor:
    """`operators.recurrent_gated_delta_rule` on any device."""
    q, k = _repeated_heads(query, key, value)
    _check_state(state, key, value)
    rates, decays, key_decays = _per_token(beta, g, gk, key, value)
    slots = Slots(ssm_state_indices, actual_seq_lengths, num_accepted_tokens, len(value))
    reads = slots.reads()
    live = [i for i, slot in enumerate(reads) if slot >= 0 and slots.lengths[i] > 0]
    device = state.device
    begun = gather_state_rows(
        state, torch.tensor([reads[i] for i in live], dtype=torch.int64, device=device), None, torch.float32
    )
    out = torch.zeros_like(value, memory_format=torch.contiguous_format)
    written: dict[int, Tensor] = {}
    for j, i in enumerate(live):
        s = begun[j]
        begin = slots.starts[i]
        for step in range(slots.lengths[i]):
            t = begin + step
            s = s * decays[t, :, None, None]
            if key_decays is not None:
                s = s * key_decays[t, :, None, :]
            change = rates[t, :, None] * (value[t].float() - torch.einsum("hvk,hk->hv", s, k[t]))
            s = s + change[:, :, None] * k[t][:, None, :]
            out[t] = (scale * torch.einsum("hvk,hk->hv", s, q[t])).to(out.dtype)
            slot = slots.write(i, step)
            if slot >= 0:
                written[slot] = s
    if written:
        scatter_state_rows_(state, torch.tensor(list(written), device=device), torch.stack(list(written.values())))
    return out


@torch.no_grad()
def chunked_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    initial_state: Tensor | None,
    *,
    beta: Tensor,
    g: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_tokens: int = 64,
) -> tuple[Tensor, Tensor]:
    """The prefill form: whole sequences, in chunks that are solved at once.

    Within a chunk the changes u of all tokens are one triangular system: u[t] + sum over j < t of b[t] (A[t]/A[j]) (k[t]·k[j])
    u[j] = b[t] (v[t] - A[t] S k[t]), with A the product of the decays since the chunk began and S its first state.

    Args:
        query, key: (tokens, key heads, key dim).
        value: (tokens, value heads, value dim).
        initial_state: (sequences, value heads, value dim, key dim), dense rows as `gather_state_rows` gives; None = zeros.
        beta, g: (tokens, value heads); g is the logarithm of the decay.
        cu_seqlens: (sequences + 1,), rising from 0.
        scale: of the query; None = key dim ** -0.5.
        use_qk_l2norm_in_kernel: normalize query and key first.
        chunk_tokens: tokens that are solved at once; the result does not depend on it but for rounding.

    Returns:
        Outputs (tokens, value heads, value dim) in value's type, zeros behind the last sequence, and final states in float32.

    Raises:
        StateError: shapes do not fit.
    """
    if use_qk_l2norm_in_kernel:
        query, key = l2_normalized(query), l2_normalized(key)
    q, k = _repeated_heads(query, key, value)
    rates, _, _ = _per_token(beta, None, None, key, value)
    if g.shape != rates.shape:
        raise StateError(f"g of shape {tuple(g.shape)}: must be {tuple(rates.shape)}")
    places = [int(place) for place in cu_seqlens.tolist()]
    if not places or places[0] != 0 or places != sorted(places) or places[-1] > len(value) or chunk_tokens < 1:
        raise StateError(f"cu_seqlens {places[:8]} for {len(value)} tokens: must rise from 0 to at most their number")
    shape = (len(places) - 1, value.shape[1], value.shape[2], key.shape[2])
    if initial_state is not None and tuple(initial_state.shape) != shape:
        raise StateError(f"initial state of shape {tuple(initial_state.shape)}: must be {shape}")
    final = torch.zeros(shape, device=value.device) if initial_state is None else initial_state.float().clone()
    out = torch.zeros_like(value, memory_format=torch.contiguous_format)
    factor = key.shape[2] ** -0.5 if scale is None else scale
    for i, (first, end) in enumerate(pairwise(places)):
        for begin in range(first, end, chunk_tokens):
            chunk = slice(begin, min(begin + chunk_tokens, end))
            parts = [part[chunk].float().transpose(0, 1) for part in (q, k, value, rates, g)]
            y, final[i] = _chunk(parts, final[i])
            out[chunk] = (factor * y).transpose(0, 1).to(out.dtype)
    return out, final


def _chunk(parts: Sequence[Tensor], s: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (heads, tokens, value dim) before scaling, and the state after.

    Parts: query, key, value, rates and logarithms of the decays of the chunk's tokens, the heads first.
    """
    q, k, v, b, g = parts
    log = g.cumsum(-1)
    causal = torch.ones(log.shape[1], log.shape[1], dtype=torch.bool, device=log.device).tril()
    ratio = (log[:, :, None] - log[:, None, :]).masked_fill(~causal, float("-inf")).exp()
    since = log.exp()[:, :, None]
    system = (b[:, :, None] * ratio * (k @ k.mT)).tril(-1)
    target = b[:, :, None] * (v - since * (k @ s.mT))
    u = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    y = since * (q @ s.mT) + (ratio * (q @ k.mT)) @ u
    left = ratio[:, -1, :, None]
    return y, since[:, -1:, :] * s + (left * u).mT @ k


class Slots:
    """Which page each sequence reads, and each token writes.

    `indices` is one page a token (tokens,), all sequences behind each other, or a table (sequences, most tokens). `lengths` may
    begin with the first sequence's start, a 0, as vLLM-Ascend gives it. A page is written by one sequence only, which may write
    it several times: its last token's state stays.
    """

    def __init__(self, indices: Tensor, lengths: Tensor, accepted: Tensor | None, tokens: int) -> None:
        self.lengths = [int(length) for length in lengths.tolist()]
        self._table: list[list[int]] | None = None
        self._flat: list[int] = []
        self._accepted = None if accepted is None else [int(count) for count in accepted.tolist()]
        sequences = None if self._accepted is None else len(self._accepted)
        if indices.dim() == 2:
            self._table = [[int(slot) for slot in row] for row in indices.tolist()]
            sequences = len(self._table)
        elif indices.dim() == 1:
            self._flat = [int(slot) for slot in indices.tolist()]
        else:
            raise StateError(f"ssm_state_indices of shape {tuple(indices.shape)}: must be (tokens,) or (sequences, tokens)")
        if sequences is not None and len(self.lengths) == sequences + 1 and self.lengths[0] == 0:
            del self.lengths[0]
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        self._check(sequences, tokens)

    def _check(self, sequences: int | None, tokens: int) -> None:
        lengths = self.lengths
        if min(lengths, default=0) < 0 or sum(lengths) > tokens:
            raise StateError(f"lengths {lengths[:8]} for {tokens} tokens: must not be negative, nor more in all")
        if sequences is not None and len(lengths) != sequences:
            raise StateError(f"{len(lengths)} lengths for {sequences} sequences")
        if self._accepted is not None and len(self._accepted) != len(lengths):
            raise StateError(f"{len(self._accepted)} num_accepted_tokens for {len(lengths)} sequences")
        if self._table is None and len(self._flat) < sum(lengths):
            raise StateError(f"{len(self._flat)} ssm_state_indices for {sum(lengths)} tokens: one each, or a table")
        for i, length in enumerate(lengths):
            count = self._accepted[i] if self._accepted is not None and length else 1
            room = len(self._table[i]) if self._table is not None else length
            if length and not 1 <= count <= room:
                raise StateError(f"sequence {i} accepted {count} tokens of {room} with a state")
            if self._table is not None and length > room:
                raise StateError(f"sequence {i} has {length} tokens, its row of the table {room} pages")
        writers: dict[int, int] = {}
        reads = self.reads()
        for i, step in self.steps():
            slot = self.write(i, step) if reads[i] >= 0 else -1
            if slot >= 0 and writers.setdefault(slot, i) != i:
                raise StateError(f"sequences {writers[slot]} and {i} both write page {slot}: each page may have one writer")

    def steps(self) -> Iterator[tuple[int, int]]:
        """Every token, as its sequence and its place in it."""
        return ((i, step) for i, length in enumerate(self.lengths) for step in range(length))

    def packed(self) -> tuple[list[int], list[int]]:
        """The pages that tokens read or write, and for each index, as if flat, its page's place among them, from 1.

        A negative page is a spare one of a sequence, for what is not kept of it; padding has nothing else. Indices that no
        token uses have place 0, whatever they say.
        """
        width = None if self._table is None else len(self._table[0]) if self._table else 0
        places = [0] * (len(self._flat) if self._table is None else len(self._table) * (width or 0))
        packed: dict[int, int] = {}
        reads = self.reads()
        begins = [(i, self._begin(i)) for i, length in enumerate(self.lengths) if length]
        for i, step in [*self.steps(), *begins]:
            slot = self.write(i, step) if reads[i] >= 0 else -1
            at = self.starts[i] + step if width is None else i * width + step
            places[at] = packed.setdefault(slot if slot >= 0 else -1 - i, len(packed) + 1)
        return list(packed), places

    def reads(self) -> Sequence[int]:
        """The page in which each sequence finds its state; -1 where it has no tokens."""
        return [self.write(i, self._begin(i)) if length else -1 for i, length in enumerate(self.lengths)]

    def _begin(self, sequence: int) -> int:
        """The place of the token whose page the sequence begins from."""
        return 0 if self._accepted is None else self._accepted[sequence] - 1

    def write(self, sequence: int, step: int) -> int:
        """The page in which a token leaves its state."""
        if self._table is not None:
            return self._table[sequence][step]
        return self._flat[self.starts[sequence] + step]


def _repeated_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key in float32, one head for each value head."""
    if query.dim() != 3 or query.shape != key.shape or value.dim() != 3 or len(value) != len(key):
        raise StateError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: must be (tokens, heads, dim), "
            "query and key alike"
        )
    heads, shared = value.shape[1], key.shape[1]
    if not shared or heads % shared:
        raise StateError(f"{heads} value heads over {shared} key heads: must be a multiple")
    return query.float().repeat_interleave(heads // shared, 1), key.float().repeat_interleave(heads // shared, 1)


def _check_state(state: Tensor, key: Tensor, value: Tensor) -> None:
    row = (value.shape[1], value.shape[2], key.shape[2])
    if state.dim() != 4 or tuple(state.shape[1:]) != row:
        raise StateError(f"state of shape {tuple(state.shape)}: must be (pages, {', '.join(map(str, row))})")


def _per_token(
    beta: Tensor | None, g: Tensor | None, gk: Tensor | None, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rates, decays and decays of key channels; what is not given is 1."""
    shape = tuple(value.shape[:2])
    for name, tensor, wanted in (("beta", beta, shape), ("g", g, shape), ("gk", gk, (*shape, key.shape[2]))):
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise StateError(f"{name} of shape {tuple(tensor.shape)}: must be {wanted}")
    ones = torch.ones(shape, device=value.device)
    rates = ones if beta is None else beta.float()
    decays = ones if g is None else g.float().exp()
    return rates, decays, None if gk is None else gk.float().exp()
