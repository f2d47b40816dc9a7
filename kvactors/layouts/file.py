"""Layout files: YAML or JSON, one mapping with a name and a list of groups (docs/layout-files.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout, check_model_name
from kvactors.errors import LayoutError
from kvactors.layouts.checks import BlockShape, check_bytes, check_layers, check_names
from kvactors.layouts.elements import canonical_kind
from kvactors.textfiles import BadFileError, did_you_mean, read_data

_FIELDS = {"name", "groups", "layers", "uncached_layers"}
_GROUP_FIELDS = {"kind", "block_tokens", "layers", "entries", "window", "chunk_tokens", "speculative", "kv_heads"}
_ENTRY_FIELDS = {"name", "bytes", "stride", "dtype", "head_size"}

_MEANT = {
    GroupKind.FULL: ("attention", "attn", "full_attention", "dense", "global", "mha", "mqa", "gqa"),
    GroupKind.SLIDING_WINDOW: ("sliding", "sliding_attention", "sliding_window_attention", "window", "swa", "local"),
    GroupKind.CHUNKED_LOCAL: ("chunked", "chunked_attention", "chunked_local_attention"),
    GroupKind.MLA: ("latent", "mla_attention"),
    GroupKind.INDEXER: ("index", "lightning_indexer"),
    GroupKind.STATE: (
        "mamba",
        "mamba1",
        "mamba2",
        "ssm",
        "linear",
        "linear_attention",
        "recurrent",
        "gdn",
        "gated_delta_net",
        "kda",
        "rwkv",
        "conv",
        "short_conv",
    ),
}
"""What people call the kinds."""


def read_layout_file(path: str | Path) -> KVLayout:
    """Reads a layout from a YAML or JSON file.

    Raises:
        LayoutError: names the file, the group and the field, and says what is wrong.
    """
    where = str(path)
    try:
        data = read_data(path)
    except BadFileError as error:
        raise LayoutError(f"{where}: {error}") from None
    return layout_from_data(data, where)


def layout_from_data(data: Any, where: str) -> KVLayout:
    """Builds a layout from what a layout file holds; `where` starts every error."""
    _mapping(where, data, _FIELDS)
    name, groups = _required(where, data, "name"), _required(where, data, "groups")
    _name(where, name)
    if not isinstance(groups, list) or not groups:
        raise LayoutError(f"{where}: groups: must be a list of at least one group")
    made = [_group(f"{where}: group {i}", i, g) for i, g in enumerate(groups)]
    _check_blocks(where, made)
    check_names(where, made)
    layers = _whole(where, "layers", data["layers"], 1) if "layers" in data else None
    uncached = sorted(_numbers(where, "uncached_layers", data["uncached_layers"])) if "uncached_layers" in data else None
    check_layers(where, made, layers, uncached)
    try:
        check_model_name(name)
        return KVLayout(name, made)
    except LayoutError as error:
        raise _located(where, error) from None


def _check_blocks(where: str, groups: list[Group]) -> None:
    """Every block size must divide the largest: else hits end only where blocks of unlike sizes happen to meet."""
    most = max(g.block_tokens for g in groups)
    for group in groups:
        if most % group.block_tokens:
            raise LayoutError(
                f"{where}: group {group.id}: block_tokens: {group.block_tokens} does not divide the layout's largest block "
                f"of {most} tokens"
            )


def _group(where: str, number: int, data: Any) -> Group:
    _mapping(where, data, _GROUP_FIELDS)
    kind = _required(where, data, "kind")
    if not isinstance(kind, str) or kind not in {k.value for k in GroupKind}:
        kinds = [k.value for k in GroupKind]
        raise LayoutError(f"{where}: kind: unknown kind {kind!r}{_kind_meant(kind) or ';'} one of {', '.join(kinds)}")
    for name, least in (("window", 2), ("chunk_tokens", 1), ("kv_heads", 1)):
        if name in data:
            _whole(where, name, data[name], least)
    block_tokens = _whole(where, "block_tokens", _required(where, data, "block_tokens"), 1)
    speculative = data.get("speculative", False)
    if not isinstance(speculative, bool):
        raise LayoutError(f"{where}: speculative: {speculative!r} must be true or false")
    layers = _layers(where, data, BlockShape(GroupKind(kind), block_tokens, data.get("kv_heads")))
    try:
        return Group(
            number,
            GroupKind(kind),
            block_tokens,
            layers,
            window=data.get("window"),
            chunk_tokens=data.get("chunk_tokens"),
            speculative=speculative,
            kv_heads=data.get("kv_heads"),
        )
    except LayoutError as error:
        raise _located(where, error) from None


def _kind_meant(name: Any) -> str:
    """A hint at the kind that is meant, by what people call it, or else by its spelling."""
    plain = str(name).lower().replace("-", "_").replace(" ", "_")
    called = next((kind.value for kind, names in _MEANT.items() if plain in names), "")
    return f"; did you mean {called}?" if called else did_you_mean(name, [kind.value for kind in GroupKind])


def _layers(where: str, data: Mapping[str, Any], shape: BlockShape) -> dict[int, list[CacheEntry]]:
    numbers, entries = data.get("layers"), _required(where, data, "entries")
    if isinstance(entries, Mapping):
        if numbers is not None and (not isinstance(numbers, list) or sorted(map(str, numbers)) != sorted(map(str, entries))):
            raise LayoutError(f"{where}: layers: {numbers} and the layers of entries {list(entries)} differ; give one of them")
        out: dict[int, list[CacheEntry]] = {}
        for key, listed in entries.items():
            layer = int(key) if isinstance(key, str) and key.isdigit() else key
            _whole(where, "entries: layer", layer, 0)
            if layer in out:
                raise LayoutError(f"{where}: entries: layer {layer} is given twice")
            out[layer] = _entries(f"{where}, layer {layer}", listed, shape)
        return out
    if numbers is None:
        raise LayoutError(f"{where}: layers: is missing")
    found = _numbers(where, "layers", numbers)
    return dict.fromkeys(found, _entries(where, entries, shape))


def _numbers(where: str, name: str, data: Any) -> list[int]:
    if not isinstance(data, list):
        raise LayoutError(f"{where}: {name}: {data!r} must be a list of layer numbers")
    seen: set[int] = set()
    for layer in data:
        _whole(where, name, layer, 0)
        if layer in seen:
            raise LayoutError(f"{where}: {name}: layer {layer} is given twice")
        seen.add(layer)
    return data


def _entries(where: str, data: Any, shape: BlockShape) -> list[CacheEntry]:
    if not isinstance(data, list) or not data:
        raise LayoutError(f"{where}: entries: must be a list of at least one entry {{name, bytes}}")
    out = []
    names: set[str] = set()
    for item in data:
        _mapping(f"{where}: entries", item, _ENTRY_FIELDS)
        name = _required(f"{where}: entries", item, "name")
        _name(f"{where}: entries", name)
        if name in names:
            raise LayoutError(f"{where}: entries: {name!r} is given twice in one layer")
        names.add(name)
        nbytes = _whole(where, f"entry {name!r}: bytes", _required(f"{where}: entry {name!r}", item, "bytes"), 1)
        stride = item.get("stride")
        if stride is not None:
            _whole(where, f"entry {name!r}: stride", stride, 1)
        dtype = item.get("dtype", "")
        if not isinstance(dtype, str) or not dtype.isprintable():
            raise LayoutError(f"{where}: entry {name!r}: dtype: {dtype!r} must be a text of printable characters")
        dtype = canonical_kind(dtype)
        head_size = item.get("head_size")
        if head_size is not None:
            _whole(where, f"entry {name!r}: head_size", head_size, 1)
        check_bytes(f"{where}: entry {name!r}", shape, nbytes, dtype, head_size)
        try:
            out.append(CacheEntry(name, nbytes, stride, dtype))
        except LayoutError as error:
            raise _located(where, error) from None
    return out


def _name(where: str, name: Any) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise LayoutError(f"{where}: name: {name!r} must be a non-empty text of printable characters")


def _mapping(where: str, data: Any, allowed: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise LayoutError(f"{where}: must be a mapping with {', '.join(sorted(allowed))}")
    for key in data:
        if key not in allowed:
            hint = did_you_mean(key, allowed) or ";"
            raise LayoutError(f"{where}: {key}: unknown field{hint} allowed are {', '.join(sorted(allowed))}")


def _required(where: str, data: Mapping[str, Any], name: str) -> Any:
    if name not in data:
        raise LayoutError(f"{where}: {name}: is missing")
    return data[name]


def _whole(where: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LayoutError(f"{where}: {name}: {value!r} must be a whole number of at least {least}")
    return value


def _located(where: str, error: LayoutError) -> LayoutError:
    text = str(error)
    return (
        error if text.startswith(where) else LayoutError(f"{where.split(': group')[0] if 'group ' in text else where}: {text}")
    )
