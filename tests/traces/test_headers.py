"""A file that was meant to be CSV is told about its header, not about JSON."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvactors.errors import TraceError
from kvactors.replay.trace import TraceReader, scan_trace

HEADERS = [
    # (the first line, what the error says besides)
    ("time,token", '"token" is not known; did you mean tokens?'),
    ("tokens,output_length", ""),
    ("Time,Tokens", '"Time" is not known; did you mean time?'),
    ("time_sm,tokens", '"time_sm" is not known; did you mean time_ms?'),
    ("time,hash,block_tokens", '"hash" is not known; did you mean hashes?'),
    ("timestamp,tokens", '"timestamp" is not known; did you mean time (seconds) or time_ms (milliseconds)?'),
    ("time;tokens;output_length", "put commas between them, not semicolons"),
    ("time\ttokens", "put commas between them, not tabs"),
    ("0,1 2 3", ""),
]


@pytest.mark.parametrize("name", ["x.csv", "x.CSV.gz", "x.dat"])
@pytest.mark.parametrize(("header", "hint"), HEADERS)
def test_a_wrong_header_is_called_one(tmp_path: Path, name: str, header: str, hint: str) -> None:
    text = f"{header}\n0,1 2 3\n".encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    for skip_bad in (False, True):
        with pytest.raises(TraceError, match="must name the columns: time ") as caught:
            scan_trace(path, skip_bad=skip_bad)
        assert (caught.value.line, caught.value.field) == (1, "")
        assert hint in caught.value.problem
        assert "known are time, time_ms, tokens," in caught.value.problem


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("x.csv", '{"a": 1}'),
        ("x.csv", "[1, 2]"),
        ("x.dat", "{,"),
        ("x.jsonl", "time,token"),
        ("x.json.gz", "1,2"),
        ("x.dat", "x"),
    ],
)
def test_what_looks_like_json_is_told_about_json(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / name
    path.write_text(line + "\n")
    with pytest.raises(TraceError) as caught:
        scan_trace(path)
    assert "columns" not in caught.value.problem


def test_json_in_a_file_called_csv_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('nonsense\n{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n')
    reader = TraceReader(path, skip_bad=True)
    assert ([r.line for r in reader], reader.format, reader.skipped) == ([2], "mooncake", 1)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", ["time,tokens\n0,1 2\n", '{"time": 0, "tokens": [1]}\n'])
@pytest.mark.parametrize("format", [None, "csv", "jsonl"])
def test_utf16_is_named(tmp_path: Path, encoding: str, text: str, format: str | None) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(text.encode(encoding))
    for skip_bad in (False, True):
        with pytest.raises(TraceError, match="is text in UTF-16: save the file as UTF-8"):
            scan_trace(path, skip_bad=skip_bad, format=format)


@pytest.mark.parametrize("line", ["1_000,1 2", "0,1_0"])
def test_pythons_own_numbers_are_none(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f"time,tokens\n{line}\n")
    with pytest.raises(TraceError, match=r"is not a (whole )?number"):
        scan_trace(path)


MISSPELT = [("output_lenght", "output_length"), ("Output-Length", "output_length"), ("output_len", "output_length")]
MISSPELT_HASHES = [
    *MISSPELT,
    ("Input_Length", "input_length"),
    ("inputLength", "input_length"),
    ("input length", "input_length"),
]
OTHER = [
    "max_output_length",
    "output_length_ms",
    "new_input_length",
    "output_tokens",
    "prompt_length",
    "time_s",
    "hash",
    "inputs",
]


def written(path: Path, kind: str, csv: bool, *names: str) -> Path:
    """Two rows of the kind, the second with columns of these names as well; in CSV both."""
    given: dict[str, object] = {"time": 0, kind: [1, 2]} | ({"block_tokens": 4} if kind == "hashes" else {})
    row = given | dict.fromkeys(names, 5)
    cells = [" ".join(map(str, cell)) if isinstance(cell, list) else str(cell) for cell in row.values()]
    rows = [",".join(row), ",".join(cells)] if csv else [json.dumps(given), json.dumps(row)]
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("csv", [True, False], ids=["csv", "json"])
@pytest.mark.parametrize(
    ("kind", "name", "meant"), [("tokens", *row) for row in MISSPELT] + [("hashes", *row) for row in MISSPELT_HASHES]
)
def test_a_misspelt_name_is_not_left_out(tmp_path: Path, kind: str, name: str, meant: str, csv: bool) -> None:
    path = written(tmp_path / "x", kind, csv, name)
    with pytest.raises(TraceError) as caught:
        scan_trace(path)
    what = "column" if csv else "field"
    assert (caught.value.line, caught.value.field) == (1 if csv else 2, name)
    assert caught.value.problem == f"is no {what} that is read; did you mean {meant}? If not, rename it, or take it out"
    if not csv:
        assert scan_trace(path, skip_bad=True).skipped == 1
    assert scan_trace(written(path, kind, csv, name, meant)).skipped == 0, "what was meant is there too"


@pytest.mark.parametrize("csv", [True, False], ids=["csv", "json"])
@pytest.mark.parametrize("kind", ["tokens", "hashes"])
def test_other_names_are_left_out(tmp_path: Path, kind: str, csv: bool) -> None:
    more = ["Input_Length", "kv_block_tokens"] if kind == "tokens" else []
    assert scan_trace(written(tmp_path / "x", kind, csv, *OTHER, *more)).requests == (1 if csv else 2)


def test_a_name_that_is_no_utf8_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'{"time": 0, "tokens": [1], "note\xff": 1}\n')
    assert scan_trace(tmp_path / "x", format="jsonl").requests == 1
