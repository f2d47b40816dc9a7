"""The boundary rule: how many tokens of a prompt are handed over, for both roles and every transport.

A recurrent state cannot be rewound, and decode has to compute the last prompt token itself to get its logits. So with state
groups prefill stops one token early: it computes tokens 0 … N-2 and hands over the state after N-1 tokens; decode computes the
last one. A prefill that drafts k tokens ahead stops k-1 tokens early. With attention alone nothing is held back: vLLM itself
sets the computed tokens to N-1 and computes the last one again.

Everything follows from the length that the prompt had when the request arrived. Prefill keeps that number with the request and
cuts before it matches its local prefix; after a preemption the same number gives the same cut.
Source: docs/design/disagg.md; vLLM's N-1 rule for Mamba states (vllm#46807) and its order of cut and match (vllm#53663).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvactors.errors import TransferPlanError

T = TypeVar("T")


def backoff(has_state: bool, lookahead: int = 0) -> int:
    """Tokens at the end of a prompt that decode computes itself.

    Args:
        has_state: one of the groups is a recurrent state.
        lookahead: k, the tokens that a speculative prefill drafts ahead; 0 or 1 = none.

    Raises:
        TransferPlanError: the lookahead is negative.
    """
    if lookahead < 0:
        raise TransferPlanError(f"lookahead = {lookahead}: must be at least 0 tokens")
    return max(1 if has_state else 0, lookahead - 1)


@dataclass(frozen=True, slots=True)
class Boundary:
    """What the two roles do with one prompt.

    Attributes:
        prompt_tokens: N, its length when the request arrived.
        handoff_tokens: tokens from its start whose KV and state are handed over; 0 = an empty pull, which only frees prefill.
        prefill_tokens: tokens that prefill keeps of its request, and computes.
    """

    prompt_tokens: int
    handoff_tokens: int
    prefill_tokens: int

    @property
    def truncated(self) -> bool:
        """Whether prefill cuts its request; it then samples one token (`max_tokens` = 1)."""
        return self.prefill_tokens < self.prompt_tokens

    def cut(self, tokens: Sequence[T]) -> Sequence[T]:
        """What prefill keeps of the prompt's ids, of its embeddings, or of the list of all tokens; cutting twice cuts once."""
        return tokens[: self.prefill_tokens]

    def decode_tokens(self, local_tokens: int) -> int:
        """Tokens that decode asks for beyond the `local_tokens` it has already.

        0 means: pull with empty block lists, so that prefill frees its blocks, and report no completion.
        """
        return max(0, self.handoff_tokens - local_tokens)


def boundary(
    prompt_tokens: int,
    *,
    has_state: bool,
    lookahead: int = 0,
    skips_prefix_cache: bool = False,
    has_ids: bool = True,
) -> Boundary:
    """Where prefill ends and decode begins.

    Args:
        prompt_tokens: N, when the request arrived.
        has_state: one of the groups is a recurrent state.
        lookahead: k, the tokens that a speculative prefill drafts ahead.
        skips_prefix_cache: decode computes the whole prompt (prompt log-probabilities): nothing is handed over, nothing cut.
        has_ids: token ids are known; a prompt of embeddings alone is not handed over, nor cut.

    Raises:
        TransferPlanError: a number of tokens is negative.
    """
    if prompt_tokens < 0:
        raise TransferPlanError(f"prompt_tokens = {prompt_tokens}: must be at least 0")
    back = backoff(has_state, lookahead)
    if skips_prefix_cache or not has_ids:
        return Boundary(prompt_tokens, 0, prompt_tokens)
    if prompt_tokens > back:
        return Boundary(prompt_tokens, prompt_tokens - back, prompt_tokens - back)
    return Boundary(prompt_tokens, 0 if has_state else prompt_tokens, prompt_tokens)
