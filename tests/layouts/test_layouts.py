"""Built-in families have the public models' numbers; layout files say what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.errors import LayoutError
from kvactors.layouts import (
    FAMILIES,
    boundary_tokens,
    find_layout,
    layout_from_data,
    read_layout_file,
    scale,
    with_block_tokens,
)


def bytes_per_token(layout: KVLayout, group: int) -> float:
    return layout.object_bytes(group) / layout.group(group).block_tokens


@pytest.mark.parametrize(
    ("name", "groups", "layers", "boundary"),
    [
        ("llama-3.1-8b", ["full"], [32], 128),
        ("gemma-3-27b", ["full", "sliding_window"], [10, 52], 128),
        ("qwen3.5-9b", ["full", "state"], [8, 24], 512),
        (
            "deepseek-v4-flash",
            ["compressed", "compressed", "indexer", "sliding_window", "sliding_window", "sliding_window"],
            [21, 20, 21, 43, 21, 20],
            256,
        ),
        ("kimi-k3", ["mla", "state"], [24, 69], 3072),
        ("seed-example", ["full", "compressed", "state"], [2, 3, 2], 1024),
    ],
)
def test_families(name: str, groups: list[str], layers: list[int], boundary: int) -> None:
    layout, family = find_layout(name)
    assert family is not None
    assert family.sources
    assert [g.kind.value for g in layout.groups] == groups
    assert [len(g.layers) for g in layout.groups] == layers
    assert boundary_tokens(layout) == boundary
    assert all(boundary % g.block_tokens == 0 for g in layout.groups)
    assert layout.model == name


def every(first: int, last: int, step: int) -> list[int]:
    return list(range(first, last + 1, step))


GROUPS: dict[str, list[tuple[int | None, int, list[int]]]] = {  # window, bytes of an object, layers; of each group
    "llama-3.1-8b": [(None, 16_777_216, every(0, 31, 1))],
    "gemma-3-27b": [
        (None, 10 * 1_048_576, every(5, 59, 6)),
        (1024, 52 * 1_048_576, [n for n in range(62) if n not in every(5, 59, 6)]),
    ],
    "qwen3.5-9b": [
        (None, 8 * 2_097_152, every(3, 31, 4)),
        (None, 24 * (49_152 + 2_097_152), [n for n in range(32) if n not in every(3, 31, 4)]),
    ],
    "deepseek-v4-flash": [
        (None, 21 * 37_376, every(2, 42, 2)),
        (None, 20 * 1_168, every(3, 41, 2)),
        (None, 21 * 8_448, every(2, 42, 2)),
        (128, 43 * 37_376, every(0, 42, 1)),
        (8, 21 * (8_192 + 32_768), every(2, 42, 2)),
        (128, 20 * 32_768, every(3, 41, 2)),
    ],
    "kimi-k3": [
        (None, 24 * 589_824, [*every(3, 91, 4), 92]),
        (None, 69 * (221_184 + 6_291_456), [n for n in range(92) if n % 4 != 3]),
    ],
    "seed-example": [(None, 16, [0, 2]), (None, 32, [1, 2, 3]), (None, 36, [0, 3])],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_windows_sizes_and_layers_of_families(name: str) -> None:
    layout = FAMILIES[name].build()
    assert [(g.window, layout.object_bytes(g.id), sorted(g.layers)) for g in layout.groups] == GROUPS[name]


@pytest.mark.parametrize("kind", [GroupKind.FULL, GroupKind.MLA, GroupKind.STATE])
def test_kv_heads_must_divide_the_ranks_only_where_a_group_is_split_by_head(kind: GroupKind) -> None:
    group = Group(0, kind, 16, {0: [CacheEntry("k", 8)]}, kv_heads=3)
    if kind is GroupKind.FULL:
        with pytest.raises(LayoutError, match="group 0: 3 KV heads do not divide tp_size 4"):
            KVLayout("m", [group], tp_size=4)
    else:
        assert KVLayout("m", [group], tp_size=4).object_bytes(0) == 8


def test_bytes_per_token() -> None:
    assert bytes_per_token(FAMILIES["llama-3.1-8b"].build(), 0) == 131072
    assert bytes_per_token(FAMILIES["qwen3.5-9b"].build(), 0) == 32768
    assert bytes_per_token(FAMILIES["kimi-k3"].build(), 0) == 24 * 1152
    seed = FAMILIES["seed-example"].build()
    assert [seed.object_bytes(g) for g in range(3)] == [16, 32, 36]
    assert [seed.commit_layer(g) for g in range(3)] == [2, 3, 3]


def test_scale_rounds_up_to_16_and_keeps_padding_and_geometry() -> None:
    entries = [CacheEntry("a", 4096, 4160), CacheEntry("b", 100), CacheEntry("c", 17, 20)]
    layout = KVLayout("m", [Group(0, GroupKind.FULL, 16, {0: entries})])
    small = scale(layout, 16).groups[0].layers[0]
    assert [(e.nbytes, e.stride) for e in small] == [(256, 320), (16, 16), (16, 19)]
    assert scale(layout, 1) is layout
    for bad in (0, -1, 1.5):
        with pytest.raises(LayoutError, match="scale"):
            scale(layout, bad)  # type: ignore[arg-type]  # what is wrong with it is the point


def test_llama_scaled_for_the_full_traces() -> None:
    layout = scale(with_block_tokens(FAMILIES["llama-3.1-8b"].build(), 512), 4096)
    assert layout.object_bytes(0) == 64 * 256
    assert layout.groups[0].block_tokens == 512


def test_with_block_tokens_leaves_recurrent_state_alone() -> None:
    layout = with_block_tokens(FAMILIES["qwen3.5-9b"].build(), 1024)
    assert [g.block_tokens for g in layout.groups] == [1024, 1024]
    assert bytes_per_token(layout, 0) == 32768
    assert layout.object_bytes(1) == FAMILIES["qwen3.5-9b"].build().object_bytes(1)


HYBRID = """
name: my-hybrid
groups:
  - {kind: full, block_tokens: 512, layers: [0, 2], entries: [{name: k, bytes: 1024}, {name: v, bytes: 1024}]}
  - {kind: sliding_window, window: 256, block_tokens: 256, layers: [1, 3], entries: [{name: k, bytes: 512}, {name: v, bytes: 512, stride: 640}]}
  - {kind: state, block_tokens: 1024, layers: [4], entries: [{name: conv, bytes: 96, stride: 128}, {name: ssm, bytes: 4096}]}
