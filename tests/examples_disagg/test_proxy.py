"""The proxy of the example, before servers that stand in for vLLM: what it asks of whom, and what it does when one fails."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tests.examples_disagg.fakes import FakeBootstrap, FakeInstance, example

instances = example("instances")
proxy_module = example("proxy")

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}


@dataclass
class Site:
    """A proxy and what stands behind it."""

    proxy: Any
    client: TestClient[web.Request, web.Application]
    prefills: list[FakeInstance]
    decodes: list[FakeInstance]
    bootstraps: list[FakeBootstrap]
    urls: dict[str, str]

    async def post(self, body: dict[str, Any] | None = None, path: str = "/v1/completions") -> tuple[int, Any]:
        async with self.client.post(path, json=BODY if body is None else body) as response:
            return response.status, await response.json()


Start = Callable[..., Awaitable[Site]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a site. An instance whose answer is "down" does not listen."""
    async with AsyncExitStack() as ends:

        async def serve(app: web.Application) -> str:
            server = await ends.enter_async_context(TestServer(app, host="127.0.0.1"))
            return str(server.make_url("")).rstrip("/")

        def refused() -> str:
            """Nothing listens there; the port stays taken, or one of the other servers could get it."""
            taken = ends.enter_context(closing(socket.socket()))
            taken.bind(("127.0.0.1", 0))
            return f"http://127.0.0.1:{taken.getsockname()[1]}"

        async def started(
            prefill: tuple[int | str, ...] = (200,),
            decode: tuple[int | str, ...] = (200,),
            concurrent: bool = False,
            **limits: float,
        ) -> Site:
            prefills = [FakeInstance(f"P{n}", answers) for n, answers in enumerate(prefill)]
            decodes = [FakeInstance(f"D{n}", answers) for n, answers in enumerate(decode)]
            if concurrent and set(prefill) == {200}:
                prefilled: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
                for instance in (*prefills, *decodes):
                    instance.prefilled = prefilled
            bootstraps = [FakeBootstrap({0: f"engine-{p.name}"}) for p in prefills]
            urls = {i.name: refused() if i.answers == "down" else await serve(i.app()) for i in (*prefills, *decodes)}
            addresses = [(urls[p.name], await serve(b.app())) for p, b in zip(prefills, bootstraps, strict=True)]
            urls |= {f"B{n}": address for n, (_, address) in enumerate(addresses)}
            proxy = proxy_module.Proxy(
                addresses, [urls[d.name] for d in decodes], concurrent=concurrent, limits=instances.Limits(**limits)
            )
            client = await ends.enter_async_context(TestClient(TestServer(proxy.app, host="127.0.0.1")))
            return Site(proxy, client, prefills, decodes, bootstraps, urls)

        yield started


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "for_p"),
    [
        ("/v1/completions", BODY, {"max_tokens": 1}),
        ("/v1/completions", BODY | {"min_tokens": 3, "logprobs": 1, "stop": ["x"]}, {"max_tokens": 1, "stop": ["x"]}),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4},
            {"max_tokens": 1, "max_completion_tokens": 1},
        ),
    ],
)
async def test_what_p_and_d_are_asked(
    start: Start, concurrent: bool, path: str, body: dict[str, Any], for_p: dict[str, Any]
) -> None:
    site = await start(concurrent=concurrent)
    assert await site.post(body, path) == (200, {"from": "D0"})
    (p,), (d,) = site.prefills[0].asked, site.decodes[0].asked
    transfer_id = p["kv_transfer_params"]["transfer_id"]
    same = {k: v for k, v in body.items() if k in ("model", "prompt", "messages")} | {"path": path}
    assert p == same | for_p | {"stream": False, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": transfer_id}}
    assert d == body | {
        "path": path,
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_engine_id": "engine-P0",
            "remote_bootstrap_addr": site.urls["B0"],
        },
    }
    assert site.prefills[0].headers[0]["X-Request-Id"] == site.decodes[0].headers[0]["X-Request-Id"] == transfer_id
    await site.post(body, path)
    assert site.prefills[0].asked[1]["kv_transfer_params"]["transfer_id"] != transfer_id
    assert site.bootstraps[0].queries == 1
    assert site.proxy.counts == {"requests": 2, "handed_over": 2}


