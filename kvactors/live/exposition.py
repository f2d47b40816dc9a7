"""A snapshot as Prometheus text (version 0.0.4), from the one list of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvactors.core.metrics import COUNTERS, FAMILIES, LIVE_COUNTERS, REVOKE_CAUSES, WAIT_BUCKETS_S, Family
from kvactors.core.sessions import GET_TERMINAL, PUT_TERMINAL, GetState, PutState
from kvactors.live.snapshot import GroupView, Snapshot, WaitView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STATES = ("running", "degraded", "draining", "drained", "closed", "dead")
PUTS_UNDER_WAY = tuple(state.value for state in PutState if state not in PUT_TERMINAL)
GETS_UNDER_WAY = tuple(state.value for state in GetState if state not in GET_TERMINAL)

Sample = tuple[Mapping[str, str], float]
"""Labels other than the rank's, and the value."""

_BY_GROUP = ("saved", "loaded", "load_failed", "skipped_existing", "skipped_no_space", "paused_no_space", "skipped_tainted")
_KEY_OF = {"saved": "saved_blocks", "loaded": "loaded_blocks"}
"""The fields of a group that are counters, and their keys in the list where these have other names."""


def exposition(snapshot: Snapshot) -> str:
    """All families that the snapshot has anything of, each with HELP and TYPE."""
    lines: list[str] = []
    rank = _label("rank", snapshot.rank)
    for key, samples in _samples(snapshot):
        family = FAMILIES[key]
        lines += _head(family)
        for labels, value in samples:
            lines.append(f"{family.name}{{{','.join([rank, *(_label(n, v) for n, v in labels.items())])}}} {_number(value)}")
    for key, wait in snapshot.waits.items():
        lines += _histogram(FAMILIES[key], rank, wait)
    return "\n".join(lines) + "\n"


def _samples(snapshot: Snapshot) -> Iterator[tuple[str, Iterable[Sample]]]:
    for key in (*COUNTERS, *LIVE_COUNTERS):
        if key in snapshot.counters:
            yield key, [({}, snapshot.counters[key])]
    yield "info", [({"version": snapshot.version, "name": snapshot.name, "model": snapshot.model}, 1)]
    yield "uptime_s", [({}, snapshot.uptime_s)]
    for key, value in snapshot.gauges.items():
        yield key, [({}, value)]
    if not snapshot.state:
        return
    yield "state", [({"state": state}, int(state == snapshot.state)) for state in STATES]
    yield "put_ended", [({"end": end}, n) for end, n in snapshot.put_ended.items()]
    revoked = {**dict.fromkeys(REVOKE_CAUSES, 0), **snapshot.revoked_by}
    yield "revoked_by", [({"cause": cause}, n) for cause, n in revoked.items()]
    yield "queued", [({"priority": priority}, n) for priority, n in snapshot.queued.items()]
    groups = snapshot.groups
    for name in _BY_GROUP:
        yield _KEY_OF.get(name, name), [({"group": str(g.id)}, getattr(g, name)) for g in groups]
    yield "puts", [({"group": str(g.id), "state": state}, g.puts.get(state, 0)) for g in groups for state in PUTS_UNDER_WAY]
    yield "gets", [({"group": str(g.id), "state": state}, g.gets.get(state, 0)) for g in groups for state in GETS_UNDER_WAY]
    yield "oldest_s", [({"group": str(g.id)}, g.oldest_s) for g in groups]
    yield "unusable", [({"group": str(g.id), "why": why}, n) for g in groups for why, n in _unusable(g)]
    messages = [("coordinator", snapshot.coordinator_messages), *((f"group-{g.id}", g.messages) for g in groups)]
    yield "mailbox", [({"actor": actor}, n) for actor, n in messages]


def _unusable(group: GroupView) -> tuple[tuple[str, int], ...]:
    return ("poisoned", group.poisoned), ("abandoned", group.abandoned)


def _histogram(family: Family, rank: str, wait: WaitView) -> list[str]:
    lines = _head(family)
    for bound, count in zip([*map(_number, WAIT_BUCKETS_S), "+Inf"], [*wait.at_most, wait.count], strict=True):
        lines.append(f'{family.name}_bucket{{{rank},le="{bound}"}} {count}')
    return [*lines, f"{family.name}_sum{{{rank}}} {_number(wait.sum_s)}", f"{family.name}_count{{{rank}}} {wait.count}"]


def _head(family: Family) -> list[str]:
    meaning = family.meaning.replace("\\", "\\\\").replace("\n", "\\n")
    return [f"# HELP {family.name} {meaning}", f"# TYPE {family.name} {family.kind}"]


def _label(name: str, value: str) -> str:
    text = value.encode("utf-8", "replace").decode().replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return f'{name}="{text}"'


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.9g}"
