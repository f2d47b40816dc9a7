"""The figures of a trace, against a computation that knows the tokens, and exact ones of small traces."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.dom import minidom

import pytest
from click.testing import CliRunner

from kvactors.cli import cli
from kvactors.replay.trace_page import render_page, render_picture
from kvactors.replay.trace_stats import TraceStats, boundaries, trace_stats
from tests.traces.rows import (
    Prompt,
    bailian,
    mooncake,
    plain_hashes,
    plain_tokens,
    prompts,
    stretched,
    times,
    write_csv,
    write_jsonl,
)

SAMPLE = Path(__file__).parents[2] / "examples/sample_trace.jsonl"


def brute_force(made: Sequence[Prompt], unit: int) -> dict[str, object]:
    """From the tokens themselves, request by request, block by block."""
    uses: Counter[tuple[int, ...]] = Counter()
    first: dict[tuple[int, ...], int] = {}
    last: dict[tuple[int, ...], int] = {}
    shared = []
    for i, prompt in enumerate(made):
        prefixes = [tuple(prompt[:end]) for end in range(unit, len(prompt) + 1, unit)]
        run = 0
        for prefix in prefixes:
            if prefix not in first:
                break
            run += unit
        shared.append(run)
        for prefix in prefixes:
            uses[prefix] += 1
            first.setdefault(prefix, i)
            last[prefix] = i
    ceiling = {}
    for b in [n for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if n % unit == 0]:
        stored: set[tuple[int, ...]] = set()
        hit = 0
        for prompt in made:
            ends = range(b, len(prompt) + 1, b)
            hit += max((e for e in ends if e < len(prompt) and tuple(prompt[:e]) in stored), default=0)
            stored.update(tuple(prompt[:e]) for e in ends)
        ceiling[b] = hit
    unique, live = [], []
    for i in range(len(made)):
        unique.append(unit * sum(1 for n in first.values() if n <= i))
        live.append(unit * sum(1 for p, n in first.items() if n <= i < last[p]))
    return {
        "complete": sum(uses.values()),
        "unique": len(uses),
        "reused": sum(1 for n in uses.values() if n > 1),
        "most": max(uses.values(), default=0),
        "once": sum(1 for n in uses.values() if n == 1),
        "shared": shared,
        "ceiling": ceiling,
        "unique over time": unique,
        "live over time": live,
    }


def figures(stats: TraceStats) -> dict[str, object]:
    points = stats.working_set.points
    return {
        "complete": stats.blocks.complete,
        "unique": stats.blocks.unique,
        "reused": stats.blocks.reused,
        "most": stats.blocks.most_uses,
        "once": stats.blocks.uses[0].blocks,
        "ceiling": {row.boundary_tokens: row.hit_tokens for row in stats.ceiling},
        "unique over time": [p.unique_tokens for p in points],
        "live over time": [p.live_tokens for p in points],
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("batch_blocks", [1, 7, 1 << 19])
def test_the_figures_are_those_of_the_tokens(tmp_path: Path, seed: int, batch_blocks: int) -> None:
    made = prompts(seed, 80)
    want = brute_force(made, 16)
    shared = want.pop("shared")
    assert isinstance(shared, list)
    for path in (
        write_jsonl(tmp_path / "b.jsonl", bailian(made)),
        write_csv(tmp_path / "t.csv", plain_tokens(made)),
        write_jsonl(tmp_path / "h.jsonl", plain_hashes(made, 16, chained=True)),
    ):
        stats = trace_stats(path, batch_blocks=batch_blocks)
        assert figures(stats) == want
        assert (stats.shared.requests, stats.shared.tokens.total) == (sum(n > 0 for n in shared), sum(shared))
        assert stats.working_set.unique_tokens == stats.blocks.unique * 16
        assert stats.working_set.peak_live_tokens == max(p.live_tokens for p in stats.working_set.points)
        assert sum(row.blocks for row in stats.blocks.uses) == stats.blocks.unique


def test_the_figures_of_512_token_blocks(tmp_path: Path) -> None:
    made = stretched(prompts(9, 30, 100), 60)
    want = brute_force(made, 512)
    assert sum(want.pop("shared")) > 0  # type: ignore[call-overload]
    assert figures(trace_stats(write_jsonl(tmp_path / "m.jsonl", mooncake(made)))) == want


def quantile(values: Sequence[int], part: float) -> int:
    return sorted(values)[math.ceil(part * len(values)) - 1]


def test_lengths_and_rate(tmp_path: Path) -> None:
    made = prompts(2, 101)
    stats = trace_stats(write_jsonl(tmp_path / "b.jsonl", bailian(made)))
    for found, values in ((stats.input_tokens, [len(p) for p in made]), (stats.output_tokens, [i % 7 for i in range(101)])):
        assert (found.total, found.min, found.max) == (sum(values), min(values), max(values))
        assert (found.median, found.p90, found.p99) == (quantile(values, 0.5), quantile(values, 0.9), quantile(values, 0.99))
    last = list(times(101))[-1]
    assert stats.duration_s == last
    assert stats.requests_per_s == 101 / last


def test_a_small_trace_to_the_token(tmp_path: Path) -> None:
    """The second prompt shares 48 tokens and has 50: at a boundary of 16 it hits 48, at 32 only 32. The third is the first
    again: its last token is never a hit. The fourth has no whole block."""
    a = list(range(64))
    made = [a, [*a[:48], 900, 901], a, [7] * 15]
    stats = trace_stats(write_jsonl(tmp_path / "t.jsonl", plain_tokens(made)))
    assert [(c.boundary_tokens, c.hit_tokens) for c in stats.ceiling[:4]] == [(16, 96), (32, 64), (64, 0), (128, 0)]
    assert stats.ceiling[0].hit_ratio == 96 / 193
    assert (stats.blocks.complete, stats.blocks.unique, stats.blocks.reused, stats.blocks.most_uses) == (11, 4, 4, 3)
    assert [(u.low, u.high, u.blocks) for u in stats.blocks.uses[:3]] == [(1, 1, 0), (2, 2, 1), (3, 4, 3)]
    assert [p.unique_tokens for p in stats.working_set.points] == [64, 64, 64, 64]
    assert [p.live_tokens for p in stats.working_set.points] == [64, 64, 0, 0]
    assert (stats.shared.requests, stats.shared.tokens.total) == (2, 48 + 64)


def test_a_trace_without_a_whole_block(tmp_path: Path) -> None:
    stats = trace_stats(write_jsonl(tmp_path / "t.jsonl", plain_tokens([[1, 2], [1, 2]])))
    assert (stats.blocks.unique, stats.working_set.peak_live_tokens, stats.ceiling[0].hit_tokens) == (0, 0, 0)


def test_the_public_figures_of_the_sample() -> None:
    stats = trace_stats(SAMPLE)
    assert (stats.requests, stats.duration_s, stats.input_tokens.total) == (334, 645.869, 1_198_834)
    ceiling = {c.boundary_tokens: c.hit_tokens for c in stats.ceiling}
    assert ceiling == {512: 870_912, 1024: 774_144, 2048: 632_832, 4096: 376_832, 8192: 40_960}


@pytest.mark.parametrize(
    ("unit", "sizes"),
    [
        (16, [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]),
        (512, [512, 1024, 2048, 4096, 8192]),
        (1, [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]),
        (48, [48, 96, 192, 384, 768, 1536, 3072, 6144]),
        (16384, [16384]),
    ],
)
def test_boundaries_that_a_trace_can_tell_about(unit: int, sizes: list[int]) -> None:
    assert boundaries(unit) == sizes


def test_times_that_go_back_and_times_that_stand_still(tmp_path: Path) -> None:
    rows = [{"time": at, "tokens": [1]} for at in (5.0, 2.5, 9.0)]
    stats = trace_stats(write_jsonl(tmp_path / "t.jsonl", rows))
    assert (stats.duration_s, [p.at_s for p in stats.working_set.points]) == (6.5, [2.5, 2.5, 6.5])
    stats = trace_stats(write_jsonl(tmp_path / "t.jsonl", rows[:1] * 3))
    assert (stats.duration_s, stats.requests_per_s) == (0.0, None)
    assert "all at once" in render_page(stats)
    minidom.parseString(render_picture(stats))


def test_long_traces_have_two_hundred_points(tmp_path: Path) -> None:
    points = trace_stats(write_jsonl(tmp_path / "t.jsonl", plain_tokens(prompts(1, 450)))).working_set.points
    assert len(points) == 200
    assert (points[0].requests, points[-1].requests) == (1, 450)


# -- the command -----------------------------------------------------------------------------------------------------------


def test_the_command_prints_json_and_writes_its_plots(tmp_path: Path) -> None:
    page, picture = tmp_path / "p.html", tmp_path / "p.svg"
    result = CliRunner().invoke(cli, ["trace", "stats", str(SAMPLE), "--json", "--plot", str(page)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["trace"] == {"path": str(SAMPLE), "format": "mooncake", "block_tokens": 512, "skipped": 0}
    assert found["blocks"]["uses"][0] == {"from": 1, "to": 1, "blocks": 178}
    assert found["ceiling"][0] == {"boundary_tokens": 512, "hit_tokens": 870912, "hit_ratio": 870912 / 1198834}
    text = page.read_text()
    assert text.count("<svg") == 6
    assert not re.search(r"<script|<link|@import|src=|href=|url\(", text)
    result = CliRunner().invoke(cli, ["trace", "stats", str(SAMPLE), "--plot", str(picture)])
    assert "870,912 │  72.6%" in result.stdout
    root = minidom.parse(str(picture)).documentElement
    assert root is not None
    assert root.getAttribute("xmlns") == "http://www.w3.org/2000/svg"
    assert [len(root.getElementsByTagName(n)) for n in ("svg", "polyline", "script", "image")] == [2, 2, 0, 0]


def test_names_of_users_are_escaped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a<b>&.jsonl", plain_tokens(prompts(1, 5)))
    stats = trace_stats(path)
    assert "a<b>" not in render_page(stats)
    minidom.parseString(render_picture(stats))
    assert "a<b>&.jsonl: jsonl" in CliRunner().invoke(cli, ["trace", "stats", str(path)]).stdout


def test_bad_lines_are_counted_or_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", ["{", *bailian(prompts(1, 5))])
    refused = CliRunner().invoke(cli, ["trace", "stats", str(path)])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"{path}:1: is not valid JSON" in refused.stderr
    assert "1 bad lines skipped" in CliRunner().invoke(cli, ["trace", "stats", str(path), "--skip-bad"]).stdout


@pytest.mark.parametrize(
    ("plot", "problem"), [("p.png", "must end in .html or .svg"), ("/no/such/p.svg", "/no/such"), ("", "name of a file")]
)
def test_a_plot_that_cannot_be_written_is_refused(plot: str, problem: str) -> None:
    result = CliRunner().invoke(cli, ["trace", "stats", str(SAMPLE), "--plot", plot])
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr
