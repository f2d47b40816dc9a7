"""What prefill and decode workers say to each other over a link, and how it is written: msgpack, one message a frame.

A decode worker opens the link, once for each prefill worker that it pulls from, and says `Hello`; the answer is `Welcome`, or a
`Problem` and the end of the link. From then on, in any order and for any number of requests:

    decode -> prefill   Pull      write these blocks (empty lists: write nothing, I only free you)
                        Abort     write nothing more for this request, and say when that is so
    prefill -> decode   Sent      all of it was written, and has arrived
                        Failed    a transfer failed; abort before your blocks are used again
                        Refused   nothing was written, nothing will be
                        Stopped   the answer to Abort: nothing follows
    both                Problem   what you sent makes no sense; the link ends where it says nothing of a request

When a link ends, everything that was asked over it and not answered has failed, on both sides: prefill stops as if aborted,
decode opens a new link to abort, or finds that the other process is gone. Source: docs/design/disagg.md.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec

from kvactors.disagg.blocks import RequestBlocks
from kvactors.disagg.geometry import PROTOCOL_VERSION, WorkerGeometry
from kvactors.disagg.states import Worker
from kvactors.errors import WireError

MAX_FRAME_BYTES = 16 << 20
"""A geometry of 200 layers takes some 100 KiB, the blocks of a million tokens 1 MiB."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Text = Annotated[str, msgspec.Meta(max_length=65536)]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of a link.

    Attributes:
        engine_id: the decode instance's.
        process: the decode worker's, new with every start.
        memory: the address of its memory for the transport.
    """

    protocol: int = PROTOCOL_VERSION
    engine_id: Name
    process: Name
    memory: Name
    geometry: WorkerGeometry


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The prefill worker takes the link. `process`: its own, new with every start."""

    protocol: int = PROTOCOL_VERSION
    engine_id: Name
    process: Name
    pp_rank: int
    tp_rank: int

    @property
    def worker(self) -> Worker:
        return Worker(self.pp_rank, self.tp_rank)


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """`pullers`: how many decode workers pull from this prefill worker in all (`heads.expected_pulls`)."""

    transfer_id: Name
    pullers: Count
    blocks: RequestBlocks


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    transfer_id: Name
    pullers: Count


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    transfer_id: Name


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    transfer_id: Name
    reason: Text


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    transfer_id: Name
    reason: Text


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    transfer_id: Name


class Problem(msgspec.Struct, frozen=True, tag="problem"):
    reason: Text


def is_name(value: object) -> bool:
    """Whether a transfer id, or an engine id, can be said on a link: 1 to 512 characters that UTF-8 has."""
    if not isinstance(value, str) or not 0 < len(value) <= 512:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


Message = Union[Hello, Welcome, Pull, Abort, Sent, Failed, Refused, Stopped, Problem]  # noqa: UP007 - msgspec reads it


class _Version(msgspec.Struct):
    """What every version's Hello and Welcome have."""

    type: str = ""
    protocol: int = PROTOCOL_VERSION


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_version = msgspec.msgpack.Decoder(_Version)


def encode(message: Message) -> bytes:
    """The frame of a message.

    Raises:
        WireError: it is larger than a frame may be, or has text that UTF-8 has not, or a number beyond 64 bits.
    """
    try:
        frame = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise WireError(f"a {type(message).__name__} cannot be written: {error}") from None
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(frame)} bytes is larger than a frame may be, {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes) -> Message:
    """The message of a frame.

    Raises:
        WireError: it is too large, of another protocol version, or not a message; says which, and what is wrong with it.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes is larger than a frame may be, {MAX_FRAME_BYTES}")
    try:
        version = _version.decode(frame).protocol
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"a frame of {len(frame)} bytes is no message: {error}") from None
    if version != PROTOCOL_VERSION:
        raise WireError(
            f"protocol version {version}, and this side speaks {PROTOCOL_VERSION}; run the same release on both sides"
        )
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"a frame of {len(frame)} bytes is no message: {error}") from None
