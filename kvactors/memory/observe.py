"""One debug line for each layer's views, all with the same prefix: what was laid over which memory.

A temporary aid: it goes when the layouts are stable. Plain logging, so that the prefix begins the line.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

PREFIX = "[non-contiguous-kv-cache]"

log = logging.getLogger("kvactors.memory")


def tell_attention(layer: str, hybrid: bool, views: Sequence[Tensor]) -> None:
    """`mode` is hybrid where the model has recurrent states too, else gqa.

    Lists have one item for each view: K and V, or the one view that holds both.
    """
    if log.isEnabledFor(logging.DEBUG):
        mode = "hybrid" if hybrid else "gqa"
        log.debug("%s attention layer=%s mode=%s %s", PREFIX, layer, mode, _strides(views))


def tell_states(layer: str, page_bytes: int, views: Sequence[Tensor]) -> None:
    """Lists have one item for each state of the page; strides and offsets count elements."""
    if log.isEnabledFor(logging.DEBUG):
        offsets = [v.storage_offset() for v in views]
        log.debug("%s state layer=%s page_bytes=%d storage_offset=%s %s", PREFIX, layer, page_bytes, offsets, _strides(views))


def _strides(views: Sequence[Tensor]) -> str:
    shapes, strides = [tuple(v.shape) for v in views], [v.stride() for v in views]
    return f"shape={shapes} stride={strides} contiguous={[v.is_contiguous() for v in views]}"
