"""What a transport has written, in numbers that anyone may read at any time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WriteCounts:
    """Of one worker's end, since it was made.

    Attributes:
        writes: `write` calls that ended well; empty ones count.
        failures: `write` calls that ended otherwise: failed, refused or cancelled.
        nbytes, descriptors: of the writes that ended well.
        seconds: spent in `write` by all of them, waiting for one's turn included.
        retries: parts of a write that were sent a second time, after a connection was lost.
    """

    writes: int = 0
    failures: int = 0
    nbytes: int = 0
    descriptors: int = 0
    seconds: float = 0.0
    retries: int = 0
