"""Starts a prefill instance, a decode instance and the proxy on this machine, with a tiny model on the CPU.

    python examples/disagg/start.py --model gptoss                 # runs until Ctrl-C
    python examples/disagg/start.py --model gptoss --once --check  # one request, compared with a single engine; then it ends

Exit code 1 if a server dies, or with `--once` if the request was not handed over, or (`--check`) has another answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import aiohttp
except ModuleNotFoundError:
    sys.exit("aiohttp is not installed here; in the root of the repository: pip install '.[disagg]'")
import models
from rich.console import Console
from rich.table import Table
from servers import ServerError, Servers, free_ports

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 16
SERVE = (
    "--load-format seeded --dtype bfloat16 --enforce-eager --enable-prefix-caching --seed 0 --host 127.0.0.1 --max-num-seqs 8 "
)
SERVE += "--max-model-len 2048 --max-num-batched-tokens 128 --num-gpu-blocks-override 256 --kv-cache-memory-bytes 268435456"
SOURCES = {"local_compute": "computed", "external_kv_transfer": "handed over", "local_cache_hit": "in its cache"}
"""vLLM's names of where a prompt's tokens came from, and ours."""

console = Console()


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Prefill and decode instances of a tiny model on vLLM's CPU backend, and a proxy."
    )
    parser.add_argument("--model", choices=sorted(models.tiny.MODELS), default="gptoss")
    parser.add_argument("--tokens", type=int, default=897, help="tokens of the prompt, at most 2000")
    parser.add_argument("--concurrent", action="store_true", help="the proxy asks both instances at the same time")
    parser.add_argument("--check", action="store_true", help="compare the answer with that of a single engine")
    parser.add_argument("--once", action="store_true", help="end after one request")
    parser.add_argument("--folder", type=Path, help="for the model and the logs; a new one if none is given")
    given = parser.parse_args(words)
    if not 1 <= given.tokens <= 2000:
        parser.error("--tokens must be from 1 to 2000")
    return given


class Site:
    """The servers of one model, and what is asked of them."""

    def __init__(self, given: argparse.Namespace, folder: Path, servers: Servers, session: aiohttp.ClientSession) -> None:
        self._given, self._servers, self._session = given, servers, session
        self._path, self._environment = models.make_folder(given.model, folder), models.environment(folder)
        self.urls: dict[str, str] = {}

    async def start(self) -> None:
        """Prefill, decode and proxy, one after the other."""
        *ports, bootstrap = free_ports(4)
        self.urls = {name: f"http://127.0.0.1:{port}" for name, port in zip(("prefill", "decode", "proxy"), ports, strict=True)}
        registry = f"http://127.0.0.1:{bootstrap}"
        await self._vllm("prefill", "kv_producer", bootstrap_port=bootstrap)
        await self._vllm("decode", "kv_consumer")
        proxy: list[str | Path] = [
            sys.executable,
            HERE / "proxy.py",
            "--port",
            str(ports[-1]),
            "--prefill",
            self.urls["prefill"],
            registry,
        ]
        proxy += ["--decode", self.urls["decode"], *(["--concurrent"] if self._given.concurrent else [])]
        await self._start("proxy", proxy)

    async def start_single(self) -> None:
        """An engine that does all by itself."""
        (port,) = free_ports(1)
        self.urls["single"] = f"http://127.0.0.1:{port}"
        await self._vllm("single", None)

    async def _vllm(self, name: str, role: str | None, **extra: Any) -> None:
        words: list[str | Path] = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self._path, *SERVE.split()]
        words += ["--port", self.urls[name].rpartition(":")[2], "--served-model-name", self._path.name]
        if role is not None:
            connector = {
                "kv_connector": "KVActorsConnector",
                "kv_connector_module_path": "kvactors.vllm",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"backend": "none", "handoff": True, **extra},
            }
            words += ["--kv-transfer-config", json.dumps(connector)]
        await self._start(name, words)
        await self.ask(
            name, {"prompt": models.prompt(5, seed=2), "max_tokens": 1}
        )  # a first step of one token crashes some CPUs

    async def _start(self, name: str, words: Sequence[str | Path]) -> None:
        with console.status(f"{name} starts"):
            await self._servers.start(name, words, self._environment, lambda: self._answers(name))
        console.print(f"{name:8} {self.urls[name]}  log: {self._servers.log(name)}", soft_wrap=True, highlight=False)

    async def _answers(self, name: str) -> bool:
        try:
            async with self._session.get(f"{self.urls[name]}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def ask(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """The one choice of an answer."""
        body = {"model": self._path.name, "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True} | body
        async with self._session.post(f"{self.urls[name]}/v1/completions", json=body, raise_for_status=True) as response:
            choice: dict[str, Any] = (await response.json())["choices"][0]
        return choice

    async def prompt_tokens(self, name: str) -> dict[str, int]:
        """Where the tokens of all prompts so far came from, by `SOURCES`."""
        async with self._session.get(f"{self.urls[name]}/metrics", raise_for_status=True) as response:
            text = await response.text()
        found = re.findall(r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        return {source: round(float(value)) for source, value in found}


async def demonstrate(site: Site, given: argparse.Namespace) -> bool:
    """Sends a request and tells what each side did; whether it was handed over, and is answered as by a single engine."""
    body = {"prompt": models.prompt(given.tokens), "max_tokens": NEW_TOKENS}
    before = {name: await site.prompt_tokens(name) for name in ("prefill", "decode")}
    answer = await site.ask("proxy", body)
    after = {name: await site.prompt_tokens(name) for name in before}
    did = {name: {source: after[name][source] - before[name][source] for source in SOURCES} for name in before}
    table = Table(title=f"tiny {given.model}: a prompt of {given.tokens} tokens, {NEW_TOKENS} new ones")
    for heading in ("", *SOURCES.values()):
        table.add_column(heading, justify="right")
    for name, tokens in did.items():
        table.add_row(name, *map(str, tokens.values()))
    console.print(table)
    console.print(f"answer: {answer['text'].strip()}", highlight=False)
    good = did["decode"]["local_compute"] <= 1
    if not good:
        console.print("decode computed the prompt by itself: see the logs")
    if given.check:
        await site.start_single()
        single = await site.ask("single", body)
        same = answer["token_ids"] == single["token_ids"]
        apart = max(abs(a - b) for a, b in zip(*(_logprobs(choice) for choice in (answer, single)), strict=True))
        console.print(f"the tokens are those of a single engine: {'yes' if same else 'NO'}", highlight=False)
        console.print(f"largest difference of their log-probabilities: {apart:g}", highlight=False)
        good = good and same
    return good


def _logprobs(choice: dict[str, Any]) -> list[float]:
    return list(choice["logprobs"]["token_logprobs"])


async def run(given: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kvactors-disagg-"))
    folder.mkdir(parents=True, exist_ok=True)
    async with aiohttp.ClientSession() as session, Servers(folder.resolve()) as servers:
        site = Site(given, folder.resolve(), servers, session)
        await site.start()
        good = await demonstrate(site, given)
        if given.once:
            return 0 if good else 1
        console.print(f"the proxy answers at {site.urls['proxy']}/v1/completions; Ctrl-C ends all", soft_wrap=True)
        await servers.watch()
    return 1


if __name__ == "__main__":
    try:
        given = arguments()
        models.tiny.require_vllm()
        sys.exit(asyncio.run(run(given)))
    except KeyboardInterrupt:
        console.print("stopped")
    except asyncio.CancelledError:  # SIGTERM
        sys.exit("stopped")
    except (ServerError, aiohttp.ClientError, TimeoutError) as error:
        sys.exit(f"{error}")
