"""What the proxy asks of one vLLM server: a prefill instance (P) with its bootstrap server, or a decode instance (D)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp

ONLY_AT_DECODE = ("stream_options", "min_tokens", "logprobs", "top_logprobs")
"""What means nothing, or is an error, in a request for one token that nobody reads."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """All in seconds.

    Attributes:
        connect_s: to be connected to an instance.
        prefill_s: for the whole answer of a P.
        silence_s: of a D, before its answer and inside it. A D that was asked at the same time as P waits for P meanwhile.
        query_s: for an answer of a bootstrap server.
        known_s: how long an engine id is believed. A P that was restarted has another, and takes longer than this to start.
        rest_s: how long an instance that failed is left out, or comes last.
    """

    connect_s: float = 5.0
    prefill_s: float = 120.0
    silence_s: float = 600.0
    query_s: float = 5.0
    known_s: float = 10.0
    rest_s: float = 10.0


class InstanceError(Exception):
    """An instance did not answer as it should; says how. `status`: of its answer, 0 without one."""

    def __init__(self, problem: str, *, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status

    @property
    def refused(self) -> bool:
        """It is up, and answered that it cannot do this: 502 and above are said by servers that are not up."""
        return 0 < self.status <= 500


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request. `opened` closes what was opened for it, and so ends what vLLM still does for it."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    transfer_id: str
    opened: ExitStack

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def may_be_handed_over(self) -> bool:
        """One prompt and one answer: P's blocks are fetched once. Log-probabilities of a prompt are computed where it ends."""
        body, prompt = self.body, self.body.get("prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            return False
        return (
            (body.get("n") or 1) == 1
            and body.get("prompt_logprobs") is None
            and not (body.get("use_beam_search") or body.get("echo"))
        )


@dataclass(frozen=True, slots=True)
class Source:
    """The P that computes a request's prompt, and which of its engines. `headers` choose that engine, if there are several."""

    prefill: Prefill
    engine_id: str
    headers: Mapping[str, str]


class Instance:
    """A vLLM server at `url`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, limits: Limits) -> None:
        self.url, self._session, self._limits = url.rstrip("/"), session, limits
        self._rests_until = 0.0

    @property
    def rests(self) -> bool:
        return self._rests_until > _now()

    def failed(self) -> None:
        self._rests_until = _now() + self._limits.rest_s

    def answered(self) -> None:
        self._rests_until = 0.0

    async def get(self, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status, below 500, and body of what it answers to a question that computes nothing.

        Raises:
            InstanceError: it does not answer.
        """
        timeout = aiohttp.ClientTimeout(total=self._limits.query_s)
        try:
            async with self._session.get(self.url + path, headers=headers, timeout=timeout) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InstanceError(_said(error)) from error
        if response.status >= 500:
            raise InstanceError(f"{response.status} {body[:300].decode(errors='replace')}", status=response.status)
        return response.status, body


class Prefill(Instance):
    """A P, and the bootstrap server that knows its engines."""

    def __init__(self, url: str, bootstrap: str, session: aiohttp.ClientSession, limits: Limits) -> None:
        super().__init__(url, session, limits)
        self.bootstrap = bootstrap.rstrip("/")
        self._engines: list[tuple[str, str]] = []
        self._known_until = 0.0
        self._turns = itertools.count()

    def failed(self) -> None:
        super().failed()
        self.forget()

    def forget(self) -> None:
        """Its engines may be others now: they are asked for again."""
        self._known_until = 0.0

    async def source(self) -> Source:
        """Its engine whose turn it is: one for each data-parallel rank.

        Raises:
            InstanceError: its bootstrap server does not know one.
        """
        if self._known_until <= _now():
            try:
                self._engines = await self._query()
            except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise InstanceError(f"its bootstrap server {self.bootstrap}: {_said(error)}") from error
            self._known_until = _now() + self._limits.known_s
        rank, engine_id = self._engines[next(self._turns) % len(self._engines)]
        return Source(self, engine_id, {"X-data-parallel-rank": rank} if len(self._engines) > 1 else {})

    async def _query(self) -> list[tuple[str, str]]:
        timeout = aiohttp.ClientTimeout(total=self._limits.query_s)
        async with self._session.get(f"{self.bootstrap}/query", timeout=timeout, raise_for_status=True) as response:
            said = await response.json(content_type=None)
        engines = [(rank, str(said[rank]["engine_id"])) for rank in sorted(said, key=int)]
        if not engines:
            raise LookupError("no engine has registered")
        return engines

    async def compute(self, call: Call, headers: Mapping[str, str]) -> None:
        """Has the prompt computed. Its blocks are kept until they are fetched, or P's `abort_timeout_s` is over.

        Raises:
            InstanceError: that did not succeed.
        """
        body = {key: value for key, value in call.body.items() if key not in ONLY_AT_DECODE}
        body |= {"stream": False, "max_tokens": 1} | ({"max_completion_tokens": 1} if "max_completion_tokens" in body else {})
        body["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": call.transfer_id}
        timeout = aiohttp.ClientTimeout(total=self._limits.prefill_s, sock_connect=self._limits.connect_s)
        headers = {**call.headers, **headers}
        try:
            async with self._session.post(self.url + call.path, json=body, headers=headers, timeout=timeout) as response:
                said = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InstanceError(_said(error)) from error
        if response.status != 200:
            raise InstanceError(f"{response.status} {said[:300]}", status=response.status)


class Decode(Instance):
    """A D."""

    async def answer(self, call: Call, source: Source | None) -> Answer:
        """Its answer, of any status below 500, once the first bytes are there.

        Args:
            source: where the prompt's blocks are; None = D computes them itself.

        Raises:
            InstanceError: it gives none. Where it refused, the hand-off may be the reason.
        """
        body = dict(call.body)
        if source is not None:
            body["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "transfer_id": call.transfer_id,
                "remote_engine_id": source.engine_id,
                "remote_bootstrap_addr": source.prefill.bootstrap,
            }
        timeout = aiohttp.ClientTimeout(sock_connect=self._limits.connect_s, sock_read=self._limits.silence_s)
        try:
            response = await self._session.post(self.url + call.path, json=body, headers=call.headers, timeout=timeout)
            call.opened.callback(response.close)
            streams = call.streams and response.status < 500
            first = await (response.content.readany() if streams else response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InstanceError(_said(error)) from error
        if response.status >= 500 or (streams and first.startswith(b'data: {"error"')):
            raise InstanceError(f"{response.status} {first[:300].decode(errors='replace')}", status=max(response.status, 500))
        return Answer(self, response, first)


class Answer:
    """What a D answers. `first`: all of it, or the first bytes of a stream."""

    def __init__(self, decode: Decode, response: aiohttp.ClientResponse, first: bytes) -> None:
        self.decode, self.first, self._response = decode, first, response
        self.status = response.status
        self.headers = {k: response.headers[k] for k in ("Content-Type", "X-Request-Id") if k in response.headers}

    async def more(self) -> bytes:
        """The next bytes; empty at the end.

        Raises:
            InstanceError: the answer broke off.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InstanceError(f"the answer broke off: {_said(error)}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


def _now() -> float:
    return asyncio.get_running_loop().time()
