"""Puts compute windows around the attention operators of the vLLM-Ascend that is installed. Not verified on hardware.

vLLM-Ascend says when a layer's cache is written and when the layer is over, but not when attention was launched. So the methods
that launch it are wrapped, in the classes that are loaded, at the wish of a connector (no plugin does it). A method that is
missing is no error: the saves of such layers happen after the layer, and so does the checkpoint.

Which methods: vLLM-Ascend at 182b75ea (August 2026); docs/ascend.md has the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any

from kvactors.core.events import Devices
from kvactors.log import get_logger
from kvactors.vllm.ascend_hooks import AscendLayers, LayerHooks, StateLayerOrder
from kvactors.vllm.names import CacheName

LayersOf = Callable[[], AscendLayers | None]
Method = Callable[..., Any]

OURS = "__kvactors_window__"

log = get_logger("kvactors.vllm")


@dataclass(frozen=True, slots=True)
class Place:
    """A method of vLLM-Ascend.

    Attributes:
        kind: the layers that run through it, for a reader.
        wrap: makes the method that replaces it.
        takes: parameters that it must have.
        without: what follows if it is missing.
    """

    kind: str
    module: str
    owner: str
    method: str
    wrap: Callable[[Method], Method]
    takes: tuple[str, ...] = ()
    without: str = "saves of these layers happen after the layer"


_layers_of: LayersOf = lambda: None  # noqa: E731 - replaced by `install`


def install(layers_of: LayersOf) -> frozenset[str]:
    """Wraps the methods that are loaded; to be called when the model is (`register_kv_caches`): others are not in use.

    May be called again: a method is wrapped once, and asks the last `layers_of`, each time it runs, whose step it is part of.

    Returns:
        The kinds of layers that have what they need.
    """
    global _layers_of
    _layers_of = layers_of
    found = set()
    for place in PLACES:
        module = sys.modules.get(place.module)
        if module is None:
            continue
        owner = getattr(module, place.owner, None)
        method = getattr(owner, place.method, None)
        if not callable(method) or not {"self", *place.takes} <= set(signature(method).parameters):
            log.warning(
                f"no {place.kind}: {place.without} ({place.owner}.{place.method} of this vLLM-Ascend is absent or another)"
            )
            continue
        found.add(place.kind)
        if not getattr(method, OURS, False):
            ours = wraps(method)(place.wrap(method))
            setattr(ours, OURS, True)
            setattr(owner, place.method, ours)
    return frozenset(found)


def _window(method: Method) -> Method:
    """Around a method that does nothing but launch the operator; the layer is the one that waited for its loads last."""

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = _layers_of()
        if layers is None:
            return method(self, *args, **kwargs)
        with layers.window():
            return method(self, *args, **kwargs)

    return launch


def _window_after_writing(method: Method) -> Method:
    """Around a method that is given the layer's name and first writes its caches; it says when it has."""

    def write_and_launch(self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        layers = _layers_of()
        if layers is None:
            return method(self, layer_name, *args, **kwargs)
        with layers.window(layer_name, written=False):
            return method(self, layer_name, *args, **kwargs)

    return write_and_launch


def _waits(method: Method) -> Method:
    """Waits for the loads of an MLA layer: vLLM-Ascend does so only in steps with a prefill.

    A request of which all but the last token was loaded counts as a decode there.
    """
    at = list(signature(method).parameters).index("attn_metadata") - 2  # without self and the name

    def forward(self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        layers = _layers_of()
        metadata = args[at] if len(args) > at else kwargs.get("attn_metadata")
        if layers is not None and metadata is not None and not metadata.num_prefills:
            layers.wait_for_layer_load(layer_name)
        return method(self, layer_name, *args, **kwargs)

    return forward


def _named(method: Method) -> Method:
    """Says which state layer computes; its report has no name."""

    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = _layers_of()
        if layers is None:
            return method(self, *args, **kwargs)
        with layers.state_layer(getattr(self, "prefix", "")):
            return method(self, *args, **kwargs)

    return compute


_ATTENTION, _SPLIT_DSA = "vllm_ascend.attention", "vllm_ascend.attention.context_parallel.dsa_cp"
_310P = "vllm_ascend._310p.attention.attention_v1"
_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
"""vLLM's own class: vLLM-Ascend puts its `_forward_core` there, on every device of theirs."""
_SPARSE = "_execute_sparse_flash_attention_process"
_NAME, _NAME_AND_METADATA = ("layer_name",), ("layer_name", "attn_metadata")
_IN_ORDER = "the layer is known by the order of the calls alone"
_UNWAITED = "loads that a step without prefill needs count as failed"

PLACES = (
    Place("compute window for FA", f"{_ATTENTION}.attention_v1", "AscendAttentionBackendImpl", "forward_impl", _window),
    Place("compute window for FA3", f"{_ATTENTION}.fa3_v1", "AscendFAImpl", "forward_impl", _window),
    Place("compute window for FA on a 310P", _310P, "AscendAttentionBackendImpl310", "forward_impl", _window),
    Place("compute window for MLA", f"{_ATTENTION}.mla_v1", "AscendMLAImpl", "_forward_prefill", _window),
    Place("compute window for SFA", f"{_ATTENTION}.sfa_v1", "AscendSFAImpl", _SPARSE, _window),
    Place(
        "compute window for DSA", f"{_ATTENTION}.dsa_v1", "AscendDSAImpl", "_forward_attention", _window_after_writing, _NAME
    ),
    Place("compute window for DSA-CP", _SPLIT_DSA, "AscendDSACPImpl", "_forward", _window_after_writing, _NAME),
    Place("wait in MLA's decode", f"{_ATTENTION}.mla_v1", "AscendMLAImpl", "forward", _waits, _NAME_AND_METADATA, _UNWAITED),
    Place("names for GDN", _GDN, "QwenGatedDeltaNetAttention", "_forward_core", _named, (), _IN_ORDER),
)


def ascend_layers(
    hooks: LayerHooks, devices: Devices, names: Mapping[str, CacheName], reporting: Collection[str]
) -> AscendLayers:
    """A worker's layers as vLLM-Ascend reports them, with their windows installed.

    Args:
        names: every cache's place.
        reporting: those of attention layers; the others of the model itself are states.
    """
    own = sorted((at.layer, name) for name, at in names.items() if not at.draft)
    layers = AscendLayers(hooks, devices, StateLayerOrder([name for _, name in own], reporting))
    found = install(lambda: layers)
    log.info("compute windows", kinds=sorted(found))
    return layers
