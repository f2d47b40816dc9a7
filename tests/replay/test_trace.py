"""Traces are read line by line, and a wrong line says where and what."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvactors.errors import TraceError
from kvactors.replay.trace import TraceReader, scan_trace

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def line(**change: Any) -> str:
    row = {**GOOD, **change}
    return json.dumps({k: v for k, v in row.items() if v is not ...})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(text + "\n" for text in lines))
    return path


BAD_LINES = [
    # (what is in the line, the field that the error names, a part of the problem)
    (line(input_length=20), "hash_ids", "2 ids"),  # guidellm#948
    (line(hash_ids=[1]), "hash_ids", "1 ids"),
    (line(hash_ids=[]), "hash_ids", "0 ids"),
    ('{"timestamp": NaN, "input_length": 20, "hash_ids": [1]}', "timestamp", "finite"),  # aiperf#581
    ('{"timestamp": Infinity, "input_length": 20, "hash_ids": [1]}', "timestamp", "finite"),
    (line(timestamp=10**400 - 1), "timestamp", "finite"),  # no float holds it
    (line(timestamp=...), "timestamp", "missing"),
    (line(input_length=...), "input_length", "missing"),
    (line(hash_ids=...), "hash_ids", "missing"),
    (line(timestamp=-1), "timestamp", "negative"),
    (line(timestamp="0"), "timestamp", "not a number"),
    (line(timestamp=None), "timestamp", "not a number"),
    (line(input_length=-600), "input_length", "at least 1"),
    (line(input_length=0, hash_ids=[]), "input_length", "at least 1"),
    (line(input_length=600.5), "input_length", "whole number"),
    (line(input_length="600"), "input_length", "whole number"),
    (line(input_length=True, hash_ids=[1]), "input_length", "whole number"),
    (line(output_length=-1), "output_length", "negative"),
    (line(output_length="x"), "output_length", "whole number"),
    (line(hash_ids="1,2"), "hash_ids", "not a list"),
    (line(hash_ids=[1, 2.5]), "hash_ids", "whole number"),
    (line(hash_ids=[1, None]), "hash_ids", "whole number"),
    (line(hash_ids=[1, -2]), "hash_ids", "64 bits"),
    (line(hash_ids=[1, 2**64]), "hash_ids", "64 bits"),
    ("[1, 2]", "", "JSON object"),
    ("{", "", "not valid JSON"),
    ("nonsense", "", "not valid JSON"),
]


@pytest.mark.parametrize(("bad", "field", "problem"), BAD_LINES)
def test_a_bad_line_names_file_line_and_field(tmp_path: Path, bad: str, field: str, problem: str) -> None:
    path = write(tmp_path / "t.jsonl", line(), bad, line())
    with pytest.raises(TraceError, match=problem) as caught:
        list(TraceReader(path))
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), 2, field)
    assert str(caught.value).startswith(f"{path}:2: {field}")


@pytest.mark.parametrize(("bad", "field", "problem"), BAD_LINES)
def test_skip_bad_counts_and_goes_on(tmp_path: Path, bad: str, field: str, problem: str) -> None:
    reader = TraceReader(write(tmp_path / "t.jsonl", line(), bad, line()), skip_bad=True)
    assert [r.line for r in reader] == [1, 3]
    assert reader.skipped == 1
    assert reader.first_bad is not None
    assert reader.first_bad.field == field
    assert problem in reader.first_bad.problem


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_a_trace_without_requests_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    for skip_bad in (False, True):
        with pytest.raises(TraceError, match="empty"):
            scan_trace(path, skip_bad=skip_bad)


def test_a_trace_of_only_bad_lines_is_an_error_even_when_they_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="all 2 lines") as caught:
        scan_trace(write(tmp_path / "t.jsonl", "{", line(timestamp=-1)), skip_bad=True)
    assert caught.value.line == 1


def test_missing_and_broken_files_are_trace_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be opened"):
        list(TraceReader(tmp_path / "none.jsonl"))
    broken = tmp_path / "t.jsonl.gz"
    broken.write_bytes(gzip.compress(line().encode() * 50)[:-20])
    with pytest.raises(TraceError, match=r"cannot be read|not valid"):
        list(TraceReader(broken))


def test_gz_and_plain_give_the_same(tmp_path: Path) -> None:
    lines = [line(timestamp=i, hash_ids=[i, i + 1]) for i in range(20)]
    plain = write(tmp_path / "t.jsonl", *lines)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(TraceReader(plain)) == list(TraceReader(packed))


def test_64_bit_ids_are_kept_whole(tmp_path: Path) -> None:
    ids = [5, 4294967301, 2**63, 2**64 - 1]
    (request,) = TraceReader(write(tmp_path / "t.jsonl", line(input_length=2000, hash_ids=ids)))
    assert list(request.hash_ids) == ids


def test_limit_stops_before_later_lines_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(), "", line(input_length=700), "{")
    assert [r.line for r in TraceReader(path, limit=2)] == [1, 3]
    summary = scan_trace(path, limit=2)
    assert (summary.requests, summary.input_tokens, summary.max_input_length) == (2, 1300, 700)
    assert summary.longest == (700, 600)


def test_the_64_longest_requests_are_noted(tmp_path: Path) -> None:
    lengths = [1 + 37 * i % 70 for i in range(70)]
    summary = scan_trace(write(tmp_path / "t.jsonl", *[line(input_length=n, hash_ids=[1]) for n in lengths]))
    assert summary.longest == tuple(range(70, 6, -1))
    assert (summary.requests, summary.max_input_length) == (70, 70)


def test_output_length_may_be_absent(tmp_path: Path) -> None:
    (request,) = TraceReader(write(tmp_path / "t.jsonl", line(output_length=...)))
    assert request.output_length == 0
