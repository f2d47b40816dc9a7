"""Every format gives the same requests; what is wrong in a row is said with its line and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.errors import ConfigError, TraceError
from kvactors.replay.formats import FORMATS, recognise, rows_of
from kvactors.replay.formats.chains import chained_ids, token_blocks
from kvactors.replay.formats.rows import from_seconds
from kvactors.replay.plan import ReplayOptions, VirtualOptions, plan_replay
from kvactors.replay.report import Report
from kvactors.replay.trace import TraceReader, scan_trace
from kvactors.replay.trace_stats import trace_stats
from kvactors.replay.virtual import run_on_virtual_time
from tests.traces.rows import bailian, mooncake, plain_hashes, plain_tokens, prompts, stretched, write_csv, write_jsonl

MADE = prompts(1, 60)

BAILIAN = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 9, "turn": 1}
BAILIAN = {**BAILIAN, "type": "text", "hash_ids": [5, 6, 7]}
TOKENS = {"time": 1.5, "tokens": [1, 2, 3]}
HASHES = {"time": 1.5, "hashes": [1, "a"], "block_tokens": 32, "input_length": 40}


def files(folder: Path) -> dict[str, Path]:
    return {
        "bailian": write_jsonl(folder / "b.jsonl", bailian(MADE)),
        "tokens": write_jsonl(folder / "t.jsonl", plain_tokens(MADE)),
        "tokens csv": write_csv(folder / "t.csv", plain_tokens(MADE)),
        "hashes": write_jsonl(folder / "h.jsonl", plain_hashes(MADE, 16)),
        "chained hashes": write_jsonl(folder / "c.jsonl", plain_hashes(MADE, 16, chained=True)),
        "hashes csv": write_csv(folder / "h.csv", plain_hashes(MADE, 16)),
    }


def same_prefixes(reader: TraceReader) -> list[list[int]]:
    """The ids, numbered in the order in which they come: what they say, whatever they are."""
    known: dict[int, int] = {}
    return [[known.setdefault(h, len(known)) for h in request.hash_ids] for request in reader]


def test_every_format_says_the_same(tmp_path: Path) -> None:
    known: dict[tuple[int, ...], int] = {}
    want = [[known.setdefault(tuple(p[: n + 16]), len(known)) for n in range(0, len(p), 16)] for p in MADE]
    for name, path in files(tmp_path).items():
        reader = TraceReader(path)
        assert same_prefixes(reader) == want, name
        format = {"bailian": "bailian", "tokens": "jsonl", "hashes": "jsonl", "chained hashes": "jsonl"}.get(name, "csv")
        assert (reader.format, reader.block_tokens) == (format, 16)
        rows = list(TraceReader(path))
        assert [r.input_length for r in rows] == [len(p) for p in MADE]
        assert [r.timestamp_ms for r in rows] == [round(i * 1117) for i in range(len(MADE))], name
        assert [r.output_length for r in rows] == [i % 7 for i in range(len(MADE))]


def test_an_example_of_the_dataset(tmp_path: Path) -> None:
    (request,) = TraceReader(write_jsonl(tmp_path / "t.jsonl", [BAILIAN]))
    assert (request.line, request.timestamp_ms, request.input_length, request.output_length) == (1, 61114.0, 40, 9)
    assert (request.block_tokens, len(request.hash_ids)) == (16, 3)
    assert request.hash_ids == chained_ids([5, 6, 7])


def mixed(number: int) -> int:
    """splitmix64's output function, in plain integers."""
    z = (number + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_ids_are_the_same_in_every_run() -> None:
    """Traces that are converted at different times must fit together."""
    total, want = 0, []
    for i, block in enumerate([5, 6, 2**64 - 1]):
        total += mixed(block + mixed(i + int.from_bytes(b"blocks")))
        want.append(mixed(total) % 2**63)
    assert chained_ids([5, 6, 2**64 - 1]) == tuple(want)
    tokens = sum(mixed(token + mixed(i + int.from_bytes(b"tokens"))) for i, token in enumerate([1, 2, 3]))
    assert token_blocks([1, 2, 3], 16).tolist() == [mixed(tokens + mixed(3))]


def test_ids_tell_prefixes_apart() -> None:
    some = [[], [1], [2], [1, 2], [2, 1], [1, 1], [2, 2], [1, 2, 1], [0], [0, 0], [2**64 - 1]]
    ids = [chained_ids(blocks)[-1] for blocks in some if blocks]
    ids += [chained_ids(token_blocks(tokens, 2))[-1] for tokens in some if tokens]
    assert len(set(ids)) == len(ids)
    assert all(0 <= h < 2**63 for h in ids)
    assert chained_ids([1, 2])[0] == chained_ids([1, 3])[0]
    assert chained_ids(token_blocks([1, 2, 3], 2))[0] == chained_ids(token_blocks([1, 2], 2))[0]


@pytest.mark.parametrize(
    ("seconds", "milliseconds"),
    [(0, 0.0), (61, 61e3), (61.114, 61114.0), (1.005, 1005.0), (0.001, 1.0), (1e-9, 1e-6), (4503599627.3705, 4503599627370.5)],
)
def test_seconds_are_exact(seconds: float, milliseconds: float) -> None:
    assert from_seconds(seconds) == milliseconds


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}', "mooncake"),
        (json.dumps(BAILIAN), "bailian"),
        ('{"timestamp": 0, "turn": 1, "input_length": 5, "hash_ids": [1]}', "bailian"),
        (json.dumps(TOKENS), "jsonl"),
        (json.dumps(HASHES), "jsonl"),
        ("time,tokens", "csv"),
        ('"time_ms" , "hashes", block_tokens', "csv"),
        ("timestamp,tokens", None),
        ("0,1 2 3", None),
        ("[1]", None),
        ("{", None),
        ("{}", None),
        ("\xff", None),
    ],
)
def test_the_format_is_told_from_a_row(line: str, name: str | None) -> None:
    assert recognise(line.encode("latin-1")) == name
    assert name is None or name in FORMATS


