"""Ctrl-C and SIGTERM in a replay whose master is frozen: the outputs are there before the store is left, and a further signal
ends the process at once and cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvactors.stores import LocalMaster

SAMPLE = Path(__file__).parents[2] / "examples" / "sample_trace.jsonl"
RPC_S = 8
"""After so long a call to a frozen master returns in the first test."""
AT_ONCE_S = 4.0
"""Leaving would take at least RPC_S, of which one second has passed when it says that it takes long."""


class Replay:
    """A replay at the trace's own speed, in a process of its own, whose master a test freezes."""

    def __init__(self, folder: Path, master: LocalMaster, rpc_s: int) -> None:
        self.report = folder / "report.json"
        config = folder / "mooncake.json"
        options = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "global_segment_size": "64MB"}
        config.write_text(json.dumps({**options, "master_server_address": master.address}))
        env = {**os.environ, "MOONCAKE_CONFIG_PATH": str(config), "MC_RPC_TIMEOUT_MS": str(rpc_s * 1000)}
        command = [sys.executable, "-m", "kvactors", "replay", str(SAMPLE), "--store", "mooncake", "--speed", "5"]
        self.process = subprocess.Popen(
            [*command, "--report", str(self.report)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    def says(self, text: str) -> None:
        """Waits until a line of stderr has the text."""
        assert self.process.stderr is not None
        assert any(text in line for line in self.process.stderr)

    def ends(self, wait_s: float) -> tuple[int, str, dict[str, Any]]:
        """The exit code, the summary and the report."""
        out, err = self.process.communicate(timeout=wait_s)
        assert "Traceback" not in err
        return self.process.returncode, out, json.loads(self.report.read_text())


@pytest.fixture
def frozen() -> Iterator[LocalMaster]:
    """A master of one test, which ends also when it is frozen."""
    with LocalMaster() as master:
        yield master
        master.kill()


def test_a_further_ctrl_c_ends_leaving_at_once_and_the_outputs_are_there(tmp_path: Path, frozen: LocalMaster) -> None:
    replay = Replay(tmp_path, frozen, rpc_s=RPC_S)
    with replay.process:
        try:
            replay.says("replaying")
            frozen.process.send_signal(signal.SIGSTOP)
            replay.process.send_signal(signal.SIGINT)
            replay.says("leaving the store")
            assert json.loads(replay.report.read_text())["interrupted"] is True
            began = time.monotonic()
            replay.process.send_signal(signal.SIGINT)
            code, out, report = replay.ends(AT_ONCE_S)
        finally:
            replay.process.kill()
    assert time.monotonic() - began < AT_ONCE_S
    assert code == 130
    assert "Interrupted" in out
    assert report["invariants"]["violations"] == []


def test_one_sigterm_on_a_frozen_master_drains_reports_and_ends_by_itself(tmp_path: Path, frozen: LocalMaster) -> None:
    replay = Replay(tmp_path, frozen, rpc_s=2)
    with replay.process:
        try:
            replay.says("replaying")
            frozen.process.send_signal(signal.SIGSTOP)
            replay.says("does not answer")
            replay.process.send_signal(signal.SIGTERM)
            code, out, report = replay.ends(20.0)
        finally:
            replay.process.kill()
    assert code == 143
    assert "BROKEN" not in out
    assert report["invariants"]["violations"] == []
    assert any(event.startswith("the store was lost") for event in report["events"])
