"""What crosses between the connector's two sides: a plan to the workers each step, a report back, a handshake once.

They are pickled by vLLM where worker and scheduler are different processes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvactors.core.layout import KVLayout
from kvactors.core.steps import GroupBlocks
from kvactors.disagg.blocks import RequestBlocks
from kvactors.disagg.messages import Source
from kvactors.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Life:
    """One attempt at a request: the engine knows it by `name`. A failed load ends it; the next attempt is a new life."""

    request_id: str
    number: int = 0

    @property
    def name(self) -> str:
        return f"{self.request_id}#{self.number}" if self.number else self.request_id


@dataclass(slots=True)
class Event:
    """What a KV cache event says of a request's blocks. `hashes`: vLLM's own, fine, from token 0."""

    token_ids: Sequence[int]
    hashes: Sequence[bytes]
    lora_name: str | None = None


@dataclass(slots=True)
class RequestPlan:
    """A request's part of a step: what to load before its layers run, and which blocks will be complete.

    Attributes:
        hashes: fine chained hashes from token 0.
        event: set where KV cache events are wanted.
        problem: why nothing of it can be loaded; the load has failed then.
    """

    life: Life
    hashes: Sequence[bytes]
    groups: dict[int, GroupBlocks]
    event: Event | None = None
    problem: str = ""

    @property
    def loads(self) -> bool:
        return any(b.load for b in self.groups.values())

    @property
    def saves(self) -> bool:
        return any(b.save for b in self.groups.values())


@dataclass(slots=True)
class LoadPlan:
    """A load between steps; the request waits for it without running. `problem`: why nothing of it can be loaded."""

    life: Life
    hashes: Sequence[bytes]
    groups: dict[int, GroupBlocks]
    problem: str = ""


@dataclass(slots=True)
class HeldPrefill:
    """A request that prefill has computed; its blocks are held until the hand-off is over."""

    transfer_id: str
    request_id: str
    blocks: RequestBlocks


@dataclass(slots=True)
class Pull:
    """A request that decode wants from its prefill. `name`: its own, also if vLLM uses the request's id again; without ids of
    blocks, prefill is only to free its own, and nothing is reported."""

    name: str
    request_id: str
    source: Source
    blocks: RequestBlocks


@dataclass(slots=True)
class HandoffPlan:
    """A step's part of the hand-off.

    Attributes:
        requests: transfer ids of requests that came to prefill.
        prefilled: those that are computed.
        cancelled: transfer ids of those that ended otherwise, and why.
        pulls: what decode wants.
        given_up: names of pulls whose requests are aborted, and why.
    """

    requests: list[str] = field(default_factory=list)
    prefilled: list[HeldPrefill] = field(default_factory=list)
    cancelled: list[tuple[str, str]] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    given_up: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.requests, self.prefilled, self.cancelled, self.pulls, self.given_up))


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """Scheduler to workers, each step.

    Attributes:
        requests: those that load inside the step, or save.
        loads: loads between steps that start with this one.
        ended: lives whose memory goes.
        runs: whether the step computes anything; an empty step has no layers.
        handoff: what is handed over between prefill and decode.
    """

    requests: list[RequestPlan] = field(default_factory=list)
    loads: list[LoadPlan] = field(default_factory=list)
    ended: list[Life] = field(default_factory=list)
    runs: bool = True
    handoff: HandoffPlan = field(default_factory=HandoffPlan)


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc, unused-ignore]
    """Workers to scheduler: what happened since the last report. Reports of several ranks add up.

    Attributes:
        failed: life -> first token that did not arrive; nothing from there on may be used.
        arrived: lives whose loads inside a step brought in everything.
        tainted: lives that recovered by themselves, but whose saves are over.
        unsaved: lives of which a step was to save something, and did not.
        lost: local blocks that hold wrong bytes, and that vLLM may have noted as computed.
        held, returned: local blocks that a late store call, or a late hand-off, may still write, and those that it no longer
            can; one count per rank and call.
    """

    failed: dict[Life, int] = field(default_factory=dict)
    arrived: set[Life] = field(default_factory=set)
    tainted: set[Life] = field(default_factory=set)
    unsaved: set[Life] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    held: Counter[int] = field(default_factory=Counter)
    returned: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        failed = dict(self.failed)
        for life, first in other.failed.items():
            failed[life] = min(first, failed.get(life, first))
        return WorkerReport(
            failed,
            self.arrived | other.arrived,
            self.tainted | other.tainted,
            self.unsaved | other.unsaved,
            self.lost | other.lost,
            self.held + other.held,
            self.returned + other.returned,
        )

    def __bool__(self) -> bool:
        return any((self.failed, self.arrived, self.tainted, self.unsaved, self.lost, self.held, self.returned))


@dataclass(slots=True)
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc, unused-ignore]
    """What a worker publishes once its caches are registered.

    Attributes:
        layout: of its stage.
        hash_tokens: tokens per fine hash.
        process: the worker's.
        hands_over: whether it takes part in hand-offs between prefill and decode.
        all_report: whether vLLM says of every cache, before it is read, that it will be; else no load may run inside a step.
    """

    layout: KVLayout
    hash_tokens: int
    all_report: bool = True
    process: int = field(default_factory=os.getpid)
    hands_over: bool = False


def one_layout_per_stage(handshakes: Mapping[tuple[int, int], Handshake]) -> list[KVLayout]:
    """The layouts of all stages, first stage first; `handshakes` by (stage, TP rank).

    Raises:
        LayoutError: ranks of a stage disagree, or a stage is missing.
    """
    stages: dict[int, KVLayout] = {}
    for (stage, rank), shake in sorted(handshakes.items()):
        known = stages.setdefault(stage, shake.layout)
        if known.digest != shake.layout.digest:
            raise LayoutError(
                f"TP rank {rank} of stage {stage} has the layout {shake.layout.digest[:12]}, another rank {known.digest[:12]}; "
                "all ranks of a stage must have the same caches"
            )
    if not stages:
        raise LayoutError("no worker published its layout")
    count = next(iter(stages.values())).pp_size
    if missing := sorted(set(range(count)) - set(stages)):
        raise LayoutError(f"stages {missing} of {count} did not publish their layouts")
    draft = {g.id for layout in stages.values() for g in layout.groups if g.speculative}
    return [_with_drafts(stages[stage], draft) for stage in sorted(stages)]


def _with_drafts(layout: KVLayout, draft: Collection[int]) -> KVLayout:
    """vLLM marks a draft's group on the stages that have layers of it; what can be hit depends on it everywhere."""
    groups = [replace(g, speculative=g.id in draft) for g in layout.groups]
    return KVLayout(layout.model, groups, layout.tp_size, layout.pp_rank, layout.pp_size, layout.first_layer)
