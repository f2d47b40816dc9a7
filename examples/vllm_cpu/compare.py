"""KVActorsConnector beside vLLM's own MooncakeStoreConnector: the same prompts, each on a fresh Mooncake of its own.

    python examples/vllm_cpu/compare.py --model gptoss

Both engines run in processes that are kept and take turns, so that what else the machine does meets both. Exit code 1 if ours
loads fewer tokens, if a token differs from the cold run, or if the ratio of the median times is above 1.05.

Both pause for a millisecond after a step in which nothing could run, as a vLLM server does and `LLM` in one process does not.
With `--no-pause` they go on at once, and leave other threads little of Python's lock.

Each engine gave the pool the memory that it loads from, and Mooncake copies whole objects out of a client's own memory. With
`--remote` it sends them over TCP, as from another machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import tiny
from rich.console import Console
from rich.table import Table

MOST_RATIO = 1.05
EMPTY_S = 10.0
"""How long saves may still hold blocks after a run."""

CONNECTORS: dict[str, dict[str, Any]] = {
    "ours": {"kv_connector": "KVActorsConnector", "kv_connector_module_path": "kvactors.vllm"},
    "theirs": {"kv_connector": "MooncakeStoreConnector"},
}


@dataclass
class Run:
    """One pass over all prompts."""

    wall_s: float
    tokens: int
    bytes_loaded: int
    outputs: list[list[int]]


@dataclass
class Side:
    """An engine in a process of its own."""

    name: str
    process: Any
    pipe: Any
    cold: Run | None = None
    warm: list[Run] = field(default_factory=list)

    def run(self) -> Run:
        self.pipe.send("run")
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise SystemExit(f"{self.name}: {answer}")
        return Run(*answer)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Loads from a store: kvactors beside vLLM's MooncakeStoreConnector, on a CPU.")
    parser.add_argument("--model", choices=sorted(tiny.MODELS), default="gptoss")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=900, help="tokens of a prompt, at most 2000")
    parser.add_argument("--rounds", type=int, default=20, help="warm runs of each connector that count")
    parser.add_argument("--no-pause", action="store_true", help="step without a pause while requests wait for their loads")
    parser.add_argument("--remote", action="store_true", help="send everything over TCP, as from another machine")
    given = parser.parse_args(words)
    if min(given.prompts, given.rounds) < 1 or not 1 <= given.tokens <= 2000:
        parser.error("--prompts and --rounds must be at least 1, --tokens from 1 to 2000")
    return given


def main() -> int:
    given = arguments()
    tiny.require_vllm()
    from kvactors.stores.mooncake.master import LocalMaster

    with ExitStack() as stack:
        sides: list[Side] = []
        for name in CONNECTORS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            master = stack.enter_context(LocalMaster())
            sides.append(started(name, given, folder, tiny.pool_file(folder, master.address)))
            stack.callback(stopped, sides[-1])
        for side in sides:
            side.cold = side.run()
        for number in range(-1, given.rounds):  # the first one is for what happens only once
            for side in sides if number % 2 else sides[::-1]:
                run = side.run()
                if number >= 0:
                    side.warm.append(run)
        return told(given, *sides)


def started(name: str, given: argparse.Namespace, folder: Path, pool: Path) -> Side:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, name, given, folder, pool), daemon=True)
    process.start()
    theirs.close()
    return Side(name, process, ours)


def stopped(side: Side) -> None:
    side.pipe.close()
    side.process.join(30)
    if side.process.is_alive():
        side.process.kill()


# -- in the process of one engine --------------------------------------------------------------------------------------


def serve(pipe: Any, name: str, given: argparse.Namespace, folder: Path, pool: Path) -> None:
    os.environ["MOONCAKE_CONFIG_PATH"] = str(pool)
    if given.remote:
        os.environ["MC_STORE_MEMCPY"] = "0"
    llm = tiny.start(given.model, folder, CONNECTORS[name], pause=not given.no_pause)
    loaded = counted()
    requests = tiny.prompts(given.prompts, given.tokens)
    while True:
        try:
            pipe.recv()
        except EOFError:
            tiny.stop(llm)
            return
        if not emptied(llm):
            pipe.send("vLLM did not empty its prefix cache")
            return
        before, began = loaded[0], time.perf_counter()
        outputs = tiny.generate(llm, requests, 1)
        wall = time.perf_counter() - began
        tokens = sum(o.num_cached_tokens or 0 for o in outputs)
        pipe.send((wall, tokens, loaded[0] - before, [list(o.outputs[0].token_ids) for o in outputs]))


def emptied(llm: Any) -> bool:
    """Lets go of everything that vLLM has cached, after steps until saves have given all blocks back."""
    until = time.monotonic() + EMPTY_S
    while not llm.reset_prefix_cache():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)  # upstream saves in threads of its own, which nobody can wait for; a step then takes in what they did
        tiny.generate(llm, [{"prompt_token_ids": [3, 4, 5]}], 1)
    return True


def counted() -> list[int]:
    """Bytes that were loaded since now, as the connector itself counts them for vLLM's metrics."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker, total = get_kv_transfer_group(), [0]
    ask = worker.get_kv_connector_stats

    def asked() -> Any:
        stats = ask()
        if stats is not None:
            total[0] += stats.data.get("loaded_bytes", 0)
            total[0] += sum(call["num_bytes"] for call in stats.data.get("load_get", ()))
        return stats

    worker.get_kv_connector_stats = asked
    return total


# -- the result --------------------------------------------------------------------------------------------------------


def told(given: argparse.Namespace, *sides: Side) -> int:
    table = Table(title=f"tiny {given.model}: {given.prompts} prompts of {given.tokens} tokens, {given.rounds} warm runs")
    for heading in ("", "cold", "warm: median", "min", "max", "tokens loaded", "bytes loaded", "same tokens"):
        table.add_column(heading, justify="right" if heading else "left")
    medians: list[float] = []
    tokens: list[int] = []
    same = True
    for side in sides:
        assert side.cold is not None
        walls = [run.wall_s for run in side.warm]
        equal = all(run.outputs == side.cold.outputs for run in side.warm)
        medians.append(median(walls))
        tokens.append(min(run.tokens for run in side.warm))
        same = same and (equal or side.name != "ours")
        table.add_row(
            CONNECTORS[side.name]["kv_connector"],
            *(f"{wall * 1e3:.1f} ms" for wall in (side.cold.wall_s, median(walls), min(walls), max(walls))),
            f"{tokens[-1]:,}",
            f"{min(run.bytes_loaded for run in side.warm):,}",
            "yes" if equal else "NO",
        )
    ratio = medians[0] / medians[1]
    good = same and tokens[0] >= tokens[1] and ratio <= MOST_RATIO
    Console().print(table)
    print(f"ratio of medians, ours to theirs: {ratio:.2f}")
    print(f"at most {MOST_RATIO}, no fewer tokens, and the same tokens as cold: {'yes' if good else 'NO'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
