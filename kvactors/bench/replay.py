"""Engine time on a trace, beside a straight loop of the same puts and gets on the same store, without actors.

The trace is planned first: which blocks of each request are found, which are new, in which chunks, and at which local
addresses. Then both sides play that plan on the same emptied store, one request after another: what a model would compute is
neither filled nor verified on either side.

* engine: lookup, then step by step begin, each layer's wait, signal and checkpoint, end and settled; release and forget.
* loop: one `readable` of the keys that a lookup asks about; then, layer by layer, `get_ranges` under one `get_open`,
  `put_ranges` and one `put_commit` a chunk, with addresses that numpy computes, at most 64 keys in a call as the engine makes
  them.

Without `--trace` the requests are drawn from the shape of Mooncake's public synthetic trace: a third are short, the rest go
on from one of some long documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvactors.bench.figures import Answer, Figure, Target
from kvactors.bench.measure import in_turn, timed
from kvactors.bench.rig import Rig, arrived
from kvactors.core.layout import KVLayout, group_hashes
from kvactors.core.lookup import KeySpace
from kvactors.core.ranges import GroupRanges, group_ranges
from kvactors.core.steps import NULL_BLOCK, GroupBlocks, StepRequest
from kvactors.core.store import Addresses, Outcome, RangeBatch
from kvactors.engine import EngineConfig
from kvactors.errors import StoreError
from kvactors.layouts import find_layout, scale, with_block_tokens
from kvactors.replay.blocks import BlockRules
from kvactors.replay.hashing import PromptHasher, trace_hash_tokens
from kvactors.replay.trace import TRACE_BLOCK_TOKENS, TraceReader, TraceRequest

NAME = "replay"
CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Model:
    """`block_tokens`: 0 = the layout's own; `limit`: of the ratio, for ranges of about `kib` KiB."""

    name: str
    block_tokens: int
    factor: int
    kib: int
    limit: float

    def layout(self) -> KVLayout:
        layout, _ = find_layout(self.name)
        if self.block_tokens:
            layout = with_block_tokens(layout, self.block_tokens)
        return scale(layout, self.factor)


MODELS = (
    Model("llama-3.1-8b", 512, 16, 64, 1.3),
    Model("llama-3.1-8b", 512, 1024, 1, 3.0),
    Model("gemma-3-27b", 0, 8, 64, 1.3),
    Model("gemma-3-27b", 0, 512, 1, 3.0),
)
"""One group and two, with ranges of 64 KiB and of 1 KiB."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """As many requests as fit in so many bytes, and no more than `requests`; drawn ones are `shorter` times shorter."""

    store_bytes: int
    requests: int
    repeat: int
    shorter: int = 1
    models: tuple[Model, ...] = MODELS


FULL, QUICK = Sizes(4 << 30, 300, 5), Sizes(512 << 20, 16, 3, shorter=2, models=(*MODELS[:2], MODELS[3]))


def measure(sizes: Sizes, say: Callable[[str], object], *, pinned: bool = False, trace: str | None = None) -> Answer:
    """Every model in turn.

    Args:
        trace: a Mooncake trace; None: drawn.

    Raises:
        TraceError: the trace cannot be read.
        StoreError: the engine found or moved something else than planned.
    """
    figures = []
    for model in sizes.models:
        say(f"{model.name}, ranges of {model.kib} KiB")
        requests = (
            synthetic(sizes.requests, shorter=sizes.shorter) if trace is None else TraceReader(trace, limit=sizes.requests)
        )
        plan = Plan(model.layout(), iter(requests), sizes.store_bytes)
        with Played(plan, pinned=pinned) as played:
            measured = in_turn({"engine": played.engine, "loop": played.loop}, sizes.repeat)
        groups = len(plan.layout.groups)
        what = f"{model.name}, {groups} group{'s' if groups > 1 else ''}, ranges of {model.kib} KiB"
        case = f"{what}, {len(plan.prompts)} requests, {plan.moved_bytes >> 20} MiB / straight loop"
        figures.append(Figure(NAME, case, measured.median("engine"), measured.median("loop"), "s", Target("<=", model.limit)))
    return Answer(figures)


def synthetic(count: int, seed: int = 0, *, shorter: int = 1) -> Iterator[TraceRequest]:
    """Requests like those of the public synthetic trace: 15,000 tokens on average, two thirds of them a repeated prefix.

    Args:
        shorter: divides the lengths of documents and of what follows them.
    """
    rng = random.Random(seed)
    documents = [[rng.getrandbits(63) for _ in range(max(1, rng.randint(16, 48) // shorter))] for _ in range(6)]
    for line in range(1, count + 1):
        short = rng.random() < 1 / 3
        prefix = [] if short else rng.choice(documents)
        own = [rng.getrandbits(63) for _ in range(1 if short else max(1, rng.randint(4, 20) // shorter))]
        ids = (*prefix, *own)
        length = len(ids) * TRACE_BLOCK_TOKENS - rng.randrange(TRACE_BLOCK_TOKENS)
        yield TraceRequest(line=line, timestamp_ms=0.0, input_length=length, hash_ids=ids)


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """What one group moves in one step: keys, and their local blocks."""

    keys: tuple[str, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of one request: what the engine is told, and what the loop does."""

    request: StepRequest
    loads: Mapping[int, Move]
    saves: Mapping[int, Move]


