"""What the connector's tests ask of vLLM: prompts, the tokens that a store should give back, and readable differences."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

Request = tuple[str, list[int], int]
"""Name, tokens of the prompt, how many to make."""

Outcome = Mapping[str, Any]
Outcomes = Mapping[str, Outcome]

MODELS = ("qwen3", "gptoss", "gemma3", "qwen3next", "granite", "dsv3")

SPARSE = {"gptoss", "gemma3", "qwen3next", "granite"}
"""Windows and states: vLLM keeps those of a prompt at the last boundary before its end, and where prompts part."""

MADE = 6  # tokens per request

NEAR = 0.5
"""By how much a log-probability may move where vLLM itself computes a token in another way; other content moves it by 2."""


def drawn(name: str, count: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(3, 512) for _ in range(count)]


def of_all_lengths(block: int) -> list[Request]:
    """One token, around a block, several chunks, and three prompts that begin alike."""
    shared = drawn("shared", 2 * block)
    prompts = {
        "1": drawn("1", 1),
        "block - 1": drawn("block - 1", block - 1),
        "block": drawn("block", block),
        "block + 1": drawn("block + 1", block + 1),
        "2 blocks": drawn("2 blocks", 2 * block),
        "3 blocks + 7": drawn("3 blocks + 7", 3 * block + 7),
        "twin a": [*shared, *drawn("a", block + 5)],
        "twin b": [*shared, *drawn("b", 9)],
        "twin c": [*shared, *drawn("c", 9)],
    }
    return [(name, prompt, MADE) for name, prompt in prompts.items()]


def siblings(block: int, name: str, count: int) -> list[Request]:
    """Prompts that share two blocks and then part."""
    shared = drawn(name, 2 * block)
    return [(f"{name} {i}", [*shared, *drawn(f"{name} {i}", 9)], MADE) for i in range(count)]


def alone(name: str, tokens: int, made: int = MADE) -> Request:
    return (name, drawn(name, tokens), made)


class Stored:
    """What a pool should hold after requests that ran one by one, each with an empty local cache."""

    def __init__(self, model: str, block: int) -> None:
        self.sparse, self.block = model in SPARSE, block
        self._boundaries: set[tuple[int, ...]] = set()

    def expected(self, requests: Iterable[Request]) -> dict[str, int]:
        """How many tokens each should load, in this order; what they compute is stored then."""
        loads = {}
        for name, prompt, _ in requests:
            whole = (len(prompt) - 1) // self.block
            hits = [n for n in range(whole + 1) if n == 0 or tuple(prompt[: n * self.block]) in self._boundaries]
            loads[name] = hits[-1] * self.block
            kept = [whole] if self.sparse else range(1, len(prompt) // self.block + 1)
            self._boundaries |= {tuple(prompt[: n * self.block]) for n in kept}
        return loads


def loaded(outcomes: Outcomes) -> dict[str, int]:
    return {name: outcome["external"] for name, outcome in outcomes.items()}


def differences(cold: Outcomes, outcomes: Outcomes, exact_until: Mapping[str, int] | None = None) -> dict[str, str]:
    """Which requests made other tokens than without a connector, or the same with other log-probabilities, and where.

    `exact_until`: requests of which only so many tokens must be the same, and the log-probabilities behind them near.
    """
    return {
        name: what
        for name, outcome in outcomes.items()
        if (what := _difference(cold[name], outcome, (exact_until or {}).get(name, len(cold[name]["tokens"]))))
    }


def _difference(wanted: Outcome, outcome: Outcome, exact: int) -> str:
    if outcome["end"] != wanted["end"]:
        return f"ended by {outcome['end']!r}, not {wanted['end']!r}"
    if outcome["tokens"][:exact] != wanted["tokens"][:exact]:
        return f"made {outcome['tokens']}, not {wanted['tokens']}"
    for at, (got, expected) in enumerate(zip(outcome["logprobs"], wanted["logprobs"], strict=True)):
        if at < exact and got != expected:
            return f"log-probabilities at {at}: {got}, not {expected}"
        if at >= exact:
            known = dict(expected)
            far = [token for token, logprob in got if token in known and abs(logprob - known[token]) > NEAR]
            if far:
                return f"log-probabilities at {at}: {got}, not near {expected}"
            if outcome["tokens"][at] != wanted["tokens"][at]:
                break  # what follows answers another text
    return ""


def check(
    cold: Outcomes, outcomes: Outcomes, requests: Iterable[Request], exact_until: Mapping[str, int] | None = None
) -> None:
    """All of the requests ended, as they did without a connector."""
    missing = {name for name, _, _ in requests} - set(outcomes)
    assert not missing, f"never ended: {sorted(missing)}"
    found = differences(cold, outcomes, exact_until)
    assert not found, "\n".join(f"{name}: {what}" for name, what in found.items())


def summed(stats: Iterable[Mapping[str, Any]], counter: str) -> int:
    """A counter of the connector over several steps; those by cache group are added up."""
    total = 0
    for step in stats:
        value = step.get(counter, 0)
        total += sum(value.values()) if isinstance(value, Mapping) else value
    return total
