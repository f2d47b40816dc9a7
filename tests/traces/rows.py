"""Made-up prompts, and traces of them in every format."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Prompt = list[int]
"""Its token ids."""


def prompts(seed: int, count: int, longest: int = 400) -> list[Prompt]:
    """Prompts that go on from parts of earlier ones, of a few tokens to `longest`."""
    rng = random.Random(seed)
    made: list[Prompt] = []
    for _ in range(count):
        base = rng.choice(made) if made and rng.random() < 0.7 else []
        kept = base[: rng.randint(0, len(base))] if rng.random() < 0.5 else list(base)
        prompt = [*kept, *(rng.randrange(50) for _ in range(rng.randint(0 if kept else 1, 120)))][:longest]
        made.append(prompt or [1])
    return made


def stretched(made: Sequence[Prompt], factor: int) -> list[Prompt]:
    """The same prompts, with every token `factor` times."""
    return [[token for token in prompt for _ in range(factor)] for prompt in made]


def times(count: int) -> Iterator[float]:
    """Seconds with three digits, as the recorded traces have."""
    for i in range(count):
        yield round(i * 1.117, 3)


def hash_ids(prompt: Prompt, block_tokens: int, known: dict[tuple[int, ...], int], *, chained: bool) -> list[int]:
    """Numbers for the blocks of a prompt, in the order in which they come: of each block's tokens, or of all up to its end."""
    ids = []
    for start in range(0, len(prompt), block_tokens):
        end = min(start + block_tokens, len(prompt))
        ids.append(known.setdefault(tuple(prompt[0 if chained else start : end]), len(known)))
    return ids


def bailian(made: Sequence[Prompt]) -> list[dict[str, Any]]:
    known: dict[tuple[int, ...], int] = {}
    return [
        {
            "chat_id": i,
            "parent_chat_id": -1,
            "timestamp": at,
            "input_length": len(prompt),
            "output_length": i % 7,
            "type": "text",
            "turn": 1,
            "hash_ids": hash_ids(prompt, 16, known, chained=False),
        }
        for i, (at, prompt) in enumerate(zip(times(len(made)), made, strict=True))
    ]


def mooncake(made: Sequence[Prompt]) -> list[dict[str, Any]]:
    known: dict[tuple[int, ...], int] = {}
    return [
        {
            "timestamp": round(at * 1000),
            "input_length": len(prompt),
            "output_length": i % 7,
            "hash_ids": hash_ids(prompt, 512, known, chained=True),
        }
        for i, (at, prompt) in enumerate(zip(times(len(made)), made, strict=True))
    ]


def plain_tokens(made: Sequence[Prompt]) -> list[dict[str, Any]]:
    return [
        {"time": at, "tokens": prompt, "output_length": i % 7}
        for i, (at, prompt) in enumerate(zip(times(len(made)), made, strict=True))
    ]


def plain_hashes(made: Sequence[Prompt], block_tokens: int, *, chained: bool = False) -> list[dict[str, Any]]:
    known: dict[tuple[int, ...], int] = {}
    return [
        {
            "time": at,
            "hashes": [f"h{n}" for n in hash_ids(prompt, block_tokens, known, chained=chained)],
            "block_tokens": block_tokens,
            "input_length": len(prompt),
            "output_length": i % 7,
        }
        for i, (at, prompt) in enumerate(zip(times(len(made)), made, strict=True))
    ]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any] | str]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    names = list(rows[0])
    cells = ([" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in map(row.get, names)] for row in rows)
    path.write_text("".join(",".join(line) + "\n" for line in (names, *cells)))
    return path
