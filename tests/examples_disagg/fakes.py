"""Servers that stand in for prefill and decode instances of vLLM, and for a bootstrap server."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/disagg"


def example(name: str) -> ModuleType:
    """A module of the example, which finds its neighbours beside it as a script does."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(EXAMPLE))


@dataclass
class FakeInstance:
    """Answers as `answers` says and keeps what it was asked.

    Attributes:
        answers: a status; or "hang" (never answers), "wait" (never what comes from a P, else 200), "stream" (an event and the
            end), "break" (an event, then the connection is cut), "endless" (an event, and no more), "event" (a stream that
            begins with an error).
        prefilled: transfer ids that P was asked for, where D is to wait for them.
    """

    name: str
    answers: int | str = 200
    prefilled: defaultdict[str, asyncio.Event] | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[CIMultiDict[str]] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post(f"/v1/{path}", self._answer) for path in ("completions", "chat/completions")])
        app.add_routes([web.get("/v1/models", self._models)])
        return app

    async def _models(self, request: web.Request) -> web.Response:
        self.headers.append(CIMultiDict(request.headers))
        status = self.answers if isinstance(self.answers, int) else 200
        return web.json_response({"object": "list", "data": [{"id": "tiny", "from": self.name}]}, status=status)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json() | {"path": request.path})
        self.headers.append(CIMultiDict(request.headers))
        self.came.set()
        if self.prefilled is not None and (params := self.asked[-1].get("kv_transfer_params")):
            if params.get("do_remote_decode"):
                self.prefilled[params["transfer_id"]].set()
            else:
                await self.prefilled[params["transfer_id"]].wait()
        if self.answers == "hang":
            await self._hang()
        if self.answers == "wait" and self.asked[-1].get("kv_transfer_params"):
            await self._hang()
        if self.answers == "wait" or isinstance(self.answers, int):
            return web.json_response({"from": self.name}, status=200 if self.answers == "wait" else self.answers)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        if self.answers == "event":
            await out.write(b'data: {"error": {"message": "the load failed"}}\n\ndata: [DONE]\n\n')
            return out
        await out.write(f'data: {{"from": "{self.name}"}}\n\n'.encode())
        if self.answers == "break":
            assert request.transport is not None
            request.transport.abort()
        elif self.answers == "endless":
            await self._hang()
        else:
            await out.write(b"data: [DONE]\n\n")
        return out

    async def _hang(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.gone.set()


@dataclass
class FakeBootstrap:
    """Knows `engines`, by data-parallel rank."""

    engines: dict[int, str]
    queries: int = 0
    status: int = 200

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/query", self._query)])
        return app

    async def _query(self, _request: web.Request) -> web.Response:
        self.queries += 1
        entries = {
            str(rank): {
                "engine_id": engine_id,
                "worker_addr": {"0": {"0": "ws://127.0.0.1:1/handoff"}},
                "tp_size": 1,
                "pp_size": 1,
            }
            for rank, engine_id in self.engines.items()
        }
        return web.json_response(entries, status=self.status)
