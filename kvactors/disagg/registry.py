"""Which prefill workers there are, and where: what the bootstrap server keeps and says. No I/O.

The answer has the fields that vLLM's Mooncake proxies read (`engine_id`, and `worker_addr` by tensor-parallel, then pipeline
rank), and two more: the sizes, so that a reader knows whether all workers are there.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated

import msgspec

from kvactors.errors import ConfigError, DisaggError

Rank = Annotated[int, msgspec.Meta(ge=0, lt=65536)]
Size = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

MOST_RETIRED = 64
"""Former engines that a registry remembers for each data-parallel rank."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill worker says of itself.

    Attributes:
        addr: where it takes links, "ws://host:port/handoff".

    Raises:
        ConfigError: a rank is not below its size.
    """

    engine_id: Name
    dp_rank: Rank
    tp_rank: Rank
    pp_rank: Rank
    addr: Name
    tp_size: Size
    pp_size: Size

    def __post_init__(self) -> None:
        for kind, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            if rank >= size:
                raise ConfigError(f"{kind}_rank = {rank}: must be below {kind}_size = {size}")


class EngineEntry(msgspec.Struct, kw_only=True):
    """The workers of one prefill engine (one data-parallel rank).

    Attributes:
        worker_addr: tensor-parallel rank -> pipeline rank -> address.
    """

    engine_id: Name
    worker_addr: dict[Rank, dict[Rank, Name]]
    tp_size: Size
    pp_size: Size

    @property
    def complete(self) -> bool:
        """Whether all tp_size x pp_size workers are there."""
        return all(
            pp_rank in self.worker_addr.get(tp_rank, {}) for tp_rank in range(self.tp_size) for pp_rank in range(self.pp_size)
        )


class RegistrationConflictError(DisaggError):
    """A registration contradicts an earlier one; nothing was changed."""


class Registry:
    """The prefill engines by data-parallel rank.

    An engine that starts again has a new id, and its first worker to register replaces the former engine as a whole, of which
    no worker lives. A late registration of the former engine is refused.
    """

    def __init__(self) -> None:
        self.engines: dict[int, EngineEntry] = {}
        self._retired: dict[int, deque[str]] = {}

    def register(self, worker: Registration) -> None:
        """Adds a worker; the same registration again changes nothing.

        Raises:
            RegistrationConflictError: another worker of this engine has the rank, the sizes differ, or the engine was replaced.
        """
        engine = self.engines.get(worker.dp_rank)
        where = f"dp_rank {worker.dp_rank}"
        if worker.engine_id in self._retired.get(worker.dp_rank, ()):
            now = engine.engine_id if engine else "another"
            raise RegistrationConflictError(
                f"engine_id: {where} was taken over from engine {worker.engine_id} by engine {now}; end this worker"
            )
        if engine is not None and engine.engine_id != worker.engine_id:
            self._retired.setdefault(worker.dp_rank, deque(maxlen=MOST_RETIRED)).append(engine.engine_id)
            engine = None
        if engine is None:
            engine = EngineEntry(engine_id=worker.engine_id, worker_addr={}, tp_size=worker.tp_size, pp_size=worker.pp_size)
        for field in ("tp_size", "pp_size"):
            before, now = getattr(engine, field), getattr(worker, field)
            if before != now:
                raise RegistrationConflictError(
                    f"{field}: engine {worker.engine_id} of {where} has {field} {before}, this worker says {now};"
                    " start all its workers with the same sizes"
                )
        stages = engine.worker_addr.setdefault(worker.tp_rank, {})
        addr = stages.setdefault(worker.pp_rank, worker.addr)
        if addr != worker.addr:
            raise RegistrationConflictError(
                f"addr: tp_rank {worker.tp_rank}, pp_rank {worker.pp_rank} of engine {worker.engine_id} ({where}) is at"
                f" {addr}, this worker says {worker.addr};"
                " give every prefill instance an engine_id of its own, new with every start"
            )
        self.engines[worker.dp_rank] = engine
