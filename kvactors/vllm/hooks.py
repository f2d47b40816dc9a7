"""Which caches report by themselves, and when a physical layer is complete.

vLLM calls the connector before and after each attention layer, by the layer's name. Recurrent layers, drafts and caches that
a layer writes on the side (an indexer's) are not reported, or not when they are final: their layers are "hookless", and the end
of the step stands for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvactors.core.layout import GroupKind, KVLayout
from kvactors.vllm.names import CacheName


@dataclass(slots=True)
class LayerHooks:
    """Attributes:
    stage_layers: name of a cache -> stage layer.
    hookless: stage layers whose saves wait for the end of the step, unless all their caches happen to report.
    expected: stage layer -> names that report before it is complete; hookless layers are not in it.
    early: hookless stage layer -> all its names; a draft's are not in it, it runs more than once.
    """

    stage_layers: Mapping[str, int]
    hookless: frozenset[int]
    expected: Mapping[int, frozenset[str]]
    early: Mapping[int, frozenset[str]]
    _reported: dict[int, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: KVLayout, names: Mapping[str, CacheName], reporting: Collection[str]) -> LayerHooks:
        """Args:
        names: every cache's place.
        reporting: those that vLLM reports.
        """
        states = {layer for g in layout.groups if g.kind is GroupKind.STATE for layer in g.layers}
        stage_layers = {name: int(layout.stage_layer(at.layer)) for name, at in names.items()}
        expected: dict[int, set[str]] = {}
        hookless: set[int] = set()
        for name, at in names.items():
            layer = stage_layers[name]
            if at.layer in states or at.draft:
                hookless.add(layer)
            elif name in reporting:
                expected.setdefault(layer, set()).add(name)
        hookless |= set(stage_layers.values()) - set(expected)
        found = {layer: frozenset(caches) for layer, caches in expected.items() if layer not in hookless}
        drafts = {stage_layers[name] for name, at in names.items() if at.draft}
        early: dict[int, set[str]] = {}
        for name, layer in stage_layers.items():
            if layer in hookless - drafts:
                early.setdefault(layer, set()).add(name)
        return cls(stage_layers, frozenset(hookless), found, {layer: frozenset(names) for layer, names in early.items()})

    def new_step(self) -> None:
        self._reported = {}

    def report(self, name: str) -> int | None:
        """A cache's layer was computed; the stage layer if that completes it, once."""
        layer = self.stage_layers.get(name)
        needed = None if layer is None else self.expected.get(layer) or self.early.get(layer)
        if layer is None or needed is None:
            return None
        reported = self._reported.setdefault(layer, set())
        new = name not in reported
        reported.add(name)
        return layer if new and reported >= needed else None

    @property
    def silent(self) -> bool:
        """Whether no layer that should report did in this step."""
        return not any(layer in self.expected for layer in self._reported)

    @property
    def all_report(self) -> bool:
        """Whether every cache is reported before it is read, so that its loads can be waited for."""
        return not self.hookless

    def missing(self) -> list[int]:
        """Stage layers that are not complete."""
        return [layer for layer, names in self.expected.items() if not self._reported.get(layer, set()) >= names]
