"""No number of a trace is without a bound, whatever its format; what is beyond says so with its line and field."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvactors.cli import cli
from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.errors import TraceError
from kvactors.replay.formats.rows import MOST_BLOCK_TOKENS, MOST_COLUMNS, MOST_MS, MOST_TOKENS
from kvactors.replay.plan import ReplayOptions, VirtualOptions, plan_replay
from kvactors.replay.trace import TraceReader, scan_trace
from kvactors.replay.trace_convert import convert
from kvactors.replay.trace_stats import trace_stats
from tests.traces.rows import write_csv, write_jsonl

MOONCAKE: dict[str, Any] = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
BAILIAN: dict[str, Any] = {"chat_id": 1, "timestamp": 5, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}
TOKENS: dict[str, Any] = {"time": 5, "tokens": [1, 2, 3], "output_length": 3}
TOKENS_MS: dict[str, Any] = {"time_ms": 5, "tokens": [1, 2, 3], "output_length": 3}
HASHES: dict[str, Any] = {"time": 5, "hashes": [1, 2], "block_tokens": 32, "input_length": 40, "output_length": 3}
WHOLE: dict[str, Any] = {"time": 5, "hashes": [1, 2], "block_tokens": 32, "output_length": 3}

HUGE = (2**63, 99999999999999999999, 10**39)
PLAIN = (TOKENS, HASHES)
LENGTHS = (MOONCAKE, BAILIAN, *PLAIN)
BEYOND = [
    # (a good row, what in it becomes too large, to what, the field that the error names, a part of the problem)
    *[(row, "output_length", n, "output_length", "the 16,777,216 that a request may have") for row in LENGTHS
      for n in (MOST_TOKENS + 1, 9 * 10**18, *HUGE)],
    *[(row, "input_length", n, "input_length", "the 16,777,216 that a request may have") for row in LENGTHS
      for n in (MOST_TOKENS + 1, *HUGE)],
    *[(row, "block_tokens", n, "block_tokens", "the 1,048,576 that a hash may cover") for row in (HASHES, WHOLE)
      for n in (MOST_BLOCK_TOKENS + 1, 10**11, 5 * 10**18, *HUGE)],
    *[(row, "timestamp", n, "timestamp", "the most that a time may be; is it in another unit?") for row, n in (
        (MOONCAKE, MOST_MS + 1), (MOONCAKE, 1e300), (BAILIAN, MOST_MS // 1000 + 1), (BAILIAN, 1e300))],
    *[(row, "time", n, "time", "more than 1e+12 seconds, the most") for row in PLAIN for n in (10**12 + 1, 1e300, 10**30)],
    (TOKENS_MS, "time_ms", 10**15 + 1, "time_ms", "more than 1e+15 milliseconds, the most"),
    (TOKENS, "tokens", [1, 2**64], "tokens", "does not fit 64 bits"),
    (TOKENS, "tokens", [1, 10**39], "tokens", "does not fit 64 bits"),
    (MOONCAKE, "hash_ids", [1, 10**39], "hash_ids", "does not fit 64 bits"),
]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]], *, csv: bool) -> Path:
    return (write_csv if csv else write_jsonl)(path, rows)


@pytest.mark.parametrize("csv", [False, True])
@pytest.mark.parametrize(("good", "name", "value", "field", "problem"), BEYOND)
def test_a_number_beyond_its_bound(
    tmp_path: Path, csv: bool, good: dict[str, Any], name: str, value: Any, field: str, problem: str
) -> None:
    if csv and "hash_ids" in good:
        return  # no format of CSV
    if csv and name not in good:
        good = {**good, name: len(good["tokens"])}
    path = write(tmp_path / "t", [good, {**good, name: value}, good], csv=csv)
    line = 3 if csv else 2
    with pytest.raises(TraceError) as caught:
        scan_trace(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), line, field)
    assert problem in caught.value.problem
    assert len(caught.value.problem) < 160
    assert (summary := scan_trace(path, skip_bad=True)).skipped == 1
    assert summary.requests == 2


@pytest.mark.parametrize("csv", [False, True])
@pytest.mark.parametrize("digits", [41, 5000])
@pytest.mark.parametrize("name", ["output_length", "tokens", "time", "block_tokens", "input_length"])
def test_numbers_of_thousands_of_digits(tmp_path: Path, csv: bool, digits: int, name: str) -> None:
    """Python itself refuses those of more than 4300."""
    good = {**(HASHES if name in HASHES else TOKENS), "time": 5}
    path = write(tmp_path / "t", [good, {**good, name: "DIGITS"}, good], csv=csv)
    number = f"[{'9' * digits}]" if name == "tokens" and not csv else "9" * digits
    path.write_text(path.read_text().replace('"DIGITS"', number).replace("DIGITS", number))
    with pytest.raises(TraceError) as caught:
        scan_trace(path)
    assert (caught.value.line, caught.value.field) == (3 if csv else 2, name)
    assert len(caught.value.problem) < 160
    assert scan_trace(path, skip_bad=True).skipped == 1


@pytest.mark.parametrize("name", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_thousands_of_digits_beside_hash_ids(tmp_path: Path, name: str) -> None:
    row = json.dumps({**MOONCAKE, name: "DIGITS"})
    path = write_jsonl(tmp_path / "t", [MOONCAKE, row.replace('"DIGITS"', "[" * (name == "hash_ids") + "9" * 5000), MOONCAKE])
    text = path.read_text()
    path.write_text(text.replace("9" * 5000, "9" * 5000 + "]") if name == "hash_ids" else text)
    with pytest.raises(TraceError, match="out of range") as caught:
        scan_trace(path)
    assert (caught.value.line, caught.value.field) == (2, name)
    assert scan_trace(path, skip_bad=True).skipped == 1


AT_THE_BOUND = [
    {
        **MOONCAKE,
        "timestamp": MOST_MS,
        "input_length": MOST_TOKENS,
        "output_length": MOST_TOKENS,
        "hash_ids": [*range(1 << 15)],
    },
    {**WHOLE, "time": MOST_MS // 1000, "hashes": [*range(16)], "block_tokens": MOST_BLOCK_TOKENS, "output_length": MOST_TOKENS},
]


@pytest.mark.parametrize("row", AT_THE_BOUND)
def test_what_is_made_at_the_bound_takes_little_memory(tmp_path: Path, row: dict[str, Any]) -> None:
    """A few MiB for a request of 16.8 million tokens, in the figures, the conversion and the plan of a replay."""
    path, out = write_jsonl(tmp_path / "t.jsonl", [row] * 2), tmp_path / "o.jsonl"
    layout = KVLayout("m", [Group(0, GroupKind.FULL, 512, {0: [CacheEntry("k", 16)]})])
    tracemalloc.start()
    try:
        stats = trace_stats(path)
        convert(TraceReader(path), str(out))
        plan_replay(ReplayOptions(str(path), layout, virtual=VirtualOptions()))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20
    assert (stats.input_tokens.total, stats.output_tokens.total) == (2 * MOST_TOKENS, 2 * MOST_TOKENS)
    assert stats.shared.tokens.total == MOST_TOKENS
    again = list(TraceReader(out))
    assert [(r.timestamp_ms, r.input_length, r.output_length, len(r.hash_ids)) for r in again] == [
        (MOST_MS, MOST_TOKENS, MOST_TOKENS, 1 << 15)
    ] * 2


def test_hashes_without_a_length_have_the_bound_of_a_length(tmp_path: Path) -> None:
    row = {**WHOLE, "hashes": [*range(17)], "block_tokens": MOST_BLOCK_TOKENS}
    with pytest.raises(TraceError, match="17825792 tokens are more than the 16,777,216") as caught:
        scan_trace(write_jsonl(tmp_path / "t.jsonl", [row]))
    assert caught.value.field == "hashes"


def test_columns_have_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for others in (MOST_COLUMNS - 2, MOST_COLUMNS - 1):
        path.write_text(f"time,tokens{',x' * others}\n0,1 2{',' * others}\n")
        if others + 2 == MOST_COLUMNS:
            assert scan_trace(path).requests == 1
            continue
        with pytest.raises(TraceError, match="has 1,025 columns, more than 1,024") as caught:
            scan_trace(path)
        assert caught.value.line == 1


@pytest.mark.parametrize("end", ["\n", ""])
def test_lines_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr("kvactors.replay.trace.MOST_LINE_BYTES", 100)
    monkeypatch.setattr("kvactors.replay.trace._PIECE_BYTES", 7)
    long = json.dumps({**TOKENS, "tokens": [1] * 200})
    for rows, at in (([TOKENS, long, TOKENS], 2), ([long, TOKENS], 1), ([TOKENS, " " * 500], 2), ([TOKENS, long], 2)):
        path = write_jsonl(tmp_path / "t.jsonl", rows)
        path.write_text(path.read_text().removesuffix("\n") + end)
        with pytest.raises(TraceError, match="is longer than 64 MiB, the most that a line may have") as caught:
            scan_trace(path)
        assert caught.value.line == at
        first = scan_trace(path, skip_bad=True)
        assert first.skipped == 1
        assert [r.line for r in TraceReader(path, skip_bad=True)] == [n for n, row in enumerate(rows, 1) if row is TOKENS]
        again = TraceReader(path, skip_bad=True, limit=first.requests, expected=first.checksum, format="jsonl")
        assert len(list(again)) == first.requests


def test_a_rate_needs_a_duration(tmp_path: Path) -> None:
    stats = trace_stats(write_jsonl(tmp_path / "t.jsonl", [{**TOKENS, "time": at} for at in (0, 1e-320)]))
    assert stats.requests_per_s is None


@pytest.mark.parametrize("words", [["trace", "stats"], ["trace", "convert"], ["replay", "--virtual"]])
def test_the_commands_say_it_in_one_line(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time,hashes,block_tokens\n0,a b,5000000000000000000\n")
    result = CliRunner().invoke(cli, [*words, str(path), *(["-"] if "convert" in words else [])])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvactors: {path}:2: block_tokens: 5000000000000000000 tokens are more than")
    assert result.stderr.count("\n") == 1
