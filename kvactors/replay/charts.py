"""Small SVG charts for the report page: lines over time, bars, and rows of spans. Text is escaped; nothing is fetched.

Colours are CSS variables of the page (`--c0` … `--c5`, `--ink`, `--faint`), so that the charts follow light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 560, 230
"""Of a chart, in its own units: on a phone a unit is 0.6 px, and the text is still read."""

LEFT, RIGHT, TOP, BOTTOM = 84, 12, 12, 34
COLOURS = 6


class Line(NamedTuple):
    """One line of a chart: a name for the legend and (x, y) points, x ascending."""

    name: str
    points: Sequence[tuple[float, float]]


class Bar(NamedTuple):
    name: str
    value: float


class Block(NamedTuple):
    """A span in a row of a timeline; times in seconds from the chart's start."""

    name: str
    start_s: float
    end_s: float


def short(value: float) -> str:
    """A number for an axis: 12, 3.4k, 5.6M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def short_bytes(value: float) -> str:
    """Bytes for an axis: 12 B, 3.4 KiB, 977 MiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1000 * 1024 ** (power - 1):
            return f"{value / 1024**power:.3g} {unit}"
    return f"{value:.3g} B"


def seconds(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value and abs(value) < 1 else f"{value:.3g} s"


def clock(value: float) -> str:
    """Seconds as 12 s, 3.5 min, 2 h."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value >= 1.5 * size:
            return f"{value / size:.3g} {unit}"
    return seconds(value)


def line_chart(
    label: str, lines: Sequence[Line], show: Callable[[float], str] = short, along: Callable[[float], str] = seconds
) -> str:
    """Lines over time with axes, a legend and the last value of each line."""
    lines = [line for line in lines if line.points]
    if not lines:
        return _nothing("There is no data to draw.")
    return line_svg(label, lines, show, along) + _legend([f"{line.name}: {show(line.points[-1][1])}" for line in lines])


def line_svg(
    label: str, lines: Sequence[Line], show: Callable[[float], str] = short, along: Callable[[float], str] = seconds
) -> str:
    """A line chart without its legend. Every line has a point."""
    most_x = max(line.points[-1][0] for line in lines) or 1.0
    top = _nice(max((y for line in lines for _, y in line.points), default=0.0))
    plot_w, plot_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> str:
        return f"{LEFT + plot_w * x / most_x:.1f},{TOP + plot_h * (1 - y / top):.1f}"

    out = [_open(label, HEIGHT)]
    for i in range(5):
        y = TOP + plot_h * i / 4
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(
            f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(show(top * (4 - i) / 4))}</text>'
        )
    out += _ticks(LEFT, plot_w, HEIGHT - 8, most_x, along)
    for i, line in enumerate(lines):
        points = [place(x, y) for x, y in line.points]
        title = f"<title>{escape(f'{line.name}: {show(line.points[-1][1])}')}</title>"
        colour = f"var(--c{i % COLOURS})"
        if len(set(points)) == 1:  # such a line has no length
            cx, cy = points[0].split(",")
            out.append(f'<circle r="4" style="fill:{colour}" cx="{cx}" cy="{cy}">{title}</circle>')
        else:
            out.append(f'<polyline class="line" style="stroke:{colour}" points="{" ".join(points)}">{title}</polyline>')
    return "".join(out) + "</svg>"


def bar_chart(label: str, bars: Sequence[Bar], show: Callable[[float], str] = short) -> str:
    """Horizontal bars with their values."""
    if not bars:
        return _nothing("There is no data to draw.")
    row, left = 26, 170
    height = row * len(bars) + 8
    most = max((bar.value for bar in bars), default=0.0) or 1.0
    out = [_open(label, height)]
    for i, bar in enumerate(bars):
        y = 4 + row * i
        width = (WIDTH - left - 90) * bar.value / most
        out.append(f'<text class="axis" x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(bar.name)}</text>')
        out.append(
            f'<rect x="{left}" y="{y + 3}" width="{width:.1f}" height="{row - 8}" rx="2" style="fill:var(--c{i % COLOURS})">'
            f"<title>{escape(f'{bar.name}: {show(bar.value)}')}</title></rect>"
        )
        out.append(f'<text class="axis" x="{left + width + 6:.1f}" y="{y + 16}">{escape(show(bar.value))}</text>')
    return "".join(out) + "</svg>"


def row_chart(label: str, rows: Sequence[tuple[str, Sequence[Block]]], length_s: float) -> str:
    """Rows of spans against one time axis: compute windows above the transfers that they hide."""
    if not rows or length_s <= 0:
        return _nothing("No step with transfers was recorded.")
    row, left = 24, 170
    height = row * len(rows) + 28
    out = [_open(label, height)]
    plot_w = WIDTH - left - RIGHT
    for i, (name, blocks) in enumerate(rows):
        y = 4 + row * i
        shown = name if len(name) <= 18 else name[:17] + "…"
        out.append(f'<text class="axis" x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(shown)}</text>')
        out.append(f'<line class="grid" x1="{left}" x2="{WIDTH - RIGHT}" y1="{y + row - 2}" y2="{y + row - 2}"/>')
        for block in blocks:
            x = left + plot_w * max(0.0, block.start_s) / length_s
            width = max(0.8, plot_w * (min(block.end_s, length_s) - max(0.0, block.start_s)) / length_s)
            title = escape(f"{block.name}: {seconds(block.end_s - block.start_s)}")
            out.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{row - 6}" style="fill:var(--c{i % COLOURS})">'
                f"<title>{title}</title></rect>"
            )
    out += _ticks(left, plot_w, height - 8, length_s, seconds)
    return "".join(out) + "</svg>"


def _open(label: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'


def _ticks(left: float, width: float, y: float, most: float, show: Callable[[float], str]) -> list[str]:
    """Labels below a chart at its start, middle and end; the outer ones stay inside, and three have room on a phone."""
    return [
        f'<text class="axis" x="{left + width * part:.1f}" y="{y}" text-anchor="{anchor}">{escape(show(most * part))}</text>'
        for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    ]


def _legend(names: Sequence[str]) -> str:
    items = "".join(f'<li><i style="background:var(--c{i % COLOURS})"></i>{escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def _nothing(text: str) -> str:
    return f'<p class="faint">{escape(text)}</p>'


def _nice(value: float) -> float:
    """The next round number at or above a value, for the top of an axis."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * size >= value)
