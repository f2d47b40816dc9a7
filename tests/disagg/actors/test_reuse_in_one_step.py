"""A request ends at prefill, and its transfer id is used again within one step: refused, as a plan has no order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def request(name: str) -> Any:
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params={"do_remote_decode": True, "transfer_id": "t"},
        num_prompt_tokens=1,
        num_computed_tokens=0,
        prompt_token_ids=[1],
        status=SimpleNamespace(name="FINISHED_ABORTED"),
    )


def test_an_id_is_free_again_when_its_cancellation_was_taken() -> None:
    pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM", exc_type=ImportError)
    from kvactors.vllm.handoff_scheduler import HandoffScheduler

    side = HandoffScheduler((), hash_tokens=16, sends=True, receives=False)
    side.arrived(first := request("first"))
    side.plan()
    side.finished(first, [])
    side.arrived(request("second"))  # in the same step: served plainly
    plan = side.plan()
    assert (plan.requests, [transfer for transfer, _ in plan.cancelled]) == ([], ["t"])
    side.arrived(request("third"))
    assert side.plan().requests == ["t"]
