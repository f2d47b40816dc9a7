"""What a snapshot and a story say about an engine that works, and about one in trouble."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvactors.core.metrics import WAIT_BUCKETS_S
from kvactors.core.store import Outcome
from kvactors.core.story import MOST_EVENTS, MOST_EVENTS_EACH, MOST_REQUESTS, StoryBook
from kvactors.live import snapshot as snapshots
from kvactors.live.client import NotFoundError, read_names, read_snapshot, read_story
from kvactors.live.stories import lines
from kvactors.live.view import StoryPart
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import COMPRESSED, FULL, STATE, Rig, arrived, full_layout, hashes
from tests.live.asking import viewed


async def test_a_snapshot_has_the_engines_own_counts(tmp_path: Path) -> None:
    async with Rig() as rig:
        with viewed(rig.engine, tmp_path, name="rig", rank="3") as view:
            fine = hashes(4)
            await rig.engine.lookup(fine, 65)
            await rig.save("a", fine)
            hit = await rig.engine.lookup(fine, 65)
            await rig.run(rig.request("b", fine, load=rig.all_blocks(fine), first_id=20))
            s, stats = read_snapshot(view.address), rig.engine.stats()
    assert (s.name, s.rank, s.model, s.state, s.circuit) == ("rig", "3", "m", "running", "closed")
    assert [(g.id, g.saved, g.loaded, g.bytes_saved) for g in s.groups] == [
        (FULL, 4, 4, 64),
        (COMPRESSED, 2, 2, 64),
        (STATE, 1, 1, 36),
    ]
    assert (s.counters["lookups"], s.counters["lookup_misses"]) == (2, 1)
    assert (s.counters["lookup_tokens"], s.counters["lookup_hit_tokens"]) == (130, hit.tokens) == (130, 64)
    assert s.counters["saved_bytes"] == sum(g.bytes_saved for g in stats.groups.values())
    assert s.put_ended == {"committed": 7, "revoked": 0, "refused": 0, "poisoned": 0, "abandoned": 0}
    assert s.gauges["sessions_open"] == 0
    assert s.gauges["stories"] == 2
    assert all(not g.puts and not g.gets and g.oldest_s == 0 for g in s.groups)


async def test_a_snapshot_shows_what_is_under_way(tmp_path: Path) -> None:
    faults = [Fault(what="freeze", call="put_ranges", nth=1)]
    async with Rig(full_layout(layers=4), faults, config={"workers": 1}) as rig:
        with viewed(rig.engine, tmp_path) as view:
            request = rig.request("a", hashes(2), save={0: [0, 1]})
            step = rig.engine.begin_step([request])
            for layer in range(4):
                await step.wait_layer(layer)
                rig.compute(layer, request)
                step.layer_ready(layer)
            await arrived(rig.store.gates["gate"])
            await rig.engine.lookup(hashes(1, "nothing"), 17)
            s = read_snapshot(view.address)
            assert s.queued["save"] == s.gauges["queue_depth"] == 3
            assert s.groups[0].puts == {"open": 2}
            assert s.groups[0].oldest_s > 0
            assert [(c.group, c.keys, c.call) for c in s.calls] == [(0, 2, "put ranges")]
            assert s.calls[0].for_s == pytest.approx(s.gauges["longest_call_s"], abs=1e-5)
            assert (s.gauges["sessions_open"], s.gauges["pending_saves"]) == (2, 4)
            rig.store.release()
            await step.end()
            await step.settled()


async def test_what_the_owner_counts_is_added_and_waits_are_kept_by_length(tmp_path: Path) -> None:
    async with Rig(full_layout()) as rig:
        totals = {"lookups": 5, "hit_tokens": 64, "exposed_wait_s": 1.5, "nonsense": 7}
        with viewed(rig.engine, tmp_path, totals=lambda: totals, gauges=lambda: {"pinned": 2}) as view:
            await rig.engine.lookup(hashes(1), 17)
            view.note_waits({"exposed_wait_s": [0.0002, 0.0003, 7.0, 100.0], "save_wait_s": 0.5, "steps": 3})
            s = read_snapshot(view.address)
    assert (s.counters["lookups"], s.counters["hit_tokens"], s.gauges["pinned"]) == (6, 64, 2)
    assert not {"nonsense", "exposed_wait_s"} & set(s.counters)
    loads = s.waits["exposed_wait_s"]
    assert (loads.count, loads.sum_s) == (4, pytest.approx(107.0005))
    assert loads.at_most[:3] == [0, 1, 2]
    assert loads.at_most[-3:] == [2, 3, 3]
    assert len(loads.at_most) == len(WAIT_BUCKETS_S)
    assert s.waits["save_wait_s"].count == 1


async def test_many_sessions_are_counted_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SLICE", 2)
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr(snapshots.asyncio, "sleep", rest)
    async with Rig(full_layout()) as rig:
        table = rig.engine.inside().tables[0]
        for i in range(5):
            table.acquire_get(f"key {i}")
        part = await snapshots.look(rig.engine.inside())
        assert part.groups[0].gets == {"opening": 5}
        assert rests == [snapshots.REST_S] * 2
        table.gets.clear()


def test_rare_causes_are_put_together() -> None:
    causes = {f"cause {i}": i + 1 for i in range(100)}
    kept = snapshots._most(causes)
    assert len(kept) == snapshots.MOST_CAUSES + 1
    assert sum(kept.values()) == sum(causes.values())
    assert kept["cause 99"] == 100


# -- stories -------------------------------------------------------------------------------------------------------------


def told(part: StoryPart) -> list[str]:
    return [line.split("s  ", 1)[1].strip() for line in lines(part)]


async def test_a_story_of_a_failed_load_names_the_cause(tmp_path: Path) -> None:
    faults = [Fault(what="outcome", call="get_ranges", outcome=Outcome.TRANSFER_FAILED, nth=2, times=1)]
    async with Rig(full_layout(), faults) as rig:
        with viewed(rig.engine, tmp_path) as view:
            fine = hashes(2)
            await rig.save("a", fine)
            await rig.run(rig.request("b", fine, load={0: [0, 1]}, first_id=9))
            (part,) = read_story(view.address, "b")
    story = told(part)
    assert story[0].endswith("step 2 begins: 2 blocks to load, 0 to save")
    assert any("get layer 1 failed (transfer failed)" in line for line in story)
    assert any("get released (not loaded: layer 1: transfer failed)" in line for line in story)
    assert any("request" in line and "load failed from token 0 on (layer 1: transfer failed)" in line for line in story)


async def test_a_story_of_a_revoked_save_names_the_cause(tmp_path: Path) -> None:
    faults = [Fault(what="outcome", call="put_ranges", outcome=Outcome.TRANSFER_FAILED, times=1)]
    async with Rig(full_layout(), faults) as rig:
        with viewed(rig.engine, tmp_path) as view:
            await rig.save("a", hashes(2))
            step = rig.engine.begin_step([rig.request("b", hashes(1, "other"), save={0: [0]})])
            await step.abort("the forward pass raised")
            await step.settled()
            story, aborted = (told(read_story(view.address, name)[0]) for name in ("a", "b"))
    assert any("put open -> revoking (layer 0: transfer failed)" in line for line in story)
    assert any("put revoking -> revoked" in line for line in story)
    assert any("step 2 is aborted (the forward pass raised)" in line for line in aborted)


async def test_a_story_says_why_nothing_was_saved_or_moved(tmp_path: Path) -> None:
    faults = [Fault(what="outcome", call="get_open", outcome=Outcome.NOT_FOUND)]
    async with Rig(full_layout(), faults) as rig:
        with viewed(rig.engine, tmp_path) as view:
            fine = hashes(2)
            await rig.save("a", fine)
            await rig.save("a", fine)
            await rig.run(rig.request("b", fine, load={0: [0]}, first_id=9))
            await rig.run(rig.request("b", hashes(3, "b"), save={0: [2]}, first_id=9))
            await rig.engine.release("b")
            again, failed = (told(read_story(view.address, name)[0]) for name in ("a", "b"))
            await rig.engine.drain()
            await rig.run(rig.request("c", fine, save={0: [0]}))
            (late,) = read_story(view.address, "c")
    assert any("blocks 0-1" in line and "put not begun (it is saved already" in line for line in again)
    assert any("get opening -> failed (not found)" in line for line in failed)
    assert any("put not begun (a load of its request failed)" in line for line in failed)
    assert failed[-1].endswith("released (finished)")
    assert any("step 5 passes through (the engine is draining)" in line for line in told(late))


async def test_a_name_that_is_no_utf_8_is_told_with_a_question_mark(tmp_path: Path) -> None:
    """As the names of files come that are no UTF-8: half of a surrogate pair."""
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path) as view:
            await rig.save("a\udcff", hashes(1))
            assert read_names(view.address) == ["a?"]
            rig.engine.keep_stories().record("b", 0, 0, "cannot read /mnt/\udcff")
            assert [part.events[0][3] for part in read_story(view.address, "b")] == ["cannot read /mnt/?"]


async def test_attempts_at_a_request_are_told_together(tmp_path: Path) -> None:
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path) as view:
            for name in ("cmpl-1", "cmpl-1#1", "cmpl-1#2", "cmpl-11"):
                await rig.save(name, hashes(1))
            assert [part.request for part in read_story(view.address, "cmpl-1")] == ["cmpl-1", "cmpl-1#1", "cmpl-1#2"]
            assert [part.request for part in read_story(view.address, "cmpl-1#1")] == ["cmpl-1#1"]
            assert read_names(view.address)[-1] == "cmpl-11"
            with pytest.raises(NotFoundError, match="no story of 'cmpl-2'"):
                read_story(view.address, "cmpl-2")


async def test_nothing_is_noted_before_somebody_asks() -> None:
    rig = Rig(full_layout())
    rig.engine = type(rig.engine)(rig.layout, rig.store, {w: a.ctypes.data for w, a in rig.local.items()}, rig.config)
    async with rig:
        await rig.save("a", hashes(1))
        assert rig.engine.story("a") == []
        assert all(table.record is None for table in rig.engine.inside().tables)
        book = rig.engine.keep_stories()
        assert rig.engine.keep_stories() is book
        await rig.save("b", hashes(1, "b"))
        assert rig.engine.story("a") == []
        assert rig.engine.story("b")[-1].endswith("put committing -> committed")


class Tick:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        self.at += 1.0
        return self.at


def test_a_book_is_bounded_in_requests_and_in_events() -> None:
    book = StoryBook(Tick())
    for i in range(MOST_REQUESTS + 10):
        book.record(f"r{i}", 0, 0, "x")
    assert len(book) == MOST_REQUESTS
    assert (book.events("r9"), len(book.events("r10"))) == ([], 1)
    for _ in range(MOST_EVENTS_EACH + 5):
        book.record("long", 0, 1, "y")
    assert len(book.events("long")) == MOST_EVENTS_EACH
    for i in range(MOST_EVENTS // MOST_EVENTS_EACH + 2):
        for _ in range(MOST_EVENTS_EACH):
            book.record(f"l{i}", 0, 1, "z")
    assert sum(len(book.events(r)) for r in book.requests()) <= MOST_EVENTS
    assert book.events("long") == []
    assert book.requests()[-1].startswith("l")


def test_lines_join_neighbours_that_say_the_same() -> None:
    part = StoryPart(
        "r",
        [
            (0.0, -1, -1, "step 1 begins"),
            (0.1, 0, 0, "open"),
            (0.2, 0, 1, "open"),
            (0.25, 0, 4, "open"),
            (0.3, 0, 3, "open"),
            (0.4, 1, 4, "open"),
            (0.5, 1, 5, "closed\x1b[2J"),
        ],
    )
    assert [" ".join(line.split()) for line in lines(part)] == [
        "0.000000 s request step 1 begins",
        "0.100000 s group 0 blocks 0-1, 3-4 open",
        "0.400000 s group 1 block 4 open",
        "0.500000 s group 1 block 5 closed\\x1b[2J",
    ]
    assert len(list(lines(part, every=True))) == 7
