"""Stand-ins for what vLLM hands the connector, read by their attributes alone, and a scheduler side over a real store.

The classes of specifications have vLLM's names, because names are what they are told apart by. Only `Serving` needs vLLM,
and imports it when it is made.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout, group_hashes
from kvactors.core.lookup import KeySpace
from kvactors.core.store import Store
from kvactors.devices import ManualClock
from kvactors.stores.memory import MemoryStore
from kvactors.vllm.settings import BOTH, ConnectorSettings

PATIENT_S = 20.0
"""A budget for lookups that no machine uses up: they are answered by threads, in real time."""


# -- layouts -----------------------------------------------------------------------------------------------------------


def group(number: int, kind: GroupKind, block_tokens: int, layers: Sequence[int] = (0,), **more: Any) -> Group:
    """A group with one entry of eight bytes on each layer."""
    return Group(number, kind, block_tokens, {layer: [CacheEntry("kv", 8)] for layer in layers}, **more)


def full(block_tokens: int = 16, **more: Any) -> KVLayout:
    """One full-attention group."""
    return KVLayout("m", [group(0, GroupKind.FULL, block_tokens, **more)])


def windowed(block_tokens: int = 16, window: int = 32) -> KVLayout:
    """A full group 0 and a window group 1, as gpt-oss has."""
    return KVLayout(
        "m",
        [
            group(0, GroupKind.FULL, block_tokens, [0]),
            group(1, GroupKind.SLIDING_WINDOW, block_tokens, [1], window=window),
        ],
    )


def recurrent(attention_tokens: int = 16, state_tokens: int = 16) -> KVLayout:
    """A full group 0 and a group 1 of recurrent state."""
    return KVLayout("m", [group(0, GroupKind.FULL, attention_tokens, [0]), group(1, GroupKind.STATE, state_tokens, [1])])


def fine_hashes(count: int, prompt: str = "p") -> list[bytes]:
    """Chained fine hashes; prompts with one name share them."""
    return [hashlib.sha256(f"{prompt}/{i}".encode()).digest() for i in range(count)]


# -- specifications of caches ------------------------------------------------------------------------------------------


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 2
    max_tp_shards: int | None = None
    sliding_window: int | None = None


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    max_tp_shards: int | None = 1
    tokens_per_state: int = 1
    cache_role: Any = None


INDEXER = SimpleNamespace(value="indexer")


@dataclass
class SlidingWindowSpec:
    block_size: int = 16
    num_kv_heads: int = 2
    max_tp_shards: int | None = None
    sliding_window: int = 32


@dataclass
class ChunkedLocalAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 2
    max_tp_shards: int | None = None
    attention_chunk_size: int = 64


@dataclass
class MambaSpec:
    block_size: int = 16
    shapes: tuple[tuple[int, ...], ...] = ((4,),)
    mamba_cache_mode: str = "align"
    tp_replicated: bool = False


@dataclass
class CrossAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 2


@dataclass
class EncoderOnlyAttentionSpec(CrossAttentionSpec): ...


@dataclass
class HiSparseHotSpec:
    block_size: int = 16


@dataclass
class UniformTypeKVCacheSpecs:
    """vLLM's wrapper: one group whose layers have specifications of their own."""

    block_size: int
    kv_cache_specs: Mapping[str, Any]


@dataclass
class CacheGroup:
    kv_cache_spec: Any
    layer_names: Sequence[str] = ("model.layers.0.self_attn.attn",)
    is_eagle_group: bool = False
    host_resident: bool = False


@dataclass
class CacheConfig:
    """vLLM's KVCacheConfig. `cacheable`: ids of the groups that are keyed; None = all."""

    kv_cache_groups: Sequence[CacheGroup]
    num_blocks: int = 4
    cacheable: Sequence[int] | None = None

    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]:
        return tuple(range(len(self.kv_cache_groups)) if self.cacheable is None else self.cacheable)


