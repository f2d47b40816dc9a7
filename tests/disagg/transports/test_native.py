"""Setting up the native engine, without one."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from kvactors.disagg.transports import native
from kvactors.disagg.transports.mooncake import MooncakeTransport
from kvactors.disagg.transports.writer import MOST_BYTES, MOST_RANGES, parts
from kvactors.errors import ConfigError


class Refusing:
    def initialize(self, *_: str) -> int:
        return -1


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, "is not installed; pip install"),
        ("raises", "cannot be loaded: no such library; try: apt-get install"),
        (Refusing, "cannot be set up on host '127.0.0.1' with protocol 'tcp', device 'none': code -1"),
    ],
)
def test_an_engine_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, module: object, says: str) -> None:
    if module == "raises":

        def broken(_: str) -> ModuleType:
            raise ImportError("no such library")

        monkeypatch.setattr(native.importlib, "import_module", broken)
    elif module is None:
        monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    else:
        monkeypatch.setattr(native, "transfer_engine_class", lambda: module)
        monkeypatch.setattr("kvactors.disagg.transports.mooncake.transfer_engine_class", lambda: module)
    with pytest.raises(ConfigError) as caught:
        MooncakeTransport("127.0.0.1", "tcp", "none")
    assert says in str(caught.value)


@pytest.mark.parametrize("version", ["0.3.7.post1", "0.3.9", "0.3.12.post1"])
def test_a_version_that_crashes_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(native, "installed_version", lambda: ("mooncake-transfer-engine", version))
    with pytest.raises(ConfigError, match=f"{version} is too old, its TransferEngine may crash the process"):
        MooncakeTransport("127.0.0.1")


def test_a_host_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvactors.disagg.transports.mooncake.transfer_engine_class", lambda: Refusing)
    with pytest.raises(ConfigError, match="has no address"):
        MooncakeTransport("a..b")


@pytest.mark.parametrize(
    ("nbytes", "cut"),
    [
        ([], []),
        ([5], [1]),
        ([1] * MOST_RANGES, [MOST_RANGES]),
        ([1] * (2 * MOST_RANGES + 1), [MOST_RANGES, MOST_RANGES, 1]),
        ([MOST_BYTES, 1, MOST_BYTES - 1, 1], [1, 2, 1]),
        ([1, 3 * MOST_BYTES, 3 * MOST_BYTES, 1], [1, 1, 1, 1]),
        ([MOST_BYTES // 2] * 5, [2, 2, 1]),
    ],
)
def test_parts_of_a_write(nbytes: list[int], cut: list[int]) -> None:
    found = list(parts(np.array(nbytes, np.int64)))
    assert [part.stop - part.start for part in found] == cut
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(len(nbytes)))
