"""The hand-off in vLLM's scheduler, with vLLM's own requests and cache manager: what is cut, asked for, held and told."""

from __future__ import annotations

from typing import Any

import pytest

# It imports all that is needed of vLLM, and keeps quiet about the warnings.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM is not importable", exc_type=ImportError)

import torch
from vllm.v1.request import RequestStatus

from kvactors.disagg.messages import Source
from kvactors.errors import HandoffBlocksError
from tests.vllm.handoff_rig import (
    DECODE,
    LAYOUTS,
    PREFILL,
    Instance,
    ask,
    full,
    hand_over,
    ids,
    recurrent,
    windowed,
)

ABORTED = RequestStatus.FINISHED_ABORTED


def prefill(config: Any = None) -> Instance:
    return Instance(full() if config is None else config, sends=True)


def decode(config: Any = None) -> Instance:
    return Instance(full() if config is None else config, receives=True)


# -- from prompt to first token ----------------------------------------------------------------------------------------


LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 40, 41, 47, 48, 49, 63, 64, 65, 71, 72, 73, 100, 128, 129)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_decode_has_all_that_its_next_token_reads(layout: str, tokens: int) -> None:
    """Also where all of it, or a part of it, is in a prefix cache on either side."""
    for at_decode in (0, 16, 32, tokens):
        for at_prefill in (0, 32):
            p, d = prefill(LAYOUTS[layout]()), decode(LAYOUTS[layout]())
            if at_prefill:
                p.seen(at_prefill)
            if at_decode:
                d.seen(at_decode)
            p.prefill("p", tokens)
            request = d.request("d", tokens, DECODE)
            external = d.admit(request)
            hand_over(p, d)
            if external:
                d.arrive(request)
                assert request.num_computed_tokens == tokens - 1
                assert d.missing(request) == [], (at_decode, at_prefill)


@pytest.mark.parametrize("scratch", [1, 2])
@pytest.mark.parametrize("tokens", [17, 33, 64, 65])
def test_scratch_slots_are_no_states(tokens: int, scratch: int) -> None:
    p, d = prefill(recurrent(scratch=scratch)), decode(recurrent(scratch=scratch))
    p.prefill("p", tokens)
    request = d.request("d", tokens, DECODE)
    d.admit(request)
    hand_over(p, d)
    d.arrive(request)
    assert d.missing(request) == []


@pytest.mark.parametrize(
    ("config", "tokens", "asked"),
    [
        (full, 1, 1),
        (full, 2, 2),
        (full, 16, 16),
        (full, 100, 100),
        (recurrent, 1, 0),
        (recurrent, 2, 1),
        (recurrent, 10, 9),
        (recurrent, 17, 16),
        (recurrent, 100, 99),
        (windowed, 38, 38),
        (windowed, 39, 38),  # 39 - 24 + 1 = 16: the window leaves block 0, and token 38 reads token 15
        (windowed, 40, 40),
    ],
)
def test_how_many_tokens_decode_asks_for(config: Any, tokens: int, asked: int) -> None:
    d = decode(config())
    request = d.request("d", tokens, DECODE)
    for _ in range(3):  # vLLM asks in every step while it has no room
        assert d.side.matched(request, 0) == (asked, asked > 0)
    assert not d.side.plan()
    assert request.kv_transfer_params["do_remote_prefill"]


@pytest.mark.parametrize(
    ("config", "lookahead", "kept"), [(full, 0, 40), (full, 1, 40), (full, 3, 38), (recurrent, 1, 39), (recurrent, 3, 38)]
)
def test_a_prefill_that_drafts_ahead_stops_earlier(config: Any, lookahead: int, kept: int) -> None:
    p = Instance(config(), sends=True, lookahead=lookahead)
    d = Instance(config(), receives=True, lookahead=lookahead)
    p.prefill("p", 40)
    request = d.request("d", 40, DECODE)
    assert d.admit(request) == kept
    hand_over(p, d)
    d.arrive(request)
    assert d.missing(request) == []


