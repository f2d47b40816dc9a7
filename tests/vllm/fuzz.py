"""`python -m tests.vllm.fuzz MODEL SEED REQUESTS LOSS ABORT [KEY=VALUE …]`: real vLLM under a store that loses reads, few local
blocks, prompts that begin alike, aborts and resets; prints what went wrong as JSON.

Requests run in batches that no cold run repeats, so log-probabilities are compared within what batching changes of them;
missing or foreign KV changes them by far more (`seeded_weights`).
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOLERANCE = 0.05
MADE = 5


def prompts_of(rng: random.Random) -> list[list[int]]:
    """Three stems, each cut at four places and continued another way."""
    stems = [[rng.randrange(3, 500) for _ in range(900)] for _ in range(3)]
    return [
        stem[:cut] + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 60))]
        for stem in stems
        for cut in (130, 300, 520, 800)
    ]


def result(output: Any) -> tuple[list[int], list[float]]:
    made = output.outputs[0]
    return list(made.token_ids), [next(iter(place.values())).logprob for place in made.logprobs]


def wrong(got: tuple[list[int], list[float]], cold: tuple[list[int], list[float]]) -> bool:
    """Whether an output was computed from other KV than the cold one."""
    same = next((i for i, (a, b) in enumerate(zip(got[0], cold[0], strict=False)) if a != b), len(cold[0]))
    return any(abs(a - b) > TOLERANCE for a, b in zip(got[1][: max(1, same)], cold[1], strict=False))


class Lossy:
    """Makes the process's memory store lose reads, and opens half as often."""

    def __init__(self, rng: random.Random, loss: float) -> None:
        from kvactors.stores.memory import MemoryStore

        self._store, self._rng, self._loss = MemoryStore, rng, loss
        self._ranges, self._open = MemoryStore.get_ranges, MemoryStore.get_open

    def __enter__(self) -> None:
        from kvactors.core.store import Outcome

        def get_ranges(store: Any, batch: Any) -> Any:
            return [Outcome.NOT_FOUND if self._rng.random() < self._loss else o for o in self._ranges(store, batch)]

        def get_open(store: Any, keys: Sequence[str], sizes: Sequence[int]) -> Any:
            found = [i for i in range(len(keys)) if self._rng.random() >= self._loss / 2]
            out = [Outcome.NOT_FOUND] * len(keys)
            if found:
                answers = self._open(store, [keys[i] for i in found], [sizes[i] for i in found])
                for i, outcome in zip(found, answers, strict=True):
                    out[i] = outcome
            return out

        self._store.get_ranges, self._store.get_open = get_ranges, get_open  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self._store.get_ranges, self._store.get_open = self._ranges, self._open  # type: ignore[method-assign]


def main(model: str, seed: int, requests: int, loss: float, abort: float, extra: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig

    from kvactors.vllm.stores import shared_memory_store
    from tests.vllm import engine

    kv = KVTransferConfig(
        kv_connector="KVActorsConnector",
        kv_connector_module_path="kvactors.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"backend": "memory", **extra},
        kv_load_failure_policy="recompute",
    )
    llm = engine.start(model, Path(tempfile.mkdtemp()), kv_transfer_config=kv, num_gpu_blocks_override=24)
    core = llm.llm_engine.engine_core.engine_core
    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, logprobs=1, max_tokens=MADE)
    rng = random.Random(seed)
    prompts = prompts_of(rng)

    def alone(prompt: list[int]) -> tuple[list[int], list[float]]:
        llm.reset_prefix_cache()
        return result(llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0])

    llm.generate([{"prompt_token_ids": [4, 5, 6, 7, 8]}], sampling, use_tqdm=False)
    cold = []
    for prompt in prompts:
        cold.append(alone(prompt))
        shared_memory_store().pool.clear()
    live: dict[str, int] = {}
    started = ended = 0
    bad: list[str] = []
    with Lossy(rng, loss):
        while started < requests or live:
            while started < requests and len(live) < 6 and rng.random() < 0.7:
                started += 1
                live[f"r{started}"] = which = rng.randrange(len(prompts))
                llm.llm_engine.add_request(f"r{started}", {"prompt_token_ids": prompts[which]}, sampling)
            for output in llm.llm_engine.step():
                if output.finished and output.request_id in live:
                    which = live.pop(output.request_id)
                    ended += 1
                    if wrong(result(output), cold[which]):
                        bad.append(f"{output.request_id}, prompt {which}: {result(output)} and not {cold[which]}")
            if live and rng.random() < abort:
                victim = rng.choice(list(live))
                del live[victim]
                llm.llm_engine.abort_request([victim])
            if rng.random() < 0.5:
                llm.reset_prefix_cache()
        while core.scheduler.has_requests():
            llm.llm_engine.step()
    stored = [f"prompt {i}" for i, prompt in enumerate(prompts) if wrong(alone(prompt), cold[i])]
    side = core.scheduler.connector.scheduler_side
    return {
        "ended": ended,
        "wrong": bad,
        "stored wrong": stored,
        "left": {
            "requests": len(core.scheduler.requests),
            "tracked": len(side._tracked) - 1,  # of the last run alone, whose end the next step would tell
            "pins": len(side.pins),
            "reset": llm.reset_prefix_cache(),
        },
        "totals": side.totals(),
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    keys = {key: json.loads(value) for key, _, value in (w.partition("=") for w in words[5:])}
    print(json.dumps(main(words[0], int(words[1]), int(words[2]), float(words[3]), float(words[4]), keys)))
