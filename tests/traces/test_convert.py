"""Converted traces share what the recorded ones share, at multiples of 512 tokens, and say what they lost."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvactors.cli import cli
from kvactors.replay.trace import TraceReader
from kvactors.replay.trace_convert import convert
from kvactors.replay.trace_stats import trace_stats
from tests.traces.rows import Prompt, bailian, mooncake, plain_hashes, plain_tokens, prompts, stretched, write_csv, write_jsonl

SAMPLE = Path(__file__).parents[2] / "examples/sample_trace.jsonl"
LONG = stretched(prompts(4, 40, 150), 30)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["trace", "convert", *map(str, words)])


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbered(path: Path) -> list[dict[str, Any]]:
    """The rows, with ids numbered in the order in which they come."""
    known: dict[int, int] = {}
    return [{**row, "hash_ids": [known.setdefault(h, len(known)) for h in row["hash_ids"]]} for row in rows_in(path)]


def test_a_trace_of_mooncakes_stays_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    result = run(SAMPLE, out)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "334 requests: mooncake, 512 tokens an id, to mooncake, 512" in result.stderr
    assert "nothing is lost" in result.stderr
    assert rows_in(out) == rows_in(SAMPLE)


@pytest.mark.parametrize("kind", ["bailian", "tokens", "csv", "hashes of 32", "hashes of 1024"])
def test_sharing_is_kept_at_multiples_of_512(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "in"
    made: list[Prompt] = LONG
    if kind == "bailian":
        write_jsonl(source, bailian(made))
    elif kind == "tokens":
        write_jsonl(source, plain_tokens(made))
    elif kind == "csv":
        write_csv(source, plain_tokens(made))
    else:
        write_jsonl(source, plain_hashes(made, int(kind.split()[-1])))
    out = tmp_path / "o.jsonl"
    assert run(source, out, "--to", "mooncake").exit_code == 0
    if kind == "hashes of 1024":  # half a block is known with the whole of it only
        want, found = trace_stats(source), trace_stats(out)
        assert [c.hit_tokens for c in found.ceiling if c.boundary_tokens >= 1024] == [c.hit_tokens for c in want.ceiling]
        return
    assert numbered(out) == mooncake(made)
    assert trace_stats(out).shared.tokens.total > 0


def test_a_block_that_does_not_fit_is_never_taken_for_another(tmp_path: Path) -> None:
    """512 lies inside a block of 48: prompts that differ within it, beyond token 512, count as different there."""
    a, b = [1] * 600, [*[1] * 520, *[2] * 80]
    source, out = write_jsonl(tmp_path / "in", plain_hashes([a, b, a, a[:512]], 48)), tmp_path / "o.jsonl"
    result = run(source, out)
    assert "lost: sharing up to a multiple of 512 inside a block of 48 tokens that is not shared whole" in result.stderr
    ids = [row["hash_ids"] for row in numbered(out)]
    assert ids == [[0, 1], [2, 3], [0, 1], [4]]


def test_converted_twice_is_converted_once(tmp_path: Path) -> None:
    source, once, twice = write_jsonl(tmp_path / "in", bailian(LONG)), tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    run(source, once)
    run(once, twice)
    assert once.read_bytes() == twice.read_bytes()
    first = rows_in(once)[1]
    assert (first["timestamp"], type(first["timestamp"])) == (1117, int)
    assert all(0 <= h < 2**63 for h in first["hash_ids"])


def test_times_keep_every_digit(tmp_path: Path) -> None:
    rows = [{"time": at, "tokens": [1]} for at in (0.1234567, 61.114, 1.005, 0, 1764493200.123456, 10**12)]
    out = tmp_path / "o.jsonl"
    run(write_jsonl(tmp_path / "in", rows), out)
    assert [row["timestamp"] for row in rows_in(out)] == [123.4567, 61114, 1005, 0, 1764493200123.456, 10**15]


def test_what_is_lost_is_said(tmp_path: Path) -> None:
    rows = bailian(LONG)
    for row in rows[4::7]:
        del row["output_length"]
    source = write_jsonl(tmp_path / "in", ["{", *rows])
    result = run(source, tmp_path / "o.jsonl", "--skip-bad", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "to": "mooncake",
        "requests": 40,
        "skipped": 1,
        "format": "bailian",
        "block_tokens": 16,
        "lost": [
            "what prompts share beyond a multiple of 512 tokens (it was told to 16 tokens)",
            "chat_id, parent_chat_id, type and turn: the format has no place for them",
            "whether output_length was known: 0 stands for it in 6 requests",
            "1 bad lines",
        ],
    }


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", ["mooncake", "bailian", "jsonl", "csv"])
def test_an_output_length_of_0_is_known_where_it_is_given(tmp_path: Path, kind: str, given: bool) -> None:
    rows = {"mooncake": mooncake, "bailian": bailian}.get(kind, plain_tokens)(LONG[:3])
    for row in rows:
        row["output_length"] = 0
    if not given:
        rows[1]["output_length"] = ""
        if kind != "csv":  # there it is an empty cell
            del rows[1]["output_length"]
    source = (write_csv if kind == "csv" else write_jsonl)(tmp_path / "in", rows)
    result = run(source, tmp_path / "o.jsonl")
    assert result.exit_code == 0, result.output
    assert ("lost: whether output_length was known: 0 stands for it in 1 requests" in result.stderr) is not given
    assert ("output_length" in result.stderr) is not given
    assert [row["output_length"] for row in rows_in(tmp_path / "o.jsonl")] == [0, 0, 0]


def test_gzip_comes_out_and_is_the_same_each_time(tmp_path: Path) -> None:
    outs = [tmp_path / "a" / "o.jsonl.gz", tmp_path / "b" / "o.jsonl.gz"]
    for out in outs:
        out.parent.mkdir()
        assert run(SAMPLE, out, "--requests", "20").exit_code == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert len(gzip.decompress(outs[0].read_bytes()).splitlines()) == 20
    assert list(TraceReader(outs[0])) == list(TraceReader(SAMPLE, limit=20))


def test_a_bad_row_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    out.write_text("mine")
    result = run(write_jsonl(tmp_path / "in.jsonl", [*bailian(LONG[:3]), "{"]), out)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "in.jsonl:4: is not valid JSON" in result.stderr
    assert out.read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl", "o.jsonl"}


def test_the_trace_itself_is_never_overwritten(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", bailian(LONG[:3]))
    before = source.read_bytes()
    result = run(source, source)
    assert result.exit_code == 2
    assert "is the same file as IN" in result.stderr
    assert source.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_exits_1() -> None:
    result = run(SAMPLE, "/dev/full")
    assert result.exit_code == 1
    assert "/dev/full: cannot be written" in result.stderr


@pytest.mark.parametrize("sink", ["> $OUT", "| head -n 3 > $OUT"])
def test_standard_output(tmp_path: Path, sink: str) -> None:
    """A link: it is written to, never replaced."""
    program, out = f"{sys.executable} -m kvactors", tmp_path / "o.jsonl"
    line = f"set -o pipefail; {program} trace convert {SAMPLE} /dev/stdout {sink.replace('$OUT', str(out))}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert Path("/dev/stdout").is_symlink()
    assert rows_in(out) == rows_in(SAMPLE)[: 3 if "head" in sink else None]


def test_standard_output_goes_on_where_a_file_ends(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    out.write_text("before\n")
    line = f"{sys.executable} -m kvactors trace convert {SAMPLE} - --requests 2 >> {out}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    first, *rest = out.read_text().splitlines()
    assert (first, [json.loads(row) for row in rest]) == ("before", rows_in(SAMPLE)[:2])


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, sent: signal.Signals) -> None:
    """It comes while a row is read, and again while the first one is heeded."""
    (tmp_path / "o.jsonl").write_text("mine")

    class Ended(TraceReader):
        def __iter__(self) -> Any:
            yield from list(super().__iter__())[:2]
            assert len(list(tmp_path.glob("o.jsonl.*.part"))) == 1
            try:
                signal.raise_signal(sent)
            finally:
                signal.raise_signal(sent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvactors.replay.trace.TraceReader", Ended)
        result = run(SAMPLE, tmp_path / "o.jsonl")
    assert (result.exit_code, result.stdout) == (128 + sent, "")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"o.jsonl": "mine"}


def test_a_part_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    part = tmp_path / f"o.jsonl.{os.getpid()}.part"
    part.write_text("theirs")
    result = run(SAMPLE, tmp_path / "o.jsonl")
    assert result.exit_code == 1
    assert "cannot be written: File exists" in result.stderr
    assert part.read_text() == "theirs"


def test_rows_are_written_while_they_are_read(tmp_path: Path) -> None:
    class Watched(TraceReader):
        sizes: list[int]

        def __iter__(self) -> Any:
            self.sizes = []
            for request in super().__iter__():
                (part,) = tmp_path.glob("o.jsonl.*.part")
                self.sizes.append(part.stat().st_size)
                yield request

    source = write_jsonl(tmp_path / "in", [{"time": i, "tokens": [i] * 600} for i in range(700)])
    reader = Watched(source)
    convert(reader, str(tmp_path / "o.jsonl"))
    assert reader.sizes[0] == 0
    assert reader.sizes[600] > 30_000
