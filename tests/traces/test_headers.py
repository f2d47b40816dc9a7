"""A file that was meant to be CSV is told about its header, not about JSON."""

from __future__ import annotations

import gzip
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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("output_lenght", "output_length"),
        ("Input_Length", "input_length"),
        (" block_tokens", "block_tokens"),
        ("block-tokens", "block_tokens"),
    ],
)
@pytest.mark.parametrize("csv", [True, False], ids=["csv", "json"])
def test_a_name_that_is_nearly_one_of_ours_is_not_left_out(tmp_path: Path, name: str, meant: str, csv: bool) -> None:
    path = tmp_path / "x"
    if csv and name.strip() == meant:
        return  # blanks around cells do not count
    path.write_text(f"time,tokens,{name}\n0,1 2 3,5\n" if csv else f'{{"time": 0, "tokens": [1, 2, 3], "{name}": 5}}\n')
    for skip_bad in (False, True):
        with pytest.raises(TraceError) as caught:
            scan_trace(path, skip_bad=skip_bad)
        assert caught.value.line == 1
        problem = f"is no {'column' if csv else 'field'} that is read; did you mean {meant}? If not, rename it, or take it out"
        assert (caught.value.field, caught.value.problem.split("; all ")[0]) == (name, problem)


@pytest.mark.parametrize("names", ["time,tokens,time_s", "time,tokens,hash", "time_ms,tokens,timestamp,token,id,outputs,chars"])
def test_names_that_are_like_what_is_given_are_left_out(tmp_path: Path, names: str) -> None:
    cells = ",".join("1" for _ in names.split(","))
    csv, rows = tmp_path / "x.csv", tmp_path / "x.jsonl"
    csv.write_text(f"{names}\n{cells}\n")
    rows.write_text("{" + ", ".join(f'"{n}": {"[1]" if n == "tokens" else 1}' for n in names.split(",")) + "}\n")
    assert [scan_trace(path).input_tokens for path in (csv, rows)] == [1, 1]
