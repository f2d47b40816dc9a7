"""Where a live view listens: the path of a unix socket, or a port of this machine's loopback."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvactors.errors import ConfigError

VARIABLE = "KVACTORS_LIVE"
"""The environment variable that turns live views on, and tells `kvactors top` and `story` where they are."""

MOST_PATH_BYTES = 107
"""The longest name of a unix socket that Linux takes."""

SCHEDULER = "scheduler"
"""The rank of vLLM's scheduler, which has a view of its own."""


@dataclass(frozen=True, slots=True)
class Address:
    """Either `path` is set, or `host` and `port`."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def of(cls, text: str) -> Address:
        """Takes `PATH` (with a slash, or ending in `.sock`) or `HOST:PORT`; `localhost` is 127.0.0.1.

        Raises:
            ConfigError: it is neither, the path is too long, or other machines could reach the host.
        """
        if not isinstance(text, str) or not text.strip() or "\0" in text:
            raise ConfigError(f"{text!r}: no address of a live view; give a socket's path such as /run/kvactors/live.sock")
        host, colon, port = text.rpartition(":")
        if "/" in text or text.endswith(".sock"):
            return cls(path=_checked_path(text))
        if not colon:
            raise ConfigError(
                f"{text}: no address of a live view: a path has a slash or ends in .sock (./{text}, {text}.sock), "
                "and a port is given as 127.0.0.1:PORT"
            )
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
            raise ConfigError(f"{text}: {port!r} is no port; give HOST:PORT with a port from 1 to 65535, or a socket's path")
        return cls(host=_loopback(host, text), port=int(port))

    def of_rank(self, rank: str, *, ranks: int = 1, replica: int = 0) -> Address:
        """The address of one rank of several: `live.sock` becomes `live.rank0.sock`; a port stays as it is for the scheduler,
        and moves up by rank + 1 for a worker.

        Args:
            ranks: workers of one vLLM engine.
            replica: the engine's number among those with the same address (data parallelism).

        Raises:
            ConfigError: the path, or the port, is out of bounds then.
        """
        if self.path:
            path = Path(self.path)
            part = rank if rank == SCHEDULER else f"rank{rank}"
            part = f"dp{replica}.{part}" if replica else part
            return Address(path=_checked_path(str(path.with_name(f"{path.stem}.{part}{path.suffix or '.sock'}"))))
        port = self.port + replica * (ranks + 1) + (0 if rank == SCHEDULER else 1 + int(rank))
        if port > 65535:
            raise ConfigError(f"{self}: the port of rank {rank} would be {port}; choose a lower one")
        return Address(host=self.host, port=port)

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def live_address(given: str = "") -> Address | None:
    """Where a live view was asked for: by an option, or else by the environment; None = nowhere.

    Raises:
        ConfigError: it is no address.
    """
    text = given or os.environ.get(VARIABLE, "")
    return Address.of(text) if text else None


def found_addresses(given: Sequence[str]) -> list[Address]:
    """What a reader means: sockets and ports as they are, a directory as all sockets in it, and a path without a socket as its
    ranks' sockets beside it. Without any, what the environment names.

    Raises:
        ConfigError: nothing was named, or nothing is there.
    """
    texts = list(given) or [os.environ.get(VARIABLE, "")]
    if texts == [""]:
        raise ConfigError(f"which engine? give a socket's path, a directory of sockets or HOST:PORT, or set {VARIABLE}")
    found: dict[Address, None] = {}
    for text in texts:
        try:
            found.update(dict.fromkeys(_expanded(text)))
        except OSError as error:
            raise ConfigError(f"{text[:80]}: is no path: {error.strerror or error}") from error
    return list(found)


def is_file(text: str) -> bool:
    """Whether there is a plain file of this name."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long, or a zero byte
        return False


def _expanded(text: str) -> list[Address]:
    path = Path(text)
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.is_socket())
        if not inside:
            raise ConfigError(f"{text}: no socket is in this directory; is an engine with {VARIABLE} set running?")
        return [_to_read(str(p)) for p in inside]
    if path.exists() and not path.is_socket():
        what = "a file" if path.is_file() else "something else"
        raise ConfigError(
            f"{text}: is {what} and no engine's socket; a file that `replay --stories` wrote is for `kvactors story`"
        )
    address = _to_read(text)
    if address.path and not path.exists():
        ranks = sorted(
            p for p in path.parent.glob(f"{_literal(path.stem)}.*{_literal(path.suffix or '.sock')}") if p.is_socket()
        )
        if not ranks:
            raise ConfigError(
                f"{text}: there is nothing of this name; is an engine with {VARIABLE} set running, as the same user? "
                "The view ends with its engine: `kvactors replay --speed 20` makes a replay last"
            )
        return [_to_read(str(p)) for p in ranks]
    return [address]


def _to_read(text: str) -> Address:
    """The address that a reader means: a name alone is a path too, since only what is there is read."""
    return Address.of(text if ":" in text or "/" in text or text.endswith(".sock") else f"./{text}")


def _literal(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _checked_path(path: str) -> str:
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise ConfigError(
            f"{path}: longer than the {MOST_PATH_BYTES} bytes that a unix socket's name may have; choose a shorter path"
        )
    return path


def _loopback(host: str, text: str) -> str:
    bare = host.removeprefix("[").removesuffix("]")
    if bare == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        address = None
    if address is None or not address.is_loopback:
        raise ConfigError(
            f"{text}: {bare or 'no host'} is not this machine's loopback, and a live view is for this machine; "
            "give 127.0.0.1:PORT, or a socket's path"
        )
    return str(address)
