"""A master of one's own: on a port that is really its own, and gone when the program that started it is."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from kvactors.errors import ConfigError, StoreError, StoreUnreachableError
from kvactors.stores import LocalMaster, MooncakeStore
from kvactors.stores.mooncake import master as masters
from kvactors.stores.mooncake.config import CONFIG_PATH

STARTS_ONE = """
import sys
from kvactors.stores import LocalMaster
master = LocalMaster()
print(master.process.pid, flush=True)
sys.stdin.read()
"""


def test_a_port_that_another_program_holds_is_not_taken_for_the_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        free, ports = masters._free_port, [taken]
        monkeypatch.setattr(masters, "_free_port", lambda: ports.pop() if ports else free())
        with LocalMaster() as master:
            assert master.port != taken
            store = MooncakeStore(**master.options())
            assert store.health().ok
            store.close()


def test_a_master_that_cannot_start_says_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masters, "TRIES", 1)
    with pytest.raises(StoreUnreachableError, match=r"did not start on 127\.0\.0\.1:"):
        LocalMaster(flags=("-no_such_flag=1",))


def test_closing_ends_it_and_closing_again_does_nothing() -> None:
    master = LocalMaster()
    pid = master.process.pid
    for _ in range(2):
        master.close()
    assert master.process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_it_does_not_outlive_the_program_that_started_it(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        watch = os.pidfd_open(pid)
        program.send_signal(how)
        program.wait(30)

    ended, _, _ = select.select([watch], [], [], 30)
    os.close(watch)
    assert ended


def test_a_master_that_runs_is_not_started_again() -> None:
    with LocalMaster() as master:
        with pytest.raises(StoreError, match="runs already"):
            master.start()
        master.kill()
        master.start()
    with pytest.raises(StoreError, match="was closed"):
        master.start()


@pytest.mark.parametrize(
    ("options", "name"), [({"lease_s": float("nan")}, "lease_s"), ({"lease_s": "1"}, "lease_s"), ({"flags": "-v=1"}, "flags")]
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LocalMaster(**options)


def test_the_file_of_another_pool_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_PATH, "/no/such/file.json")
    with LocalMaster() as master:
        store = MooncakeStore(master.config())
        assert store.health().ok
        store.close()