def test_a_local_prefix_is_not_asked_for() -> None:
    d = decode()
    d.seen(33)
    request = d.request("d", 100, DECODE)
    assert d.admit(request) == 68
    (pull,) = d.side.plan().pulls
    assert ids(pull.blocks) == [(2, d.tables(request)[0][2:7])]
    assert pull.source == Source("t", "p", "http://127.0.0.1:8998")
    assert pull.blocks.tokens == 100


def test_decode_asks_once() -> None:
    d = decode()
    request = d.request("d", 40, DECODE)
    d.admit(request)
    assert len(d.side.plan().pulls) == 1
    assert not request.kv_transfer_params["do_remote_prefill"]
    d.side.allocated(request, d.manager.get_blocks("d"), 0)
    assert not d.side.plan()
    assert d.side.loads(request)


@pytest.mark.parametrize(
    ("config", "tokens", "more"),
    [
        (recurrent, 1, {}),
        (full, 40, {"skip_reading_prefix_cache": True}),
        (recurrent, 40, {"skip_reading_prefix_cache": True}),
    ],
)
def test_where_nothing_is_handed_over_prefill_is_told_to_free(config: Any, tokens: int, more: dict[str, Any]) -> None:
    p, d = prefill(config()), decode(config())
    request = p.prefill("p", tokens, **more)
    assert (request.num_prompt_tokens, request.max_tokens) == (tokens, 8)
    asked = d.request("d", tokens, DECODE, **more)
    assert d.admit(asked) == 0
    (pull,) = d.side.plan().pulls
    assert pull.blocks.empty
    assert not d.side.loads(asked)


def test_a_whole_local_prefix_is_an_empty_pull() -> None:
    """vLLM's own cache never has the last token; with a state that is all of it."""
    d = decode(recurrent())
    d.seen(48)
    request = d.request("d", 49, DECODE)
    assert d.admit(request) == 0
    assert [pull.blocks.empty for pull in d.side.plan().pulls] == [True]


def test_a_prompt_of_embeddings_alone_is_not_handed_over() -> None:
    d = decode()
    request = ask("d", 40, DECODE)
    request.prompt_token_ids = None
    request.prompt_embeds = torch.zeros(40, 4)
    d.side.arrived(request)
    assert d.side.matched(request, 0) == (0, False)


# -- what prefill cuts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "kept", "hashes"), [(1, 1, 0), (2, 1, 0), (16, 15, 0), (17, 16, 1), (32, 31, 1), (33, 32, 2)]
)
def test_with_a_state_prefill_drops_the_last_token(tokens: int, kept: int, hashes: int) -> None:
    p = prefill(recurrent())
    request = p.request("p", tokens, PREFILL)
    assert request.prompt_token_ids == list(request.all_token_ids) == list(range(kept))
    assert (request.num_prompt_tokens, request.num_tokens, len(request.block_hashes)) == (kept, kept, hashes)
    assert request.max_tokens == (8 if kept == tokens else 1)
    assert bool(request.kv_transfer_params.get("_p_side_truncated")) is (kept < tokens)


def test_a_request_is_cut_once() -> None:
    p = prefill(recurrent())
    request = p.request("p", 40, PREFILL)
    p.side.plan()
    p.side._transfers.clear()
    p.side.arrived(request)
    assert request.num_prompt_tokens == 39


def test_the_list_of_whoever_asked_is_not_cut() -> None:
    """In one process the prompt's list is the caller's."""
    p = prefill(recurrent())
    request = ask("p", 40, PREFILL)
    theirs = request.prompt_token_ids
    p.side.arrived(request)
    assert theirs == list(range(40))


def test_embeddings_beside_ids_are_cut_with_them() -> None:
    p = prefill(recurrent())
    request = ask("p", 40, PREFILL)
    request.prompt_embeds = torch.zeros(40, 4)
    request.prompt_is_token_ids = [True] * 40
    p.side.arrived(request)
    assert (len(request.prompt_embeds), len(request.prompt_is_token_ids)) == (39, 39)


