"""The test's end of a process with real vLLM in it, see `tests.vllm.connector_driver`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tests.vllm.engine import ENVIRONMENT, ROOT

ANSWER_S = 120.0


class Led:
    """A process that runs one command after the other. A context manager; leaving it ends the process.

    Each command of `Driver` is a method here: `led.generate(…)`. `send` and `receive` are its two halves, for several
    processes that work at the same time.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.connector_driver", str(write)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "VLLM_HOST_IP": "127.0.0.1", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[write],
        )
        os.close(write)
        self._answers = os.fdopen(read)
        self._ended = os.pidfd_open(self._process.pid)

    def __getattr__(self, command: str) -> Any:
        if command.startswith("_"):
            raise AttributeError(command)

        def ask(*arguments: Any, **options: Any) -> Any:
            self.send(command, *arguments, **options)
            return self.receive()

        return ask

    def send(self, command: str, *arguments: Any, **options: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments, options], default=str) + "\n")
        self._process.stdin.flush()

    def receive(self, wait_s: float = ANSWER_S) -> Any:
        """The answer to the oldest command without one; an error there is an AssertionError here."""
        ready, _, _ = select.select([self._answers, self._ended], [], [], wait_s)
        line = self._answers.readline() if self._answers in ready else ""
        if not line:
            self._process.kill()
            state = f"ended with {self._process.wait()}" if ready else f"did not answer within {wait_s} s"
            raise AssertionError(f"the process with vLLM {state}; it wrote last:\n{self.log()[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"in the process with vLLM:\n{answer['error']}\nit wrote last:\n{self.log()[-2000:]}")
        return answer["answer"]

    def signal(self, number: int) -> None:
        """Stops, continues or kills the process."""
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait()

    def log(self) -> str:
        """All that the process has written so far."""
        return os.pread(self._log.fileno(), 1 << 22, 0).decode(errors="replace")

    def told(self) -> str:
        """What kvactors logged of late, in any of its processes."""
        return "\n".join([line for line in self.log().splitlines() if "event=" in line][-40:])

    def lives(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        os.close(self._ended)
        self._log.close()

    def __enter__(self) -> Led:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
