"""`kvactors top`: several engines' snapshots as tables, with rates from one look to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvactors.core.metrics import WAIT_BUCKETS_S
from kvactors.errors import LiveViewError
from kvactors.fitting import FittingTable
from kvactors.live.address import Address
from kvactors.live.client import read_snapshot
from kvactors.live.printable import printable, shown_bytes, shown_seconds
from kvactors.live.snapshot import Snapshot, WaitView

MOST_CAUSES = 4
BAD, GOOD = "bold red", "green"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at one engine saw: a snapshot, or why there is none."""

    address: Address
    snapshot: Snapshot | None = None
    problem: str = ""


def look_at(addresses: Sequence[Address]) -> list[Seen]:
    """One look at every engine; one that does not answer does not spoil the others."""
    seen = []
    for address in addresses:
        try:
            seen.append(Seen(address, read_snapshot(address)))
        except LiveViewError as error:
            seen.append(Seen(address, problem=str(error)))
    return seen


def render(seen: Iterable[Seen], before: Mapping[Address, Snapshot]) -> RenderableType:
    """The tables of all engines; rates are since `before`, and left out where that is empty."""
    parts: list[RenderableType] = []
    for one in seen:
        if one.snapshot is None:
            parts.append(Text(printable(one.problem), style=BAD))
            continue
        parts += [
            _head(one.snapshot),
            _groups(one.snapshot, before.get(one.address)),
            _facts(one.snapshot, before.get(one.address)),
        ]
    return Group(*parts)


def _head(s: Snapshot) -> Text:
    text = Text()
    text.append(printable(s.name) or "engine", style="bold")
    text.append(f"  rank {printable(s.rank)}  process {s.pid}")
    if s.model:
        text.append(f"  {printable(s.model)}")
    if s.state:
        text.append("  ").append(s.state, style=GOOD if s.state == "running" else BAD)
        text.append("  circuit ").append(s.circuit, style=GOOD if s.circuit == "closed" else BAD)
    text.append(f"  up {shown_seconds(s.uptime_s)}")
    return text


def _groups(s: Snapshot, before: Snapshot | None) -> RenderableType:
    if not s.groups:
        return Text("no groups here")
    numbers = ("saved", "loaded", "failed", "from store", "there", "no space", "puts", "gets", "oldest")
    table = FittingTable(("group", *numbers), frozenset(numbers), box=SIMPLE_HEAD)
    earlier = {g.id: g for g in before.groups} if before is not None else {}
    seconds = s.at_s - before.at_s if before is not None else 0.0
    for g in s.groups:
        old = earlier.get(g.id)
        table.add_row(
            f"{g.id} {g.kind} {g.block_tokens}",
            _rated(g.saved, None if old is None else old.saved, seconds),
            _rated(g.loaded, None if old is None else old.loaded, seconds),
            Text(f"{g.load_failed:,}", style=BAD if g.load_failed else ""),
            _share(g.loaded, g.loaded + g.saved),
            f"{g.skipped_existing:,}",
            Text(f"{g.skipped_no_space:,}", style=BAD if g.skipped_no_space else ""),
            _states(g.puts),
            _states(g.gets),
            shown_seconds(g.oldest_s) if g.oldest_s else "-",
        )
    return table


