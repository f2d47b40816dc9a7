"""How an engine is bounded and how patient it is."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvactors.errors import ConfigError

MOST_S = 1e8
"""Longest deadline, seconds: three years; a timer cannot be set for much longer."""


def seconds(value: object) -> bool:
    """Whether a value is a usable number of seconds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_S


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and deadlines of one engine.

    Attributes:
        prefetch_layers: how many layers with loads may be read ahead of the compute; 0 = only on demand. With a store for which
            short ranges are dear, layers are read a little further ahead, in runs.
        max_pending_saves: save tasks (all saves of one layer) that may be unfinished when `checkpoint` returns.
        max_transfer_blocks: most keys in one store call; 0 = as many as the most ranges in a call allow; None = 64, or as many
            as make 1 MiB if that is more (see `most_keys`).
        max_transfer_bytes: most bytes in one store call; a bigger range is split; 0 = no limit.
        workers: general transfer workers; one more takes loads only.
        call_deadline_s: a store call that takes longer marks its worker lost.
        step_deadline_s: how long a transfer may wait for its device event, and a compute thread for an answer.
        drain_deadline_s: default patience of `drain`.
        strict: raise from `wait_layer` when a load failed (replay, tests) instead of reporting the request.
        max_lost_workers: lost workers that are replaced at a time; beyond it calls that no worker could make fail at once.
        probe_interval_s: how often an unreachable store is probed.
        switch_interval_s: the interpreter's switch interval while a `BlockingEngine` runs, for the whole process; None leaves
            it. For so long a compute thread in pure Python keeps the GIL after a signal: 5 ms unless set.
        audit: watch every store call and note what breaks an invariant (replay, tests); costs some time per key and layer.
    """

    prefetch_layers: int = 2
    max_pending_saves: int = 8
    max_transfer_blocks: int | None = None
    max_transfer_bytes: int = 16 << 20
    workers: int = 2
    call_deadline_s: float = 30.0
    step_deadline_s: float = 60.0
    drain_deadline_s: float = 60.0
    strict: bool = False
    max_lost_workers: int = 8
    probe_interval_s: float = 1.0
    switch_interval_s: float | None = None
    audit: bool = False

    def __post_init__(self) -> None:
        least = {"max_pending_saves": 1, "workers": 1}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.name in ("max_transfer_blocks", "switch_interval_s"):
                continue
            if f.name.endswith("_s"):
                if not seconds(value):
                    raise ConfigError(f"EngineConfig.{f.name} = {value!r}: must be a number of seconds, more than 0")
            elif f.name in ("strict", "audit"):
                if not isinstance(value, bool):
                    raise ConfigError(f"EngineConfig.{f.name} = {value!r}: must be True or False")
            elif not isinstance(value, int) or isinstance(value, bool) or value < least.get(f.name, 0):
                raise ConfigError(f"EngineConfig.{f.name} = {value!r}: must be a whole number >= {least.get(f.name, 0)}")
