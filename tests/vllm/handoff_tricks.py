"""What a test sees of, and does to, a hand-off between two processes with real vLLM, behind the connector's back."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Any

from kvactors.disagg import Descriptors
from kvactors.disagg.blocks import NULL_BLOCK, RequestBlocks
from kvactors.disagg.messages import Outcome, OutcomeKind, Source
from kvactors.disagg.worker import HandoffWorker


class HandoffTricks:
    """Of the one worker in this process."""

    llm: Any

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, dict[str, str]] = {}
        self._reached = threading.Event()

    def where(self) -> list[str]:
        """The instance's id and the address of its bootstrap server, for `kv_transfer_params`."""
        transfer = self.llm.llm_engine.vllm_config.kv_transfer_config
        return [transfer.engine_id, f"http://127.0.0.1:{transfer.kv_connector_extra_config['bootstrap_port']}"]

    def watch_blocks(self) -> None:
        """From now on the bytes of every block are noted, at prefill when it is held, at decode when it has arrived."""
        worker = self._handoff()
        prefilled, receive, outcomes = worker.prefilled, worker.receive, worker.outcomes
        asked: dict[str, tuple[str, RequestBlocks]] = {}

        def watched_prefilled(transfer_id: str, blocks: RequestBlocks) -> None:
            self.seen[transfer_id] = digests(worker, blocks)
            prefilled(transfer_id, blocks)

        def watched_receive(request_id: str, source: Source, blocks: RequestBlocks) -> None:
            asked[request_id] = (source.transfer_id, blocks)
            receive(request_id, source, blocks)

        def watched_outcomes() -> list[Outcome]:
            told = outcomes()
            for outcome in told:
                if outcome.kind is OutcomeKind.LOADED:
                    transfer_id, blocks = asked.pop(outcome.request_id)
                    self.seen[transfer_id] = digests(worker, blocks)
            return told

        worker.prefilled, worker.receive, worker.outcomes = watched_prefilled, watched_receive, watched_outcomes  # type: ignore[method-assign]

    def hands_over(self) -> bool:
        """Whether the connector has something for its worker, which goes with the next step; a server makes it at once."""
        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        handing = getattr(connector, "_handing", None)
        return handing is not None and bool(handing.busy)

    def blocks_seen(self) -> dict[str, dict[str, str]]:
        """Transfer id -> "layer/piece/position" -> what was in that block."""
        seen, self.seen = self.seen, {}
        return seen

    def handoffs(self) -> dict[str, int]:
        """What the worker has counted since its start, and what is under way."""
        worker = self._handoff()
        counts: dict[str, int] = {"pending": worker.pending}
        for of in (worker.sent, worker.received):
            if of is not None:
                counts |= {name: getattr(of, name) for name in of.__slots__}
        return counts

    def hold_writes(self) -> None:
        """Each write stops in its middle, until `release_writes`."""
        worker = self._handoff()
        real: Callable[[str, Descriptors], Coroutine[Any, Any, None]] = worker._transport.write
        self._reached.clear()
        self._gate = gate = asyncio.Event()

        async def held(memory: str, descriptors: Descriptors) -> None:
            first, second = halves(descriptors)
            await real(memory, first)
            self._reached.set()
            await gate.wait()
            await real(memory, second)

        worker._transport.write = held  # type: ignore[method-assign]
        self._real_write = real

    def wait_held(self) -> None:
        """Returns when a write has stopped in its middle."""
        assert self._reached.wait(60.0), "no write began"

    def release_writes(self) -> None:
        worker = self._handoff()
        worker._transport.write = self._real_write  # type: ignore[method-assign]
        worker._loop.call_soon_threadsafe(self._gate.set)

    def until_pending(self, count: int) -> None:
        """Steps until so many hand-offs are under way, fenced ones included."""
        end = time.monotonic() + 60.0
        while (now := self._handoff().pending) != count:
            assert time.monotonic() < end, f"{now} hand-offs are under way, not {count}"
            self.llm.llm_engine.step()

    def _handoff(self) -> HandoffWorker:
        worker = _find(self.llm)._worker
        assert isinstance(worker, HandoffWorker)
        return worker


def _find(llm: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group()._handoff
    assert side is not None, f"no hand-off in {llm}"
    return side


def digests(worker: HandoffWorker, blocks: RequestBlocks) -> dict[str, str]:
    geometry = worker._geometry
    found: dict[str, str] = {}
    pieces: dict[str, int] = {}
    for region in geometry.regions:
        piece = pieces[region.layer_name] = pieces.get(region.layer_name, -1) + 1
        group, of = geometry.groups[region.group_index], blocks.groups[region.group_index]
        for i, block in enumerate(of.ids):
            if block == NULL_BLOCK:
                continue
            content = blake2b(digest_size=16)
            for kernel in range(group.kernel_blocks):
                at = region.base_address + (block * group.kernel_blocks + kernel) * region.block_bytes
                content.update(ctypes.string_at(at, region.payload_bytes * region.pieces))
            found[f"{region.layer_name}/{piece}/{of.first_index + i}"] = content.hexdigest()
    return found


def halves(whole: Descriptors) -> tuple[Descriptors, Descriptors]:
    cut = max(1, len(whole) // 2)
    first, second = slice(None, cut), slice(cut, None)
    return (
        Descriptors(whole.src[first], whole.dst[first], whole.nbytes[first]),
        Descriptors(whole.src[second], whole.dst[second], whole.nbytes[second]),
    )
