"""The embedded store beside a real Mooncake: the same random calls, and every answer and every byte must agree.

Two clients of one `MemoryPool` walk beside two clients of one master. Time stands still for the one and is made not to matter
for the other (its leases and timeouts are longer than the test); what time does is in the scripted cases below the walk.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvactors.core.store import Outcome, RangeBatch, Store
from kvactors.stores import LocalMaster, MemoryStore, MooncakeStore
from tests.mooncake.conftest import DISCARD_S, LEASE_S, RELEASE_S
from tests.stores.contract import Buffer, one_range
from tests.stores.memory_world import ManualClock

OK, INVALID, EXISTS, NOT_OWNER = Outcome.OK, Outcome.INVALID, Outcome.EXISTS, Outcome.NOT_OWNER

LONG_S = 600
"""Longer than the walk takes."""

NAMES = ("a", "b", "c", "d", "e")
SIZES = (96, 96, 96, 96, 64, 64, 1, 0, -1)
ROW_BYTES = 512
"""Local bytes for the ranges of one key in a call."""

Range = tuple[int, int]
"""Of an object: offset and size."""


def overlap(one: Range, other: Range) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


clients = st.integers(0, 1)
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)
sizes_of_four = st.lists(st.sampled_from(SIZES), min_size=4, max_size=4)

FITTING = [(0, 96), (0, 64), (0, 1), (0, 32), (32, 32), (32, 64), (64, 32), (5, 40), (60, 5)]
spans = st.lists(st.sampled_from(FITTING), max_size=4) | st.lists(
    st.sampled_from([*FITTING, (1, 0), (90, 7), (96, 1)]), max_size=4
)
"""Wholes, neighbours, overlaps; some are empty, some lie past the end."""
apart = spans.map(lambda ranges: [r for i, r in enumerate(ranges) if not any(overlap(r, other) for other in ranges[:i])])
places = st.sampled_from(["dense", "dense", "scattered", "scattered", "unregistered"])
"""How ranges lie in local memory; the last is scattered too, but for one range of the first key."""

T = TypeVar("T")
numbers = itertools.count()


@dataclass
class Pair:
    """Both stores, with two clients each, and local memory: the same to write from, one for each store to read into."""

    memory: tuple[MemoryStore, MemoryStore]
    mooncake: tuple[MooncakeStore, MooncakeStore]

    def __post_init__(self) -> None:
        self.source, self.unregistered = Buffer(4096), Buffer(4096)
        self.targets = (Buffer(4096), Buffer(4096))
        for store in (*self.memory, *self.mooncake):
            for buffer in (self.source, *self.targets):
                store.register(buffer.address, buffer.nbytes)

    def counts(self) -> npt.NDArray[np.int64]:
        """What both stores count, one row for each of them."""
        shared = ("reads", "writes", "read_bytes", "written_bytes")
        memory = [[store.stats()[name] for name in ("open_gets", *shared)] for store in self.memory]
        mooncake = [[store.stats()[name] for name in ("gets_open", *shared)] for store in self.mooncake]
        return np.array([memory, mooncake], np.int64)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with LocalMaster(lease_s=LONG_S, discard_timeout_s=LONG_S, release_timeout_s=2 * LONG_S) as master:
        # One client sends ranges through its staging buffers, the other as they are.
        owner = MooncakeStore(**master.options(), global_segment_size=64 << 20)
        other = MooncakeStore(**master.options(), staging_bytes=0)
        memory = MemoryStore(
            64 << 20, clock=ManualClock(), lease_s=LONG_S, discard_timeout_s=LONG_S, release_timeout_s=2 * LONG_S
        )
        yield Pair((memory, memory.client()), (owner, other))
        with ThreadPoolExecutor() as closers:
            list(closers.map(MooncakeStore.close, (owner, other)))


class Walk(RuleBasedStateMachine):
    """What the two stores are known to answer differently (docs/design/mooncake.md) is kept out where a comment says so."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair
        self.prefix = f"walk{next(numbers)}/"
        self.sizes: dict[str, int] = {}
        """of every object that is there, committed or not"""
        self.written: dict[str, npt.NDArray[np.bool_]] = {}
        """which of its bytes: the others may be anything"""
        self.before = pair.counts()

    def keys(self, chosen: Sequence[str]) -> list[str]:
        return [self.prefix + name for name in chosen]

    def both(self, client: int, call: Callable[[MemoryStore | MooncakeStore], T]) -> T:
        """The answer of both stores."""
        wanted = call(self.pair.memory[client])
        assert call(self.pair.mooncake[client]) == wanted
        return wanted

    @rule(client=clients, chosen=names, sizes=sizes_of_four)
    def put_open(self, client: int, chosen: list[str], sizes: list[int]) -> None:
        # A size larger than the pool is left out: INVALID in memory, NO_SPACE on Mooncake, which cannot tell for how long.
        keys, sizes = self.keys(chosen), sizes[: len(chosen)]
        for key, size, answer in zip(keys, sizes, self.both(client, lambda s: s.put_open(keys, sizes)), strict=True):
            if answer is OK:
                self.sizes[key], self.written[key] = size, np.zeros(size, np.bool_)

    @rule(client=clients, chosen=names, ranges=apart, place=places)
    def put_ranges(self, client: int, chosen: list[str], ranges: list[Range], place: str) -> None:
        # Ranges that overlap in the object are left out: in which order the ranges of one call are written is not said.
        keys, source = self.keys(chosen), self.pair.source
        source.bytes[:] = np.random.default_rng(next(numbers)).integers(0, 256, source.nbytes, np.uint8)
        batch = self.batch(keys, ranges, source, place)
        for key, answer in zip(keys, self.both(client, lambda s: s.put_ranges(batch)), strict=True):
            if answer is OK:
                for offset, size in ranges:
                    self.written[key][offset : offset + size] = True

    @rule(client=clients, chosen=names, commit=st.sampled_from([True, True, False]))
    def end(self, client: int, chosen: list[str], commit: bool) -> None:
        keys = self.keys(chosen)
        self.both(client, lambda s: s.put_commit(keys) if commit else s.put_revoke(keys))

    @rule(client=clients, chosen=names, wrong=st.sampled_from([False, False, False, True]))
    def get_open(self, client: int, chosen: list[str], wrong: bool) -> None:
        keys = self.keys(chosen)
        sizes = [self.sizes.get(key, 8) for key in keys]
        if wrong:
            sizes[-1] += 1
        self.both(client, lambda s: s.get_open(keys, sizes))

    @rule(client=clients, chosen=names, ranges=spans, place=places)
    def get_ranges(self, client: int, chosen: list[str], ranges: list[Range], place: str) -> None:
        keys, answers = self.keys(chosen), []
        stores: tuple[Store, Store] = (self.pair.memory[client], self.pair.mooncake[client])
        for store, target in zip(stores, self.pair.targets, strict=True):
            target.bytes[:] = 0
            answers.append(store.get_ranges(self.batch(keys, ranges, target, place)))
        assert answers[1] == answers[0]
        memory, mooncake = self.pair.targets
        batch = self.batch(keys, ranges, memory, place)
        for row, key in enumerate(keys):
            if answers[0][row] is OK:  # else Mooncake may have written a part
                for address, (offset, size) in zip(batch.addresses[row].tolist(), ranges, strict=True):
                    at = slice(address - memory.address, address - memory.address + size)
                    known = self.written[key][offset : offset + size]
                    assert (memory.bytes[at][known] == mooncake.bytes[at][known]).all()

    @rule(client=clients, chosen=names, ranges=apart, place=places)
    def store(self, client: int, chosen: list[str], ranges: list[Range], place: str) -> None:
        self.put_open(client, chosen, [96] * 4)
        self.put_ranges(client, chosen, ranges, place)
        self.end(client, chosen, True)

    @rule(client=clients, chosen=names, ranges=spans, place=places)
    def load(self, client: int, chosen: list[str], ranges: list[Range], place: str) -> None:
        self.get_open(client, chosen, False)
        self.get_ranges(client, chosen, ranges, place)

    @rule(client=clients, chosen=names)
    def get_close(self, client: int, chosen: list[str]) -> None:
        keys = self.keys(chosen)
        self.both(client, lambda s: s.get_close(keys))

    @rule(client=clients, chosen=names)
    def readable(self, client: int, chosen: list[str]) -> None:
        keys = self.keys(chosen)
        self.both(client, lambda s: s.readable(keys))

    @rule(client=clients, name=st.sampled_from(NAMES))
    def remove(self, client: int, name: str) -> None:
        key = self.prefix + name
        self.both(client, lambda s: s.remove(key))

    @rule(client=clients, name=st.sampled_from(NAMES))
    def remove_by_force(self, client: int, name: str) -> None:
        # Reading on after it is left out: NOT_FOUND in memory, the bytes of whatever lies there now on Mooncake.
        key = self.prefix + name
        for reader in (0, 1):
            self.both(reader, lambda s: s.get_close([key]))
        self.both(client, lambda s: s.remove(key, force=True))

    @rule(client=clients)
    def remove_what_is_not_leased(self, client: int) -> None:
        """As eviction does when space is short."""
        keys = self.keys(NAMES)
        gone = sum(self.pair.memory[client].remove(key) is OK for key in keys)
        assert self.pair.mooncake[client].remove_matching(f"{self.prefix}.*") == gone

    @invariant()
    def counts_agree(self) -> None:
        now = self.pair.counts()
        assert (now[1] - self.before[1] == now[0] - self.before[0]).all()

    def teardown(self) -> None:
        """Leaves nothing of this example behind, on either side, however it ended."""
        keys = self.keys(NAMES)
        for stores in (self.pair.memory, self.pair.mooncake):
            for store in stores:
                store.get_close(keys)
                store.put_revoke(keys)
            for key in keys:
                stores[0].remove(key, force=True)

    def batch(self, keys: Sequence[str], ranges: Sequence[Range], buffer: Buffer, place: str) -> RangeBatch:
        """A batch in the buffer. Dense = ranges lie behind each other; scattered = with gaps, the later ones first."""
        sizes = [size for _, size in ranges]
        starts = (
            np.cumsum([0, *sizes[:-1]])[: len(sizes)] if place == "dense" else ROW_BYTES - 104 * np.arange(1, len(sizes) + 1)
        )
        addresses = buffer.address + np.arange(len(keys))[:, None] * ROW_BYTES + starts[None, :]
        if place == "unregistered" and ranges:
            addresses[0, -1] = self.pair.unregistered.address
        return RangeBatch(
            keys, addresses.astype(np.int64), np.array(sizes, np.int64), np.array([offset for offset, _ in ranges], np.int64)
        )


