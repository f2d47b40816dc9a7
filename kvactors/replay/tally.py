"""The running counts of a replay, and their history for charts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_EVENTS = 200
MOST_SAMPLES = 400
MOST_PREFIXES = 1 << 20
"""Prompts that are remembered to see whether two of them begin alike."""


class Sample(NamedTuple):
    """The counts at one time; times in clock seconds since the start."""

    at_s: float
    completed: int
    input_tokens: int
    hit_tokens: int
    hit_blocks: tuple[int, ...]
    bytes_saved: int
    bytes_loaded: int
    open_sessions: int
    load_failures: int


@dataclass(slots=True)
class GroupTally:
    looked_up: int = 0
    hit: int = 0


@dataclass(slots=True)
class Tally:
    """Counts of the harness itself; what sessions and transfers did is the engine's to count.

    `outages`: how many times the store was found unreachable after a step or at the end. `shared`: whether a prompt begins as
    one before it, by a whole boundary; None = there were too many to tell.
    """

    groups: dict[int, GroupTally]
    requests: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    verified_bytes: int = 0
    mismatched_bytes: int = 0
    load_failed: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    outages: int = 0
    compute_s: float = 0.0
    exposed_load_s: float = 0.0
    exposed_save_s: float = 0.0
    events: list[str] = field(default_factory=list)
    events_dropped: int = 0
    samples: list[Sample] = field(default_factory=list)
    shared: bool | None = False
    _prefixes: set[bytes] = field(default_factory=set)
    _every: int = 1
    _skipped: int = 0

    @classmethod
    def of(cls, group_ids: Iterable[int]) -> Tally:
        return cls({g: GroupTally() for g in group_ids})

    def event(self, text: str) -> None:
        """Notes something that went wrong, for the report; only the first ones are kept."""
        if len(self.events) < MOST_EVENTS:
            self.events.append(text)
        else:
            self.events_dropped += 1

    def note_prefix(self, prefix: bytes, *, may_hit: bool) -> None:
        """A prompt came whose first boundary has this hash; `may_hit`: it goes on after it."""
        if self.shared is not False:
            return
        if may_hit and prefix in self._prefixes:
            self.shared = True
        elif len(self._prefixes) < MOST_PREFIXES:
            self._prefixes.add(prefix)
            return
        else:
            self.shared = None
        self._prefixes.clear()

    def wants_sample(self) -> bool:
        """Whether the next request's end should be sampled; gets rarer as samples gather."""
        self._skipped += 1
        if self._skipped < self._every:
            return False
        self._skipped = 0
        return True

    def sample(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) > MOST_SAMPLES:
            self.samples = self.samples[::2]
            self._every *= 2
