"""All state of one step (or of one `LoadBlocks`) that threads share: what failed, and what is still under way.

Made on the compute thread in `begin_step`, before any message is posted. Failures are recorded before the latch of their
layer opens; so whoever acts on a later `LayerReady` sees them (I5, I12).
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvactors.actors.latch import Latch
from kvactors.core.sessions import Owner
from kvactors.core.steps import FailedLoad, StepRequest


class LayerTask:
    """All loads, or all saves, of one layer of one step, whatever its groups and calls.

    Each group first plans its part (how many calls it makes, maybe none); the task ends when every group planned and every
    call is done. Thread-safe; ends exactly once.
    """

    __slots__ = ("_jobs", "_lock", "_on_end", "_waiting", "latch", "layer")

    def __init__(self, layer: int, groups: Iterable[int], on_end: Callable[[], None] | None = None) -> None:
        self.layer = layer
        self.latch = Latch()
        self._waiting = set(groups)
        self._jobs = 0
        self._lock = threading.Lock()
        self._on_end = on_end

    def plan(self, group_id: int, jobs: int) -> bool:
        """The group will make `jobs` calls; 0 = none. Only its first answer counts: False for any later one."""
        with self._lock:
            if group_id not in self._waiting:
                return False
            self._waiting.remove(group_id)
            self._jobs += jobs
            ended = not self._waiting and not self._jobs
        if ended:
            self._end()
        return True

    def job_done(self) -> None:
        with self._lock:
            self._jobs -= 1
            ended = not self._waiting and not self._jobs
        if ended:
            self._end()

    @property
    def planned(self) -> bool:
        """Whether every group has said how many calls it makes; those calls were queued, or are about to be."""
        return not self._waiting

    def waits_for(self, group_id: int) -> bool:
        return group_id in self._waiting

    @property
    def ended(self) -> bool:
        return self.latch.is_open

    def _end(self) -> None:
        if self._on_end is not None:
            self._on_end()
        self.latch.open()


class StepState:
    """See the module.

    Attributes:
        id: monotonic number; messages name the step by it.
        requests: request id -> what was asked for it, bad requests left out.
        problems: request id -> why it was left out; if it was to load anything, its load has failed (I5).
        load_groups, save_groups: groups that have something to load, to save.
        load_layers: stage layers with loads, ascending; the prefetch distance counts these.
        save_layers: stage layers on which something may be saved.
        loads, saves: stage layer -> its task.
        failed: request id -> first stage layer whose load failed. Only ever grows, or a layer shrinks.
        ended: opens when the blocks may be reused; `settled` when every session reached its end.
        passed_through: nothing is moved for this step; its loads are reported failed.
        windowed: loads follow the prefetch window (a step) or start at once (`LoadBlocks`).
    """

    def __init__(
        self,
        id: int,
        requests: Mapping[str, StepRequest],
        problems: Mapping[str, str],
        rejected_loads: Iterable[str],
        group_layers: Mapping[int, Sequence[int]],
        block_tokens: Mapping[int, int],
        *,
        windowed: bool = True,
    ) -> None:
        self.id = id
        self.requests = requests
        self.problems = problems
        self.windowed = windowed
        self._block_tokens = block_tokens
        self._group_layers = group_layers
        self.load_groups = frozenset(g for r in requests.values() for g, b in r.groups.items() if len(b.load))
        self.save_groups = frozenset(g for r in requests.values() for g, b in r.groups.items() if len(b.save))
        self.groups = self.load_groups | self.save_groups
        by_layer: dict[int, list[int]] = {}
        for g in self.load_groups:
            for layer in group_layers[g]:
                by_layer.setdefault(layer, []).append(g)
        self.load_layers = tuple(sorted(by_layer))
        self.loads = {layer: LayerTask(layer, groups) for layer, groups in by_layer.items()}
        self.save_layers = frozenset(layer for g in self.save_groups for layer in group_layers[g])
        self.saves: dict[int, LayerTask] = {}
        self.failed: dict[str, int] = {}
        self.ended = Latch()
        self.settled = Latch()
        self.passed_through = False
        self.aborted = False
        self.closed = False
        self.window_sent = 0
        self.prepare_timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        self._broken: dict[str, set[tuple[int, int]]] = {r: set() for r in rejected_loads}
        self._reasons: dict[str, str] = {r: problems[r] for r in rejected_loads}
        self.failed.update(dict.fromkeys(rejected_loads, 0))
        self.fenced: set[tuple[int, int]] = set()
        """(group id, local block id) of destinations that a store call may still write."""
        self.saved: list[Owner] = []
        """whose blocks were committed; whole once `settled` is open"""

    # -- saves ---------------------------------------------------------------------------------------------------------

    def begin_save(self, layer: int, on_end: Callable[[], None]) -> None:
        """Makes the save task of a layer (compute thread); it ends at once if the step was closed meanwhile."""
        self.saves[layer] = LayerTask(layer, [g for g in self.save_groups if layer in self._group_layers[g]], on_end)
        if self.closed:
            self.close()

    # -- the prefetch window -------------------------------------------------------------------------------------------

    def window(self, after: int, layers: int) -> tuple[int, ...]:
        """Load layers that may run once stage layer `after` is ready: those up to it, and the next `layers` with loads."""
        return self.load_layers[: bisect_right(self.load_layers, after) + layers]

    # -- failures ------------------------------------------------------------------------------------------------------

    def fail(self, request_id: str, layer: int, blocks: Iterable[tuple[int, int]], reason: str) -> None:
        """Notes that (group, block index) of a request will not arrive, from `layer` on; `reason`: of the first layer that has
        one. Any thread."""
        with self._lock:
            self._broken.setdefault(request_id, set()).update(blocks)
            known = self.failed.get(request_id)
            if known is None or (layer < known and reason):
                self._reasons[request_id] = reason
            if known is None or layer < known:
                self.failed[request_id] = layer

    def fail_layer(self, layer: int, reason: str, groups: Iterable[int] | None = None) -> None:
        """Notes that whatever the groups (default: all) were to load on `layer` and after it will not arrive."""
        chosen = self.load_groups if groups is None else set(groups)
        for request in self.requests.values():
            blocks = [(g, i) for g, b in request.groups.items() if g in chosen for i in b.load]
            if blocks:
                self.fail(request.request_id, layer, blocks, reason)

    def fail_request(self, request_id: str, layer: int, reason: str) -> None:
        """Notes that nothing that a request of the step was to load will arrive, from `layer` on."""
        groups = self.requests[request_id].groups
        self.fail(request_id, layer, [(g, i) for g, b in groups.items() for i in b.load], reason)

    def first_wrong(self) -> dict[str, int]:
        """Failed request -> start of its earliest block that will not arrive, tokens: what lies before it goes on."""
        if not self.failed:
            return {}
        with self._lock:
            return {r: min((i * self._block_tokens[g] for g, i in b), default=0) for r, b in self._broken.items()}

    def block_tokens(self, group_id: int) -> int:
        return self._block_tokens[group_id]

    def failed_by(self, layer: int) -> frozenset[str]:
        """Requests whose load failed on `layer` or before it."""
        if not self.failed:
            return frozenset()
        with self._lock:
            return frozenset(r for r, at in self.failed.items() if at <= layer)

    def failures(self) -> dict[str, FailedLoad]:
        """Every failed request, with the blocks of all its groups that cover the same tokens (I8)."""
        with self._lock:
            broken = {r: set(b) for r, b in self._broken.items()}
            layers, reasons = dict(self.failed), dict(self._reasons)
        return {r: self._failed_load(r, layers[r], blocks, reasons[r]) for r, blocks in broken.items()}

    def failure(self, request_id: str) -> FailedLoad | None:
        """`failures` of one request; None: it did not fail."""
        with self._lock:
            if request_id not in self.failed:
                return None
            layer, blocks, reason = self.failed[request_id], set(self._broken[request_id]), self._reasons[request_id]
        return self._failed_load(request_id, layer, blocks, reason)

    def _failed_load(self, request_id: str, layer: int, broken: set[tuple[int, int]], reason: str) -> FailedLoad:
        request = self.requests.get(request_id)
        if request is None:
            return FailedLoad(request_id, layer, 0, {}, reason)
        tokens = self._block_tokens
        spans = [(i * tokens[g], (i + 1) * tokens[g]) for g, i in broken]
        blocks: dict[int, tuple[int, ...]] = {}
        for g, b in request.groups.items():
            t = tokens[g]
            hit = tuple(i for i in b.load if any(lo < (i + 1) * t and i * t < hi for lo, hi in spans))
            if hit:
                blocks[g] = hit
        return FailedLoad(request.request_id, layer, min((lo for lo, _ in spans), default=0), blocks, reason)

    def close(self) -> None:
        """The step ended: a save task that is still made for it (a late signal) ends at once."""
        self.closed = True
        for task in list(self.saves.values()):
            for group_id in self.groups:
                task.plan(group_id, 0)

    # -- giving up -----------------------------------------------------------------------------------------------------

    def forgo(self, group_id: int, reason: str) -> None:
        """The group will do nothing more: its loads that were not planned are failed, its parts of all tasks are closed."""
        for layer in self.load_layers:
            task = self.loads[layer]
            if task.waits_for(group_id):
                self.fail_layer(layer, reason, (group_id,))
                task.plan(group_id, 0)
        for task in list(self.saves.values()):
            task.plan(group_id, 0)

    def pass_through(self, reason: str) -> None:
        """Nothing is moved for this step: every load is reported failed, every latch of a layer opens."""
        self.passed_through = True
        for group_id in self.groups:
            self.forgo(group_id, reason)

    def fence_unended(self) -> set[tuple[int, int]]:
        """Fences the destinations of layers that have not ended, before `give_up` tells anybody of the end.

        Returns:
            (group id, local block id) of all that a store call may still write.
        """
        for layer in self.load_layers:
            if not self.loads[layer].ended:
                self.fence_layer(layer)
        return set(self.fenced)

    def give_up(self, reason: str) -> None:
        """The engine died: whatever is under way is reported failed, every latch opens, save tasks without calls under way are
        uncounted. Whoever a latch wakes may reuse the blocks that are not fenced by now."""
        self.passed_through = True
        for layer in self.load_layers:
            task = self.loads[layer]
            if not task.ended:
                self.fail_layer(layer, reason)
                task.latch.open()
        self.close()
        for task in list(self.saves.values()):
            task.latch.open()
        self.ended.open()
        self.settled.open()

    def fence_layer(self, layer: int) -> None:
        """Destinations of a layer whose load did not return in time: a store call may still write them (I4)."""
        for request in self.requests.values():
            for g, b in request.groups.items():
                if layer in self._group_layers[g]:
                    self.fenced.update((g, int(b.block_ids[i])) for i in b.load)
