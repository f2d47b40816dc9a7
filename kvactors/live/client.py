"""Reads a live view: a request over its socket, an answer that is checked before it is believed."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TypeVar
from urllib.parse import quote

import msgspec

from kvactors.errors import LiveViewError
from kvactors.live.address import Address
from kvactors.live.snapshot import SCHEMA, Snapshot
from kvactors.live.view import StoryPart

ANSWER_S = 5.0
MOST_ANSWER_BYTES = 8 << 20

T = TypeVar("T")


class NotFoundError(LiveViewError):
    """The view has nothing under that name."""


def read_snapshot(address: Address) -> Snapshot:
    """What goes on in the engine.

    Raises:
        LiveViewError: nobody answers, or not a view of this version.
    """
    return _decoded(address, get(address, "/snapshot"), Snapshot)


def read_story(address: Address, request: str) -> list[StoryPart]:
    """What happened to a request, one part for each attempt at it.

    Raises:
        NotFoundError: nothing is known of it.
        LiveViewError: nobody answers, or not a view of this version.
    """
    return _decoded(address, get(address, f"/story?request={quote(request, safe='')}"), list[StoryPart])


def read_names(address: Address) -> list[str]:
    """The requests whose story is kept, the latest last.

    Raises:
        LiveViewError: nobody answers, or not a view of this version.
    """
    return _decoded(address, get(address, "/stories"), list[str])


def get(address: Address, target: str) -> bytes:
    """The body of an answer.

    Raises:
        NotFoundError: the answer is 404.
        LiveViewError: there is no answer, or it is an error.
    """
    try:
        answer = _exchange(address, f"GET {target} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode("latin-1"))
    except OSError as error:
        hint = "; is the engine running, as the same user?" if address.path else "; is the engine running?"
        raise LiveViewError(f"{address}: {error.strerror or error or 'no answer in time'}{hint}") from error
    head, blank, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if not blank or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise LiveViewError(f"{address}: what answers there is no live view of an engine")
    if words[1] != b"200":
        kind = NotFoundError if words[1] == b"404" else LiveViewError
        raise kind(f"{address}: {_problem(body)}")
    return body


def _exchange(address: Address, request: bytes) -> bytes:
    deadline_s = time.monotonic() + ANSWER_S
    family = socket.AF_UNIX if address.path else socket.AF_INET6 if ":" in address.host else socket.AF_INET
    answer = bytearray()
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as asking:
        asking.settimeout(ANSWER_S)
        asking.connect(address.path or (address.host, address.port))
        asking.sendall(request)
        while part := asking.recv(1 << 16):
            answer += part
            if len(answer) > MOST_ANSWER_BYTES:
                raise LiveViewError(f"{address}: the answer is longer than {MOST_ANSWER_BYTES >> 20} MiB; it is no live view")
            asking.settimeout(max(0.001, deadline_s - time.monotonic()))
    return bytes(answer)


def _problem(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return "an error that says nothing"


def _decoded(address: Address, body: bytes, kind: type[T]) -> T:
    try:
        found = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LiveViewError(
            f"{address}: the answer is none of this version's ({error}); run the engine's own kvactors"
        ) from error
    if isinstance(found, Snapshot) and found.schema != SCHEMA:
        raise LiveViewError(f"{address}: a snapshot of schema {found.schema}, this is {SCHEMA}; run the engine's own kvactors")
    return found
