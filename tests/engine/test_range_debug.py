"""KVACTORS_RANGE_DEBUG=1 shows every group's ranges, sparse state included."""

from __future__ import annotations

import logging
import re

import pytest

from kvactors.actors.range_debug import LOGGER, VARIABLE
from tests.engine.rig import COMPRESSED, FULL, STATE, Rig, hashes

RANGE = re.compile(r" layer=(\d+) block=(\d+) .*offset=(\d+) bytes=(\d+) ")


async def test_every_group_shows_a_load_range(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with caplog.at_level(logging.DEBUG, LOGGER):
        async with Rig() as rig:
            fine = hashes(4)
            await rig.save("w", fine)
            await rig.run(rig.request("a", fine, load=rig.all_blocks(fine), first_id=9))
    lines = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    for group in (FULL, COMPRESSED, STATE):
        gets = [line for line in lines if "get range" in line and f"group={group} " in line]
        assert gets, f"group {group} has no load range"
        assert all(
            f"{field}=" in line for line in gets for field in ("request", "layer", "block", "offset", "bytes", "cache_event")
        )
        blocks = rig.all_blocks(fine)[group]
        wanted = sorted((int(r.layer), b, r.offset, r.entry.nbytes) for r in rig.layout.ranges(group) for b in blocks)
        for kind in ("get", "put"):
            said = [RANGE.search(line) for line in lines if f"{kind} range" in line and f"group={group} " in line]
            assert sorted(tuple(map(int, found.groups())) for found in said if found) == wanted
    assert any("committed" in line for line in lines)


async def test_it_is_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, LOGGER):
        async with Rig() as rig:
            await rig.save("w", hashes(2))
    assert not [r for r in caplog.records if r.name == LOGGER]
