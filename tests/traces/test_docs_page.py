"""What docs/traces.md shows is what happens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvactors.cli import cli
from kvactors.replay.formats import FORMATS
from kvactors.replay.formats.plain import COLUMNS
from kvactors.replay.formats.rows import MAX_HASH_ID, MOST_BLOCK_TOKENS, MOST_COLUMNS, MOST_LINE_BYTES, MOST_MS, MOST_TOKENS
from kvactors.replay.trace import TraceReader
from kvactors.replay.trace_stats import trace_stats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/traces.md").read_text()


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


def read(folder: Path, text: str) -> list[tuple[str, int, float]]:
    path = folder / "t"
    path.write_text(text)
    reader = TraceReader(path)
    return [(reader.format, request.input_length, request.timestamp_ms) for request in reader]


def test_the_printed_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert CliRunner().invoke(cli, ["trace", "stats", "examples/sample_trace.jsonl"]).stdout == block("text")


def test_the_rows_of_the_table(tmp_path: Path) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)`(?=[ ,])", PAGE, re.MULTILINE))
    assert tuple(name for name in rows if name in FORMATS) == FORMATS
    assert read(tmp_path, rows["mooncake"]) == [("mooncake", 700, 1200.0)]
    assert read(tmp_path, rows["bailian"]) == [("bailian", 40, 61114.0)]
    assert read(tmp_path, rows["jsonl"]) == [("jsonl", 4, 1200.0)]
    assert read(tmp_path, f"time,tokens,output_length\n{rows['csv']}\n") == [("csv", 4, 1200.0)]


def test_the_examples_of_plain_rows(tmp_path: Path) -> None:
    assert read(tmp_path, block("csv")) == [("csv", 18, 0.0), ("csv", 19, 1500.0)]
    assert trace_stats(tmp_path / "t").ceiling[0].hit_tokens == 16
    assert read(tmp_path, block("json")) == [("jsonl", 41, 250.0)]


def test_the_columns_are_all_there() -> None:
    table = PAGE.split("## Plain JSON lines and CSV")[1].split("Other columns")[0]
    assert set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))) == set(COLUMNS)


def test_the_bounds_are_those_of_the_code() -> None:
    (table,) = re.findall(r"\| what \| at most \|\n(.*?)\n\n", PAGE, re.DOTALL)
    for most in (
        f"{MOST_TOKENS:,} (2^24)",
        f"{MOST_BLOCK_TOKENS:,} (2^20)",
        f"10^{len(str(MOST_MS)) - 1} milliseconds",
        f"10^{len(str(MOST_MS // 1000)) - 1} seconds",
        f"2^{(MAX_HASH_ID + 1).bit_length() - 1} - 1",
        f"{MOST_LINE_BYTES >> 20} MiB",
        f"{MOST_COLUMNS:,}",
    ):
        assert f"| {most}" in table or f", {most}" in table


def test_the_json_names_are_all_there() -> None:
    result = CliRunner().invoke(cli, ["trace", "stats", str(ROOT / "examples/sample_trace.jsonl"), "--json"])

    def names(data: object) -> set[str]:
        if isinstance(data, dict):
            return {*data, *(n for value in data.values() for n in names(value))}
        return {n for value in data for n in names(value)} if isinstance(data, list) else set()

    table = PAGE.split("names:\n")[1].split("The trace is read once")[0]
    assert names(json.loads(result.stdout)) - {"schema", "blocks"} <= set(re.findall(r"`(\w+)`", table))


def test_the_options_are_all_there() -> None:
    group = cli.get_command(click.Context(cli), "trace")
    assert isinstance(group, click.Group)
    for command in group.commands.values():
        for parameter in command.params:
            assert all(name in PAGE for name in parameter.opts if name.startswith("--")), parameter.name