def test_the_first_row_that_tells_decides(tmp_path: Path) -> None:
    rows = ["{", "nonsense", {"hash": 1}, BAILIAN, {**BAILIAN, "timestamp": -1}, BAILIAN]
    reader = TraceReader(write_jsonl(tmp_path / "t.jsonl", rows), skip_bad=True)
    assert [r.line for r in reader] == [4, 6]
    assert (reader.format, reader.skipped, reader.first_bad.line if reader.first_bad else 0) == ("bailian", 4, 1)


@pytest.mark.parametrize("name", ["bailian", "tokens", "tokens csv", "hashes csv"])
def test_the_second_reading_leaves_out_the_same_rows(tmp_path: Path, name: str) -> None:
    path = files(tmp_path)[name]
    lines = ["{", "1,2", '{"time": 1, "turn": 2}', *path.read_text().splitlines(), "{"]
    path.write_text("".join(f"{line}\n" for line in lines))
    first = scan_trace(path, skip_bad=True)
    assert (first.requests, first.skipped) == (len(MADE), 4)
    again = TraceReader(path, skip_bad=True, limit=first.requests, expected=first.checksum, format=first.format)
    assert list(again) == list(TraceReader(path, skip_bad=True))


def test_a_bom_and_gzip(tmp_path: Path) -> None:
    for name, path in files(tmp_path).items():
        packed = tmp_path / "packed.gz"
        packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n")))
        assert list(TraceReader(packed)) == list(TraceReader(path)), name


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="'moon': unknown; use one of mooncake, bailian, jsonl, csv"):
        rows_of("moon")


def changed(row: dict[str, Any], **change: Any) -> dict[str, Any]:
    return {k: v for k, v in {**row, **change}.items() if v is not ...}


