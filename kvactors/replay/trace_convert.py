"""Traces of any format as Mooncake's: `kvactors trace convert`."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np

from kvactors.replay.formats import TRACE_BLOCK_TOKENS, TraceRequest
from kvactors.replay.formats.chains import part_ids
from kvactors.replay.trace import TraceReader

STANDARD_OUTPUT = "-"

_NOT_CARRIED = {
    "bailian": ("chat_id, parent_chat_id, type and turn: the format has no place for them",),
    "jsonl": ("the tokens, or the hashes as they were: a number for each block stays",),
    "csv": ("the tokens, or the hashes as they were: a number for each block stays",),
}


@dataclass(frozen=True, slots=True)
class Converted:
    """What was converted; `lost`: what of it the result does not say any more, a sentence each."""

    requests: int
    skipped: int
    format: str
    block_tokens: int
    lost: tuple[str, ...]


def appears_whole(out: str) -> bool:
    """Whether a result is written beside its place first: until it is whole, there is something to remove."""
    return out != STANDARD_OUTPUT and not os.path.islink(out) and (not os.path.exists(out) or os.path.isfile(out))


def convert(reader: TraceReader, out: str) -> Converted:
    """Writes a trace in Mooncake's format, row by row.

    Args:
        reader: what is read.
        out: a file, packed where its name ends in .gz. It appears when all is written, unless it is a link or no regular
            file (/dev/stdout, a pipe): that is written to as rows are read, and so is standard output, "-".

    Raises:
        TraceError: a row is wrong; nothing is left behind.
        OSError: the result cannot be written.
    """
    regular = appears_whole(out)
    written = f"{out}.{os.getpid()}.part" if regular else out
    requests = unknown = 0
    try:
        with ExitStack() as stack:
            # Opened by its name, standard output would lose what is in it, where it goes on from the end of a file.
            target = os.dup(1) if out == STANDARD_OUTPUT else written
            file: BinaryIO = stack.enter_context(open(target, "xb" if regular else "wb"))
            if out.endswith(".gz"):
                file = cast(BinaryIO, stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0)))
            for request in reader:
                file.write(mooncake_row(request))
                requests += 1
                unknown += not request.output_known
        if regular:
            os.replace(written, out)
    except FileExistsError:  # what is there is another's
        raise
    except BaseException:
        if regular:
            with suppress(FileNotFoundError):
                os.unlink(written)
        raise
    return Converted(requests, reader.skipped, reader.format, reader.block_tokens, tuple(_lost(reader, unknown)))


def mooncake_row(request: TraceRequest) -> bytes:
    """A request as a line of Mooncake's format."""
    at: float = request.timestamp_ms
    row = {
        "timestamp": int(at) if at == int(at) else at,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": ids_per(TRACE_BLOCK_TOKENS, request),
    }
    return json.dumps(row).encode() + b"\n"


def ids_per(tokens: int, request: TraceRequest) -> Sequence[int]:
    """One id per so many prompt tokens, the last for what is left: equal where the prompts are equal up to the end of it.

    Where it ends inside a block of the trace, it is the same only for prompts that share that whole block.
    """
    length, block, ids = request.input_length, request.block_tokens, request.hash_ids
    each, rest = divmod(tokens, block)
    if not rest:
        return ids if each == 1 else ids[each - 1 :: each] + ids[len(ids) // each * each :][-1:]
    ends = np.minimum(np.arange(tokens, length + tokens, tokens), length)
    at = -(-ends // block) - 1
    inside = ends - at * block
    words = np.array(ids, np.uint64)[at]
    whole = (ends == length) | (inside == block)
    made: list[int] = np.where(whole, words, part_ids(words, inside)).tolist()
    return made


def _lost(reader: TraceReader, unknown: int) -> Sequence[str]:
    block, lost = reader.block_tokens, []
    if block < TRACE_BLOCK_TOKENS:
        lost.append(f"what prompts share beyond a multiple of {TRACE_BLOCK_TOKENS} tokens (it was told to {block} tokens)")
    if TRACE_BLOCK_TOKENS % block and block % TRACE_BLOCK_TOKENS:
        lost.append(
            f"sharing up to a multiple of {TRACE_BLOCK_TOKENS} inside a block of {block} tokens that is not shared whole"
        )
    lost += _NOT_CARRIED.get(reader.format, ())
    if unknown:
        lost.append(f"whether output_length was known: 0 stands for it in {unknown:,} requests")
    if reader.skipped:
        lost.append(f"{reader.skipped:,} bad lines")
    return lost
