"""The views that `cache_views` lays over a buffer are those of vLLM's own model runner, for every kind of model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.vllm import view_record
from tests.vllm.engine import run_alone
from tests.vllm.view_record import Record

FULL, WINDOW, STATE, LATENT = "FullAttentionSpec", "SlidingWindowSpec", "MambaSpec", "MLAAttentionSpec"

GROUPS = {
    "qwen3": [(FULL, 128)],
    "gemma3": [(FULL, 128), (WINDOW, 128), (WINDOW, 128)],
    "gptoss": [(FULL, 128), (WINDOW, 128)],
    "qwen3next": [(FULL, 384), *[(STATE, 384)] * 3],
    "granite": [(FULL, 256), *[(STATE, 256)] * 3],
    "nemotronh": [(FULL, 128), *[(STATE, 128)] * 3],
    "dsv3": [(LATENT, 128)],
}
"""What each model stands for: its groups, in any order."""

WITHOUT_AMX = {"dsv3": [(LATENT, 16)]}
"""vLLM's kernel for latent vectors on a CPU without AMX knows blocks of 16 tokens only."""


@pytest.fixture(scope="module")
def record_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Record]]:
    """The record of a model by name; the engines of all chosen tests start at once, two at a time."""
    folder = tmp_path_factory.mktemp("models")
    chosen = [
        item.callspec.params["model"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec") and "model" in item.callspec.params
    ]

    def start(model: str) -> Record:
        out = folder / f"{model}.record.json"
        run_alone("tests.vllm.view_record", model, folder, out)
        return view_record.read(out)

    with ThreadPoolExecutor(2) as two:
        records: dict[str, Future[Record]] = {model: two.submit(start, model) for model in dict.fromkeys(chosen)}
        yield lambda model: records[model].result()
        for waiting in records.values():
            waiting.cancel()


@pytest.mark.parametrize("model", GROUPS)
def test_views_equal_those_of_vllms_own_runner(model: str, record_of: Callable[[str], Record]) -> None:
    record = record_of(model)
    assert sorted(record.groups) in (sorted(GROUPS[model]), WITHOUT_AMX.get(model))
    assert record.ours == record.theirs
    assert record.config_layout == record.layout, "without a layout, `cache_views` takes the configuration's"


@pytest.mark.parametrize("model", [model for model, groups in GROUPS.items() if (STATE, groups[-1][1]) in groups])
def test_states_of_a_page_equal_those_into_which_a_layer_splits_its_view(
    model: str, record_of: Callable[[str], Record]
) -> None:
    record = record_of(model)
    assert len(record.our_states) == 3
    assert record.our_states == record.their_states
