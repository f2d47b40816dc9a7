"""`python -m tests.vllm.told MODEL`: the KV cache events that vLLM publishes for one long prompt, as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPT = [3 + (7 * i) % 490 for i in range(400)]


def main(model: str) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.config.kv_events import KVEventsConfig

    from tests.vllm import engine

    kv = KVTransferConfig(
        kv_connector="KVActorsConnector",
        kv_connector_module_path="kvactors.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"backend": "memory"},
    )
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    llm = engine.start(model, Path(tempfile.mkdtemp()), kv_transfer_config=kv, kv_events_config=events)
    told: list[Any] = []
    llm.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher.publish = lambda batch: told.extend(batch.events)
    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=4)
    for _ in range(2):
        llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        llm.reset_prefix_cache()
    return {
        medium: [
            {
                "hashes": [str(h) for h in e.block_hashes],
                "tokens": list(e.token_ids),
                "group": e.group_idx,
                "size": e.block_size,
            }
            for e in told
            if getattr(e, "medium", None) == medium and hasattr(e, "token_ids")
        ]
        for medium in ("GPU", "STORAGE")
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
