"""A prefill and a decode instance without an engine: vLLM's own requests and cache manager, our scheduler side, and memory that
says of every slot which token it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvactors.core.layout import GroupKind
from kvactors.disagg.blocks import RequestBlocks, plan_blocks
from kvactors.disagg.geometry import GroupGeometry
from kvactors.disagg.messages import Outcome, OutcomeKind, Source
from kvactors.vllm.handoff_blocks import handoff_groups
from kvactors.vllm.handoff_scheduler import HandoffScheduler

BLOCKS = 256
DONE = RequestStatus.FINISHED_LENGTH_CAPPED

PREFILL = {"do_remote_decode": True, "transfer_id": "t"}
DECODE = {
    "do_remote_prefill": True,
    "transfer_id": "t",
    "remote_engine_id": "p",
    "remote_bootstrap_addr": "http://127.0.0.1:8998",
}


def attention(kind: type[Any], block: int, **more: Any) -> Any:
    return kind(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, **more)


def state(block: int, scratch: int = 0) -> MambaSpec:
    return MambaSpec(
        block_size=block,
        shapes=((8,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=scratch,
    )


def caches(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"model.layers.{i}.self_attn.attn"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(BLOCKS, [], groups)


def full(block: int = 16) -> KVCacheConfig:
    return caches(attention(FullAttentionSpec, block))


def windowed(block: int = 16, window: int = 24) -> KVCacheConfig:
    """A full group and one with a window."""
    window_spec = attention(SlidingWindowSpec, block, sliding_window=window)
    return caches(attention(FullAttentionSpec, block), window_spec)


def chunked(block: int = 16, chunk: int = 32) -> KVCacheConfig:
    return caches(attention(FullAttentionSpec, block), attention(ChunkedLocalAttentionSpec, block, attention_chunk_size=chunk))


def recurrent(block: int = 16, scratch: int = 0) -> KVCacheConfig:
    return caches(attention(FullAttentionSpec, block), state(block, scratch))


LAYOUTS = {"full": full, "window": windowed, "chunk": chunked, "state": recurrent}


def ask(name: str, tokens: int, params: dict[str, Any] | None, hash_tokens: int = 16, **more: Any) -> Request:
    """One of vLLM's requests. The prompt is 0, 1, 2, …, so that requests share prefixes."""
    extra = None if params is None else {"kv_transfer_params": dict(params)}
    sampling = SamplingParams(max_tokens=8, extra_args=extra, **more)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(hash_tokens, sha256)
    return Request(name, list(range(tokens)), sampling, None, block_hasher=hasher)


