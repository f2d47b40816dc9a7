"""KVACTORS_RANGE_DEBUG=1: one log line for each range and session event, with request, group, layer, block, offset, bytes.

Meant for checking a new model or device: every group must show a load range. Off by default; it costs a line per range.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from kvactors.core.calls import RangeCall
from kvactors.core.sessions import Owner
from kvactors.log import get_logger

VARIABLE = "KVACTORS_RANGE_DEBUG"
LOGGER = "kvactors.ranges"


class RangeDebug:
    """Writes the lines; made only when they are wanted."""

    def __init__(self) -> None:
        logger = logging.getLogger(LOGGER)
        logger.setLevel(logging.DEBUG)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())
        self._log = get_logger(LOGGER)

    def ranges(self, kind: str, group_id: int, call: RangeCall, owners: Sequence[tuple[str, int]], event: object) -> None:
        """`owners`: request id and block index of each row of the call."""
        batch = call.batch
        sizes, offsets = batch.sizes.tolist(), batch.offsets.tolist()
        for (request_id, block), local in zip(owners, call.block_ids.tolist(), strict=True):
            for size, offset in zip(sizes, offsets, strict=True):
                self._log.debug(
                    f"{kind} range",
                    request=request_id,
                    group=group_id,
                    layer=call.layer,
                    block=block,
                    local_block=local,
                    offset=offset,
                    bytes=size,
                    cache_event=type(event).__name__ if event is not None else "none",
                )

    def session(self, what: str, owner: Owner) -> None:
        """`what` is a line of the request's story: opened, committed, revoked, …"""
        self._log.debug(what, request=owner.request_id, group=owner.group_id, block=owner.block_index)


def wanted() -> bool:
    return os.environ.get(VARIABLE, "0") == "1"
