"""Random walks of the memory store beside a plain model of its table: every answer and every byte must agree."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvactors.core.store import Outcome
from kvactors.stores import MemoryStore
from tests.stores.contract import Buffer, ranges
from tests.stores.memory_world import ManualClock

KEYS = [f"k{i}" for i in range(5)]
CAPACITY, LEASE, DISCARD, RELEASE = 200, 10, 30, 100
keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)
clients = st.integers(0, 1)


@dataclass(eq=False)
class Life:
    """One life of a key in the model; bytes that were never written are None: the store may hold anything there."""

    key: str
    owner: int
    opened_at: float
    data: list[int | None]
    state: str = "open"
    lease_until: float = -1.0
    touched: int = 0


@dataclass
class Model:
    now: float = 1000.0
    ticks: int = 0
    current: dict[str, Life] = field(default_factory=dict)
    held: list[Life] = field(default_factory=list)  # everything that occupies memory
    puts: list[dict[str, Life]] = field(default_factory=lambda: [{}, {}])
    gets: list[dict[str, tuple[Life, float]]] = field(default_factory=lambda: [{}, {}])

    def used(self) -> int:
        return sum(len(life.data) for life in self.held)

    def drop(self, life: Life) -> None:
        life.state = "gone"
        self.held.remove(life)
        if self.current.get(life.key) is life:
            del self.current[life.key]
        if self.puts[life.owner].get(life.key) is life:
            del self.puts[life.owner][life.key]

    def reap(self) -> None:
        for life in [*self.held]:
            if life.state in ("open", "superseded") and self.now - life.opened_at >= RELEASE:
                self.drop(life)

    def touch(self, life: Life) -> None:
        self.ticks += 1
        life.touched, life.lease_until = self.ticks, self.now + LEASE

    def put_open(self, client: int, names: list[str], sizes: list[int]) -> list[Outcome]:
        answers, opened, missing = [], set(), 0
        for key, size in zip(names, sizes, strict=True):
            life = self.current.get(key)
            if size == 0:
                answer = Outcome.INVALID
            elif key in opened:
                answer = Outcome.EXISTS
            elif key in self.puts[client]:
                answer = Outcome.INVALID
            elif life and (life.state == "committed" or self.now - life.opened_at < DISCARD):
                answer = Outcome.EXISTS
            elif size > CAPACITY:
                answer = Outcome.INVALID
            elif self.used() + size > CAPACITY:
                answer, missing = Outcome.NO_SPACE, missing + size
            else:
                if life:
                    life.state = "superseded"
                made = Life(key, client, self.now, [None] * size)
                self.current[key] = self.puts[client][key] = made
                self.held.append(made)
                opened.add(key)
                answer = Outcome.OK
            answers.append(answer)
        if missing:
            for life in sorted(self.held, key=lambda one: one.touched):
                if self.used() <= max(0, CAPACITY - missing):
                    break
                if life.state == "committed" and life.lease_until <= self.now:
                    self.drop(life)
        return answers

    def end(self, client: int, names: list[str], commit: bool) -> list[Outcome]:
        answers = {}
        for key in dict.fromkeys(names):
            life = self.puts[client].get(key)
            if life is None or (life.state == "superseded" and commit):
                answers[key] = Outcome.INVALID
            elif life.state == "superseded":
                del self.puts[client][key]
                answers[key] = Outcome.NOT_OWNER
            else:
                if commit:
                    del self.puts[client][key]
                    self.ticks += 1
                    life.state, life.touched = "committed", self.ticks
                else:
                    self.drop(life)
                answers[key] = Outcome.OK
        return [answers[key] for key in names]

    def get_open(self, client: int, names: list[str], sizes: list[int]) -> list[Outcome]:
        answers = []
        for key, size in zip(names, sizes, strict=True):
            life = self.current.get(key)
            if life is None:
                answers.append(Outcome.NOT_FOUND)
            elif life.state != "committed":
                answers.append(Outcome.NOT_READY)
            elif len(life.data) != size:
                self.touch(life)
                answers.append(Outcome.SIZE_MISMATCH)
            else:
                self.touch(life)
                self.gets[client][key] = (life, life.lease_until)
                answers.append(Outcome.OK)
        return answers


class MemoryStoreWalk(RuleBasedStateMachine):
    @initialize(slab=st.sampled_from([4096, 1 << 16]))
    def begin(self, slab: int) -> None:
        self.model, self.clock = Model(), ManualClock()
        self.buffer = Buffer(4096)
        first = MemoryStore(
            CAPACITY,
            clock=self.clock,
            lease_s=LEASE,
            discard_timeout_s=DISCARD,
            release_timeout_s=RELEASE,
            watermark=0.0,
            slab_bytes=slab,
        )
        self.stores = [first, first.client()]
        for store in self.stores:
            store.register(self.buffer.address, self.buffer.nbytes)
        self.writes = 0

    @rule(client=clients, names=keys, data=st.data())
    def put_open(self, client: int, names: list[str], data: st.DataObject) -> None:
        sizes = [data.draw(st.sampled_from([40, 40, 64, 90, 0, CAPACITY + 1])) for _ in names]
        self.model.reap()
        assert self.stores[client].put_open(names, sizes) == self.model.put_open(client, names, sizes)

    @rule(client=clients, names=keys, size=st.integers(0, 40), offset=st.integers(0, 60))
    def put_ranges(self, client: int, names: list[str], size: int, offset: int) -> None:
        self.model.reap()
        wanted, addresses, seen = [], [], set()
        for i, key in enumerate(names):
            self.writes += 1
            payload = bytes([self.writes % 256]) * max(size, 1)
            addresses.append([self.buffer.fill(100 * i, payload)])
            life = self.model.puts[client].get(key)
            good = life is not None and life.state == "open" and key not in seen
            seen.add(key)
            if good and life is not None and 0 < size <= len(life.data) - offset:
                life.data[offset : offset + size] = payload
                wanted.append(Outcome.OK)
            else:
                wanted.append(Outcome.INVALID)
        assert self.stores[client].put_ranges(ranges(names, addresses, [size], [offset])) == wanted

    @rule(client=clients, names=keys, commit=st.booleans())
    def end(self, client: int, names: list[str], commit: bool) -> None:
        self.model.reap()
        store = self.stores[client]
        answers = (store.put_commit if commit else store.put_revoke)(names)
        assert answers == self.model.end(client, names, commit)

    @rule(client=clients, names=keys, data=st.data())
    def get_open(self, client: int, names: list[str], data: st.DataObject) -> None:
        self.model.reap()
        sizes = []
        for key in names:
            life = self.model.current.get(key)
            wrong = data.draw(st.integers(0, 9)) == 0
            sizes.append(7 if life is None or wrong else len(life.data))
        assert self.stores[client].get_open(names, sizes) == self.model.get_open(client, names, sizes)

    @rule(client=clients, names=keys, size=st.integers(1, 40), offset=st.integers(0, 60))
    def get_ranges(self, client: int, names: list[str], size: int, offset: int) -> None:
        self.model.reap()
        gets, wanted, ended = self.model.gets[client], [], []
        expected: list[list[int | None] | None] = []
        for key in names:
            life, until = gets.get(key, (None, 0.0))
            expected.append(None)
            if life is None:
                wanted.append(Outcome.INVALID)
            elif self.model.now >= until:
                wanted.append(Outcome.LEASE_EXPIRED)
                ended.append(key)
            elif life.state != "committed":
                wanted.append(Outcome.NOT_FOUND)
                ended.append(key)
            elif size > len(life.data) - offset:
                wanted.append(Outcome.INVALID)
            else:
                wanted.append(Outcome.OK)
                expected[-1] = life.data[offset : offset + size]
        for key in ended:
            gets.pop(key, None)
        self.buffer.bytes[2000:] = 255
        addresses = [[self.buffer.address + 2000 + 100 * i] for i in range(len(names))]
        assert self.stores[client].get_ranges(ranges(names, addresses, [size], [offset])) == wanted
        for i, payload in enumerate(expected):
            got = self.buffer.read(2000 + 100 * i, size)
            for byte, known in zip(got, payload or [255] * size, strict=True):
                assert known is None or byte == known

    @rule(client=clients, names=keys)
    def get_close(self, client: int, names: list[str]) -> None:
        self.model.reap()
        assert self.stores[client].get_close(names) == [Outcome.OK] * len(names)
        for key in names:
            self.model.gets[client].pop(key, None)

    @rule(client=clients, names=keys)
    def readable(self, client: int, names: list[str]) -> None:
        self.model.reap()
        lives = [self.model.current.get(key) for key in names]
        here = [life is not None and life.state == "committed" for life in lives]
        assert self.stores[client].readable(names) == here
        for life in lives:
            if life is not None and life.state == "committed":
                self.model.touch(life)

    @rule(client=clients, key=st.sampled_from(KEYS), force=st.booleans())
    def remove(self, client: int, key: str, force: bool) -> None:
        self.model.reap()
        life = self.model.current.get(key)
        if life is None:
            wanted = Outcome.NOT_FOUND
        elif life.state != "committed":
            wanted = Outcome.NOT_READY
        elif life.lease_until > self.model.now and not force:
            wanted = Outcome.LEASED
        else:
            wanted = Outcome.OK
            self.model.drop(life)
        assert self.stores[client].remove(key, force) is wanted

    @rule(seconds=st.sampled_from([1, 5, 9, 10, 21, 40]))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.model.now += seconds

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        self.model.reap()
        stats = self.stores[0].stats()
        assert stats["bytes"] == self.model.used() <= CAPACITY
        assert stats["objects"] == sum(life.state == "committed" for life in self.model.held)
        assert [store.stats()["open_puts"] for store in self.stores] == [len(puts) for puts in self.model.puts]
        self.stores[0].pool.arena.check()

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.close()


MemoryStoreWalk.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestMemoryStoreWalk = MemoryStoreWalk.TestCase
