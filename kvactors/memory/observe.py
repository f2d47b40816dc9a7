"""One debug line for each layer's views, all with the same prefix: what was laid over which memory.

A temporary aid: it goes when the layouts are stable.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvactors.log import get_logger

PREFIX = "[non-contiguous-kv-cache]"

log = get_logger("kvactors.memory")


def tell_attention(layer: str, hybrid: bool, views: Sequence[Tensor]) -> None:
    """`mode` is hybrid where the model has recurrent states too, else gqa."""
    log.debug(
        f"{PREFIX} attention",
        layer=layer,
        mode="hybrid" if hybrid else "gqa",
        shape=[tuple(v.shape) for v in views],
        stride=[v.stride() for v in views],
        contiguous=[v.is_contiguous() for v in views],
    )


def tell_states(layer: str, page_bytes: int, views: Sequence[Tensor]) -> None:
    log.debug(
        f"{PREFIX} state",
        layer=layer,
        page_bytes=page_bytes,
        shape=[tuple(v.shape) for v in views],
        stride=[v.stride() for v in views],
        storage_offset=[v.storage_offset() for v in views],
        contiguous=[v.is_contiguous() for v in views],
    )
