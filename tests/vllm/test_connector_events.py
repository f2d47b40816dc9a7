"""What routers are told: each block once, when it is in the store, under the hash by which vLLM tells of its own."""

from __future__ import annotations

import json

from tests.vllm.engine import ask_alone
from tests.vllm.told import PROMPT


def test_every_stored_block_is_told_once_with_vllms_hash_and_its_tokens() -> None:
    told = json.loads(ask_alone("tests.vllm.told", "gptoss"))
    local = {h for event in told["GPU"] for h in event["hashes"]}
    stored = told["STORAGE"]
    assert sorted((e["group"], tuple(e["hashes"])) for e in stored) == sorted(
        {(e["group"], tuple(e["hashes"])) for e in stored}
    )
    size = stored[0]["size"]
    blocks = len(PROMPT) // size
    of_full = [e for e in stored if sum(1 for other in stored if other["group"] == e["group"]) == blocks]
    assert [e["tokens"] for e in of_full] == [PROMPT[i * size : (i + 1) * size] for i in range(blocks)]
    assert {e["group"] for e in stored} == {0, 1}
    assert all(e["hashes"][0] in local for e in stored)