BAD = [
    # (a good row, the bad one after it, the field that the error names, a part of the problem)
    (BAILIAN, changed(BAILIAN, hash_ids=[5, 6]), "hash_ids", "has 2 ids, but input_length 40 needs 3 (one per 16 tokens"),
    (BAILIAN, changed(BAILIAN, hash_ids=[5, 6, 2**64]), "hash_ids", "64 bits"),
    (BAILIAN, changed(BAILIAN, timestamp=-0.5), "timestamp", "negative"),
    (BAILIAN, changed(BAILIAN, timestamp="1"), "timestamp", "not a number of seconds"),
    (BAILIAN, changed(BAILIAN, timestamp=1e306), "timestamp", "not a finite number of seconds"),
    (BAILIAN, changed(BAILIAN, timestamp=...), "timestamp", "missing"),
    (BAILIAN, changed(BAILIAN, input_length=0, hash_ids=[]), "input_length", "at least 1"),
    (BAILIAN, "{", "", "not valid JSON"),
    (TOKENS, changed(TOKENS, time=...), "time", "missing"),
    (TOKENS, changed(TOKENS, time_ms=3), "time", "not both"),
    (TOKENS, changed(TOKENS, time="x"), "time", "expected `float | null`, got `str`"),
    (TOKENS, changed(TOKENS, time=-1), "time", "negative"),
    (TOKENS, changed(TOKENS, time=..., time_ms=-1), "time_ms", "negative"),
    (TOKENS, changed(TOKENS, tokens=[]), "input_length", "at least 1"),
    (TOKENS, changed(TOKENS, tokens=[1, -2]), "tokens", "token -2 does not fit 64 bits"),
    (TOKENS, changed(TOKENS, tokens=[1, "a"]), "tokens", "expected `int`, got `str`"),
    (TOKENS, changed(TOKENS, tokens=...), "tokens", "missing"),
    (TOKENS, changed(TOKENS, hashes=[1]), "tokens", "not both"),
    (TOKENS, changed(TOKENS, input_length=4), "input_length", "is 4, but there are 3 tokens"),
    (TOKENS, HASHES, "block_tokens", "32 here, but the first row has tokens in blocks of 16"),
    (TOKENS, "[1]", "", "expected `object`, got `array`"),
    (TOKENS, "nonsense", "", "not valid JSON"),
    (HASHES, changed(HASHES, block_tokens=...), "block_tokens", "missing"),
    (HASHES, changed(HASHES, block_tokens=0), "block_tokens", "at least 1"),
    (HASHES, changed(HASHES, block_tokens=20), "block_tokens", "20 here, but the first row has hashes in blocks of 32"),
    (HASHES, changed(HASHES, hashes=[1, 2, 3]), "hashes", "has 3 ids, but input_length 40 needs 2 (one per 32 tokens"),
    (HASHES, changed(HASHES, hashes=[1, 2.5]), "hashes", "expected `int | str`"),
    (HASHES, changed(HASHES, output_length=-1), "output_length", "negative"),
]


@pytest.mark.parametrize(("good", "bad", "field", "problem"), BAD)
def test_a_bad_row_names_its_line_and_field(tmp_path: Path, good: Any, bad: Any, field: str, problem: str) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [good, bad, good])
    with pytest.raises(TraceError) as caught:
        list(TraceReader(path))
    assert (caught.value.line, caught.value.field) == (2, field)
    assert problem in caught.value.problem
    reader = TraceReader(path, skip_bad=True)
    assert [r.line for r in reader] == [1, 3]
    assert reader.skipped == 1


BAD_CSV = [
    ("1.5.0,1 2,", "time", 2, "'1.5.0' is not a number of seconds"),
    ("nan,1 2,", "time", 2, "not a finite number"),
    ("1,1 x,", "tokens", 2, "'x' is not a whole number"),
    ("1,1 -2,", "tokens", 2, "token -2 does not fit"),
    ("1,,", "tokens", 2, "missing"),
    ("1,1 2,5,6", "", 2, "has 4 cells, but there are 3 columns"),
    ("1,1 2,1.5", "output_length", 2, "'1.5' is not a whole number"),
]


@pytest.mark.parametrize(("line", "field", "number", "problem"), BAD_CSV)
def test_a_bad_line_of_csv(tmp_path: Path, line: str, field: str, number: int, problem: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"time,tokens,output_length\n{line}\n1,1 2,3\n")
    with pytest.raises(TraceError) as caught:
        list(TraceReader(path))
    assert (caught.value.line, caught.value.field) == (number, field)
    assert problem in caught.value.problem
    assert [r.line for r in TraceReader(path, skip_bad=True)] == [3]