"""  # noqa: E501


def test_yaml_and_json_files_give_the_same_layout(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "a.yaml").write_text(HYBRID)
    (tmp_path / "a.json").write_text(json.dumps(yaml.safe_load(HYBRID)))
    a, b = read_layout_file(tmp_path / "a.yaml"), read_layout_file(tmp_path / "a.json")
    assert a.digest == b.digest
    assert [a.object_bytes(g) for g in range(3)] == [4096, 2048, 4192]
    assert a.groups[1].layers[3][1].stride == 640
    assert boundary_tokens(a) == 1024


def test_entries_may_map_layers_to_entries(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps(
            {
                "name": "m",
                "groups": [
                    {
                        "kind": "compressed",
                        "block_tokens": 32,
                        "entries": {"0": [{"name": "c", "bytes": 10}], "1": [{"name": "c", "bytes": 11, "dtype": "bf16"}]},
                    }
                ],
            }
        )
    )
    layout = read_layout_file(path)
    assert [r.entry.nbytes for r in layout.ranges(0)] == [10, 11]
    assert layout.ranges(0)[1].entry.dtype == "bf16"


def group(**change: Any) -> dict[str, Any]:
    base = {"kind": "full", "block_tokens": 16, "layers": [0], "entries": [{"name": "k", "bytes": 8}], **change}
    return {k: v for k, v in base.items() if v is not ...}


def entries(*items: dict[str, Any]) -> dict[str, Any]:
    return {"name": "m", "groups": [group(entries=list(items))]}


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ({"groups": []}, ["name", "missing"]),
        ({"name": "m"}, ["groups", "missing"]),
        ({"name": "m", "groups": []}, ["groups", "at least one"]),
        ({"name": "m", "groups": [group()], "colour": 1}, ["colour", "unknown field"]),
        ([], ["mapping"]),
        ({"name": "m", "groups": [group(kind="fuul")]}, ["group 0", "unknown kind 'fuul'", "sliding_window"]),
        ({"name": "m", "groups": [group(kind=...)]}, ["group 0", "kind", "missing"]),
        ({"name": "m", "groups": [group(), group(kind="sliding_window")]}, ["group 1", "window"]),
        ({"name": "m", "groups": [group(kind="chunked_local")]}, ["group 0", "chunk_tokens"]),
        ({"name": "m", "groups": [group(window=64)]}, ["group 0", "window is only for"]),
        ({"name": "m", "groups": [group(block_tokens=0)]}, ["group 0", "block_tokens", "at least 1"]),
        ({"name": "m", "groups": [group(block_tokens="16")]}, ["group 0", "block_tokens"]),
        ({"name": "m", "groups": [group(block_tokens=512), group(block_tokens=768)]}, ["group 0", "512", "divide", "768"]),
        ({"name": "m", "groups": [group(layers=[0, 0])]}, ["group 0", "layer 0 is given twice"]),
        ({"name": "m", "groups": [group(layers=[-1])]}, ["group 0", "layers", "-1"]),
        ({"name": "m", "groups": [group(layers=...)]}, ["group 0", "layers", "missing"]),
        ({"name": "m", "groups": [group(window_size=1)]}, ["group 0", "window_size", "unknown field"]),
        (entries({"name": "k", "bytes": 64, "stride": 32}), ["group 0", "'k'", "larger than the stride of 32"]),
        (entries({"name": "k", "bytes": 8}, {"name": "k", "bytes": 8}), ["group 0", "'k' is given twice"]),
        (entries({"name": "k"}), ["group 0", "bytes", "missing"]),
        (entries({"name": "k", "bytes": 1.5}), ["group 0", "bytes", "1.5"]),
        (entries({"bytes": 8}), ["group 0", "name", "missing"]),
        (entries(), ["group 0", "entries", "at least one"]),
    ],
)
def test_a_bad_layout_names_file_group_and_field(data: Any, parts: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        layout_from_data(data, "my.yaml")
    text = str(caught.value)
    assert text.startswith("my.yaml")
    assert text.count("group ") <= 1
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.yaml", "name: m\ngroups: [", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.yaml", "name: m\nname: n\ngroups: []", "given twice"),
        ("a.yaml", "", "mapping"),
    ],
)
def test_a_file_that_is_no_yaml_or_json(tmp_path: Path, name: str, text: str, part: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(LayoutError, match=part) as caught:
        read_layout_file(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part"),
    [("lama-3.1-8b", "llama-3.1-8b"), ("qwen", "qwen3.5-9b"), ("zzz", "built in are"), ("./none.yaml", "cannot be read")],
)
def test_an_unknown_name_suggests_close_ones(name: str, part: str) -> None:
    with pytest.raises(LayoutError, match=part):
        find_layout(name)