class Instance:
    """vLLM's scheduler as far as the hand-off sees it, in vLLM's order."""

    def __init__(self, config: KVCacheConfig, *, sends: bool = False, receives: bool = False, lookahead: int = 0) -> None:
        self.block = max(group.kv_cache_spec.block_size for group in config.kv_cache_groups)
        self.config = config
        self.manager = KVCacheManager(config, 4096, self.block, self.block)
        self.groups = handoff_groups(config)
        self.side = HandoffScheduler(self.groups, hash_tokens=self.block, sends=sends, receives=receives, lookahead=lookahead)
        self.tokens: dict[tuple[int, int], dict[int, int]] = {}
        """(group, block) -> slot -> token"""
        self.states: dict[tuple[int, int], int] = {}
        """(group, slot) -> how many tokens the state has seen"""

    @property
    def geometry(self) -> list[GroupGeometry]:
        return [
            GroupGeometry(
                kind=g.kind,
                block_tokens=g.block_tokens,
                blocks=BLOCKS,
                layers={},
                window=g.window,
                chunk_tokens=g.chunk_tokens,
            )
            for g in self.groups
        ]

    def request(self, name: str, tokens: int, params: dict[str, Any] | None, **more: Any) -> Request:
        request = ask(name, tokens, params, self.block, **more)
        self.side.arrived(request)
        return request

    def tables(self, request: Request) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(request.request_id)  # type: ignore[no-any-return]

    def local(self, request: Request) -> tuple[Any, int]:
        blocks, tokens, _ = self.manager.get_computed_blocks(request)
        return blocks, tokens

    def compute(self, request: Request, upto: int | None = None) -> int:
        """Computes the prompt (up to a token) in chunks that end on blocks; how many tokens ran."""
        end, ran = request.num_prompt_tokens if upto is None else upto, 0
        while request.num_computed_tokens < end:
            hit, local = (None, 0) if request.num_computed_tokens else self.local(request)
            begin = request.num_computed_tokens + local
            past = min(end, (begin // self.block + 1) * self.block)
            self.manager.new_step_starts()
            assert self.manager.allocate_slots(request, past - begin, local, hit) is not None
            request.num_computed_tokens = past
            self._write(request, begin, past)
            ran += past - begin
        return ran

    def _write(self, request: Request, begin: int, end: int) -> None:
        for group, table in zip(self.groups, self.tables(request), strict=True):
            if group.kind is GroupKind.STATE:
                self.states[group.number, table[-(-end // group.block_tokens) - 1]] = end
                continue
            for token in range(begin, end):
                self.tokens.setdefault((group.number, table[token // group.block_tokens]), {})[token % group.block_tokens] = (
                    token
                )

    def end(self, request: Request, status: RequestStatus = DONE) -> bool:
        """The request ends; whether its blocks are kept."""
        request.status = status
        computed = request.num_computed_tokens
        self.manager.remove_skipped_blocks(request.request_id, computed, num_prompt_tokens=request.num_prompt_tokens)
        kept = self.side.finished(request, self.manager.get_block_ids_for_computed_tokens(request.request_id, computed))
        if not kept:
            self.manager.free(request)
        return kept

    def prefill(self, name: str, tokens: int, params: dict[str, Any] | None = None, **more: Any) -> Request:
        """A whole request at prefill: it samples one token and ends."""
        request = self.request(name, tokens, PREFILL if params is None else params, **more)
        self.compute(request)
        request.append_output_token_ids(5)
        self.end(request)
        return request

    def seen(self, tokens: int, name: str = "seen") -> None:
        """A plain request ran before, and left its blocks in vLLM's prefix cache."""
        request = self.request(name, tokens, None)
        self.compute(request)
        self.end(request)

    def admit(self, request: Request) -> int:
        """vLLM matches and allocates; how many tokens come from prefill."""
        hit, local = self.local(request)
        found = self.side.matched(request, local)
        external = 0 if found is None or request.skip_reading_prefix_cache else found[0]
        self.manager.new_step_starts()
        new = 0 if external else min(self.block, request.num_tokens - local)
        given = self.manager.allocate_slots(request, new, local, hit, 0, external, delay_cache_blocks=bool(external))
        assert given is not None
        self.side.allocated(request, self.manager.get_blocks(request.request_id), external)
        request.num_computed_tokens = local + external
        if external:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        return external

    def arrive(self, request: Request) -> None:
        """Its load is over."""
        self.side.reported([request.request_id], ())
        request.status = RequestStatus.WAITING
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1

    def missing(self, request: Request) -> list[str]:
        """What the request's next token would read, and is not there."""
        found: list[str] = []
        now = request.num_computed_tokens
        for group, table in zip(self.groups, self.tables(request), strict=True):
            if group.kind is GroupKind.STATE:
                has = self.states.get((group.number, table[(now - 1) // group.block_tokens])) if now else 0
                if has != now:
                    found.append(f"group {group.number}: the state is that after {has} tokens, not {now}")
                continue
            begin = 0
            if group.window is not None:
                begin = max(0, now - group.window + 1)
            if group.chunk_tokens is not None:
                begin = now // group.chunk_tokens * group.chunk_tokens
            for token in range(begin, now):
                block = table[token // group.block_tokens]
                held = self.tokens.get((group.number, block), {}).get(token % group.block_tokens)
                if not block or held != token:
                    found.append(f"group {group.number}: token {token} in block {block} is {held}")
        return found


def hand_over(prefill: Instance, decode: Instance) -> int:
    """What the workers do with the two plans: copies what is asked for; how many blocks."""
    held = {h.transfer_id: h for h in prefill.side.plan().prefilled}
    copied = 0
    for pull in decode.side.plan().pulls:
        blocks = held[pull.source.transfer_id].blocks
        pairs = plan_blocks(prefill.geometry, decode.geometry, blocks, pull.blocks)
        for group, pair in zip(decode.groups, pairs, strict=True):
            for src, dst in zip(pair.src.tolist(), pair.dst.tolist(), strict=True):
                copied += 1
                if group.kind is GroupKind.STATE:
                    decode.states[group.number, dst] = prefill.states[group.number, src]
                else:
                    decode.tokens[group.number, dst] = dict(prefill.tokens[group.number, src])
    return copied


class FakeWorker:
    """The front of a worker's hand-off, which tests tell what to say."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.free: set[str] = set()
        self.told: list[Outcome] = []
        self.waited: list[float] = []
        self.pending = 0
        self.sent = None
        self.closed = False

    def request(self, transfer_id: str) -> None:
        self.calls.append(("request", transfer_id))

    def prefilled(self, transfer_id: str, blocks: RequestBlocks) -> None:
        self.calls.append(("prefilled", transfer_id, blocks))

    def cancel(self, transfer_id: str, reason: str) -> None:  # noqa: ARG002 - the front's signature
        self.calls.append(("cancel", transfer_id))

    def freed(self) -> set[str]:
        free, self.free = self.free, set()
        return free

    def receive(self, request_id: str, source: Source, blocks: RequestBlocks) -> None:  # noqa: ARG002 - the front's signature
        self.calls.append(("receive", request_id, blocks.empty))

    def give_up(self, request_id: str, reason: str) -> None:  # noqa: ARG002 - the front's signature
        self.calls.append(("give_up", request_id))

    def outcomes(self) -> list[Outcome]:
        told, self.told = self.told, []
        return told

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)

    def close(self) -> None:
        self.closed = True

    # What a test says

    def tell(self, name: str, kind: OutcomeKind, *, fenced: bool = False) -> None:
        self.told.append(Outcome(name, kind, "why", fenced))

    def take(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


def ids(blocks: RequestBlocks) -> list[tuple[int, Sequence[int]]]:
    return [(g.first_index, list(g.ids)) for g in blocks.groups]
