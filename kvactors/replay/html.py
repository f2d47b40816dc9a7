"""The report as one self-contained page: numbers, charts, what went wrong. No script, no external request."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from kvactors.core.observe import Span
from kvactors.replay.charts import Bar, Block, Line, bar_chart, line_chart, row_chart, short_bytes
from kvactors.replay.no_hits import why_no_hits
from kvactors.replay.report import Report
from kvactors.replay.summary import si_bytes
from kvactors.replay.tally import Sample
from kvactors.replay.timeline import busiest_step, track_order

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--card:#f6f7f9;--ink:#1c2128;--faint:#68707c;--rule:#d9dde3;
--c0:#2f6fde;--c1:#d9622b;--c2:#2e9d6a;--c3:#9450c8;--c4:#97740c;--c5:#cc3f6d;--bad:#c22f2f;--good:#23805a;--warn:#8a5a00}
@media(prefers-color-scheme:dark){:root{--bg:#14171c;--card:#1d2229;--ink:#e4e8ee;--faint:#98a1ad;--rule:#343b45;
--c0:#6ea3ff;--c1:#f0925f;--c2:#5cc898;--c3:#bf8cee;--c4:#dfbb55;--c5:#f0789f;--bad:#ff7b7b;--good:#65cfa0;--warn:#f0b44c}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 16px 48px;max-width:1240px;background:var(--bg);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;margin:0 0 2px}h2{font-size:16px;margin:0 0 8px}
.faint{color:var(--faint);margin:0 0 14px;overflow-wrap:anywhere}
.verdict{font-weight:600}.bad{color:var(--bad)}.good{color:var(--good)}.warn{color:var(--warn)}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:16px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(136px,1fr));gap:10px;margin:14px 0 18px}
.card,section{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 14px;min-width:0}
.card{padding:12px}.card b{display:block;font-size:18px;font-variant-numeric:tabular-nums}
.card span{color:var(--faint);font-size:13px}
svg{display:block;width:100%;height:auto}.grid{stroke:var(--rule);stroke-width:1}.axis{fill:var(--faint);font-size:14px}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}
.line:nth-of-type(3n+2){stroke-dasharray:9 4}.line:nth-of-type(3n){stroke-dasharray:3 4}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0 0;padding:0;font-size:13px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
.scroll{overflow:auto;max-height:340px}.scroll:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
.grid2+section{margin-top:16px}table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 8px;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
ol{margin:0;padding-left:30px;font-size:13px;overflow-wrap:anywhere}
@media(max-width:520px){body{padding:14px 10px 32px}.card b{font-size:17px}.axis{font-size:17.5px}}
"""


def render_page(report: Report, samples: Sequence[Sample], spans: Sequence[Span]) -> str:
    """The page for a run; `samples` and `spans` may be empty."""
    title = f"Replay of {Path(report.trace.path).name} on {report.layout.name}"
    parts = [
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(_subtitle(report))}</p>',
        _verdict(report),
        _cards(report),
        '<div class="grid2">',
        section("Hits by group over time (blocks)", line_chart("hits by group over time", _hit_lines(report, samples))),
        section("Payload over time", line_chart("bytes saved and loaded over time", _byte_lines(samples), short_bytes)),
        section("Layers of the busiest step", _layer_rows(spans, busiest_step(spans))),
        section("Sessions", bar_chart("sessions by their end", _session_bars(report)) + _open_sessions(samples)),
        section("Failures", _failures(report, samples)),
        section("Where the time went", bar_chart("seconds by use", _time_bars(report), lambda s: f"{s:.3g} s")),
        "</div>",
        section("Groups", _group_table(report)),
        "</body></html>\n",
    ]
    return "".join(parts)


def write_page(path: str | Path, report: Report, samples: Sequence[Sample], spans: Sequence[Span]) -> None:
    Path(path).write_text(render_page(report, samples, spans), encoding="utf-8")


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _subtitle(report: Report) -> str:
    return (
        f"{report.trace.path} · {report.store} store · {report.clock} clock · seed {report.seed} · "
        f"boundary {report.layout.boundary_tokens} tokens · layout {report.layout.digest[:12]}"
    )


def _verdict(report: Report) -> str:
    if report.broken:
        lines = [*report.invariants.violations]
        if report.bytes.mismatched:
            lines.append(f"{report.bytes.mismatched} loaded bytes were wrong")
        if report.requests.failed:
            lines.append(f"{report.requests.failed} requests failed")
        text = "; ".join(lines[:5]) or "not all requests were done"
        return f'<p class="verdict bad">Broken: {escape(text)}</p>'
    text, tone = "All requests done, every loaded byte right, no invariant broken.", "good"
    if report.interrupted:
        text, tone = "Interrupted and drained: what ran was right.", "plain"
    elif not report.tokens.hit:
        text, tone = f"{text} No hits: {why_no_hits(report, report.layout.boundary_tokens)}.", "plain"
    elif report.failures.load_failed:
        text = f"{text} Loads failed for {report.failures.load_failed:,} requests, which were computed again."
    return f'<p class="verdict {"warn" if _troubled(report) else tone}">{escape(text)}</p>'


def _troubled(report: Report) -> bool:
    """Whether something went wrong that a run may show: the store failed it, and it went on without."""
    f, s = report.failures, report.sessions
    failed = f.load_failed or f.outages or f.lost_calls or f.lookup_errors
    return bool(failed or s.put_poisoned or s.put_abandoned)