@dataclass(frozen=True, slots=True)
class Planned:
    """One request; `asked`: keys that a lookup asks about."""

    hashes: Sequence[bytes]
    tokens: int
    hit_tokens: int
    asked: tuple[str, ...]
    chunks: tuple[Chunk, ...]


class Plan:
    """Requests as long as their objects fit; `stored`: every key that is saved."""

    def __init__(self, layout: KVLayout, requests: Iterator[TraceRequest], store_bytes: int) -> None:
        self.layout = layout
        self.rules = BlockRules(layout, trace_hash_tokens(g.block_tokens for g in layout.groups))
        self.prompts: list[Planned] = []
        self.local_blocks = 1
        self.stored_bytes = self.moved_bytes = 0
        self.stored: dict[str, int] = {}
        self._hasher = PromptHasher(self.rules.hash_tokens)
        self._keys = KeySpace([layout])
        for request in requests:
            before = self.stored_bytes, dict(self.stored)
            prompt = self._planned(request)
            if self.stored_bytes > store_bytes and self.prompts:
                self.stored_bytes, self.stored = before
                break
            self.prompts.append(prompt)
            self.local_blocks = max(self.local_blocks, *(-(-request.input_length // g.block_tokens) for g in layout.groups))
            for chunk in prompt.chunks:
                for moves in (chunk.loads, chunk.saves):
                    self.moved_bytes += sum(layout.object_bytes(g) * len(move.keys) for g, move in moves.items())

    def _planned(self, request: TraceRequest) -> Planned:
        rules, layout = self.rules, self.layout
        hashes, tokens = self._hasher.hashes(request), request.input_length
        of_group = {g.id: group_hashes(hashes, g.block_tokens, rules.hash_tokens) for g in layout.groups}
        hit = rules.reach.longest_hit(hashes, tokens, lambda g, h: self._keys.keys(g, h)[0] in self.stored)
        kept, loads = rules.kept(tokens), rules.loaded(hit)
        asked = tuple(
            layout.key(g.id, of_group[g.id][i])
            for g, mask in zip(layout.groups, rules.reach.lookup_mask(hit.tokens), strict=True)
            for i, wanted in enumerate(mask)
            if wanted and i < len(of_group[g.id])
        )
        chunks: list[Chunk] = []
        for start in range(hit.tokens, tokens, CHUNK_TOKENS):
            end = min(tokens, start + CHUNK_TOKENS)
            groups: dict[int, GroupBlocks] = {}
            getting: dict[int, Move] = {}
            putting: dict[int, Move] = {}
            for g in layout.groups:
                load = loads[g.id].tolist() if start == hit.tokens else []
                save = rules.saved(g, kept[g.id], start, end).tolist()
                used = {*load, *save}
                ids = [i if i in used else NULL_BLOCK for i in range(max(used, default=-1) + 1)]
                groups[g.id] = GroupBlocks(ids, load, save)
                key = {i: layout.key(g.id, of_group[g.id][i]) for i in used}
                fresh = [i for i in save if key[i] not in self.stored]
                getting[g.id] = Move(tuple(key[i] for i in load), tuple(load))
                putting[g.id] = Move(tuple(key[i] for i in fresh), tuple(fresh))
                self.stored.update((key[i], g.id) for i in fresh)
                self.stored_bytes += len(fresh) * layout.object_bytes(g.id)
            chunks.append(Chunk(StepRequest(f"r{request.line}", hashes, groups), getting, putting))
        return Planned(hashes, tokens, hit.tokens, asked, tuple(chunks))


class Played:
    """A plan on one store, played by the engine or by the loop; each time the store is emptied again, its memory stays."""

    def __init__(self, plan: Plan, *, pinned: bool = False) -> None:
        self._plan, layout = plan, plan.layout
        store_bytes = plan.stored_bytes + plan.stored_bytes // 64 + 128 * len(plan.stored)
        self._rig = Rig(
            layout, plan.local_blocks, store_bytes, EngineConfig(), pinned=pinned, hash_tokens=plan.rules.hash_tokens
        )
        config = EngineConfig()
        self._ranges = {g.id: group_ranges(layout, g.id, self._rig.bases, config) for g in layout.groups if g.layers}

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        self._rig.__exit__()

    def engine(self) -> float:
        """Seconds of the engine."""
        taken = timed(self._run_engine)
        self._empty()
        return taken

    def loop(self) -> float:
        """Seconds of the straight loop."""
        taken = timed(self._run_loop)
        self._empty()
        return taken

    def _empty(self) -> None:
        store = self._rig.store
        for key in self._plan.stored:
            if not store.remove(key, force=True).ok:
                raise StoreError(f"bench replay: {key} was planned to be saved, and is not in the store")

    def _run_engine(self) -> None:
        engine, layers = self._rig.engine, self._rig.layers
        for prompt in self._plan.prompts:
            found = engine.lookup(prompt.hashes, prompt.tokens).tokens
            if found != prompt.hit_tokens:
                raise StoreError(f"bench replay: the engine found {found} tokens where {prompt.hit_tokens} were planned")
            for chunk in prompt.chunks:
                step = engine.begin_step([chunk.request])
                for layer in layers:
                    arrived(step, layer)
                    step.layer_ready(layer)
                    step.checkpoint(layer)
                step.end()
                step.settled()
            name = prompt.chunks[0].request.request_id
            engine.release(name)
            engine.forget(name)

    def _run_loop(self) -> None:
        store, layout = self._rig.store, self._rig.layout
        for prompt in self._plan.prompts:
            store.readable(prompt.asked)
            for chunk in prompt.chunks:
                moves = [(g, chunk.loads[g], chunk.saves[g], self._ranges[g], layout.object_bytes(g)) for g in self._ranges]
                for _, load, save, _, nbytes in moves:
                    if load.keys:
                        _all_ok(store.get_open(load.keys, [nbytes] * len(load.keys)))
                    if save.keys:
                        _all_ok(store.put_open(save.keys, [nbytes] * len(save.keys)))
                for layer in self._rig.layers:
                    for _, load, save, ranges, _ in moves:
                        for batch in _batches(ranges, layer, load):
                            _all_ok(store.get_ranges(batch))
                        for batch in _batches(ranges, layer, save):
                            _all_ok(store.put_ranges(batch))
                for _, load, save, _, _ in moves:
                    if load.keys:
                        store.get_close(load.keys)
                    if save.keys:
                        _all_ok(store.put_commit(save.keys))


def _batches(ranges: GroupRanges, layer: int, move: Move) -> Iterator[RangeBatch]:
    of_layer = ranges.layers.get(layer)
    if of_layer is None:
        return
    for cut in of_layer.cuts(len(move.keys)):
        keys, ids = _rows(move, cut.row_lo, cut.row_hi)
        pieces = slice(cut.col_lo, cut.col_hi)
        addresses = of_layer.addresses(ids, cut.col_lo, cut.col_hi)
        yield RangeBatch(keys, addresses, of_layer.sizes[pieces], of_layer.offsets[pieces])


@lru_cache(maxsize=64)
def _rows(move: Move, lo: int, hi: int) -> tuple[tuple[str, ...], Addresses]:
    """Keys and local blocks of a call; the same objects on every layer, as the engine has them."""
    return move.keys[lo:hi], np.array(move.ids[lo:hi], np.int64)


def _all_ok(outcomes: Iterable[Outcome]) -> None:
    ok = Outcome.OK
    for outcome in outcomes:
        if outcome is not ok:
            raise StoreError(f"bench replay: a call of the straight loop answered {outcome.value}")
