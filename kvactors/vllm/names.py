"""From the names of a model's layers to the numbers and entry names of a layout.

A name such as "model.layers.3.self_attn.attn" is physical layer 3, entry "model.layers.*.self_attn.attn". The rest of the name
stays in the entry, because a layer may hold several caches (an indexer's, a second attention's).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvactors.errors import LayoutError


@dataclass(frozen=True, slots=True)
class CacheName:
    """Where a named cache belongs.

    Attributes:
        layer: physical layer, counted over the whole model; a draft's layers follow on the model's own.
        entry: the name with the layer's number taken out; the same in every process that runs the model.
        draft: whether the layer belongs to a draft (EAGLE, MTP), which runs after the model.
    """

    layer: int
    entry: str
    draft: bool


def cache_names(names: Iterable[str], hidden_layers: int) -> dict[str, CacheName]:
    """Every name's place.

    Args:
        hidden_layers: layers of the model itself. A layer with a higher number is a draft's; so is one that counts from 0 again
            under another prefix than the model's.

    Raises:
        LayoutError: a name has no layer number, or two caches of one layer cannot be told apart.
    """
    parsed = {name: _parse(name) for name in sorted(names)}
    main = _main_root(parsed.values(), hidden_layers)
    found: dict[str, CacheName] = {}
    taken: dict[tuple[int, str], str] = {}
    for name, (prefix, number, entry) in parsed.items():
        beside = number < hidden_layers and _root(prefix) != main
        layer = number + hidden_layers if beside else number
        found[name] = CacheName(layer, entry, draft=layer >= hidden_layers)
        other = taken.setdefault((layer, entry), name)
        if other != name:
            raise LayoutError(
                f"{other!r} and {name!r} are one cache of layer {layer} by their names; give each a name of its own"
            )
    return found


DRAFT_ROOTS = ("draft", "mtp", "eagle")


def _main_root(parsed: Iterable[tuple[str, int, str]], hidden_layers: int) -> str:
    """Where the model's own names begin: what has the deepest layer is no draft."""
    deepest: dict[str, int] = {}
    for prefix, number, _ in parsed:
        if number < hidden_layers:
            deepest[_root(prefix)] = max(number, deepest.get(_root(prefix), -1))
    ranked = sorted(deepest, key=lambda root: (-deepest[root], root.startswith(DRAFT_ROOTS), root))
    return ranked[0] if ranked else ""


def _root(prefix: str) -> str:
    return prefix.partition(".")[0]


def _parse(name: str) -> tuple[str, int, str]:
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            return ".".join(parts[:at]), int(part), ".".join([*parts[:at], "*", *parts[at + 1 :]])
    raise LayoutError(f"{name!r} has no layer number in it, such as model.layers.3.self_attn.attn")


def stage_names(placed: Mapping[str, CacheName]) -> dict[int, list[str]]:
    """Physical layer -> the names of its caches."""
    layers: dict[int, list[str]] = {}
    for name, at in placed.items():
        layers.setdefault(at.layer, []).append(name)
    return layers
