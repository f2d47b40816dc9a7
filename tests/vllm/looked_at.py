"""`python -m tests.vllm.looked_at MODEL`: what the live views of an engine show after a cold run and a reload, as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPT = [3 + (7 * i) % 490 for i in range(400)]


def main(model: str) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig

    from kvactors.live.address import found_addresses
    from kvactors.live.client import get, read_names, read_snapshot, read_story
    from tests.vllm import engine

    kv = KVTransferConfig(
        kv_connector="KVActorsConnector",
        kv_connector_module_path="kvactors.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"backend": "memory", "live": str(folder / "live.sock")},
    )
    llm = engine.start(model, Path(tempfile.mkdtemp()), kv_transfer_config=kv)
    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=4)
    for _ in range(2):
        llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        llm.reset_prefix_cache()
    worker, scheduler = found_addresses([str(folder / "live.sock")])
    names = read_names(worker)
    seen = {
        "sockets": sorted(p.name for p in folder.iterdir()),
        "names": [name.rpartition("-")[0] for name in names],
        "story": [event[3] for event in read_story(worker, names[-1])[0].events],
        "worker": json.loads(get(worker, "/snapshot")),
        "scheduler": json.loads(get(scheduler, "/snapshot")),
        "states": [read_snapshot(worker).state, read_snapshot(scheduler).state],
    }
    llm.llm_engine.engine_core.shutdown()
    seen["left"] = sorted(p.name for p in folder.iterdir())
    return seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