@pytest.mark.parametrize("tokens", [16, 40])
def test_attention_alone_is_not_cut(tokens: int) -> None:
    request = prefill().request("p", tokens, PREFILL)
    assert (request.num_prompt_tokens, request.max_tokens) == (tokens, 8)


def test_a_prompt_that_ends_behind_a_block_which_prefill_has() -> None:
    """vllm#53663: N = 129, blocks of 128, prefill has 128: it runs 128 tokens, also after a preemption."""
    p = prefill(recurrent(128))
    p.seen(128)
    request = p.request("p", 129, PREFILL)
    assert p.compute(request) == 128
    p.manager.free(request)  # a preemption
    request.num_computed_tokens = 0
    assert p.compute(request) == 128
    request.append_output_token_ids(5)
    assert p.end(request)
    (held,) = p.side.plan().prefilled
    assert held.blocks.tokens == 128


# -- how prefill ends --------------------------------------------------------------------------------------------------


def test_prefill_says_what_came_and_what_is_computed() -> None:
    p = prefill()
    request = p.request("p", 40, PREFILL)
    assert p.side.busy
    assert p.side.plan().requests == ["t"]
    assert not p.side.busy
    p.compute(request)
    table = list(p.tables(request)[0])
    request.append_output_token_ids(5)
    assert p.end(request)
    (held,) = p.side.plan().prefilled
    assert (held.transfer_id, held.request_id, held.blocks.tokens) == ("t", "p", 40)
    assert ids(held.blocks) == [(0, table)]


@pytest.mark.parametrize(
    ("status", "computed", "kept"),
    [
        (RequestStatus.FINISHED_LENGTH_CAPPED, 40, True),
        (RequestStatus.FINISHED_STOPPED, 40, True),
        (RequestStatus.FINISHED_ABORTED, 40, False),
        (RequestStatus.FINISHED_ABORTED, 16, False),
        (RequestStatus.FINISHED_ERROR, 40, False),
        (RequestStatus.FINISHED_IGNORED, 0, False),
        (RequestStatus.FINISHED_LENGTH_CAPPED, 16, False),
    ],
)
def test_blocks_are_kept_only_of_a_prompt_that_is_computed(status: RequestStatus, computed: int, kept: bool) -> None:
    p = prefill()
    request = p.request("p", 40, PREFILL)
    p.side.plan()
    p.compute(request, computed)
    assert p.end(request, status) is kept
    plan = p.side.plan()
    assert ([h.transfer_id for h in plan.prefilled], [t for t, _ in plan.cancelled]) == (["t"] * kept, ["t"] * (not kept))
    again = p.request("p2", 40, PREFILL)
    assert bool(p.side.plan().requests) is not kept  # the id is in use while the blocks are held
    p.side.reported((), ["p"])
    assert p.side.finished(again, [[]]) is False


def test_a_state_that_has_seen_more_than_the_prompt_is_not_handed_over() -> None:
    p = prefill(recurrent())
    request = p.request("p", 40, PREFILL)
    p.compute(request)
    request.append_output_token_ids(5)
    p.compute(request, 40)
    assert not p.end(request)
    assert "cannot be rewound" in p.side.plan().cancelled[0][1]


def test_a_transfer_id_may_be_used_again_when_its_blocks_are_free() -> None:
    p = prefill()
    p.prefill("p", 40)
    p.side.plan()
    p.request("p2", 40, PREFILL)
    assert not p.side.plan().requests
    p.side.reported((), ["p"])
    p.request("p3", 40, PREFILL)
    assert p.side.plan().requests == ["t"]


def test_a_decode_with_another_prompt_is_refused_by_position() -> None:
    p, d = prefill(), decode()
    p.prefill("p", 40)
    d.admit(d.request("d", 60, DECODE))
    with pytest.raises(HandoffBlocksError):
        hand_over(p, d)