def test_every_answer_and_every_byte_agree(pair: Pair) -> None:
    run_state_machine_as_test(cast(Any, lambda: Walk(pair)), settings=settings(max_examples=400, stateful_step_count=40))


@dataclass
class Timed:
    """Two clients of a store with short timeouts, and what lets time pass for it."""

    old: MemoryStore | MooncakeStore
    new: MemoryStore | MooncakeStore
    wait: Callable[[float], object]


@pytest.fixture
def timed(owner: MooncakeStore, reader: MooncakeStore) -> Iterator[tuple[Timed, Timed, Buffer]]:
    buffer, clock = Buffer(), ManualClock()
    memory = MemoryStore(1 << 20, clock=clock, lease_s=LEASE_S, discard_timeout_s=DISCARD_S, release_timeout_s=RELEASE_S)
    sides = Timed(memory, memory.client(), clock.advance), Timed(owner, reader, threading.Event().wait)
    for side in sides:
        for store in (side.old, side.new):
            store.register(buffer.address, buffer.nbytes)
    yield *sides, buffer
    for side in sides:
        for store in (side.old, side.new):
            store.unregister(buffer.address)


def test_what_grants_a_lease_and_for_how_long_agrees(timed: tuple[Timed, Timed, Buffer]) -> None:
    def leases(side: Timed, buffer: Buffer) -> list[object]:
        keys = ["opened", "opened elsewhere", "asked for", "opened with a wrong size", "closed", "renewed", "fresh"]
        side.old.put_open(keys, [8] * len(keys))
        side.old.put_commit(keys)
        side.old.get_open(["opened", "closed", "renewed"], [8, 8, 8])
        side.new.get_open(["opened elsewhere"], [8])
        side.new.readable(["asked for"])
        side.old.get_open(["opened with a wrong size"], [9])
        side.old.get_close(["closed"])
        now = [side.old.remove(key) for key in keys]
        side.wait(LEASE_S * 0.7)
        side.old.get_open(["renewed"], [8])
        side.wait(LEASE_S * 0.6)
        answers: list[object] = [
            side.old.get_ranges(one_range(key, buffer.address, 8)) for key in ("opened", "opened", "renewed")
        ]
        return [now, answers, [side.new.remove(key) for key in keys]]

    memory, mooncake, buffer = timed
    assert leases(mooncake, buffer) == leases(memory, buffer)


