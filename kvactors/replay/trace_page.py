"""The figures of a trace as text, as a page with charts, or as one picture. No script, no external request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvactors.replay.charts import COLOURS, HEIGHT, WIDTH, Bar, Line, bar_chart, clock, line_chart, line_svg, short
from kvactors.replay.html import STYLE, card_row, section
from kvactors.replay.trace_stats import Lengths, TraceStats, Uses

PICTURE, PAGE = ".svg", (".html", ".htm")
_LEGEND_ROW = 22


def print_stats(stats: TraceStats, console: Console) -> None:
    """Tables for people."""
    trace, blocks, shared, kept = stats.trace, stats.blocks, stats.shared, stats.working_set
    console.print(f"{Path(trace.path).name}: {trace.format}, {trace.block_tokens} tokens a block")
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    rate = "" if stats.requests_per_s is None else f", {stats.requests_per_s:.3g} requests/s"
    skipped = f", {trace.skipped:,} bad lines skipped" if trace.skipped else ""
    table.add_row("requests", f"{stats.requests:,}", f"in {clock(stats.duration_s)}{rate}{skipped}")
    table.add_row("prompts", f"{stats.input_tokens.total:,} tokens", _spread(stats.input_tokens))
    table.add_row("outputs", f"{stats.output_tokens.total:,} tokens", _spread(stats.output_tokens))
    part = f"{blocks.reused / blocks.unique:.1%} of them come again" if blocks.unique else "no prompt has a whole block"
    table.add_row("blocks", f"{blocks.unique:,} different", f"of {blocks.complete:,}; {part}, one {blocks.most_uses:,} times")
    table.add_row("shared", f"{shared.requests:,} requests", f"begin like one before; tokens: {_spread(shared.tokens)}")
    live = f"{kept.peak_live_tokens:,} at most at once that come again later"
    table.add_row("working set", f"{kept.unique_tokens:,} tokens", live)
    console.print(table)
    console.print("the most that a cache of unlimited capacity can serve, by boundary:")
    table = Table()
    for column in ("boundary", "tokens hit", "of all"):
        table.add_column(column, justify="right")
    for row in stats.ceiling:
        table.add_row(str(row.boundary_tokens), f"{row.hit_tokens:,}", f"{row.hit_ratio:.1%}")
    console.print(table)


def _spread(lengths: Lengths) -> str:
    return f"{lengths.min:,} to {lengths.max:,}; median {lengths.median:,}, p90 {lengths.p90:,}, p99 {lengths.p99:,}"


def write_plot(path: str, stats: TraceStats) -> None:
    """Writes a page, or a picture where the name ends in .svg."""
    make = render_picture if path.lower().endswith(PICTURE) else render_page
    Path(path).write_text(make(stats), encoding="utf-8")


def render_page(stats: TraceStats) -> str:
    title, along = f"Trace {Path(stats.trace.path).name}", _along(stats)
    subtitle = f"{stats.trace.path} · {stats.trace.format} · {stats.trace.block_tokens} tokens a block"
    parts = [
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(subtitle)}</p>',
        card_row(_cards(stats)),
        '<div class="grid2">',
        section("Ceiling of the hit rate by boundary", bar_chart("ceiling of the hit rate", _ceiling_bars(stats), _percent)),
        section("Working set over time (tokens)", line_chart("working set over time", _kept_lines(stats), short, along)),
        section("Requests over time", line_chart("requests over time", _request_lines(stats), short, along)),
        section("How often a block comes (different blocks)", bar_chart("uses of a block", _use_bars(stats))),
        section("Prompt lengths (tokens)", bar_chart("prompt lengths", _length_bars(stats.input_tokens))),
        section("Output lengths (tokens)", bar_chart("output lengths", _length_bars(stats.output_tokens))),
        "</div></body></html>\n",
    ]
    return "".join(parts)


def render_picture(stats: TraceStats) -> str:
    """The first two charts of the page, one below the other."""
    bars = bar_chart("ceiling of the hit rate", _ceiling_bars(stats), _percent)
    lines = _kept_lines(stats)
    curves = line_svg("working set over time", lines, short, _along(stats))
    box = re.match(r'<svg viewBox="0 0 \d+ (\d+)"', bars)
    top = 34 + (int(box[1]) if box else HEIGHT)
    height = top + 34 + HEIGHT + _LEGEND_ROW * len(lines) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<style>{_picture_style()}</style>",
        f'<rect width="{WIDTH}" height="{height}" style="fill:var(--bg)"/>',
        _title(f"{Path(stats.trace.path).name}: ceiling of the hit rate by boundary", 22),
        _placed(bars, 34, top - 34),
        _title("working set over time (tokens)", top + 22),
        _placed(curves, top + 34, HEIGHT),
    ]
    for i, line in enumerate(lines):
        y = top + 34 + HEIGHT + _LEGEND_ROW * i
        out.append(f'<rect x="16" y="{y + 4}" width="10" height="10" rx="2" style="fill:var(--c{i % COLOURS})"/>')
        text = f"{line.name}: {short(line.points[-1][1])}"
        out.append(f'<text class="axis" x="32" y="{y + 14}">{escape(text)}</text>')
    return "".join(out) + "</svg>\n"


def _picture_style() -> str:
    """The page's colours and what its charts use; a picture's own root stands in for the page's."""
    kept = [rule for rule in STYLE.strip().split("\n") if rule.startswith((":root", "--c", "@media(prefers"))]
    charts = ".grid{stroke:var(--rule);stroke-width:1}.axis{fill:var(--faint);font-size:14px}"
    lines = ".line{fill:none;stroke-width:2.2;stroke-linejoin:round}.title{fill:var(--ink);font-size:16px;font-weight:600}"
    return "".join(kept) + charts + lines + "text{font-family:system-ui,sans-serif}"


