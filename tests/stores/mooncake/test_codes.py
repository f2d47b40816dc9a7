"""Mooncake's codes as outcomes: docs/design/store-contract.md has the table."""

from __future__ import annotations

import pytest

from kvactors.core.store import Outcome
from kvactors.stores.mooncake.codes import outcome_of, range_outcome

TABLE = {
    -200: Outcome.NO_SPACE,
    -600: Outcome.INVALID,
    -601: Outcome.NOT_OWNER,
    -702: Outcome.NO_REPLICA,
    -703: Outcome.NOT_READY,
    -704: Outcome.NOT_FOUND,
    -705: Outcome.EXISTS,
    -706: Outcome.LEASED,
    -707: Outcome.LEASE_EXPIRED,
    -800: Outcome.TRANSFER_FAILED,
    -900: Outcome.UNREACHABLE,
    -901: Outcome.UNREACHABLE,
}


@pytest.mark.parametrize("code", TABLE)
def test_a_known_code_has_one_outcome_from_every_call(code: int) -> None:
    assert outcome_of(code) is range_outcome(code, 8) is TABLE[code]


@pytest.mark.parametrize("code", [-1, -1000, -7, 1])
def test_an_unknown_code_is_never_a_success(code: int) -> None:
    assert outcome_of(code) is Outcome.INVALID
    assert range_outcome(code, 8) is Outcome.TRANSFER_FAILED


def test_a_range_call_succeeds_only_with_every_byte() -> None:
    assert outcome_of(0) is Outcome.OK
    assert [range_outcome(moved, 8) for moved in (8, 7, 9, 0)] == [Outcome.OK, *[Outcome.TRANSFER_FAILED] * 3]
    assert range_outcome(0, 0) is Outcome.OK
