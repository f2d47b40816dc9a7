"""Mooncake's return codes as outcomes: the table of docs/design/store-contract.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvactors.core.store import Outcome

OK, RPC_FAIL, RPC_TIMEOUT, OBJECT_NOT_FOUND, REPLICA_NOT_READY = 0, -900, -901, -704, -703

UNREACHABLE = (RPC_FAIL, RPC_TIMEOUT)
"""The master did not answer: every session of this client is void (I11)."""

OUTCOMES: Mapping[int, Outcome] = MappingProxyType(
    {
        OK: Outcome.OK,
        -200: Outcome.NO_SPACE,
        -600: Outcome.INVALID,
        -601: Outcome.NOT_OWNER,
        -702: Outcome.NO_REPLICA,
        REPLICA_NOT_READY: Outcome.NOT_READY,
        OBJECT_NOT_FOUND: Outcome.NOT_FOUND,
        -705: Outcome.EXISTS,
        -706: Outcome.LEASED,
        -707: Outcome.LEASE_EXPIRED,
        -800: Outcome.TRANSFER_FAILED,
        RPC_FAIL: Outcome.UNREACHABLE,
        RPC_TIMEOUT: Outcome.UNREACHABLE,
    }
)


def outcome_of(code: int) -> Outcome:
    """What a call on sessions answered for one key; INVALID for a code that is not in the table."""
    return OUTCOMES.get(code, Outcome.INVALID)


def range_outcome(answer: int, nbytes: int) -> Outcome:
    """What a range call that should move `nbytes` answered for one key: bytes moved, or a code."""
    if answer == nbytes:
        return Outcome.OK
    return Outcome.TRANSFER_FAILED if answer >= 0 else OUTCOMES.get(answer, Outcome.TRANSFER_FAILED)
