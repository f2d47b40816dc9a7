"""Every kind of model over two processes: decode answers as a single engine does, and computes no more than it has to.

Where the CPU has no AMX, the answers for latent vectors (dsv3) are not compared: vLLM's two kernels for them do not agree with
each other in one engine without any connector (what a prompt's last token is followed by differs by up to 1.6 in
log-probability, in fp32, between a prompt computed whole and one whose last token is decoded). The bytes are.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvactors.disagg import boundary
from tests.vllm.connector_cases import MADE, Request, check
from tests.vllm.connector_engines import has_amx, no_mooncake
from tests.vllm.handoff_pair import STATES, Pair, pair, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(no_mooncake()), reason=no_mooncake())]

MODELS = ("qwen3", "gptoss", "qwen3next", "granite", "dsv3")

PROMPTS = 50


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, list[Request]]]:
    """The pair, started, and prompts that a single engine has answered."""
    with pair(request.param, tmp_path_factory.mktemp("models")) as made:
        made.decode.start(None)
        requests = random_prompts(made.decode.block, PROMPTS, 900)
        made.decode.cold.update(made.decode.led.parted(requests))
        made.decode.led.stop()
        made.begin()
        yield made, requests


def test_fifty_prompts(both: tuple[Pair, list[Request]]) -> None:
    pair, requests = both
    free = pair.prefill.led.free_blocks(), pair.decode.led.free_blocks()
    pair.prefill.led.watch_blocks()
    pair.decode.led.watch_blocks()
    at_prefill, at_decode, ids = pair.run(requests)
    if pair.model != "dsv3" or has_amx():
        check(pair.decode.cold, at_decode, requests)
    pair.settle()
    assert (pair.prefill.led.free_blocks(), pair.decode.led.free_blocks()) == free

    for name, prompt, _ in requests:
        rule = boundary(len(prompt), has_state=stops_early(pair, len(prompt)))
        assert sum(at_prefill[name]["scheduled"]) == rule.prefill_tokens, name
        rest = len(prompt) - min(rule.handoff_tokens, len(prompt) - 1)
        assert at_decode[name]["scheduled"] == [rest, *[1] * (MADE - 1)], name

    sent, got = pair.prefill.led.blocks_seen(), pair.decode.led.blocks_seen()
    moved = {name for name, prompt, _ in requests if len(prompt) > 1 or pair.model not in STATES}
    assert {name for name in ids if ids[name] in got} == moved
    for transfer_id, blocks in got.items():
        assert blocks, transfer_id
        assert blocks.items() <= sent[transfer_id].items(), transfer_id
    counts = pair.prefill.led.handoffs(), pair.decode.led.handoffs()
    assert [counts[0][what] for what in ("pending", "freed", "failed", "refused")] == [0, PROMPTS, 0, 0]
    assert [counts[1][what] for what in ("pending", "loaded", "failed")] == [0, len(moved), 0]


def stops_early(pair: Pair, tokens: int) -> bool:
    """Decode computes the last token from a state before it, or where a window of 64 has just left a block of 128."""
    return pair.model in STATES or (pair.model == "gptoss" and tokens > 64 and (tokens - 63) % 128 == 0)
