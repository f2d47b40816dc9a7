"""Range calls on their way to the native client: joined, staged where that pays, and answered key by key."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvactors.core.store import Outcome, RangeBatch
from kvactors.errors import StoreError
from kvactors.stores.mooncake.client import Client
from kvactors.stores.mooncake.coalesce import GOOD_RANGE_BYTES, Staging, joined
from kvactors.stores.mooncake.codes import range_outcome
from kvactors.stores.mooncake.staging import StagingBuffers
from kvactors.stores.regions import Regions

PUT_RANGES, GET_RANGES = "batch_put_from_multi_buffer_ranges", "batch_get_into_multi_buffer_ranges"

GET_WHOLE = "batch_get_into_multi_buffers"
"""Reads whole objects: from a segment of this process at the speed of memory, where ranges always go through a socket."""

Answers = list[Outcome]


class Sender:
    """Thread-safe.

    Args:
        protocol: staging was measured over TCP; other transports move small ranges well, or from memory that cannot be copied.
        staging_bytes: memory for staging buffers; 0 = none.

    Raises:
        StoreError: the staging buffers cannot be registered.
    """

    def __init__(self, client: Client, protocol: str, staging_bytes: int) -> None:
        self._count: Counter[str] = Counter()
        self._client = client
        self._lock = threading.Condition()
        self._closed = False
        self._scattering = 0
        staging = StagingBuffers(staging_bytes) if protocol == "tcp" else None
        self._staging = staging if staging is not None and staging.slot_bytes else None
        if self._staging is not None:
            code = client.tell("register_buffer", self._staging.address, self._staging.nbytes)
            if code != 0:
                raise StoreError(f"the staging buffer of {self._staging.nbytes} bytes cannot be registered ({code})")

    @property
    def good_range_bytes(self) -> int:
        return GOOD_RANGE_BYTES if self._staging is not None else 0

    def close(self) -> None:
        """No call that is still under way writes local memory any more when this returns."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._scattering)

    @contextmanager
    def _may_scatter(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreError("the Mooncake store was closed while it was read; nothing was delivered")
            self._scattering += 1
        try:
            yield
        finally:
            with self._lock:
                self._scattering -= 1
                self._lock.notify_all()

    def counted(self) -> Counter[str]:
        """A copy of what was counted: `ranges_sent`, `staged_bytes`, `whole_objects`."""
        with self._lock:
            return self._count.copy()

    def put(self, batch: RangeBatch, answers: Answers, rows: Sequence[int], host: Regions | None) -> None:
        """Writes the ranges of `rows` and fills in their answers. `host`: what may be copied by the CPU; None = all of it."""
        if len(set(batch.keys)) < len(batch.keys):
            rows = [row for row in rows if batch.keys[row] not in batch.keys[:row]]
        self._send(batch, PUT_RANGES, answers, rows, host, lambda: None)

    def get(
        self, batch: RangeBatch, answers: Answers, rows: Sequence[int], host: Regions | None, judge: Callable[[], None]
    ) -> None:
        """Reads the ranges of `rows`; `judge` corrects their answers before anything leaves a staging buffer."""
        self._send(batch, GET_RANGES, answers, rows, host, judge)

    def get_whole(self, batch: RangeBatch, answers: Answers, rows: Sequence[int], judge: Callable[[], None]) -> None:
        """Reads `rows`, whose ranges are whole objects of different keys, in the objects' order."""
        if not rows:
            return
        whole = joined(batch if len(rows) == len(batch.keys) else _part(batch, np.array(rows, np.intp)))
        codes = self._client.ask(GET_WHOLE, whole.keys, whole.addresses.tolist(), [whole.sizes.tolist()] * len(rows))
        for row, code in zip(rows, codes, strict=True):
            answers[row] = range_outcome(code, whole.nbytes_per_key)
        judge()
        with self._lock:
            self._count["whole_objects"] += len(rows)

    def _send(
        self,
        batch: RangeBatch,
        call: str,
        answers: Answers,
        rows: Sequence[int],
        host: Regions | None,
        judge: Callable[[], None],
    ) -> None:
        if not rows:
            return
        whole = joined(batch if len(rows) == len(batch.keys) else _part(batch, np.array(rows, np.intp)))
        staging, plan, slot = self._staging, None, None
        if staging is not None and (host is None or host.cover(whole.addresses, whole.sizes).all()):
            plan = Staging.plan(whole)
            if plan is not None and plan.pitch <= staging.slot_bytes:
                slot = staging.take()
        if staging is None or plan is None or slot is None:
            self._call(whole, call, answers, rows)
            judge()
            return
        try:
            most = staging.slot_bytes // plan.pitch
            for lo in range(0, len(rows), most):
                chunk, chunk_rows = _part(whole, slice(lo, lo + most)), rows[lo : lo + most]
                if call == PUT_RANGES:
                    plan.gather(chunk, slot)
                self._call(plan.sent(chunk, slot), call, answers, chunk_rows)
                judge()
                good = [i for i, row in enumerate(chunk_rows) if answers[row] is Outcome.OK]
                if call == GET_RANGES:
                    with self._may_scatter():
                        plan.scatter(chunk, slot, slice(None) if len(good) == len(chunk_rows) else np.array(good, np.int64))
                with self._lock:
                    self._count["staged_bytes"] += len(good) * int(whole.sizes[plan.columns].sum())
        finally:
            staging.give_back(slot)

    def _call(self, batch: RangeBatch, call: str, answers: Answers, rows: Sequence[int]) -> None:
        n, nbytes = len(batch.keys), batch.nbytes_per_key
        sizes, offsets = batch.sizes.tolist(), batch.offsets.tolist()
        codes = self._client.ask(call, batch.keys, batch.addresses.tolist(), [sizes] * n, [offsets] * n)
        for row, code in zip(rows, codes, strict=True):
            answers[row] = range_outcome(code, nbytes)
        with self._lock:
            self._count["ranges_sent"] += n * len(sizes)


def _part(batch: RangeBatch, rows: slice | npt.NDArray[np.intp]) -> RangeBatch:
    keys = batch.keys[rows] if isinstance(rows, slice) else [batch.keys[row] for row in rows.tolist()]
    return RangeBatch(keys, batch.addresses[rows], batch.sizes, batch.offsets)
