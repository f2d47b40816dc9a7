"""What to replay, checked against itself and the whole trace before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from kvactors.core.layout import KVLayout
from kvactors.errors import ConfigError
from kvactors.layouts import boundary_tokens
from kvactors.layouts.scale import SCALED_TO_BYTES
from kvactors.replay.blocks import BlockRules
from kvactors.replay.hashing import trace_hash_tokens
from kvactors.replay.trace import TraceSource, TraceSummary, scan_trace
from kvactors.stores import BACKENDS, FaultPlan
from kvactors.stores.fault_plan import MOST_LATENCY_S
from kvactors.stores.mooncake.config import LEAST_SEGMENT_BYTES

_MOST_BLOCKS = 1 << 31

LEAST_SPEED, MOST_SPEED = 1e-6, 1e9
"""Times that a trace can be played slower or faster; beyond, arrival times mean nothing any more."""


@dataclass(frozen=True, slots=True)
class VirtualOptions:
    """How fast the simulated machine is.

    Attributes:
        bandwidth: bytes a second of one transfer worker.
        latency_s: seconds that every store call takes besides.
        layer_time_s: seconds of compute per layer of a step.
    """

    bandwidth: int = 10 << 30
    latency_s: float = 0.0002
    layer_time_s: float = 0.001


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay, and how. Sizes in bytes, lengths in tokens.

    Attributes:
        local_master: start a Mooncake master for this run, and give it `capacity` bytes.
        virtual: on virtual time; None = live.
        format: of the trace, one of `FORMATS`; None: as its first row tells.
    """

    trace: str
    layout: KVLayout
    store: str = "memory"
    local_master: bool = False
    capacity: int | None = None
    retention: int | None = None
    local_blocks: int | None = None
    concurrency: int = 1
    chunk_tokens: int = 8192
    speed: float | None = None
    requests: int | None = None
    skip_bad: bool = False
    faults: FaultPlan | None = None
    seed: int = 0
    virtual: VirtualOptions | None = None
    format: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A replay whose every input was checked."""

    options: ReplayOptions
    summary: TraceSummary
    rules: BlockRules
    source: TraceSource

    @property
    def seed(self) -> int:
        """The seed in force: the fault plan's own, or else the option's."""
        faults = self.options.faults
        return self.options.seed if faults is None or faults.seed is None else faults.seed


def plan_replay(options: ReplayOptions) -> Plan:
    """Checks the whole trace and every option against each other, before anything runs.

    Raises:
        LocalError: a bad trace line, a layout or an option that cannot work.
    """
    layout = options.layout
    _check_times(options)
    _check_store(options)
    b = boundary_tokens(layout)
    if options.retention is not None and (options.retention < 0 or options.retention % b):
        raise ConfigError(f"--retention {options.retention}: must be 0 or a multiple of the layout's boundary of {b} tokens")
    if options.capacity is not None:
        for group in layout.groups:
            if layout.object_bytes(group.id) > options.capacity:
                can_shrink = SCALED_TO_BYTES * len(layout.ranges(group.id)) <= options.capacity
                raise ConfigError(
                    f"--capacity {options.capacity}: is smaller than one object of group {group.id}, "
                    f"which has {layout.object_bytes(group.id)} bytes; give more capacity"
                    f"{' or a larger --scale' if can_shrink else ''}"
                )
    if options.virtual is not None and options.faults is not None and any(f.what == "freeze" for f in options.faults.faults):
        raise ConfigError(
            "--faults: a freeze holds a thread until somebody lets it go, and --virtual has no threads; use latency instead"
        )
    source = TraceSource(options.trace)
    summary = scan_trace(source, skip_bad=options.skip_bad, limit=options.requests, format=options.format)
    hash_tokens = trace_hash_tokens((g.block_tokens for g in layout.groups), summary.block_tokens)
    rules = BlockRules(layout, hash_tokens, options.retention)
    return Plan(options, summary, rules, source)


def _check_times(options: ReplayOptions) -> None:
    virtual, speed = options.virtual, options.speed
    if virtual is not None:
        for name, value in (("--latency", virtual.latency_s), ("--layer-time", virtual.layer_time_s)):
            if not 0 <= value <= MOST_LATENCY_S:
                raise ConfigError(f"{name} {value:g}: must be from 0 to {MOST_LATENCY_S:g} seconds")
    if speed is not None and not LEAST_SPEED <= speed <= MOST_SPEED:
        raise ConfigError(f"--speed {speed:g}: must be from {LEAST_SPEED:g} to {MOST_SPEED:g}")


def _check_store(options: ReplayOptions) -> None:
    if options.store not in BACKENDS:
        raise ConfigError(f"--store {options.store}: unknown store; use one of {', '.join(BACKENDS)}")
    if options.store == "memory":
        if options.local_master and options.virtual is not None:
            raise ConfigError("--local-master: starts a real Mooncake, which has no virtual time; leave it or --virtual out")
        if options.local_master:
            raise ConfigError("--local-master: belongs to the Mooncake store; give --store mooncake too")
    elif options.virtual is not None:
        raise ConfigError("--store mooncake: a real store has no virtual time; use --store memory, or leave --virtual out")
    elif options.capacity is not None and not options.local_master:
        raise ConfigError("--capacity: the capacity of a configured pool is its owners'; give --local-master, or leave it out")
    elif options.capacity is not None and options.capacity < LEAST_SEGMENT_BYTES:
        raise ConfigError(f"--capacity {options.capacity}: a Mooncake pool has at least 16 MiB; give more")


def local_blocks(plan: Plan) -> dict[int, int]:
    """Local blocks per group: enough for any requests of the trace that can run at once, or the bound if that is less."""
    longest = plan.summary.longest
    n = plan.options.concurrency
    together = [*longest[:n], *[longest[0]] * max(0, min(n, plan.summary.requests) - len(longest))]
    out: dict[int, int] = dict.fromkeys((g.id for g in plan.rules.groups), 0)
    for length in together:
        for g, most in plan.rules.enough_blocks(length).items():
            out[g] += most
    limit = plan.options.local_blocks
    return {g: max(1, min(most, _MOST_BLOCKS if limit is None else limit)) for g, most in out.items()}
