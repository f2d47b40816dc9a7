"""Layout files: YAML or JSON, one mapping with a name and a list of groups (docs/layout-files.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.errors import LayoutError

_GROUP_FIELDS = {"kind", "block_tokens", "layers", "entries", "window", "chunk_tokens", "speculative", "kv_heads"}
_ENTRY_FIELDS = {"name", "bytes", "stride", "dtype"}


def read_layout_file(path: str | Path) -> KVLayout:
    """Reads a layout from a YAML or JSON file.

    Raises:
        LayoutError: names the file, the group and the field, and says what is wrong.
    """
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LayoutError(f"{where}: is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise LayoutError(f"{where}: cannot be read: {error.strerror or error}") from None
    try:
        data = json.loads(text) if where.endswith(".json") else yaml.load(text, Loader=_Loader)
    except _Duplicate as error:
        raise LayoutError(f"{where}: {error}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise LayoutError(
            f"{where}: is not valid {'JSON' if where.endswith('.json') else 'YAML'}: {_first_line(error)}"
        ) from None
    return layout_from_data(data, where)


def layout_from_data(data: Any, where: str) -> KVLayout:
    """Builds a layout from what a layout file holds; `where` starts every error."""
    _mapping(where, data, {"name", "groups"})
    name, groups = _required(where, data, "name"), _required(where, data, "groups")
    if not isinstance(name, str) or not name:
        raise LayoutError(f"{where}: name: {name!r} must be a non-empty text")
    if not isinstance(groups, list) or not groups:
        raise LayoutError(f"{where}: groups: must be a list of at least one group")
    made = [_group(f"{where}: group {i}", i, g) for i, g in enumerate(groups)]
    _check_blocks(where, made)
    try:
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
    if kind not in {k.value for k in GroupKind}:
        raise LayoutError(f"{where}: kind: unknown kind {kind!r}; one of {', '.join(k.value for k in GroupKind)}")
    for name in ("window", "chunk_tokens", "kv_heads"):
        if name in data:
            _whole(where, name, data[name], 1)
    block_tokens = _whole(where, "block_tokens", _required(where, data, "block_tokens"), 1)
    speculative = data.get("speculative", False)
    if not isinstance(speculative, bool):
        raise LayoutError(f"{where}: speculative: {speculative!r} must be true or false")
    layers = _layers(where, data)
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


def _layers(where: str, data: Mapping[str, Any]) -> dict[int, list[CacheEntry]]:
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
            out[layer] = _entries(f"{where}, layer {layer}", listed)
        return out
    if numbers is None:
        raise LayoutError(f"{where}: layers: is missing")
    if not isinstance(numbers, list):
        raise LayoutError(f"{where}: layers: {numbers!r} must be a list of layer numbers")
    shared = _entries(where, entries)
    seen: set[int] = set()
    for layer in numbers:
        _whole(where, "layers", layer, 0)
        if layer in seen:
            raise LayoutError(f"{where}: layers: layer {layer} is given twice")
        seen.add(layer)
    return dict.fromkeys(numbers, shared)


def _entries(where: str, data: Any) -> list[CacheEntry]:
    if not isinstance(data, list) or not data:
        raise LayoutError(f"{where}: entries: must be a list of at least one entry {{name, bytes}}")
    out = []
    names: set[str] = set()
    for item in data:
        _mapping(f"{where}: entries", item, _ENTRY_FIELDS)
        name = _required(f"{where}: entries", item, "name")
        if not isinstance(name, str) or not name:
            raise LayoutError(f"{where}: entries: name: {name!r} must be a non-empty text")
        if name in names:
            raise LayoutError(f"{where}: entries: {name!r} is given twice in one layer")
        names.add(name)
        nbytes = _whole(where, f"entry {name!r}: bytes", _required(f"{where}: entry {name!r}", item, "bytes"), 1)
        stride = item.get("stride")
        if stride is not None:
            _whole(where, f"entry {name!r}: stride", stride, 1)
        dtype = item.get("dtype", "")
        if not isinstance(dtype, str):
            raise LayoutError(f"{where}: entry {name!r}: dtype: {dtype!r} must be a text")
        try:
            out.append(CacheEntry(name, nbytes, stride, dtype))
        except LayoutError as error:
            raise _located(where, error) from None
    return out


def _mapping(where: str, data: Any, allowed: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise LayoutError(f"{where}: must be a mapping with {', '.join(sorted(allowed))}")
    for key in data:
        if key not in allowed:
            raise LayoutError(f"{where}: {key}: unknown field; allowed are {', '.join(sorted(allowed))}")


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


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Duplicate(Exception):
    """A mapping names a key twice; YAML would silently keep the last."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key that is given twice."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, str | int) and key in seen:
            raise _Duplicate(f"line {key_node.start_mark.line + 1}: {key!r} is given twice")
        if isinstance(key, str | int):
            seen.add(key)
    out: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return out


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
