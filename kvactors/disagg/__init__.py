"""The hand-off of a request from a prefill worker to a decode worker: its KV and state, straight into the other's memory.

What is here decides and plans; nothing in it does I/O. `docs/design/disagg.md` says who does what.
"""

from kvactors.disagg.blocks import GroupBlocks, RequestBlocks, plan_blocks
from kvactors.disagg.boundary import Boundary, backoff, boundary
from kvactors.disagg.descriptors import BlockPairs, Descriptors, RegionCopy, batches, region_descriptors, request_descriptors
from kvactors.disagg.geometry import (
    PROTOCOL_VERSION,
    EntryGeometry,
    GroupGeometry,
    WorkerGeometry,
    compatible,
    tp_map,
    worker_geometry,
)
from kvactors.disagg.heads import HeadPart, SharedGroup, TpMap, expected_pulls, layers_by_stage, rank_heads
from kvactors.disagg.receiving import ReceiveAction, ReceiveInstruction, Receiving
from kvactors.disagg.regions import TransferRegion, align_regions, expand_transfer_regions
from kvactors.disagg.routes import route
from kvactors.disagg.sending import SendAction, Sending, SendInstruction
from kvactors.disagg.states import Worker

__all__ = [
    "PROTOCOL_VERSION",
    "BlockPairs",
    "Boundary",
    "Descriptors",
    "EntryGeometry",
    "GroupBlocks",
    "GroupGeometry",
    "HeadPart",
    "ReceiveAction",
    "ReceiveInstruction",
    "Receiving",
    "RegionCopy",
    "RequestBlocks",
    "SendAction",
    "SendInstruction",
    "Sending",
    "SharedGroup",
    "TpMap",
    "TransferRegion",
    "Worker",
    "WorkerGeometry",
    "align_regions",
    "backoff",
    "batches",
    "boundary",
    "compatible",
    "expand_transfer_regions",
    "expected_pulls",
    "layers_by_stage",
    "plan_blocks",
    "rank_heads",
    "region_descriptors",
    "request_descriptors",
    "route",
    "tp_map",
    "worker_geometry",
]
