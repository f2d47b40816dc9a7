"""What a caller hands the engine for one step, and what it gets back about loads that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

NULL_BLOCK = -1
"""Local block id of a placeholder: never transferred, whatever the load and save lists say."""


class Phase(Enum):
    """Where in a layer a `layer_ready` stands. EXIT implies ENTRY for the groups that were not signalled yet."""

    ENTRY = "entry"
    """Before attention: the cache of attention groups is written, recurrent state is not."""
    EXIT = "exit"
    """After the layer's compute: everything is written."""


class ReleaseReason(Enum):
    FINISHED = "finished"
    ABORTED = "aborted"
    PREEMPTED = "preempted"
    """Sessions close, but the memory of committed keys stays for the resumed request."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """One request's blocks of one group in one step.

    Attributes:
        block_ids: current local block id of each block index from 0; `NULL_BLOCK` where there is none.
        load: block indices to load before their layer is computed.
        save: block indices whose bytes will be complete when each layer is signalled.
    """

    block_ids: Sequence[int]
    load: Sequence[int] = ()
    save: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request in a step.

    Attributes:
        request_id: the owner of all sessions opened for it.
        hashes: fine chained hashes of the prompt, one per hash unit, from token 0.
        groups: group id -> its blocks; a group that is absent takes no part.
        restarted_at: tokens; set when the request recomputes from there after a failed load (I12).
    """

    request_id: str
    hashes: Sequence[bytes]
    groups: Mapping[int, GroupBlocks]
    restarted_at: int | None = None


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A request whose load failed; nothing from `first_token` on may be used. What was to be loaded before it has arrived, once
    the step has ended.

    Attributes:
        layer: first stage layer whose load failed.
        first_token: start of the earliest block that failed.
        blocks: group id -> block indices of that request (of all groups) that cover the same tokens (I8).
        reason: what the store, or the engine, answered.
    """

    request_id: str
    layer: int
    first_token: int
    blocks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    reason: str = ""
