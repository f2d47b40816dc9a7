"""Which faults a simulated run meets: presets by name, drawn call by call from the run's generator."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvactors.core.store import Outcome
from kvactors.errors import ConfigError

FREEZE_S = 1e6
"""A frozen call returns only when the run is long over."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Chances of each fault; per call unless it says otherwise.

    Attributes:
        key: per key of a put or get call, an outcome that is not OK.
        short: an answer with one key too few.
        raises: the call raises; half of the time after it was carried out.
        dies: the same, with what a dying worker thread would raise.
        spike: the call takes up to one and a half call deadlines longer.
        freeze: the call does not return.
        evict: an object that nobody reads is dropped before the call.
        kill: the master dies, and comes back empty up to 20 virtual seconds later.
        space: the pool holds few objects.
        lease: leases are short, and reads past them return other objects' bytes as success.
        event_lost: per layer, its device event never fires.
        event_late: per layer, its device event fires late.
        slow: per layer, the compute takes up to 2 virtual seconds.
        crash: per run, a group's actor raises at some message.
        full: for up to 5 virtual seconds nothing more fits into the pool, and nothing is evicted.
    """

    key: float = 0.0
    short: float = 0.0
    raises: float = 0.0
    dies: float = 0.0
    spike: float = 0.0
    freeze: float = 0.0
    evict: float = 0.0
    kill: float = 0.0
    space: bool = False
    lease: bool = False
    event_lost: float = 0.0
    event_late: float = 0.2
    slow: float = 0.0
    crash: float = 0.0
    full: float = 0.0


PRESETS: Mapping[str, FaultRates] = {
    "none": FaultRates(),
    "flaky-keys": FaultRates(key=0.03),
    "flaky-store": FaultRates(key=0.02, short=0.01, raises=0.02, dies=0.01),
    "lost-master": FaultRates(kill=0.01),
    "slow-store": FaultRates(spike=0.08, freeze=0.004, slow=0.05),
    "evicting": FaultRates(evict=0.05, space=True, lease=True, slow=0.1, full=0.01),
    "kill-writer": FaultRates(freeze=0.01, crash=0.5, event_lost=0.01),
    "combined": FaultRates(0.01, 0.005, 0.01, 0.005, 0.03, 0.002, 0.02, 0.003, True, True, 0.003, 0.2, 0.03, 0.1, 0.002),
}

_KEY_OUTCOMES: Mapping[str, Sequence[Outcome]] = {
    "put_open": (Outcome.EXISTS, Outcome.NO_SPACE, Outcome.INVALID),
    "put_ranges": (Outcome.TRANSFER_FAILED, Outcome.INVALID, Outcome.NO_REPLICA),
    "put_commit": (Outcome.TRANSFER_FAILED, Outcome.INVALID),
    "put_revoke": (Outcome.TRANSFER_FAILED, Outcome.NOT_OWNER),
    "get_open": (Outcome.NOT_FOUND, Outcome.NOT_READY),
    "get_ranges": (Outcome.TRANSFER_FAILED, Outcome.LEASE_EXPIRED, Outcome.NO_REPLICA),
    "get_close": (),
    "readable": (),
}


WHOLE_CALL = frozenset({"short", "raises", "dies", "spike", "freeze", "kill", "event_lost", "crash"})
"""Faults that can hit any request, whatever its keys."""


class WorkerDeath(BaseException):
    """What a dying worker thread raises: not an `Exception`."""


ALL = "all"
"""Every preset in turn, the combined one included: seed s gets the preset number s modulo their count."""


def preset_of(name: str, seed: int) -> str:
    """The preset that a seed runs under.

    Raises:
        ConfigError: there is no such preset.
    """
    if name == ALL:
        return tuple(PRESETS)[seed % len(PRESETS)]
    if name not in PRESETS:
        raise ConfigError(f"--faults {name}: no such preset; one of {', '.join([*PRESETS, ALL])}")
    return name


class Trouble:
    """Draws faults. `limit` stops injecting after that many, so that a failing run can be made smaller.

    Attributes:
        injected: how many faults were injected, by kind.
        whole_calls: how many of them could hit any request.
    """

    def __init__(self, rates: FaultRates, rng: random.Random, limit: int | None = None) -> None:
        self.rates, self._rng, self._left = rates, rng, limit
        self.injected: dict[str, int] = {}
        self.whole_calls = 0

    def draw(self, kind: str, chance: float) -> bool:
        """Whether a fault happens now. Always draws, so that a limit changes nothing before it is reached."""
        hit = chance > 0 and self._rng.random() < chance
        if not hit or self._left == 0:
            return False
        if self._left is not None:
            self._left -= 1
        self.injected[kind] = self.injected.get(kind, 0) + 1
        self.whole_calls += kind in WHOLE_CALL
        return True

    def pick(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)

    def key_outcomes(self, call: str, keys: Sequence[str]) -> dict[str, Outcome]:
        outcomes = _KEY_OUTCOMES[call]
        if not outcomes or not self.rates.key:
            return {}
        return {k: outcomes[self._rng.randrange(len(outcomes))] for k in keys if self.draw("key", self.rates.key)}
