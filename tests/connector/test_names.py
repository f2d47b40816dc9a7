"""From layer names to physical layers: the same whoever lists them, and a draft's layers come after the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from kvactors.errors import LayoutError
from kvactors.vllm.names import CacheName, cache_names, stage_names


def placed(names: Sequence[str], hidden_layers: int) -> dict[str, tuple[int, bool]]:
    return {name: (at.layer, at.draft) for name, at in cache_names(names, hidden_layers).items()}


def test_the_number_in_a_name_is_the_physical_layer_and_the_rest_names_the_entry() -> None:
    assert cache_names(["model.layers.3.self_attn.attn"], 8) == {
        "model.layers.3.self_attn.attn": CacheName(3, "model.layers.*.self_attn.attn", draft=False)
    }


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.11.self_attn.attn",
        "model.language_model.layers.11.linear_attn",
        "thinker.model.layers.11.mixer",
        "backbone.11.attn",
    ],
)
def test_prefixes_may_nest(name: str) -> None:
    (at,) = cache_names([name], 12).values()
    assert (at.layer, at.entry, at.draft) == (11, name.replace("11", "*"), False)


def test_only_the_first_number_is_the_layers() -> None:
    (at,) = cache_names(["model.layers.6.self_attn.1.attn"], 8).values()
    assert (at.layer, at.entry) == (6, "model.layers.*.self_attn.1.attn")


def test_digits_inside_of_a_word_are_no_layer_number() -> None:
    (at,) = cache_names(["qwen3.layers.2.attn0"], 8).values()
    assert (at.layer, at.entry) == (2, "qwen3.layers.*.attn0")


@pytest.mark.parametrize("name", ["model.norm", "", "model.layers.x.attn", "model.layers3.attn", "model.layers.٣.attn"])
def test_a_name_without_a_number_is_refused_by_name(name: str) -> None:
    with pytest.raises(LayoutError, match=f"'{name}' has no layer number"):
        cache_names(["model.layers.0.attn", name], 8)


# -- several caches of a layer -----------------------------------------------------------------------------------------


def test_two_attentions_on_one_layer_are_two_entries() -> None:
    names = ["model.layers.4.self_attn.attn", "model.layers.4.cross_attn.attn"]
    found = cache_names(names, 8)
    assert {at.layer for at in found.values()} == {4}
    assert len({at.entry for at in found.values()}) == 2


def test_an_indexer_is_an_entry_beside_its_attention() -> None:
    found = cache_names(["model.layers.2.self_attn.attn", "model.layers.2.self_attn.indexer.k_cache"], 8)
    assert [(at.layer, at.draft) for at in found.values()] == [(2, False), (2, False)]
    assert stage_names(found) == {2: ["model.layers.2.self_attn.attn", "model.layers.2.self_attn.indexer.k_cache"]}


def test_two_caches_that_no_name_tells_apart_are_refused_with_both_names() -> None:
    with pytest.raises(
        LayoutError, match=r"'model\.layers\.02\.attn' and 'model\.layers\.2\.attn'|'model\.layers\.2\.attn' and"
    ):
        cache_names(["model.layers.2.attn", "model.layers.02.attn"], 8)


# -- drafts ------------------------------------------------------------------------------------------------------------


def test_a_layer_past_the_models_own_is_a_drafts() -> None:
    """DeepSeek's MTP and EAGLE count on."""
    assert placed(["model.layers.43.self_attn.attn", "model.layers.44.mtp_block.self_attn.attn"], 44) == {
        "model.layers.43.self_attn.attn": (43, False),
        "model.layers.44.mtp_block.self_attn.attn": (44, True),
    }


def test_also_under_another_prefix() -> None:
    assert placed(["model.layers.3.self_attn.attn", "draft.layers.4.self_attn.attn"], 4) == {
        "model.layers.3.self_attn.attn": (3, False),
        "draft.layers.4.self_attn.attn": (4, True),
    }


def test_a_draft_that_counts_from_0_under_another_prefix_follows_on_the_model() -> None:
    """Qwen3-Next's MTP, and draft models."""
    names = [*[f"model.layers.{i}.self_attn.attn" for i in range(4)], "mtp.layers.0.self_attn.attn"]
    assert placed(names, 4)["mtp.layers.0.self_attn.attn"] == (4, True)
    assert placed(names, 4)["model.layers.0.self_attn.attn"] == (0, False)


def test_a_draft_model_of_several_layers_keeps_their_order() -> None:
    names = [*[f"model.layers.{i}.self_attn.attn" for i in range(4)], *[f"draft_model.layers.{i}.attn" for i in range(3)]]
    found = placed(names, 4)
    assert [found[f"draft_model.layers.{i}.attn"] for i in range(3)] == [(4, True), (5, True), (6, True)]


def test_towers_of_one_model_are_not_drafts_of_each_other() -> None:
    names = ["model.language_model.layers.0.attn", "model.language_model.layers.1.attn", "model.audio.layers.0.attn"]
    assert not any(draft for _, draft in placed(names, 2).values())


# -- who lists them ----------------------------------------------------------------------------------------------------


MIXED = [
    "model.layers.0.self_attn.attn",
    "model.layers.1.linear_attn",
    "model.layers.1.self_attn.indexer",
    "mtp.layers.0.self_attn.attn",
]


def test_the_order_of_names_changes_nothing() -> None:
    results = [cache_names(order, 2) for order in permutations(MIXED)]
    assert all(result == results[0] for result in results)


def test_not_even_where_a_draft_has_as_many_layers_as_the_model() -> None:
    names = ["model.layers.0.self_attn.attn", "draft_model.layers.0.self_attn.attn"]
    for order in permutations(names):
        assert placed(order, 1) == {names[0]: (0, False), names[1]: (1, True)}


def test_not_even_where_a_draft_has_more_caches_than_the_models_part_of_a_stage() -> None:
    names = ["model.layers.3.self_attn.attn", "mtp.layers.0.self_attn.attn", "mtp.layers.0.self_attn.indexer.k_cache"]
    assert placed(names, 4) == {names[0]: (3, False), names[1]: (4, True), names[2]: (4, True)}


def test_every_stage_names_a_layer_alike() -> None:
    names = [f"model.layers.{i}.self_attn.attn" for i in range(44)] + ["model.layers.44.mtp_block.self_attn.attn"]
    whole = cache_names(names, 44)
    for stage in (names[:21], names[21:]):
        assert cache_names(stage, 44) == {name: whole[name] for name in stage}