def test_the_writer_who_takes_a_key_over_cannot_tell_the_stores_apart(timed: tuple[Timed, Timed, Buffer]) -> None:
    """The one who lost it can: see the next test."""

    def take_over(side: Timed, buffer: Buffer) -> list[object]:
        keys = ["taken", "left"]
        side.old.put_open(keys, [8, 8])
        early = side.new.put_open(keys, [8, 8])
        side.wait(DISCARD_S * 1.1)
        taken = side.new.put_open(["taken"], [16])
        written = side.new.put_ranges(one_range("taken", buffer.fill(0, b"sixteen bytes..."), 16))
        not_yet = side.old.get_open(["taken"], [16])
        done = [side.old.put_open(keys, [8, 8]), side.new.put_commit(["taken"]), side.new.get_open(["taken"], [16])]
        read = side.new.get_ranges(one_range("taken", buffer.address + 100, 16))
        return [early, taken, written, not_yet, done, read, buffer.read(100, 16), side.old.put_commit(["left"])]

    memory, mooncake, buffer = timed
    assert take_over(mooncake, buffer) == take_over(memory, buffer)


def test_the_writer_who_lost_a_key_hears_more_from_the_embedded_store(timed: tuple[Timed, Timed, Buffer]) -> None:
    """Documented, and of no use to anyone: an engine stops at half of the discard timeout. Mooncake goes on to write to where
    the old object was, and its client never forgets the session; what a master has not yet cleared away after the release
    timeout can even be committed."""

    def lose(side: Timed, buffer: Buffer) -> list[list[Outcome]]:
        key = "lost"
        side.old.put_open([key], [8])
        side.wait(DISCARD_S * 1.1)
        assert side.new.put_open([key], [8]) == [OK]
        return [
            side.old.put_ranges(one_range(key, buffer.address, 8)),
            side.old.put_commit([key]),
            side.old.put_revoke([key]),
            side.old.put_revoke([key]),
            side.new.put_commit([key]),
            side.old.put_open([key], [8]),
        ]

    memory, mooncake, buffer = timed
    assert lose(memory, buffer) == [[INVALID], [INVALID], [NOT_OWNER], [INVALID], [OK], [EXISTS]]
    assert lose(mooncake, buffer) == [[OK], [NOT_OWNER], [NOT_OWNER], [NOT_OWNER], [OK], [INVALID]]