def _cards(report: Report) -> str:
    wall = max(report.time.wall_s, 1e-9)
    moved = report.bytes.saved + report.bytes.loaded
    cards = [
        (f"{report.tokens.hit_ratio:.1%}", f"{report.tokens.hit:,} of {report.tokens.input:,} tokens hit"),
        (f"{report.requests.completed:,}", f"of {report.requests.total:,} requests done"),
        (f"{report.requests.completed / wall:,.0f}/s", f"requests, {report.time.wall_s:.2f} s in all"),
        (si_bytes(report.bytes.saved), "saved"),
        (si_bytes(report.bytes.loaded), "loaded"),
        (f"{si_bytes(moved / wall)}/s", "moved"),
        (f"{report.bytes.mismatched:,}", f"wrong bytes of {si_bytes(report.bytes.verified)} compared"),
        (f"{report.invariants.checked:,}", f"invariant checks, {len(report.invariants.violations):,} broken"),
    ]
    return card_row(cards)


def card_row(cards: Sequence[tuple[str, str]]) -> str:
    """Figures, each with what it counts."""
    items = "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)
    return f'<div class="cards">{items}</div>'


def _hit_lines(report: Report, samples: Sequence[Sample]) -> list[Line]:
    return [
        Line(f"group {group.id} ({group.kind})", [(s.at_s, float(s.hit_blocks[i])) for s in samples])
        for i, group in enumerate(report.layout.groups)
    ]


def _byte_lines(samples: Sequence[Sample]) -> list[Line]:
    return [
        Line("saved", [(s.at_s, float(s.bytes_saved)) for s in samples]),
        Line("loaded", [(s.at_s, float(s.bytes_loaded)) for s in samples]),
    ]


def _layer_rows(spans: Sequence[Span], step: Span | None) -> str:
    if step is None:
        return row_chart("layer timeline", [], 0.0)
    start, end = step.start_s, step.end_s
    inside = [s for s in spans if s.end_s >= start and s.start_s <= end and s.track != "harness"]
    rows: list[tuple[str, list[Block]]] = []
    for track in sorted({s.track for s in inside}, key=track_order)[:12]:
        mine = sorted((s for s in inside if s.track == track), key=lambda s: s.start_s)[:400]
        rows.append((track, [Block(s.name, s.start_s - start, s.end_s - start) for s in mine]))
    return _step_name(step) + row_chart("compute windows and transfers of one step", rows, end - start)


def _step_name(step: Span) -> str:
    """Which step it is, and whose, by the names that the timeline file has."""
    ids, more = str(step.args.get("ids", "")).replace(",", ", "), step.args.get("more")
    of = f": requests {ids}{f' and {more} more' if more else ''}" if ids else ""
    return f'<p class="faint">{escape(f"{step.name[:1].upper()}{step.name[1:]}{of}")}</p>'


def _session_bars(report: Report) -> list[Bar]:
    s = report.sessions
    bars = [Bar("put committed", s.put_committed), Bar("put revoked", s.put_revoked)]
    if s.put_poisoned or s.put_abandoned:
        bars += [Bar("put poisoned", s.put_poisoned), Bar("put abandoned", s.put_abandoned)]
    bars += [Bar("get closed", s.get_closed), Bar("get expired", s.get_expired), Bar("open at the end", s.open_at_end)]
    return bars


def _open_sessions(samples: Sequence[Sample]) -> str:
    if not any(s.open_sessions for s in samples):
        return ""
    return line_chart("open sessions over time", [Line("open", [(s.at_s, float(s.open_sessions)) for s in samples])])


def _failures(report: Report, samples: Sequence[Sample]) -> str:
    f = report.failures
    text = (
        f"{f.injected:,} faults injected, {f.load_failed:,} requests with a failed load, "
        f"{f.recomputed_tokens:,} tokens recomputed, {report.preemptions:,} preemptions, "
        f"{report.trace.skipped:,} bad trace lines."
    )
    out = f"<p>{escape(text)}</p>"
    if f.load_failed:
        out += line_chart("failed loads over time", [Line("failed", [(s.at_s, float(s.load_failures)) for s in samples])])
    if report.events:
        out += _scrolling("events", "<ol>" + "".join(f"<li>{escape(text)}</li>" for text in report.events[:40]) + "</ol>")
    return out


def _time_bars(report: Report) -> list[Bar]:
    t = report.time
    rest = max(0.0, t.wall_s - t.compute_s - t.exposed_load_s - t.exposed_save_s)
    return [
        Bar("compute", t.compute_s),
        Bar("waiting for loads", t.exposed_load_s),
        Bar("waiting for saves", t.exposed_save_s),
        Bar("everything else", rest),
    ]


def _group_table(report: Report) -> str:
    head = ("group", "kind", "tokens a block", "layers", "object bytes", "asked", "hit", "loaded", "saved", "there already")
    rows = []
    for g in report.layout.groups:
        b = report.blocks[str(g.id)]
        numbers = (g.block_tokens, g.layers, g.object_bytes, b.looked_up, b.hit, b.loaded, b.saved, b.skipped_existing)
        rows.append((str(g.id), g.kind, *(f"{n:,}" for n in numbers)))
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    header = "".join(f"<th>{escape(c)}</th>" for c in head)
    return _scrolling("groups", f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>")


def _scrolling(label: str, body: str) -> str:
    """What may be larger than its box: not every browser lets the keyboard into one that is not marked."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{body}</div>'