async def test_what_a_client_says_of_transfers_is_dropped_and_its_key_passed_on(start: Start) -> None:
    site = await start()
    body = BODY | {"kv_transfer_params": {"do_remote_prefill": True, "remote_bootstrap_addr": "http://elsewhere:1"}}
    async with site.client.post("/v1/completions", json=body, headers={"Authorization": "Bearer k"}):
        pass
    assert site.decodes[0].asked[0]["kv_transfer_params"]["remote_bootstrap_addr"] == site.urls["B0"]
    assert site.prefills[0].headers[0]["Authorization"] == site.decodes[0].headers[0]["Authorization"] == "Bearer k"


@pytest.mark.parametrize("concurrent", [False, True])
async def test_a_stream_passes_as_it_is(start: Start, concurrent: bool) -> None:
    site = await start(decode=("stream",), concurrent=concurrent)
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    async with site.client.post("/v1/completions", json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.text() == 'data: {"from": "D0"}\n\ndata: [DONE]\n\n'
    assert site.prefills[0].asked[0]["stream"] is False
    assert "stream_options" not in site.prefills[0].asked[0]
    assert site.decodes[0].asked[0]["stream_options"] == {"include_usage": True}


async def test_instances_take_turns(start: Start) -> None:
    site = await start(prefill=(200, 200), decode=(200, 200, 200))
    assert [(await site.post())[1]["from"] for _ in range(6)] == ["D0", "D1", "D2"] * 2
    assert [len(p.asked) for p in site.prefills] == [3, 3]
    engines = [d["kv_transfer_params"]["remote_engine_id"] for instance in site.decodes for d in instance.asked]
    assert sorted(engines) == ["engine-P0"] * 3 + ["engine-P1"] * 3


async def test_ranks_of_one_p_take_turns(start: Start) -> None:
    site = await start()
    site.bootstraps[0].engines = {0: "first", 1: "second"}
    for _ in range(4):
        await site.post()
    assert [h["X-data-parallel-rank"] for h in site.prefills[0].headers] == ["0", "1", "0", "1"]
    assert [d["kv_transfer_params"]["remote_engine_id"] for d in site.decodes[0].asked] == ["first", "second"] * 2
    assert "X-data-parallel-rank" not in site.decodes[0].headers[0]


@pytest.mark.parametrize(
    "body",
    [
        BODY | {"n": 2},
        BODY | {"prompt": ["a", "b"]},
        BODY | {"prompt": [[5, 6], [7, 8]]},
        BODY | {"echo": True},
        BODY | {"prompt_logprobs": 0},
        BODY | {"use_beam_search": True},
    ],
)
async def test_what_cannot_be_handed_over_goes_to_d_alone(start: Start, body: dict[str, Any]) -> None:
    site = await start()
    assert (await site.post(body))[0] == 200
    assert site.prefills[0].asked == []
    assert site.decodes[0].asked == [body | {"path": "/v1/completions"}]
    assert site.proxy.counts == {"requests": 1, "plain": 1}


@pytest.mark.parametrize("prompt", ["a", ["a"], [[5, 6]], [5]])
async def test_one_prompt_is_handed_over_however_it_is_written(start: Start, prompt: Any) -> None:
    site = await start()
    await site.post(BODY | {"prompt": prompt})
    assert site.proxy.counts["handed_over"] == 1


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize(("p", "failed"), [("down", 1), (503, 1), (500, 1), ("hang", 1), (400, 0)])
async def test_p_fails_and_d_computes(start: Start, p: int | str, failed: int, concurrent: bool) -> None:
    """In concurrent mode D, which waits for P, is asked anew."""
    site = await start(prefill=(p,), decode=("wait",), concurrent=concurrent, prefill_s=0.05)
    assert await site.post() == (200, {"from": "D0"})
    assert "kv_transfer_params" not in site.decodes[0].asked[-1]
    assert site.proxy.counts["prefill_failed"] == failed
    assert site.proxy.counts["plain"] == 1
    asked = len(site.prefills[0].asked)
    await site.post()  # one that is not up is left alone for a while
    assert len(site.prefills[0].asked) - asked == (1 if p in (400, 500) else 0)


async def test_p_is_tried_again_after_its_rest(start: Start) -> None:
    site = await start(prefill=(503, 200), rest_s=0.0)
    for _ in range(4):
        await site.post()
    assert [len(p.asked) for p in site.prefills] == [2, 2]
    assert site.proxy.counts == {"requests": 4, "handed_over": 2, "plain": 2, "prefill_failed": 2}


async def test_another_p_takes_over_while_one_rests(start: Start) -> None:
    site = await start(prefill=("down", 200))
    for _ in range(4):
        await site.post()
    assert len(site.prefills[1].asked) == 3
    assert site.proxy.counts == {"requests": 4, "handed_over": 3, "plain": 1, "prefill_failed": 1}


@pytest.mark.parametrize("said", ["{}", "[]", '{"0": {}}', '{"x": {"engine_id": "e"}}', "no JSON", None])
async def test_a_bootstrap_server_that_knows_nothing(start: Start, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def query(_self: FakeBootstrap, _request: web.Request) -> web.Response:
        return web.Response(text=said) if said is not None else web.Response(status=500)

    monkeypatch.setattr(FakeBootstrap, "_query", query)
    site = await start()
    assert (await site.post())[0] == 200
    assert site.prefills[0].asked == []
    assert site.proxy.counts == {"requests": 1, "plain": 1, "prefill_failed": 1}


async def test_a_restarted_p_has_another_engine(start: Start) -> None:
    """Its id is asked for again after P failed, after D did, and when the last answer is old."""
    site = await start(prefill=(200,), decode=(200,), rest_s=0.0, known_s=30.0)
    (p,), (d,), (bootstrap,) = site.prefills, site.decodes, site.bootstraps

    def engines() -> list[str]:
        return [body.get("kv_transfer_params", {}).get("remote_engine_id", "") for body in d.asked]

    await site.post()
    bootstrap.engines = {0: "second"}
    await site.post()
    p.answers = 503
    await site.post()
    p.answers = 200
    await site.post()
    assert engines() == ["engine-P0", "engine-P0", "", "second"]
    bootstrap.engines = {0: "third"}
    d.answers = 500
    assert (await site.post())[0] == 502
    d.answers = 200
    await site.post()
    assert engines()[4:] == ["second", "third"]
    assert bootstrap.queries == 3


async def test_an_old_engine_id_is_not_believed(start: Start) -> None:
    site = await start(known_s=0.0)
    await site.post()
    site.bootstraps[0].engines = {0: "second"}
    await site.post()
    assert [d["kv_transfer_params"]["remote_engine_id"] for d in site.decodes[0].asked] == ["engine-P0", "second"]


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize(("d", "handed_over"), [("down", True), ("hang", True), (503, True), (500, False)])
async def test_d_fails_and_another_answers(start: Start, d: int | str, handed_over: bool, concurrent: bool) -> None:
    """What D refused may have failed for the hand-off, so the next one computes it."""
    site = await start(decode=(d, 200), concurrent=concurrent, silence_s=0.05)
    assert await site.post() == (200, {"from": "D1"})
    assert ("kv_transfer_params" in site.decodes[1].asked[0]) is handed_over
    assert site.proxy.counts["decode_failed"] == 1
    for _ in range(2):
        assert await site.post() == (200, {"from": "D1"})
    assert len(site.decodes[0].asked) == {"down": 0, 500: 2}.get(d, 1)  # one that is not up comes last for a while


async def test_a_stream_that_begins_with_an_error_goes_to_another(start: Start) -> None:
    site = await start(decode=("event", "stream"))
    async with site.client.post("/v1/completions", json=BODY | {"stream": True}) as response:
        assert (await response.text()).startswith('data: {"from": "D1"}')


@pytest.mark.parametrize("stream", [False, True])
async def test_no_d_answers(start: Start, stream: bool) -> None:
    site = await start(decode=("down", 503))
    status, said = await site.post(BODY | {"stream": stream})
    assert status == 502
    assert said["error"]["message"].startswith("no decode instance answers: ")
    assert all(site.urls[name] in said["error"]["message"] for name in ("D0", "D1"))
    async with site.client.get("/health") as response:
        assert response.status == 503
        health = await response.json()
    assert health["instances"] == {site.urls["P0"]: "ok", site.urls["D0"]: "failed lately", site.urls["D1"]: "failed lately"}
    assert health["counts"] == {"requests": 1, "decode_failed": 2}


async def test_p_is_not_asked_while_no_d_may_be_up(start: Start) -> None:
    """It would keep blocks that nobody fetches."""
    site = await start(decode=("down",))
    assert [(await site.post())[0] for _ in range(3)] == [502] * 3
    assert len(site.prefills[0].asked) == 1
    assert site.proxy.counts == {"requests": 3, "decode_failed": 3}


async def test_p_is_asked_again_when_d_is_back(start: Start) -> None:
    site = await start(decode=(503,))
    await site.post()
    site.decodes[0].answers = 200
    assert [(await site.post())[0] for _ in range(2)] == [200] * 2
    assert site.proxy.counts == {"requests": 3, "decode_failed": 1, "plain": 1, "handed_over": 1}


async def test_what_d_says_of_a_bad_request_is_passed_on(start: Start) -> None:
    site = await start(prefill=(400,), decode=(400, 200))
    assert await site.post() == (400, {"from": "D0"})
    assert site.proxy.counts["decode_failed"] == 0


@pytest.mark.parametrize("body", [b"no JSON", b"[1]", b'"text"', b"\xff"])
async def test_what_is_no_request(start: Start, body: bytes) -> None:
    site = await start()
    async with site.client.post("/v1/completions", data=body, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "the body must be a JSON object"
    assert site.prefills[0].asked == site.decodes[0].asked == []


async def test_a_stream_that_breaks_off_does_not_end_as_a_whole_one(start: Start) -> None:
    site = await start(decode=("break",))
    got = b""
    async with site.client.post("/v1/completions", json=BODY | {"stream": True}) as response:
        while b"error" not in got:
            got += await response.content.readany()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    assert got.startswith(b'data: {"from": "D0"}\n\ndata: {"error": ')
    assert b"the answer broke off" in got
    assert site.proxy.counts["decode_failed"] == 1


@pytest.mark.parametrize(
    ("p", "d", "concurrent", "stream", "cut"),
    [
        ("hang", 200, False, False, ["P0"]),
        (200, "hang", False, False, ["D0"]),
        (200, "hang", False, True, ["D0"]),
        (200, "endless", False, True, ["D0"]),
        ("hang", "hang", True, False, ["P0", "D0"]),
        ("hang", "hang", True, True, ["P0", "D0"]),
    ],
)
async def test_a_client_that_leaves(
    start: Start, p: int | str, d: int | str, concurrent: bool, stream: bool, cut: list[str]
) -> None:
    """What vLLM still does for it is broken off, and so given up there."""
    site = await start(prefill=(p,), decode=(d,), concurrent=concurrent)
    waiting = [i for i in (*site.prefills, *site.decodes) if i.name in cut]
    asking = asyncio.ensure_future(site.post(BODY | {"stream": stream}))
    await asyncio.wait_for(asyncio.gather(*(i.came.wait() for i in waiting)), 2)
    asking.cancel()
    await asyncio.wait_for(asyncio.gather(*(i.gone.wait() for i in waiting)), 2)
    assert site.proxy.counts["requests"] == 1
    assert site.proxy.counts["prefill_failed"] == site.proxy.counts["decode_failed"] == 0


async def test_d_that_needs_no_p_does_not_wait_for_it(start: Start) -> None:
    site = await start(prefill=("hang",), concurrent=True)
    assert await site.post() == (200, {"from": "D0"})
    await asyncio.wait_for(site.prefills[0].gone.wait(), 2)


@pytest.mark.parametrize(
    ("decode", "status", "said"),
    [
        ((200,), 200, "'from': 'D0'"),
        (("down", 200), 200, "'from': 'D1'"),
        ((503, 200), 200, "'from': 'D1'"),
        ((401, 200), 401, "'from': 'D0'"),
        (("down", 503), 502, "no decode instance answers: "),
    ],
)
async def test_the_models_are_those_of_a_decode_instance(
    start: Start, decode: tuple[int | str, ...], status: int, said: str
) -> None:
    site = await start(decode=decode)
    async with site.client.get("/v1/models", headers={"Authorization": "Bearer k"}) as response:
        assert response.status == status
        assert said in str(await response.json())
    asked = [headers for instance in site.decodes for headers in instance.headers]
    assert asked
    assert all(headers["Authorization"] == "Bearer k" for headers in asked)
    assert not site.proxy.counts, "nobody asked for tokens, and a D that was busy is no worse for it"
    assert not any(instance.headers for instance in site.prefills)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "required"),
        (["--prefill", "http://a:1"], "expected 2"),
        (["--prefill", "http://a:1", "a:2", "--decode", "http://b:1"], "'a:2' must begin with http://"),
        (["--prefill", "http://a:1", "http://a:2", "--decode", "b:1"], "'b:1' must begin with http://"),
    ],
)
def test_what_is_wrong_on_the_command_line(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        proxy_module.main(words)
    assert problem in capsys.readouterr().err