def vllm_config(
    *,
    role: str = BOTH,
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
    pcp: int = 1,
    device: str = "cpu",
    dtype: str = "auto",
    enforce_eager: bool = True,
    cross_layers: bool = False,
) -> SimpleNamespace:
    """The parts of a VllmConfig that the connector reads."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role),
        parallel_config=SimpleNamespace(
            world_size=tp * pp,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            decode_context_parallel_size=dcp,
            prefill_context_parallel_size=pcp,
        ),
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(cache_dtype=dtype, enable_cross_layers_blocks=cross_layers),
        model_config=SimpleNamespace(enforce_eager=enforce_eager, hf_text_config=SimpleNamespace()),
    )


# -- vLLM's block pool -------------------------------------------------------------------------------------------------


class BlockPool:
    """Counts references as vLLM's pool does. A block may be taken by another request when nobody refers to it."""

    def __init__(self, blocks: int = 16) -> None:
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0) for i in range(blocks)]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"block {block.block_id} was given back more often than it was taken"

    @property
    def held(self) -> list[int]:
        return [b.block_id for b in self.blocks if b.ref_cnt]


# -- requests and steps ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """vLLM's Request: its hashes grow with its tokens, one for each whole `hash_tokens`."""

    request_id: str
    num_prompt_tokens: int
    hash_tokens: int = 16
    prompt: str = "p"
    num_computed_tokens: int = 0
    shared_prefix_boundary: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    hashed: bool = True
    made: int = 0
    """tokens that decoding has made so far"""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.made

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(1000, 1000 + self.num_tokens))

    @property
    def block_hashes(self) -> list[bytes]:
        return fine_hashes(self.num_tokens // self.hash_tokens if self.hashed else 0, self.prompt)


def block_id(group_id: int, index: int) -> int:
    """Where the stand-in scheduler puts a request's block, if a test says nothing else."""
    return 100 * (group_id + 1) + index


@dataclass
class Tables:
    """Block tables of one request, as `KVCacheBlocks` gives them. 0 is vLLM's block for "none"."""

    of_group: list[list[int]]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(self.of_group)


@dataclass
class BlockState:
    tables: Mapping[str, Tables]
    boundary_state_offloads: Mapping[str, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        tables = self.tables.get(request_id)
        return None if tables is None else tables.get_block_ids()


@dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict[str, int]
    kv_connector_block_state: BlockState
    finished_req_ids: set[str] = field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Before:
    """A store whose lookups call something first, which may wait or raise."""

    def __init__(self, store: Store, lookup: Callable[[], object]) -> None:
        self._store, self._lookup = store, lookup

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def readable(self, keys: Sequence[str]) -> list[bool]:
        self._lookup()
        return self._store.readable(keys)


class Serving:
    """vLLM's scheduler, as far as the connector sees it: calls a real `SchedulerSide` in vLLM's order.

    Args:
        stages: layouts of all pipeline stages.
        lookup: called before every lookup.
    """

    def __init__(
        self,
        *stages: KVLayout,
        layerwise: bool = False,
        role: str = BOTH,
        retention: int | None = None,
        hash_tokens: int = 16,
        events: bool = False,
        lookup: Callable[[], object] = lambda: None,
        **settings: Any,
    ) -> None:
        from kvactors.vllm.messages import Handshake
        from kvactors.vllm.scheduler import SchedulerSide

        self.stages, self.hash_tokens = stages, hash_tokens
        self.clock = ManualClock()
        self.store = MemoryStore()
        self.opened = 0
        self._lookup = lookup
        self.side = SchedulerSide(
            ConnectorSettings.of({"backend": "memory", "lookup_budget_s": PATIENT_S, **settings}),
            self.clock,
            self._open,
            role=role,
            layerwise=layerwise,
            retention=retention,
            hash_tokens=hash_tokens,
            events=events,
        )
        self.pool = BlockPool(1000)
        self.side.pins.pool = self.pool
        ranks = [(stage, rank) for stage in stages for rank in range(stage.tp_size)]
        self.side.connect({(s.pp_rank, rank): Handshake(s, hash_tokens) for s, rank in ranks})
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, Tables] = {}

    def _open(self) -> Store:
        self.opened += 1
        store: Any = Before(self.store.client(), self._lookup)
        return store  # type: ignore[no-any-return]

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.side.close()
        self.store.close()

    # What the store has

    def put(self, tokens: int, prompt: str = "p", only: Mapping[int, Sequence[int]] | None = None) -> None:
        """Stores a prompt's blocks: of every group all, or those at the indices in `only`."""
        hashes = fine_hashes(tokens // self.hash_tokens, prompt)
        space = KeySpace(self.stages)
        for g in self.stages[0].groups:
            of_group = group_hashes(hashes, g.block_tokens, self.hash_tokens)
            for i, block_hash in enumerate(of_group):
                if only is None or i in only.get(g.id, ()):
                    keys = space.keys(g.id, block_hash)
                    self.store.put_open(keys, [8] * len(keys))
                    self.store.put_commit(keys)

    def lose(self, group_id: int, index: int, prompt: str = "p") -> None:
        """Takes one block out of the store."""
        units = self.stages[0].group(group_id).block_tokens // self.hash_tokens
        for key in KeySpace(self.stages).keys(group_id, fine_hashes((index + 1) * units, prompt)[-1]):
            self.store.remove(key, force=True)

    # Scheduling

    def request(self, name: str, tokens: int, **more: Any) -> Request:
        request = self.requests[name] = Request(name, tokens, self.hash_tokens, **more)
        return request

    def ask(self, request: Request, local: int = 0) -> tuple[int | None, bool]:
        return self.side.matched(request, local)

    def allocate(self, request: Request, external: int, nulls: Mapping[int, Sequence[int]] | None = None) -> None:
        """vLLM found blocks for the whole request; those at `nulls` have no memory."""
        tables = []
        for number in range(1 + max(g.id for g in self.stages[0].groups)):
            tokens = self.stages[0].group(number).block_tokens
            ids = [block_id(number, i) for i in range(-(-(request.num_tokens + 64) // tokens))]
            for i in (nulls or {}).get(number, ()):
                ids[i] = 0
            tables.append(ids)
        self.tables[request.request_id] = Tables(tables)
        self.side.allocated(request, self.tables[request.request_id], external)

    def admit(self, request: Request, local: int = 0, **more: Any) -> int:
        """Match and allocation in one, as when vLLM has room: tokens that will be loaded."""
        external, between = self.ask(request, local)
        assert external is not None
        self.allocate(request, external, **more)
        request.num_computed_tokens = local + external
        if external and between:
            self.step()  # the load starts with the step that vLLM plans now
        return external

    def step(
        self,
        scheduled: Mapping[str, int] | None = None,
        *,
        offers: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
        finished: Sequence[str] = (),
        without_table: Sequence[str] = (),
    ) -> Any:
        """Plans a step that computes so many tokens of each request, and counts them as computed."""
        scheduled = dict(scheduled or {})
        tables = {name: table for name, table in self.tables.items() if name not in without_table}
        state = BlockState({n: t for n, t in tables.items() if n in {*scheduled, *(offers or {})}}, offers or {})
        self.plan = self.side.plan(SchedulerOutput(scheduled, state, set(finished)))
        for name, tokens in scheduled.items():
            if name in self.requests:
                self.requests[name].num_computed_tokens += tokens
        return self.plan

    def admitted(self, request: Request, local: int = 0, **more: Any) -> Any:
        """The plan that carries the request's load between steps."""
        assert self.admit(request, local, **more) > 0
        return self.plan

    def over(self, *requests: Request) -> None:
        """Their loads between steps are over on all ranks, and vLLM lets them run."""
        self.side.reported(None, [r.request_id for r in requests])
        for request in requests:
            self.side.allocated(request, self.tables[request.request_id], 0)

    def report(self, *, over: Sequence[str] = (), **fields: Any) -> None:
        from kvactors.vllm.messages import WorkerReport

        fields = {k: Counter(v) if k in ("held", "returned") else v for k, v in fields.items()}
        self.side.reported(WorkerReport(**fields), over)

    def preempt(self, request: Request) -> None:
        """vLLM takes its blocks: it begins anew, with all its tokens for a prompt."""
        request.num_computed_tokens = 0
        del self.tables[request.request_id]


def loads(plan: Any) -> dict[str, dict[int, list[int]]]:
    """Request -> group -> indices of the blocks that a plan loads, between steps or inside it."""
    found = {r.life.name: {g: list(b.load) for g, b in r.groups.items() if b.load} for r in [*plan.loads, *plan.requests]}
    return {name: groups for name, groups in found.items() if groups}


def saves(plan: Any) -> dict[str, dict[int, list[int]]]:
    """Request -> group -> indices of the blocks that a step saves."""
    found = {r.life.name: {g: list(b.save) for g, b in r.groups.items() if b.save} for r in plan.requests}
    return {name: groups for name, groups in found.items() if groups}
