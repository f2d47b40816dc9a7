"""A client in a process of its own that can be killed or frozen: it gives memory to the pool, or opens puts and no more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
END_S = 10.0


class OtherClient:
    """A process with one `MooncakeStore`, made with these options. A context manager."""

    def __init__(self, **options: Any) -> None:
        environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mooncake.owner_process", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
            text=True,
        )
        assert self._answer() == "ready"

    def put_open(self, keys: Sequence[str], nbytes: int) -> list[str]:
        """Opens puts there; answers the outcomes' values."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"keys": list(keys), "nbytes": nbytes}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        assert isinstance(answer, list)
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Lets the process end as it should; kills it if it is frozen or does not come to an end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.stdout.close()

    def __enter__(self) -> OtherClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the other client ended with {self.process.wait()}"
        return json.loads(line)


def main() -> None:
    from kvactors.stores import MooncakeStore

    store = MooncakeStore(**json.loads(sys.argv[1]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        outcomes = store.put_open(asked["keys"], [asked["nbytes"]] * len(asked["keys"]))
        print(json.dumps([outcome.value for outcome in outcomes]), flush=True)
    store.close()


if __name__ == "__main__":
    main()