# -- requests that cannot be handed over -------------------------------------------------------------------------------


BAD = [
    *[{k: v for k, v in DECODE.items() if k != key} for key in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")],
    {**DECODE, "transfer_id": ""},
    {**DECODE, "transfer_id": 5},
    {**DECODE, "transfer_id": "x" * 513},
]


@pytest.mark.parametrize("params", BAD)
def test_decode_without_all_fields_is_served_plainly(params: dict[str, Any]) -> None:
    d = decode()
    request = d.request("d", 40, params)
    assert d.side.matched(request, 0) is None
    assert not request.kv_transfer_params["do_remote_prefill"]
    assert d.admit(request) == 0
    assert not d.end(request, ABORTED)
    assert not d.side.plan()


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, {"do_remote_decode": True, "transfer_id": None}])
def test_prefill_without_transfer_id_is_served_plainly(params: dict[str, Any]) -> None:
    p = prefill(recurrent())
    request = p.request("p", 40, params)
    assert request.num_prompt_tokens == 40
    p.compute(request)
    assert not p.end(request)
    assert not p.side.plan()


@pytest.mark.parametrize(("instance", "params"), [(prefill, DECODE), (decode, PREFILL)])
def test_the_other_role_is_served_plainly(instance: Any, params: dict[str, Any]) -> None:
    one = instance()
    request = one.request("r", 40, params)
    assert one.side.matched(request, 0) is None
    one.compute(request)
    assert not one.end(request)
    assert not one.side.plan()


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False, "do_remote_decode": False}])
def test_requests_that_ask_for_nothing(params: dict[str, Any] | None) -> None:
    one = Instance(full(), sends=True, receives=True)
    request = one.request("r", 40, params)
    assert one.side.matched(request, 0) is None
    assert not one.side.loads(request)
    assert not one.end(request, ABORTED)
    assert not one.side.plan()


# -- how decode ends ---------------------------------------------------------------------------------------------------


def test_aborted_before_it_had_blocks() -> None:
    d = decode()
    request = d.request("d", 40, DECODE)
    assert not d.end(request, ABORTED)
    (pull,) = d.side.plan().pulls
    assert pull.blocks.empty
    assert not d.end(request, ABORTED)
    assert not d.side.plan()


def test_aborted_while_it_waits() -> None:
    d = decode()
    request = d.request("d", 40, DECODE)
    d.admit(request)
    (pull,) = d.side.plan().pulls
    assert d.side.finished(request, d.tables(request)) is False  # vLLM keeps its blocks by itself
    assert [name for name, _ in d.side.plan().given_up] == [pull.name]
    d.side.reported(["d"], ())
    assert not d.side.plan()


@pytest.mark.parametrize("when", ["reported", "running"])
def test_aborted_when_its_blocks_are_there(when: str) -> None:
    d = decode()
    request = d.request("d", 40, DECODE)
    d.admit(request)
    d.side.plan()
    d.arrive(request)
    if when == "running":
        d.compute(request)
    assert not d.end(request, ABORTED)
    assert not d.side.plan()


def test_after_a_failure_nothing_is_offered_again() -> None:
    d = decode()
    request = d.request("d", 40, DECODE)
    d.admit(request)
    d.side.plan()
    d.side.reported(["d"], ())
    d.manager.free(request)  # vLLM's way of a failed load
    request.num_computed_tokens = 0
    request.status = RequestStatus.WAITING
    assert d.side.matched(request, 0) is None
    assert not d.side.loads(request)
    assert d.compute(request) == 40
    assert not d.end(request)
    assert not d.side.plan()


def test_an_id_that_is_used_again_names_another_pull() -> None:
    d = decode()
    names = []
    for _ in range(2):
        request = d.request("d", 40, DECODE)
        d.admit(request)
        (pull,) = d.side.plan().pulls
        names.append(pull.name)
        d.end(request, ABORTED)
        assert [name for name, _ in d.side.plan().given_up] == [pull.name]
    assert len(set(names)) == 2
