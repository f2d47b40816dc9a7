"""Instances of several workers: other tensor-parallel sizes on each side, and stages at prefill."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvactors.disagg import boundary
from tests.vllm.connector_cases import MADE, alone, check
from tests.vllm.connector_engines import no_mooncake
from tests.vllm.handoff_pair import pair

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(no_mooncake()), reason=no_mooncake())]

TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}

SIZES = [
    ("qwen3", TP2, {}),
    ("gptoss", {}, TP2),
    ("gptoss", PP2, {}),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("model", "prefill", "decode"), SIZES, ids=["tp 2 to 1", "tp 1 to 2", "pp 2 to 1"])
def test_sizes(model: str, prefill: dict[str, int], decode: dict[str, int], tmp_path: Path) -> None:
    """Sums of partial products differ in their last bits between sizes, so log-probabilities are near, not equal."""
    with pair(model, tmp_path) as two:
        requests = [alone(f"{n}", n) for n in (1, 127, 129, 300, 400)]
        for of in (two.prefill, two.decode):  # seeded weights would be others for each size
            of.arguments |= {"load_format": "safetensors", "distributed_executor_backend": "mp"}
        two.decode.led.write_weights(model, str(tmp_path))
        two.decode.start(None)
        cold = two.decode.led.one_by_one(requests)
        two.decode.led.stop()
        two.prefill.arguments |= prefill
        two.decode.arguments |= decode
        two.begin()
        free = two.prefill.led.free_blocks(), two.decode.led.free_blocks()
        _, at_decode, _ = two.run(requests)
        check(cold, at_decode, requests, exact_until={name: 0 for name, _, _ in requests})
        for name, prompt, _ in requests:
            rest = len(prompt) - min(boundary(len(prompt), has_state=False).handoff_tokens, len(prompt) - 1)
            told = f"{name}\n{two.decode.led.told()}\n{two.prefill.led.told()}"
            assert at_decode[name]["scheduled"] == [rest, *[1] * (MADE - 1)], told
            assert at_decode[name]["tokens"][:1] == cold[name]["tokens"][:1], name
        two.settle()
        assert (two.prefill.led.free_blocks(), two.decode.led.free_blocks()) == free
