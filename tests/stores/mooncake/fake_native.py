"""A native Mooncake client in plain Python: the answers of the real one, and ways to make it answer or behave otherwise."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kvactors.stores import MooncakeConfig, MooncakeStore
from kvactors.stores.copying import view
from kvactors.stores.mooncake.client import Client
from tests.stores.contract import Buffer
from tests.stores.memory_world import ManualClock

SEGMENT = "10.0.0.1:12345"


def _scripted(method: Callable[..., Any]) -> Callable[..., Any]:
    name = method.__name__

    @functools.wraps(method)
    def call(self: FakeNative, *arguments: Any) -> Any:
        self.calls.append((name, arguments))
        if name in self.before:
            self.before[name]()
        if self.answers[name]:
            answer = self.answers[name].pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        return method(self, *arguments)

    return call


class FakeNative:
    """Attributes:
    calls: every call so far, with its arguments.
    answers: by call, what it answers next instead of the truth; exceptions are raised.
    before: by call, what happens first in each.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, list[Any]] = defaultdict(list)
        self.before: dict[str, Callable[[], object]] = {}
        self.puts: dict[str, bytearray] = {}
        self.objects: dict[str, bytearray] = {}
        self.gets: set[str] = set()
        self.memory: set[int] = set()

    def made(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of that name."""
        return [arguments for made, arguments in self.calls if made == name]

    @_scripted
    def batch_put_session_start(self, keys: list[str], sizes: list[int], *_: Any) -> list[int]:
        answers = []
        for key, size in zip(keys, sizes, strict=True):
            answers.append(-600 if key in self.puts else -705 if key in self.objects else 0)
            if answers[-1] == 0:
                self.puts[key] = bytearray(size)
        return answers

    @_scripted
    def batch_put_from_multi_buffer_ranges(self, keys: list[str], *ranges: list[list[int]]) -> list[int]:
        return [self._move(True, self.puts.get(key), *mine) for key, *mine in zip(keys, *ranges, strict=True)]

    @_scripted
    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        found = {key: self.puts.pop(key) for key in keys if key in self.puts}
        self.objects.update(found)
        return [0 if key in found else -600 for key in keys]

    @_scripted
    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        return [-600 if self.puts.pop(key, None) is None else 0 for key in keys]

    @_scripted
    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        self.gets.update(key for key in keys if key in self.objects)
        return [0 if key in self.objects else -703 if key in self.puts else -704 for key in keys]

    @_scripted
    def batch_get_into_multi_buffer_ranges(self, keys: list[str], *ranges: list[list[int]]) -> list[int]:
        open_ = [self.objects.get(key) if key in self.gets else None for key in keys]
        return [self._move(False, data, *mine) for data, *mine in zip(open_, *ranges, strict=True)]

    @_scripted
    def batch_get_session_end(self, keys: list[str]) -> int:
        self.gets.difference_update(keys)
        return 0

    @_scripted
    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.objects) for key in keys]

    @_scripted
    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        return {key: [_replica(key, len(self.objects[key]))] for key in keys if key in self.objects}

    @_scripted
    def remove(self, key: str, _force: bool) -> int:
        return -704 if self.objects.pop(key, None) is None else 0

    @_scripted
    def remove_by_regex(self, _pattern: str, _force: bool) -> int:
        return 0

    @_scripted
    def register_buffer(self, address: int, _nbytes: int) -> int:
        self.memory.add(address)
        return 0

    @_scripted
    def unregister_buffer(self, address: int) -> int:
        self.memory.remove(address)
        return 0

    @_scripted
    def health_check(self) -> int:
        return 0

    @_scripted
    def close(self) -> int:
        return 0

    @staticmethod
    def _move(
        into: bool, data: bytearray | None, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> int:
        if data is None or any(offset + size > len(data) for size, offset in zip(sizes, offsets, strict=True)):
            return -600
        for address, size, offset in zip(addresses, sizes, offsets, strict=True):
            if into:
                data[offset : offset + size] = view(address, size).tobytes()
            else:
                view(address, size)[:] = memoryview(data)[offset : offset + size]
        return sum(sizes)


def _replica(key: str, nbytes: int) -> Any:
    where = SimpleNamespace(size=nbytes, transport_endpoint=SEGMENT, buffer_address=hash(key))
    memory = SimpleNamespace(buffer_descriptor=where)
    return SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: memory)


class Gate:
    """Holds a native call until released."""

    def __init__(self, native: FakeNative, name: str) -> None:
        self.arrived, self.release = threading.Semaphore(0), threading.Event()
        native.before[name] = self

    def __call__(self) -> None:
        self.arrived.release()
        assert self.release.wait(30)

    def wait_for(self, calls: int) -> None:
        for _ in range(calls):
            assert self.arrived.acquire(timeout=30)


class Bench:
    """A store over a fake client, on a clock that stands still, with a buffer that is registered."""

    def __init__(self, native: FakeNative | None = None, **options: Any) -> None:
        self.native, self.clock, self.buffer = native or FakeNative(), ManualClock(), Buffer()
        config = MooncakeConfig("127.0.0.1:50051", **{"staging_bytes": 0, **options})
        self.store = MooncakeStore(config, clock=self.clock, client=Client(config, native=self.native))
        self.store.register(self.buffer.address, self.buffer.nbytes)
        self.native.calls.clear()

    def put(self, key: str, data: bytes) -> str:
        """An object that is there already."""
        self.native.objects[key] = bytearray(data)
        return key
