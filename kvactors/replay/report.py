"""The JSON report of a replay. Its names are stable: other programs read them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvactors.core.layout import KVLayout
from kvactors.core.stats import EngineStats
from kvactors.replay.store_events import store_events
from kvactors.replay.tally import Tally

SCHEMA = 1
RawBytes = bytes


class TracePart(msgspec.Struct, kw_only=True):
    path: str
    requests: int
    skipped: int = 0
    format: str = "mooncake"
    block_tokens: int = 512


class GroupPart(msgspec.Struct, kw_only=True):
    id: int
    kind: str
    block_tokens: int
    layers: int
    object_bytes: int


class LayoutPart(msgspec.Struct, kw_only=True):
    name: str
    digest: str
    groups: list[GroupPart]
    boundary_tokens: int
    hash_tokens: int


class RequestsPart(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class TokensPart(msgspec.Struct, kw_only=True):
    input: int
    hit: int
    computed: int
    hit_ratio: float


class BlocksPart(msgspec.Struct, kw_only=True):
    looked_up: int
    hit: int
    saved: int
    loaded: int
    skipped_existing: int
    skipped_no_space: int = 0


class BytesPart(msgspec.Struct, kw_only=True):
    saved: int
    loaded: int
    verified: int
    mismatched: int


class SessionsPart(msgspec.Struct, kw_only=True):
    put_opened: int
    put_committed: int
    put_revoked: int
    put_poisoned: int
    put_abandoned: int
    get_opened: int
    get_closed: int
    get_expired: int
    open_at_end: int
    put_refused: int = 0
    revoked_by: dict[str, int] = {}


class InvariantsPart(msgspec.Struct, kw_only=True):
    checked: int
    violations: list[str]


class TimePart(msgspec.Struct, kw_only=True):
    wall_s: float
    compute_s: float
    exposed_load_s: float
    exposed_save_s: float


class FailuresPart(msgspec.Struct, kw_only=True):
    injected: int
    load_failed: int
    recomputed_tokens: int
    outages: int = 0
    lost_calls: int = 0
    lookup_errors: int = 0


class NoHitsPart(msgspec.Struct, kw_only=True):
    """What is known of a run without any hit.

    Attributes:
        shared_prefix: whether a prompt begins as one before it, by a whole boundary; None = there were too many to tell.
        evictions: objects that the store evicted; None = it does not say.
        faults: kind -> how many were injected.
        together: whether several requests were in play at a time.
        retention: whether blocks of some boundaries were not to be saved.
    """

    shared_prefix: bool | None
    evictions: int | None = None
    faults: dict[str, int] = {}
    together: bool = False
    retention: bool = False


class Report(msgspec.Struct, kw_only=True):
    """Everything a run counted. Units: tokens, blocks (objects), payload bytes, seconds.

    `interrupted`: the run was stopped; the counts are those of what ran. `events` says in words what went
    wrong. `no_hits` is there where nothing was hit. The other parts are as the names say; see docs/cli.md.
    """

    schema: int = SCHEMA
    trace: TracePart
    layout: LayoutPart
    store: str
    clock: str
    seed: int
    requests: RequestsPart
    tokens: TokensPart
    blocks: dict[str, BlocksPart]
    bytes: BytesPart
    sessions: SessionsPart
    invariants: InvariantsPart
    time: TimePart
    failures: FailuresPart
    preemptions: int = 0
    steps: int = 0
    interrupted: bool = False
    events: list[str] = []
    event_log_sha256: str | None = None
    no_hits: NoHitsPart | None = None

    @property
    def broken(self) -> bool:
        """Whether something went wrong that a run must not show: the exit code is 1."""
        return bool(
            self.invariants.violations
            or self.bytes.mismatched
            or self.requests.failed
            or (self.requests.completed < self.requests.total and not self.interrupted)
        )

    def to_json(self) -> RawBytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def write(self, path: str | Path) -> None:
        Path(path).write_bytes(self.to_json())


def build_report(
    *,
    trace: TracePart,
    layout: KVLayout,
    boundary_tokens: int,
    hash_tokens: int,
    store: str,
    clock: str,
    seed: int,
    tally: Tally,
    stats: EngineStats,
    violations: list[str],
    checked: int,
    wall_s: float,
    injected: int,
    preemptions: int,
    interrupted: bool,
    no_hits: NoHitsPart | None = None,
) -> Report:
    """Joins the harness's counts with the engine's."""
    s = stats.sessions
    groups = stats.groups
    events = [*store_events(stats, tally.outages), *tally.events]
    if tally.events_dropped:
        events.append(f"… and {tally.events_dropped} more")
    blocks: dict[str, BlocksPart] = {}
    for g in layout.groups:
        counted, mine = groups.get(g.id), tally.groups[g.id]
        blocks[str(g.id)] = BlocksPart(
            looked_up=mine.looked_up,
            hit=mine.hit,
            saved=counted.saved if counted else 0,
            loaded=counted.loaded if counted else 0,
            skipped_existing=counted.skipped_existing if counted else 0,
            skipped_no_space=counted.skipped_no_space if counted else 0,
        )
    return Report(
        trace=trace,
        layout=LayoutPart(
            name=layout.model,
            digest=layout.digest,
            groups=[
                GroupPart(
                    id=g.id,
                    kind=g.kind.value,
                    block_tokens=g.block_tokens,
                    layers=len(g.layers),
                    object_bytes=layout.object_bytes(g.id),
                )
                for g in layout.groups
            ],
            boundary_tokens=boundary_tokens,
            hash_tokens=hash_tokens,
        ),
        store=store,
        clock=clock,
        seed=seed,
        requests=RequestsPart(total=trace.requests, completed=tally.completed, failed=tally.failed),
        tokens=TokensPart(
            input=tally.input_tokens,
            hit=tally.hit_tokens,
            computed=tally.computed_tokens,
            hit_ratio=tally.hit_tokens / tally.input_tokens if tally.input_tokens else 0.0,
        ),
        blocks=blocks,
        bytes=BytesPart(
            saved=sum(g.bytes_saved for g in groups.values()),
            loaded=sum(g.bytes_loaded for g in groups.values()),
            verified=tally.verified_bytes,
            mismatched=tally.mismatched_bytes,
        ),
        sessions=SessionsPart(
            put_opened=s.put_opened,
            put_committed=s.put_committed,
            put_revoked=s.put_revoked,
            put_poisoned=s.put_poisoned,
            put_abandoned=s.put_abandoned,
            get_opened=s.get_opened,
            get_closed=s.get_closed,
            get_expired=s.get_expired,
            open_at_end=s.open_now,
            put_refused=s.put_refused,
            revoked_by=dict(s.revoked_by),
        ),
        invariants=InvariantsPart(checked=checked, violations=violations),
        time=TimePart(
            wall_s=wall_s,
            compute_s=tally.compute_s,
            exposed_load_s=tally.exposed_load_s,
            exposed_save_s=tally.exposed_save_s,
        ),
        failures=FailuresPart(
            injected=injected,
            load_failed=tally.load_failed,
            recomputed_tokens=tally.recomputed_tokens,
            outages=tally.outages,
            lost_calls=stats.lost_workers,
            lookup_errors=stats.lookup_errors,
        ),
        preemptions=preemptions,
        steps=tally.steps,
        interrupted=interrupted,
        events=events,
        no_hits=no_hits,
    )
