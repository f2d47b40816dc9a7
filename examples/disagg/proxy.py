"""A proxy before prefill (P) and decode (D) instances of vLLM that hand requests over with `KVActorsConnector`.

    python examples/disagg/proxy.py --prefill http://127.0.0.1:8100 http://127.0.0.1:8998 --decode http://127.0.0.1:8200

Both may be repeated; they take turns. P gets each request first, for one token; then D gets it, with the place of P's blocks.
With `--concurrent` both get it at once. What cannot be handed over is computed by D alone. `GET /health` has the counts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

try:
    import aiohttp
    from aiohttp import web
except ModuleNotFoundError:
    sys.exit("aiohttp is not installed here: pip install aiohttp")
from instances import Answer, Call, Decode, Instance, InstanceError, Limits, Prefill, Source

log = logging.getLogger("proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")


class Proxy:
    """See the module. `app` is for a server that cancels a handler when its client is gone.

    Args:
        prefills: URL of each P, and of its bootstrap server.
        decodes: URL of each D.
        concurrent: ask P and D at the same time.
    """

    def __init__(
        self,
        prefills: Sequence[tuple[str, str]],
        decodes: Sequence[str],
        *,
        concurrent: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._addresses, self._limits = (prefills, decodes), limits or Limits()
        self._serve = self._at_once if concurrent else self._in_turn
        self._prefill_turns, self._decode_turns = itertools.count(), itertools.count()
        self._prefills: list[Prefill] = []
        self._decodes: list[Decode] = []
        self.app = web.Application(client_max_size=64 << 20)
        self.app.cleanup_ctx.append(self._run)
        self.app.add_routes([web.get("/health", self._health), web.get("/v1/models", self._models)])
        self.app.add_routes([web.post(path, self._generate) for path in PATHS])

    async def _run(self, _app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # vLLM closes idle connections after 5 s
        async with aiohttp.ClientSession(connector=connector) as session:
            prefills, decodes = self._addresses
            self._prefills = [Prefill(url, bootstrap, session, self._limits) for url, bootstrap in prefills]
            self._decodes = [Decode(url, session, self._limits) for url in decodes]
            yield

    # -- clients -------------------------------------------------------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        instances = {i.url: "failed lately" if i.rests else "ok" for i in (*self._prefills, *self._decodes)}
        status = 503 if all(decode.rests for decode in self._decodes) else 200
        return web.json_response({"instances": instances, "counts": self.counts}, status=status)

    async def _models(self, request: web.Request) -> web.Response:
        """What the first D that answers says; all have the same model."""
        problems = []
        for decode in sorted(self._decodes, key=lambda decode: decode.rests):
            try:
                status, body = await decode.get(request.path, _passed_on(request))
            except InstanceError as error:  # which it may be too busy for: requests still go there
                problems.append(f"{decode.url}: {error}")
            else:
                return web.Response(body=body, status=status, content_type="application/json")
        return web.json_response(_problem(502, f"no decode instance answers: {'; '.join(problems)}"), status=502)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return web.json_response(_problem(400, "the body must be a JSON object"), status=400)
        body.pop("kv_transfer_params", None)  # they name addresses to connect to: that is not a client's to say
        transfer_id = uuid.uuid4().hex
        headers = _passed_on(request) | {"X-Request-Id": transfer_id}
        self.counts["requests"] += 1
        with ExitStack() as opened:
            call = Call(request.path, body, headers, transfer_id, opened)
            try:
                return await self._pass_on(request, call, await self._serve(call))
            except InstanceError as error:
                return web.json_response(_problem(502, str(error)), status=502)
            except asyncio.CancelledError:
                self.counts["cancelled"] += 1
                log.info("%s: the client is gone", transfer_id)
                raise

    async def _pass_on(self, request: web.Request, call: Call, answer: Answer) -> web.StreamResponse:
        if not call.streams:
            return web.Response(body=answer.first, status=answer.status, headers=answer.headers)
        out = web.StreamResponse(status=answer.status, headers=answer.headers)
        await out.prepare(request)
        chunk = answer.first
        while chunk:
            await out.write(chunk)
            try:
                chunk = await answer.more()
            except InstanceError as error:  # too late for another D: the client must not take this for the end
                self._failed(answer.decode, "decode_failed", error)
                problem = json.dumps(_problem(502, f"{answer.decode.url}: {error}"))
                await out.write(f"data: {problem}\n\n".encode())
                if request.transport is not None:
                    request.transport.close()
                break
        return out

    # -- the two orders ------------------------------------------------------------------------------------------------

    async def _in_turn(self, call: Call) -> Answer:
        source = await self._source(call)
        if source is not None and not await self._prefill(call, source):
            source = None
        return await self._decode(call, source)

    async def _at_once(self, call: Call) -> Answer:
        source = await self._source(call)
        if source is None:
            return await self._decode(call, None)
        prefill = asyncio.ensure_future(self._prefill(call, source))
        decode = asyncio.ensure_future(self._decode(call, source))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if decode.done() or prefill.result():
                return await decode
            decode.cancel()  # it would wait for blocks that never come
            return await self._decode(call, None)
        finally:
            prefill.cancel()
            decode.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)

    async def _source(self, call: Call) -> Source | None:
        """The P whose turn it is, or None: D computes this request alone."""
        awake = [prefill for prefill in self._prefills if not prefill.rests]
        why = "no prefill instance is up"
        if not call.may_be_handed_over:
            why = "it has several prompts or answers, or asks for log-probabilities of its prompt"
        elif all(decode.rests for decode in self._decodes):
            why = "no decode instance may be up, and prefill's blocks would wait for one"
        elif awake:
            prefill = awake[next(self._prefill_turns) % len(awake)]
            try:
                return await prefill.source()
            except InstanceError as error:
                self._failed(prefill, "prefill_failed", error)
                why = f"the engine of {prefill.url} is not known"
        self._plain(call, why)
        return None

    async def _prefill(self, call: Call, source: Source) -> bool:
        try:
            await source.prefill.compute(call, source.headers)
        except InstanceError as error:
            if not 400 <= error.status < 500:  # else it is the request that is wrong, and D says so
                self._failed(source.prefill, "prefill_failed", error)
            self._plain(call, f"prefill at {source.prefill.url}: {error}")
            return False
        return True

    async def _decode(self, call: Call, source: Source | None) -> Answer:
        """The answer of the first D that gives one; each is asked once, those that failed lately last.

        Raises:
            InstanceError: none does; says what each did.
        """
        turn, problems = next(self._decode_turns) % len(self._decodes), []
        for decode in sorted(self._decodes[turn:] + self._decodes[:turn], key=lambda decode: decode.rests):
            try:
                answer = await decode.answer(call, source)
            except InstanceError as error:
                self._failed(decode, "decode_failed", error)
                problems.append(f"{decode.url}: {error}")
                if error.refused and source is not None:  # because of the hand-off, perhaps
                    source.prefill.forget()
                    source = None
            else:
                decode.answered()
                self.counts["plain" if source is None else "handed_over"] += 1
                return answer
        raise InstanceError(f"no decode instance answers: {'; '.join(problems)}")

    # -- what went wrong -----------------------------------------------------------------------------------------------

    def _plain(self, call: Call, why: str) -> None:
        log.info("%s: computed at decode: %s", call.transfer_id, why)

    def _failed(self, instance: Instance, count: str, error: InstanceError) -> None:
        self.counts[count] += 1
        if not error.refused:
            instance.failed()
        log.warning("%s failed: %s", instance.url, error)


def _passed_on(request: web.Request) -> dict[str, str]:
    return {k: v for k, v in request.headers.items() if k == "Authorization"}


def _problem(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "proxy_error", "code": status}}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A proxy before prefill and decode instances of vLLM.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs=2, action="append", required=True, metavar=("URL", "BOOTSTRAP"))
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--concurrent", action="store_true", help="ask P and D at the same time")
    parser.add_argument("--prefill-s", type=float, default=Limits.prefill_s, help="for the whole answer of a P")
    parser.add_argument("--silence-s", type=float, default=Limits.silence_s, help="longest silence of a D")
    given = parser.parse_args(words)
    for url in [*itertools.chain(*given.prefill), *given.decode]:
        if not url.startswith(("http://", "https://")):
            parser.error(f"{url!r} must begin with http:// or https://")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    limits = Limits(prefill_s=given.prefill_s, silence_s=given.silence_s)
    proxy = Proxy(given.prefill, given.decode, concurrent=given.concurrent, limits=limits)
    web.run_app(proxy.app, host=given.host, port=given.port, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()