def _facts(s: Snapshot, before: Snapshot | None) -> RenderableType:
    table = Table(box=ROUNDED, show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, text in _rows(s, before):
        if text:
            table.add_row(name, text)
    return table


def _rows(s: Snapshot, before: Snapshot | None) -> Iterator[tuple[str, str | Text]]:
    if s.state:
        yield "bytes", _bytes(s, before)
    if s.counters.get("lookups"):
        yield "lookups", _lookups(s)
    if s.state:
        yield from _work(s)
    if s.revoked_by:
        most = sorted(s.revoked_by.items(), key=lambda item: -item[1])
        left = len(most) - MOST_CAUSES
        text = ", ".join(f"{count:,} {printable(cause)}" for cause, count in most[:MOST_CAUSES])
        yield "revokes", Text(text + (f", {left} more causes" if left > 0 else ""), style=BAD)
    yield "waits", f"{_wait('loads', s.waits.get('exposed_wait_s'))}; {_wait('saves', s.waits.get('save_wait_s'))}"
    trouble = [f"{int(s.gauges[key]):,} {what}" for key, what in _TROUBLES.items() if s.gauges.get(key)]
    trouble += [f"{int(s.counters[key]):,} {what}" for key, what in _FAILURES.items() if s.counters.get(key)]
    unusable = sum(g.poisoned + g.abandoned for g in s.groups)
    trouble += [f"{unusable:,} keys unusable"] if unusable else []
    if trouble:
        yield "trouble", Text(", ".join(trouble), style=BAD)


def _bytes(s: Snapshot, before: Snapshot | None) -> str:
    def moved(key: str) -> str:
        now = s.counters.get(key, 0)
        if before is None or s.at_s <= before.at_s or now <= before.counters.get(key, 0):
            return shown_bytes(now)
        return f"{shown_bytes(now)} ({shown_bytes((now - before.counters.get(key, 0)) / (s.at_s - before.at_s))}/s)"

    return f"saved {moved('saved_bytes')}, loaded {moved('loaded_bytes')}"


def _lookups(s: Snapshot) -> str:
    c = s.counters
    text = f"{_n(s, 'lookups')}, {_share(c['lookups'] - c.get('lookup_misses', 0), c['lookups'])} hit"
    if c.get("lookup_tokens"):
        text += f", {_share(c.get('lookup_hit_tokens', 0), c['lookup_tokens'])} of the tokens"
    if "hit_tokens" in c:
        text += f", {_n(s, 'hit_tokens')} tokens loaded"
    return f"{text}, {_n(s, 'lookup_errors')} failed"


def _work(s: Snapshot) -> Iterator[tuple[str, str]]:
    pending = int(s.gauges.get("pending_saves", 0))
    yield "steps", f"{_n(s, 'steps')}, {_n(s, 'steps_passed_through')} passed through; {pending} saves pending"
    gated = int(s.gauges.get("gated", 0))
    yield "queue", _listed(s.queued) + (f", {gated} wait for the device" if gated else "")
    calls = (f"{printable(c.call)} of group {c.group}, {c.keys} keys, {shown_seconds(c.for_s)}" for c in s.calls)
    yield "calls", "; ".join(calls) or "none under way"
    ends = ", ".join(f"{count:,} {end}" for end, count in s.put_ended.items() if count)
    yield "puts", f"{_n(s, 'put_opened')} opened" + (f": {ends}" if ends else "")
    expired = f", {_n(s, 'get_expired')} leases expired" if s.counters.get("get_expired") else ""
    yield "gets", f"{_n(s, 'get_opened')} opened, {_n(s, 'get_closed')} closed{expired}"


def _n(s: Snapshot, key: str) -> str:
    return f"{int(s.counters.get(key, 0)):,}"


_TROUBLES = {
    "late": "calls past their deadline",
    "missing_workers": "workers missing",
    "fenced": "blocks fenced",
    "pinned": "blocks pinned",
}
_FAILURES = {
    "lost_workers": "workers lost so far",
    "failed_loads": "loads failed",
    "load_deadlines": "loads past their deadline",
    "aborted_steps": "steps aborted",
    "bad_requests": "requests left out",
}


def _rated(now: int, before: int | None, seconds: float) -> str:
    rate = f" ({(now - before) / seconds:,.0f}/s)" if before is not None and seconds > 0 and now > before else ""
    return f"{now:,}{rate}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _states(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in states.items()) or "-"


def _listed(queued: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in queued.items() if count) or "empty"


def _wait(what: str, wait: WaitView | None) -> str:
    if wait is None or not wait.count:
        return f"none for {what}"
    half = next((b for b, n in zip(WAIT_BUCKETS_S, wait.at_most, strict=False) if 2 * n >= wait.count), None)
    typical = f", half of them at most {shown_seconds(half)}" if half is not None and wait.count > 1 else ""
    return f"{shown_seconds(wait.sum_s)} for {what} in {wait.count:,} step{'s' if wait.count != 1 else ''}{typical}"