@pytest.mark.parametrize(
    ("header", "problem"),
    [("0.5,1 2 3", "must name the columns"), ("time,tokens,time", "a column twice"), ("time,prompt", "must name the columns")],
)
def test_csv_needs_its_columns_named(tmp_path: Path, header: str, problem: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n0.5,1 2 3,0.5\n")
    with pytest.raises(TraceError, match=problem) as caught:
        list(TraceReader(path, format="csv"))
    assert caught.value.line == 1


def test_other_columns_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('user,time_ms,"tokens"\nann,1500,"1 2 3"\n')
    (request,) = TraceReader(path)
    assert (request.timestamp_ms, request.input_length, request.line) == (1500.0, 3, 2)


def test_hashes_without_a_length_are_whole_blocks(tmp_path: Path) -> None:
    (request,) = TraceReader(write_jsonl(tmp_path / "t.jsonl", [changed(HASHES, input_length=...)]))
    assert request.input_length == 64


def test_whole_numbers_and_texts_are_the_same_hashes(tmp_path: Path) -> None:
    row = {"time": 0, "block_tokens": 16}
    rows = list(TraceReader(write_jsonl(tmp_path / "t.jsonl", [{**row, "hashes": [1, 22]}, {**row, "hashes": ["1", "22"]}])))
    assert rows[0].hash_ids == rows[1].hash_ids


def test_a_row_of_16_token_blocks_is_told_about_the_other_format(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"timestamp": 1, "input_length": 40, "hash_ids": [1, 2, 3]}])
    with pytest.raises(TraceError, match="give --format bailian"):
        list(TraceReader(path))
    (request,) = TraceReader(path, format="bailian")
    assert (request.timestamp_ms, request.block_tokens) == (1000.0, 16)


# -- what the replay makes of them -----------------------------------------------------------------------------------------


def brute_force_hits(made: list[list[int]], boundary: int) -> int:
    """Tokens that an unlimited cache serves, from the tokens themselves."""
    stored: set[tuple[int, ...]] = set()
    hit = 0
    for prompt in made:
        best = 0
        for end in range(boundary, len(prompt), boundary):
            if tuple(prompt[:end]) in stored:
                best = end
        hit += best
        stored.update(tuple(prompt[:end]) for end in range(boundary, len(prompt) + 1, boundary))
    return hit


def replayed(path: Path, block_tokens: int) -> Report:
    layout = KVLayout("m", [Group(0, GroupKind.FULL, block_tokens, {0: [CacheEntry("k", 16)]})])
    return run_on_virtual_time(plan_replay(ReplayOptions(str(path), layout, virtual=VirtualOptions()))).report


@pytest.mark.parametrize("block_tokens", [16, 80])
def test_the_replay_hits_what_the_tokens_say(tmp_path: Path, block_tokens: int) -> None:
    want = brute_force_hits(MADE, block_tokens)
    assert want > 0
    of_all = files(tmp_path)
    for name in ("bailian", "tokens csv", "chained hashes"):
        report = replayed(of_all[name], block_tokens)
        assert report.tokens.hit == want, name
        assert report.bytes.mismatched == 0
        assert (report.trace.block_tokens, report.layout.hash_tokens) == (16, 16)


def test_blocks_below_the_traces_own_are_cut_from_it(tmp_path: Path) -> None:
    """Of a 16-token block, 4 tokens are known only with the whole of it."""
    path = write_jsonl(tmp_path / "t.jsonl", plain_tokens([[*range(40)], [*range(40), 1, 2, 3]]))
    report = replayed(path, 4)
    assert (report.tokens.hit, report.layout.hash_tokens) == (32, 4)


def test_the_replay_of_mooncakes_blocks_is_as_before(tmp_path: Path) -> None:
    made = stretched(prompts(3, 20, 150), 30)
    path = write_jsonl(tmp_path / "t.jsonl", mooncake(made))
    report, stats = replayed(path, 512), trace_stats(path)
    assert report.tokens.hit == brute_force_hits(made, 512) == stats.ceiling[0].hit_tokens > 0
    assert scan_trace(path).format == "mooncake"