def _title(text: str, y: int) -> str:
    return f'<text class="title" x="16" y="{y}">{escape(text)}</text>'


def _placed(chart: str, y: int, height: int) -> str:
    return chart.replace("<svg ", f'<svg x="0" y="{y}" width="{WIDTH}" height="{height}" ', 1)


def _percent(ratio: float) -> str:
    return f"{ratio:.1%}"


def _along(stats: TraceStats) -> Callable[[float], str]:
    return clock if stats.duration_s > 0 else short


def _cards(stats: TraceStats) -> list[tuple[str, str]]:
    best, rate = stats.ceiling[0], stats.requests_per_s
    pace = "all at once" if rate is None else f"{rate:.3g} a second for {clock(stats.duration_s)}"
    return [
        (f"{stats.requests:,}", f"requests, {pace}"),
        (short(stats.input_tokens.total), f"prompt tokens, {stats.input_tokens.median:,} in the median"),
        (f"{best.hit_ratio:.1%}", f"can be hits, at a boundary of {best.boundary_tokens}"),
        (short(stats.blocks.unique), f"different blocks of {stats.blocks.complete:,}"),
        (short(stats.working_set.unique_tokens), "tokens to keep everything"),
        (short(stats.working_set.peak_live_tokens), "tokens at most that come again"),
    ]


def _ceiling_bars(stats: TraceStats) -> list[Bar]:
    return [Bar(f"{row.boundary_tokens} tokens", row.hit_ratio) for row in stats.ceiling]


def _use_bars(stats: TraceStats) -> list[Bar]:
    return [Bar(_times(row), float(row.blocks)) for row in stats.blocks.uses if row.blocks]


def _times(row: Uses) -> str:
    if row.high is None:
        return f"{row.low} times or more"
    if row.low == row.high:
        return "once" if row.low == 1 else "twice" if row.low == 2 else f"{row.low} times"
    return f"{row.low} to {row.high} times"


def _length_bars(lengths: Lengths) -> list[Bar]:
    names = ("least", "median", "90% up to", "99% up to", "longest")
    values = (lengths.min, lengths.median, lengths.p90, lengths.p99, lengths.max)
    return [Bar(name, float(value)) for name, value in zip(names, values, strict=True)]


def _kept_lines(stats: TraceStats) -> list[Line]:
    x = _times_of(stats)
    points, most = stats.working_set.points, short(stats.working_set.peak_live_tokens)
    return [
        Line("everything so far", [(at, float(p.unique_tokens)) for at, p in zip(x, points, strict=True)]),
        Line(
            f"what comes again later, at most {most}; now",
            [(at, float(p.live_tokens)) for at, p in zip(x, points, strict=True)],
        ),
    ]


def _request_lines(stats: TraceStats) -> list[Line]:
    points = stats.working_set.points
    return [Line("requests", [(at, float(p.requests)) for at, p in zip(_times_of(stats), points, strict=True)])]


def _times_of(stats: TraceStats) -> Sequence[float]:
    """Seconds; numbers of requests where all come at once."""
    points = stats.working_set.points
    return [p.at_s if stats.duration_s > 0 else float(p.requests) for p in points]
