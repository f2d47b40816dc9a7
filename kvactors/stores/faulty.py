"""A store that misbehaves by plan: wraps any `Store`, for tests, simulations and drills.

The draws come from one seeded generator in the order in which calls arrive, so a run is repeated exactly when its calls come
in the same order (one thread, or a simulated pool). Nothing polls: a frozen call waits on an event, and latency is an
injected sleep.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from kvactors.core.store import Health, Outcome, RangeBatch, Store
from kvactors.errors import ConfigError, StoreError, StoreUnreachableError
from kvactors.stores.fault_plan import KEYED_CALLS, Fault, FaultPlan

T = TypeVar("T")

_Rows = list[int] | None
"""The rows of a call that are to be carried out; None = the call as it came."""


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault that was injected: into which call (its name and its number of that name), for which keys."""

    call: str
    nth: int
    what: str
    keys: tuple[str, ...] = ()


class Gate:
    """Where frozen calls wait. `arrived` is set once a call was held; `release` lets all pass, also later ones."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._open = threading.Event()

    def hold(self) -> None:
        self.arrived.set()
        self._open.wait()

    def release(self) -> None:
        self._open.set()

    def shut(self) -> None:
        """Hold calls again."""
        self.arrived.clear()
        self._open.clear()


class FaultyStore:
    """Wraps a store and injects the faults of a plan. Implements `kvactors.core.store.Store`; thread-safe.

    Args:
        store: the store behind; its `name`, `lease_s` and `put_safe_age_s` are taken over.
        plan: a `FaultPlan`, a mapping for one, the name of a preset, or a plain sequence of faults.
        sleep: how latency passes; seconds in, nothing out.
        rng: replaces the generator that the plan's seed would make.

    Attributes of the wrapped store that are not part of `Store` (such as `contains`) are reached through this one unharmed.
    """

    def __init__(
        self,
        store: Store,
        plan: FaultPlan | Mapping[str, Any] | str | Sequence[Fault] = (),
        *,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        if isinstance(plan, str):
            plan = FaultPlan.preset(plan)
        elif isinstance(plan, Mapping):
            plan = FaultPlan.from_mapping(plan)
        elif not isinstance(plan, FaultPlan):
            plan = FaultPlan(tuple(plan))
        if any(fault.what == "evict" for fault in plan.faults) and not hasattr(store, "remove"):
            raise ConfigError(f"what = 'evict': the {store.name!r} store cannot remove a key")
        self.store, self.plan = store, plan
        self.name, self.lease_s, self.put_safe_age_s = store.name, store.lease_s, store.put_safe_age_s
        self.injections: deque[Injection] = deque(maxlen=10_000)
        """The injected faults in order; the newest, of a long run."""
        self.gates = {fault.gate: Gate() for fault in plan.faults if fault.what == "freeze"}
        self._sleep = sleep
        self._rng = rng or random.Random(plan.seed or 0)
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._done: Counter[int] = Counter()  # injections per fault, by its place in the plan
        self._killed_by: Fault | None = None
        self._dead_calls_left: int | None = None

    def __repr__(self) -> str:
        state = " killed" if self._killed_by else ""
        return f"<FaultyStore{state} {self.plan.name or len(self.plan.faults)}, {self.injected} injected, on {self.store!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "store":
            raise AttributeError(name)
        return getattr(self.store, name)

    @property
    def injected(self) -> int:
        """How many faults were injected."""
        return self._counts.total()

    @property
    def counts(self) -> dict[str, int]:
        """Injected faults by kind."""
        with self._lock:
            return dict(self._counts)

    @property
    def killed(self) -> bool:
        return self._killed_by is not None

    def kill(self, fault: Fault | None = None) -> None:
        """Make every later call fail now, as a `kill` fault does."""
        with self._lock:
            self._kill(fault or Fault(what="kill"))

    def revive(self) -> None:
        """End a kill. Sessions of before are as the wrapped store has them."""
        with self._lock:
            self._killed_by = None

    def release(self, gate: str = "gate") -> None:
        """Let the calls frozen at a gate go on, and all later ones pass."""
        self.gates[gate].release()

    # The store's calls

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        return self._answer("put_open", keys, lambda rows: self.store.put_open(_of(keys, rows), _of(sizes, rows)))

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        return self._answer("put_ranges", batch.keys, lambda rows: self.store.put_ranges(_rows(batch, rows)))

    def put_commit(self, keys: Sequence[str]) -> list[Outcome]:
        return self._answer("put_commit", keys, lambda rows: self.store.put_commit(_of(keys, rows)))

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        return self._answer("put_revoke", keys, lambda rows: self.store.put_revoke(_of(keys, rows)))

    def get_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        return self._answer("get_open", keys, lambda rows: self.store.get_open(_of(keys, rows), _of(sizes, rows)))

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        return self._answer("get_ranges", batch.keys, lambda rows: self.store.get_ranges(_rows(batch, rows)))

    def get_close(self, keys: Sequence[str]) -> list[Outcome]:
        return self._answer("get_close", keys, lambda rows: self.store.get_close(_of(keys, rows)))

    def readable(self, keys: Sequence[str]) -> list[bool]:
        """As the wrapped store; False for an injected outcome, but StoreUnreachableError where a bool cannot say so."""
        return self._call("readable", keys, lambda rows: self.store.readable(_of(keys, rows)), _unreadable)

    def register(self, address: int, nbytes: int) -> None:
        def make(_: _Rows) -> list[None]:
            self.store.register(address, nbytes)
            return []

        self._call("register", (), make, lambda _: None)

    def unregister(self, address: int) -> None:
        def make(_: _Rows) -> list[None]:
            self.store.unregister(address)
            return []

        self._call("unregister", (), make, lambda _: None)

    def health(self) -> Health:
        """The wrapped store's health; not ok while killed."""
        with self._lock:
            killed = self._killed_by is not None
            if killed:
                self._count_dead_call()  # a probe counts: else a kill for some calls never ends once nothing but probes comes
        if killed:
            return Health(False, "the store does not answer (injected)")
        return self._call("health", (), lambda _: [self.store.health()], lambda _: Health(False))[0]

    def stats(self) -> Mapping[str, Any]:
        """The wrapped store's stats, and `injected` faults by kind. Works while killed."""
        return {**self._call("stats", (), lambda _: [self.store.stats()], lambda _: {})[0], "injected": self.counts}

    def close(self) -> None:
        """Release every gate and close the wrapped store; nothing is injected."""
        for gate in self.gates.values():
            gate.release()
        self.store.close()

    # Inside

    def _answer(self, call: str, keys: Sequence[str], make: Callable[[_Rows], list[Outcome]]) -> list[Outcome]:
        return self._call(call, keys, make, lambda fault: fault.outcome or Outcome.UNREACHABLE)

    def _call(
        self,
        call: str,
        keys: Sequence[str],
        make: Callable[[_Rows], list[T]],
        answer_of: Callable[[Fault], T],
    ) -> list[T]:
        """Ask the plan what goes wrong, then do it around `make`, which carries the call out for the rows it is given."""
        with self._lock:
            killed, hits = self._plan_call(call, keys)
        if killed is not None:
            if killed.raises or not keys:
                raise StoreUnreachableError(f"{call}: the store does not answer (injected)")
            return [answer_of(killed) for _ in keys]
        everything = list(range(len(keys)))
        wrong: dict[int, Fault] = {}
        for fault, rows in hits:
            if fault.what == "latency":
                self._sleep(fault.latency_s)
            elif fault.what == "evict":
                for row in rows:
                    self.store.remove(keys[row], force=True)  # type: ignore[attr-defined]  # evict is for stores that have it
            elif fault.what == "freeze" and not fault.applied:
                self.gates[fault.gate].hold()
            elif fault.what == "raise" and not fault.applied:
                raise _error(call, fault)
            elif fault.what == "outcome":
                for row in rows:
                    wrong.setdefault(row, fault)
        sent = [row for row in everything if row not in wrong or wrong[row].applied]
        rows_sent: _Rows = None if len(sent) == len(keys) else sent
        real = make(rows_sent) if rows_sent is None or sent else []
        if not wrong or len(real) != len(sent):
            answers = list(real)
        else:
            by_row = dict(zip(sent, real, strict=True))
            answers = [answer_of(wrong[row]) if row in wrong else by_row[row] for row in everything]
        for fault, _ in hits:
            if fault.what == "freeze" and fault.applied:
                self.gates[fault.gate].hold()
            elif fault.what == "raise" and fault.applied:
                raise _error(call, fault)
            elif fault.what == "short":
                answers = answers[:-1]
            elif fault.what == "long":
                answers = [*answers, *answers[-1:]]
        return answers

    def _plan_call(self, call: str, keys: Sequence[str]) -> tuple[Fault | None, list[tuple[Fault, list[int]]]]:
        """Under the lock: count the call, and say what goes wrong with it: a kill, or faults with the rows they hit."""
        self._calls[call] += 1
        if call in KEYED_CALLS:
            self._calls["*"] += 1
        found: list[tuple[int, Fault, list[int]]] = []
        if self._killed_by is None:
            for place, fault in enumerate(self.plan.faults):
                rows = self._hit(place, fault, call, keys)
                if rows is None:
                    continue
                if fault.what == "kill":  # whatever else was due did not happen
                    self._done[place] += 1
                    self._kill(fault)
                    found.clear()
                    break
                found.append((place, fault, rows))
        for place, fault, rows in found:
            self._done[place] += 1
            self._note(call, fault.what, keys, rows)
        hits = [(fault, rows) for _, fault, rows in found]
        killed = self._killed_by
        if killed is None or call == "stats":
            return None, hits
        self._note(call, "kill", keys, range(len(keys)))
        self._count_dead_call()
        return killed, []

    def _count_dead_call(self) -> None:
        if self._dead_calls_left is not None:
            self._dead_calls_left -= 1
            if self._dead_calls_left <= 0:
                self._killed_by = None

    def _hit(self, place: int, fault: Fault, call: str, keys: Sequence[str]) -> list[int] | None:
        if fault.call != call and not (fault.call == "*" and call in KEYED_CALLS):
            return None
        nth = self._calls[fault.call]
        if fault.times is not None and self._done[place] >= fault.times:
            return None
        if (fault.nth is not None and nth != fault.nth) or (fault.every is not None and nth % fault.every):
            return None
        rows = [row for row, key in enumerate(keys) if fault.key is None or fault.key in key]
        if call in KEYED_CALLS and not rows and (fault.key is not None or fault.what in ("outcome", "evict")):
            return None
        if fault.probability is not None:
            if fault.what in ("outcome", "evict"):
                rows = [row for row in rows if self._rng.random() < fault.probability]
                return rows or None
            if self._rng.random() >= fault.probability:
                return None
        return rows

    def _kill(self, fault: Fault) -> None:
        self._killed_by, self._dead_calls_left = fault, fault.calls

    def _note(self, call: str, what: str, keys: Sequence[str], rows: Sequence[int]) -> None:
        self._counts[what] += 1
        self.injections.append(Injection(call, self._calls[call], what, tuple(keys[row] for row in rows)))


def _unreadable(fault: Fault) -> bool:
    if fault.what == "kill" or fault.outcome is Outcome.UNREACHABLE:
        raise StoreUnreachableError("readable: the store does not answer (injected)")
    return False


def _error(call: str, fault: Fault) -> StoreError:
    if fault.unreachable:
        return StoreUnreachableError(f"{call}: the store does not answer (injected)")
    return StoreError(f"{call}: failed (injected)")


def _of(values: Sequence[T], rows: _Rows) -> Sequence[T]:
    return values if rows is None else [values[row] for row in rows]


def _rows(batch: RangeBatch, rows: _Rows) -> RangeBatch:
    if rows is None:
        return batch
    return replace(batch, keys=[batch.keys[row] for row in rows], addresses=batch.addresses[np.asarray(rows, np.intp)])
