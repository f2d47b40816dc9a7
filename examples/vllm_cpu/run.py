"""Runs prompts through a tiny model twice, with an empty prefix cache each time: the second run loads from the store.

    python examples/vllm_cpu/run.py --model gptoss --backend memory
    python examples/vllm_cpu/run.py --model qwen3next --backend mooncake --local-master

Exit code 1 if a token differs, or if nothing was loaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tiny
from rich.console import Console
from rich.table import Table

NEW_TOKENS = 8


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A tiny model on vLLM's CPU backend, cold and from the store.")
    parser.add_argument("--model", choices=sorted(tiny.MODELS), default="gptoss")
    parser.add_argument("--backend", choices=["memory", "mooncake"], default="memory")
    parser.add_argument("--local-master", action="store_true", help="start a Mooncake master for this run")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=900, help="tokens of a prompt, at most 2000")
    given = parser.parse_args(words)
    if given.local_master and given.backend != "mooncake":
        parser.error("--local-master goes with --backend mooncake")
    if given.backend == "mooncake" and not given.local_master and "MOONCAKE_CONFIG_PATH" not in os.environ:
        parser.error("--backend mooncake needs --local-master, or MOONCAKE_CONFIG_PATH")
    if given.prompts < 1 or not 1 <= given.tokens <= 2000:
        parser.error("--prompts must be at least 1, --tokens from 1 to 2000")
    return given


def main() -> int:
    given = arguments()
    tiny.require_vllm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if given.local_master:
            from kvactors.stores.mooncake.master import LocalMaster

            master = stack.enter_context(LocalMaster())
            os.environ["MOONCAKE_CONFIG_PATH"] = str(tiny.pool_file(folder, master.address))
        connector = {
            "kv_connector": "KVActorsConnector",
            "kv_connector_module_path": "kvactors.vllm",
            "kv_connector_extra_config": {"backend": given.backend},
        }
        llm = tiny.start(given.model, folder, connector)
        stack.callback(tiny.stop, llm)
        requests = tiny.prompts(given.prompts, given.tokens)
        cold = [timed(llm, request) for request in requests]
        if not llm.reset_prefix_cache():
            raise SystemExit("vLLM did not empty its prefix cache")
        warm = [timed(llm, request) for request in requests]
        return told(given, cold, warm, llm.llm_engine.vllm_config.cache_config.block_size)


def timed(llm: Any, request: dict[str, list[int]]) -> tuple[Any, float]:
    began = time.perf_counter()
    (output,) = tiny.generate(llm, [request], NEW_TOKENS)
    return output, time.perf_counter() - began


def told(given: argparse.Namespace, cold: list[tuple[Any, float]], warm: list[tuple[Any, float]], block_tokens: int) -> int:
    table = Table(title=f"tiny {given.model}, store: {given.backend}")
    for heading in ("prompt", "tokens", "loaded", "same token ids", "cold", "from the store"):
        table.add_column(heading, justify="right")
    loaded, same = 0, True
    for number, ((before, cold_s), (after, warm_s)) in enumerate(zip(cold, warm, strict=True), 1):
        equal = list(before.outputs[0].token_ids) == list(after.outputs[0].token_ids)
        tokens = after.num_cached_tokens or 0  # vLLM's own cache was emptied: all of them came from the store
        table.add_row(
            str(number),
            str(len(after.prompt_token_ids)),
            str(tokens),
            "yes" if equal else "NO",
            f"{cold_s * 1e3:.0f} ms",
            f"{warm_s * 1e3:.0f} ms",
        )
        loaded, same = loaded + tokens, same and equal
    Console().print(table)
    if not loaded and given.tokens <= block_tokens:
        print(f"nothing could be loaded: only whole blocks of {block_tokens} tokens are, and one token is left to compute;")
        print(f"give --tokens {block_tokens + 1} or more")
    return 0 if same and loaded else 1


if __name__ == "__main__":
    sys.exit(main())
