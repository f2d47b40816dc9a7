"""Several workers: each rank stores and loads its own part, and all agree on what was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.connector_cases import Stored, check, loaded, of_all_lengths
from tests.vllm.connector_engines import Model, Pool, no_mooncake, pool

pytestmark = pytest.mark.skipif(bool(no_mooncake()), reason=no_mooncake())

RANKS = {"tp": {"tensor_parallel_size": 2}, "pp": {"pipeline_parallel_size": 2}}


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(tmp_path_factory.mktemp("mooncake")) as made:
        yield made


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_two_ranks(name: str, ranks: str, mooncake: Pool, tmp_path: Path) -> None:
    changes = {**RANKS[ranks], "distributed_executor_backend": "mp", "load_format": "safetensors"}
    model = Model(name, tmp_path, mooncake.environment, **changes)
    try:
        model.led.write_weights(name, str(tmp_path))
        model.start(None)
        requests = of_all_lengths(model.block)
        model.run_cold(requests)
        stored = Stored(name, model.block)
        led = model.start({"backend": "mooncake", "namespace": ranks})
        for _ in range(2):
            expected = stored.expected(requests)
            outcomes = led.one_by_one(requests)
            check(model.cold, outcomes, requests)
            assert loaded(outcomes) == expected, led.told()
        led.reset()
        check(model.cold, led.generate(requests), requests)
    finally:
        model.close()
