"""Faults as data: what goes wrong, when, for which keys; read from YAML or JSON mappings, or one of the presets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvactors.core.store import Outcome
from kvactors.errors import ConfigError
from kvactors.textfiles import BadFileError, did_you_mean, read_data

KEYED_CALLS = (
    "put_open", "put_ranges", "put_commit", "put_revoke", "get_open", "get_ranges", "get_close", "readable",
)  # fmt: skip
OTHER_CALLS = ("register", "unregister", "health", "stats")

_PLAN_FIELDS = ("faults", "name", "preset", "seed")
MOST_LATENCY_S = 3600.0
"""Longest time that can be given to one call, seconds."""

WHATS = ("outcome", "raise", "short", "long", "latency", "freeze", "kill", "evict")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong. Conditions that are given must all hold; calls are counted per call name, from 1.

    Attributes:
        what: `outcome` answers `outcome` for the keys hit (False from `readable`); `raise` raises; `short` and `long` return
            a list with one answer too few or too many; `latency` sleeps `latency_s` before the call; `freeze` holds the call
            until its gate is released; `kill` makes this and every later call fail, for `calls` calls or until `revive`;
            `evict` removes the keys hit from the store before the call.
        call: a call of `Store` ("put_ranges", …), or "*" = any call that takes keys. A kill counts them all together.
        nth: only the nth such call.
        every: only each every-th such call.
        probability: chance per such call; for `outcome` and `evict` per key.
        key: only keys that contain this text, and only calls that name such a key.
        times: at most so many injections; None = no limit.
        outcome: for `outcome`, and for a `kill` (UNREACHABLE) when it does not raise.
        applied: `outcome`, `raise`, `freeze`: let the store carry the call out first, so that only its answer is lost or late.
        raises: a kill raises StoreUnreachableError rather than answering per key.
        unreachable: `raise` raises StoreUnreachableError rather than StoreError.
        latency_s: seconds.
        gate: name of the gate that a freeze waits at.
        calls: how many calls a kill lasts; None = until `FaultyStore.revive`.
    """

    what: str
    call: str = "*"
    nth: int | None = None
    every: int | None = None
    probability: float | None = None
    key: str | None = None
    times: int | None = None
    outcome: Outcome | None = None
    applied: bool = False
    raises: bool = False
    unreachable: bool = False
    latency_s: float = 0.0
    gate: str = "gate"
    calls: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.what, str) or self.what not in WHATS:
            raise ConfigError(f"what = {self.what!r}: {_one_of(self.what, WHATS)}")
        if not isinstance(self.call, str) or (self.call != "*" and self.call not in KEYED_CALLS + OTHER_CALLS):
            raise ConfigError(f'call = {self.call!r}: must be "*", or {_one_of(self.call, KEYED_CALLS + OTHER_CALLS)}')
        for name in ("nth", "every", "times", "calls"):
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise ConfigError(f"{name} = {count!r}: must be a whole number >= 1")
        if self.probability is not None and not (_number(self.probability) and 0 <= self.probability <= 1):
            raise ConfigError(f"probability = {self.probability!r}: must be a number from 0 to 1")
        if not (_number(self.latency_s) and 0 <= self.latency_s <= MOST_LATENCY_S):
            raise ConfigError(f"latency_s = {self.latency_s!r}: must be a number of seconds from 0 to {MOST_LATENCY_S:g}")
        for name in ("applied", "raises", "unreachable"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be true or false")
        for name in ("key", "gate"):
            text = getattr(self, name)
            if not (isinstance(text, str) and text) and not (name == "key" and text is None):
                raise ConfigError(f"{name} = {text!r}: must be a non-empty string")
        if self.outcome is not None and not isinstance(self.outcome, Outcome):
            raise ConfigError(f"outcome = {self.outcome!r}: must be an Outcome")
        if self.what == "outcome" and self.outcome is None:
            raise ConfigError("outcome = None: a fault that answers an outcome must say which")
        if self.what == "latency" and self.latency_s == 0:
            raise ConfigError("latency_s = 0.0: a latency fault must say how many seconds")
        if self.call in OTHER_CALLS and (self.what in ("outcome", "short", "long", "evict") or self.key is not None):
            raise ConfigError(f"call = {self.call!r}: takes no keys, so {self.what!r} or a key cannot apply to it")

    @classmethod
    def from_mapping(cls, fields_given: Mapping[str, Any], where: str = "fault") -> Fault:
        """A fault from a mapping with this class's field names; `outcome` by its name or value. ConfigError names the field."""
        if not isinstance(fields_given, Mapping):
            raise ConfigError(f"{where} = {fields_given!r}: must be a mapping")
        known = {f.name for f in fields(cls)}
        for name in fields_given:
            if name not in known:
                hint = did_you_mean(name, known) or ";"
                raise ConfigError(f"{where}.{name}: no such field{hint} known are {', '.join(sorted(known))}")
        if "what" not in fields_given:
            raise ConfigError(f"{where}.what: missing; must be one of {', '.join(WHATS)}")
        given = dict(fields_given)
        if isinstance(given.get("outcome"), str):
            given["outcome"] = _outcome(given["outcome"], where)
        try:
            return cls(**given)
        except ConfigError as error:
            raise ConfigError(f"{where}.{error}") from None


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults and the seed of the one generator that draws their chances; None = whoever runs the plan chooses it."""

    faults: tuple[Fault, ...] = ()
    seed: int | None = None
    name: str = ""

    @classmethod
    def from_mapping(cls, plan: Mapping[str, Any]) -> FaultPlan:
        """A plan from `{"seed": 7, "faults": [{"what": …}, …]}` or `{"preset": "flaky-store", "seed": 7}`."""
        if not isinstance(plan, Mapping):
            raise ConfigError(f"fault plan = {plan!r}: must be a mapping")
        for name in plan:
            if name not in _PLAN_FIELDS:
                hint = did_you_mean(name, _PLAN_FIELDS) or ";"
                raise ConfigError(f"{name}: no such field in a fault plan{hint} known are {', '.join(_PLAN_FIELDS)}")
        seed = plan.get("seed")
        if "seed" in plan and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            raise ConfigError(f"seed = {seed!r}: must be a whole number >= 0")
        faults: tuple[Fault, ...] = ()
        name = plan.get("name", "")
        if not isinstance(name, str):
            raise ConfigError(f"name = {name!r}: must be a string")
        if "preset" in plan:
            preset = cls.preset(plan["preset"], seed)
            faults, name = preset.faults, name or preset.name
        listed = plan.get("faults", [])
        if not isinstance(listed, list | tuple):
            raise ConfigError(f"faults = {listed!r}: must be a list")
        more = tuple(Fault.from_mapping(one, f"faults[{i}]") for i, one in enumerate(listed))
        return cls(faults + more, seed, name)

    @classmethod
    def preset(cls, name: str, seed: int | None = None) -> FaultPlan:
        """One of `PRESETS` by its name."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ConfigError(f"preset = {name!r}: {_one_of(name, PRESETS)}")
        return cls(PRESETS[name], seed, name)

    @classmethod
    def load(cls, path: str | Path) -> FaultPlan:
        """A plan from a YAML or JSON file (docs/faults.md)."""
        try:
            plan = read_data(path)
        except BadFileError as error:
            raise ConfigError(f"fault plan {path}: {error}") from None
        try:
            return cls.from_mapping(plan)
        except ConfigError as error:
            raise ConfigError(f"fault plan {path}: {error}") from None


PRESETS: dict[str, tuple[Fault, ...]] = {
    # A store that works, mostly: some ranges fail, the pool is full now and then, an object is evicted, an answer is lost.
    "flaky-store": (
        Fault(what="outcome", call="put_open", probability=0.02, outcome=Outcome.NO_SPACE),
        Fault(what="outcome", call="put_ranges", probability=0.02, outcome=Outcome.TRANSFER_FAILED),
        Fault(what="outcome", call="get_open", probability=0.02, outcome=Outcome.NOT_FOUND),
        Fault(what="outcome", call="get_ranges", probability=0.02, outcome=Outcome.TRANSFER_FAILED),
        Fault(what="raise", call="put_commit", probability=0.01),
        Fault(what="short", call="readable", probability=0.01),
    ),
    # The master goes away in the middle of the work: every later call answers UNREACHABLE (I11).
    "lost-master": (Fault(what="kill", call="*", nth=40, outcome=Outcome.UNREACHABLE),),
    # Transfers take milliseconds, and each tenth much longer.
    "slow-store": (
        Fault(what="latency", call="put_ranges", latency_s=0.002),
        Fault(what="latency", call="get_ranges", latency_s=0.002),
        Fault(what="latency", call="put_ranges", every=10, latency_s=0.05),
        Fault(what="latency", call="get_ranges", every=10, latency_s=0.05),
    ),
    # Objects vanish between the lookup and the read, as fresh commits without a lease do.
    "evicting": (
        Fault(what="evict", call="get_open", probability=0.1),
        Fault(what="evict", call="get_ranges", probability=0.05),
    ),
    # The client dies while it writes: its puts stay open until the discard timeout.
    "kill-writer": (Fault(what="kill", call="put_ranges", nth=3, raises=True),),
}
"""Fault plans by name."""


def _outcome(text: str, where: str) -> Outcome:
    wanted = text.replace("_", " ").replace("-", " ").lower()
    for one in Outcome:
        if wanted in (one.name.replace("_", " ").lower(), one.value):
            return one
    hint = did_you_mean(wanted, (one.value for one in Outcome))
    raise ConfigError(f"{where}.outcome = {text!r}: must be one of {', '.join(one.name for one in Outcome)}{hint}")


def _one_of(name: object, known: Collection[str]) -> str:
    return f"must be one of {', '.join(known)}{did_you_mean(name, known)}"
