"""One request while it is played: how far it is, and which local blocks it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvactors.core.reachability import Hit
from kvactors.core.steps import NULL_BLOCK
from kvactors.replay.blocks import Indices
from kvactors.replay.trace import TraceRequest


@dataclass(slots=True, eq=False)
class Prompt:
    """A traced request in play.

    Attributes:
        id: the engine's request id.
        request: the trace's row.
        hashes: fine hashes of its complete hash units.
        kept: per group, the blocks to save of the whole prompt.
        arrival_s: when it may start, clock seconds.
        computed: tokens whose blocks are valid; moves at the end of a step.
        end: where the step in hand ends, tokens.
        tables: per group, the local block of each block index; NULL_BLOCK where there is none.
        hit: what the step in hand loads; None when it loads nothing.
        loading: per group, the block indices of that load.
        served: tokens served from the store, counted once, when their bytes had arrived; None until then.
        failures: loads that failed.
        restarted_at: tokens; set for the first step after a failed load.
        restarting: a load failed and the prompt has not been admitted again.
        lost_tokens: tokens of a failed hit that are not yet known to be recomputed.
        parked_free: free blocks of the pool when it was last refused; None when it was not.
    """

    id: str
    request: TraceRequest
    hashes: Sequence[bytes]
    kept: Mapping[int, Indices]
    arrival_s: float = 0.0
    computed: int = 0
    end: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    hit: Hit | None = None
    loading: Mapping[int, Indices] = field(default_factory=dict)
    served: int | None = None
    failures: int = 0
    restarted_at: int | None = None
    restarting: bool = False
    lost_tokens: int = 0
    parked_free: int | None = None

    @property
    def length(self) -> int:
        return self.request.input_length

    @property
    def done(self) -> bool:
        return self.computed >= self.length

    def put_blocks(self, group_id: int, indices: Indices, ids: Sequence[int], blocks: int) -> None:
        """Notes the local blocks of some block indices; the table grows to `blocks` entries."""
        table = self.tables.setdefault(group_id, [])
        if len(table) < blocks:
            table += [NULL_BLOCK] * (blocks - len(table))
        for index, block in zip(indices.tolist(), ids, strict=True):
            table[index] = block

    def clear_blocks(self) -> dict[int, list[int]]:
        """Forgets all local blocks and progress; returns the blocks per group."""
        held = {g: [b for b in table if b != NULL_BLOCK] for g, table in self.tables.items()}
        self.tables = {}
        self.computed = self.end = 0
        self.hit = None
        self.loading = {}
        return held
