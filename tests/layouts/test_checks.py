"""A layout file whose layers, groups and bytes contradict each other is refused; what hybrid models need is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvactors.core.layout import MOST_LAYERS, KVLayout
from kvactors.errors import LayoutError
from kvactors.layouts import FAMILIES, layout_from_data
from kvactors.layouts.checks import spans


def group(kind: str, layers: list[int], *names: str, **more: Any) -> dict[str, Any]:
    window = {"sliding_window": {"window": 8}, "chunked_local": {"chunk_tokens": 8}}.get(kind, {})
    entries = [{"name": name, "bytes": 8} for name in names or ("k", "v")]
    return {"kind": kind, "block_tokens": 16, "layers": layers, "entries": entries, **window, **more}


def read(*groups: dict[str, Any], **more: Any) -> KVLayout:
    return layout_from_data({"name": "m", "groups": list(groups), **more}, "my.yaml")


def as_data(layout: KVLayout) -> dict[str, Any]:
    """A layout as its file would say it."""
    groups = []
    for g in layout.groups:
        entries = {
            layer: [{"name": e.name, "bytes": e.nbytes, "stride": e.stride, "dtype": e.dtype} for e in es]
            for layer, es in g.layers.items()
        }
        given = {"window": g.window, "chunk_tokens": g.chunk_tokens, "kv_heads": g.kv_heads}
        fields = {name: value for name, value in given.items() if value is not None}
        groups.append({"kind": g.kind.value, "block_tokens": g.block_tokens, "entries": entries, **fields})
    return {"name": layout.model, "groups": groups, "layers": layout.stage_layers}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_built_in_family_is_legal_as_a_file(name: str) -> None:
    layout = FAMILIES[name].build()
    assert layout_from_data(as_data(layout), "my.yaml").digest == layout.digest


@pytest.mark.parametrize(
    ("groups", "more"),
    [
        ([group("mla", [0, 1], "latent"), group("indexer", [0, 1], "index")], {}),  # sparse attention over a latent cache
        ([group("full", [0]), group("indexer", [0], "index")], {}),
        ([group("full", [0, 1]), group("state", [0, 1], "conv", "ssm")], {}),  # attention and state in parallel
        ([group("compressed", [0], "c4"), group("compressed", [0], "c128"), group("sliding_window", [0], "kv")], {}),
        ([group("sliding_window", [0]), group("sliding_window", [0], "kv_state")], {}),  # a compressor's state
        ([group("full", [0, 2]), group("full", [1, 3])], {}),  # one kind, split into groups of equal size
        ([group("mla", [0], "first"), group("mla", [0], "second")], {}),  # two attentions in one layer
        ([group("full", [1])], {"uncached_layers": [0, 2, 3]}),  # layers of experts only
        ([group("full", [1])], {"uncached_layers": [0, 2], "layers": 3}),
        ([group("full", [1, 0])], {"layers": 2}),  # in any order
        ([group("full", [0])], {"uncached_layers": []}),
        ([group("full", [1, 3])], {}),  # the file does not say how many layers there are
        ([group("full", [0, 1]), group("sliding_window", [1, 2], "k2", "v2")], {}),  # two caches in layer 1
        ([group("full", [0], "k"), group("indexer", [0], "k")], {}),  # an indexer's own K
        ([group("compressed", [0], "kv"), group("sliding_window", [0], "kv")], {}),
        ([group("full", [0], "s"), group("state", [0], "s")], {}),
    ],
)
def test_what_hybrid_models_need_is_legal(groups: list[dict[str, Any]], more: dict[str, Any]) -> None:
    assert len(read(*groups, **more).groups) == len(groups)


@pytest.mark.parametrize(
    ("groups", "more", "problem"),
    [
        ([group("full", [0, 3])], {"layers": 4}, "layers 1-2: found in no group, expected every layer from 0 to 3"),
        ([group("full", [1, 2])], {"uncached_layers": []}, "layers 0: found in no group, expected every layer from 0 to 2"),
        ([group("full", [0, 2]), group("state", [5], "s")], {"layers": 6}, "layers 1, 3-4: found in no group"),
        ([group("full", [0, 65_535])], {"uncached_layers": []}, "layers 1-65534: found in no group"),
        ([group("full", [0, 10**12])], {}, "group 0: layer number = 1000000000000: must be less than 65536"),
        ([group("full", [0, 1])], {"layers": 4}, "layers 2-3: found in no group, expected every layer from 0 to 3"),
        ([group("full", [0, 1])], {"layers": 4, "uncached_layers": [3]}, "layers 2: found in no group"),
        (
            [group("full", [0, 1, 2])],
            {"layers": 2},
            "group 0: found layer 2, expected numbers from 0 to 1: the model has 2 layers",
        ),
        ([group("full", [0, 1])], {"uncached_layers": [1]}, "group 0: found layer 1, which uncached_layers names too"),
        ([group("full", [0])], {"layers": 1, "uncached_layers": [1]}, "uncached_layers: found 1, expected numbers from 0 to 0"),
        ([group("full", [0])], {"uncached_layers": [1, 1]}, "uncached_layers: layer 1 is given twice"),
        ([group("full", [0])], {"uncached_layers": 1}, "uncached_layers: 1 must be a list of layer numbers"),
        ([group("full", [0])], {"uncached_layers": ["1"]}, "uncached_layers: '1' must be a whole number"),
        ([group("full", [0])], {"layers": 0}, "layers: 0 must be a whole number of at least 1"),
        ([group("full", [0, 0])], {}, "group 0: layers: layer 0 is given twice"),
    ],
)
def test_layers_that_contradict_each_other(groups: list[dict[str, Any]], more: dict[str, Any], problem: str) -> None:
    with pytest.raises(LayoutError) as caught:
        read(*groups, **more)
    assert str(caught.value).startswith(f"my.yaml: {problem}")


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        (
            [group("full", [0, 5]), group("sliding_window", [*range(1, 5), *range(5, 12)])],
            "groups 0 (full) and 1 (sliding_window): both have layer 5 with 'k', 'v', expected each cache of a layer in one",
        ),
        (
            [group("mla", [0], "kv"), group("state", [1], "s"), group("full", [0, 1, 2], "kv")],
            "groups 0 (mla) and 2 (full): both have layer 0 with 'kv'",
        ),
        (
            [group("chunked_local", [0, 1, 2, 4]), group("chunked_local", [0, 1, 2, 4], "v", "x")],
            "groups 0 (chunked_local) and 1 (chunked_local): both have layer 0-2, 4 with 'v'",
        ),
    ],
)
def test_one_cache_in_two_groups_of_attention(groups: list[dict[str, Any]], problem: str) -> None:
    for more in ({}, {"layers": 12}):
        with pytest.raises(LayoutError) as caught:
            read(*groups, **more)
        assert str(caught.value).startswith(f"my.yaml: {problem}")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("BF16", "bf16"),
        ("float16", "fp16"),
        ("half", "fp16"),
        ("torch.float32", "fp32"),
        ("float8_e4m3fn", "fp8_e4m3"),
        ("float8_e5m2", "fp8_e5m2"),
        ("torch.int8", "int8"),
        ("bf16", "bf16"),
        ("NF4", "NF4"),
        ("", ""),
    ],
)
def test_element_kinds_by_the_names_of_torch(dtype: str, kind: str) -> None:
    layout = read(sized("full", 8, dtype=dtype))
    assert layout.ranges(0)[0].entry.dtype == kind
    assert layout.digest == read(sized("full", 8, dtype=kind)).digest


def test_a_head_size_with_a_name_of_torch() -> None:
    assert read(sized("full", 262144, dtype="bfloat16", head_size=128)).object_bytes(0) == 262144
    with pytest.raises(LayoutError, match=r"found dtype 'bf61', .* did you mean bf16\?"):
        read(sized("full", 262144, dtype="bf61", head_size=128))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("mamba", "state"),
        ("Mamba2", "state"),
        ("gdn", "state"),
        ("kda", "state"),
        ("linear-attention", "state"),
        ("ssm", "state"),
        ("swa", "sliding_window"),
        ("sliding window", "sliding_window"),
        ("local", "sliding_window"),
        ("attention", "full"),
        ("dense", "full"),
        ("chunked", "chunked_local"),
        ("slidingwindow", "sliding_window"),
        ("ful", "full"),
    ],
)
def test_what_people_call_the_kinds(said: str, meant: str) -> None:
    with pytest.raises(LayoutError, match=f"unknown kind '{said}'; did you mean {meant}\\? one of full, "):
        read({**group("full", [0]), "kind": said})


@pytest.mark.parametrize(
    ("given", "problem"),
    [({"window": 0}, "window: 0 must be a whole number of at least 2"), ({"window": 1}, "of at least 2"), ({}, "at least 2")],
)
def test_the_least_window_is_the_same_wherever_it_is_named(given: dict[str, Any], problem: str) -> None:
    data = group("sliding_window", [0])
    del data["window"]
    with pytest.raises(LayoutError, match=problem):
        read({**data, **given})


def sized(kind: str, nbytes: int, *, block_tokens: int = 128, kv_heads: int | None = 8, **entry: Any) -> dict[str, Any]:
    """A group of one layer with one entry."""
    heads = {} if kv_heads is None else {"kv_heads": kv_heads}
    entries = [{"name": "k", "bytes": nbytes, **entry}]
    return {**group(kind, [0]), "block_tokens": block_tokens, "entries": entries, **heads}


@pytest.mark.parametrize(
    "legal",
    [
        sized("full", 262144, dtype="bf16", head_size=128),
        sized("sliding_window", 262144, dtype="bf16", head_size=128),
        sized("chunked_local", 131072, dtype="fp8_e4m3", head_size=128),
        sized("full", 262144 * 2, dtype="bf16", head_size=256),  # K and V in one
        sized("mla", 128 * 576 * 2, kv_heads=1, dtype="bf16", head_size=576),
        sized("full", 262145, dtype="bf16"),  # no head size
        sized("full", 262145),  # no dtype
        sized("full", 262145, dtype="nf4"),  # one of unknown size
        sized("full", 262145, kv_heads=None, dtype="bf16"),
        sized("compressed", 128 // 4 * 584, kv_heads=1, dtype="fp8_e4m3"),  # a row for four tokens
        sized("indexer", 33, kv_heads=1, dtype="fp8_e4m3"),
        sized("state", 98, kv_heads=32, dtype="fp32"),
    ],
)
def test_bytes_that_fit(legal: dict[str, Any]) -> None:
    assert read(legal).object_bytes(0) == legal["entries"][0]["bytes"]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (
            sized("full", 2048, dtype="bf16", head_size=128),  # of one token
            "bytes: found 2048, expected 262144 (block_tokens 128 x kv_heads 8 x head_size 128 x 2 bytes of bf16)",
        ),
        (sized("mla", 128 * 576, kv_heads=1, dtype="bf16", head_size=576), "bytes: found 73728, expected 147456"),
        (sized("full", 131072, dtype="bf16", head_size=128), "bytes: found 131072, expected 262144"),  # of one byte each
        (sized("full", 8, dtype="bf16", head_size=128, kv_heads=None), "head_size: the group has no kv_heads, expected both"),
        (sized("full", 8, head_size=128), "head_size: found dtype '', expected one of fp32, "),
        (sized("full", 8, dtype="nf4", head_size=128), "head_size: found dtype 'nf4', expected one of fp32, "),
        (
            sized("state", 8, dtype="bf16", head_size=128),
            "head_size: found in a group of kind state, expected only in full, chunked_local, mla, sliding_window",
        ),
        (sized("full", 8, dtype="bf16", head_size=0), "head_size: 0 must be a whole number of at least 1"),
        (sized("full", 8, dtype="bf16", head_size="128"), "head_size: '128' must be a whole number of at least 1"),
    ],
)
def test_bytes_that_do_not_fit(bad: dict[str, Any], problem: str) -> None:
    for data in (bad, {**bad, "layers": None, "entries": {"0": bad["entries"]}}):
        with pytest.raises(LayoutError) as caught:
            read({name: value for name, value in data.items() if value is not None})
        text = str(caught.value).replace("group 0, layer 0", "group 0")
        assert text.startswith(f"my.yaml: group 0: entry 'k': {problem}"), text


@pytest.mark.parametrize(("numbers", "told"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")])
def test_spans(numbers: list[int], told: str) -> None:
    assert spans(numbers) == told


def test_the_page_has_the_bound_of_layer_numbers() -> None:
    page = Path(__file__).parents[2] / "docs/layout-files.md"
    assert f"from 0 and below {MOST_LAYERS:,};" in page.read_text()
