"""Every benchmark runs, names its cases once, and moves what it says; what its figures are is not asked here."""

from __future__ import annotations

import math

import pytest

from kvactors.bench import lookup, memory, mooncake, overlap, replay, state_rows, step
from kvactors.bench.figures import Answer, Skipped
from kvactors.bench.measure import Measured
from kvactors.bench.rows import NAMES
from kvactors.core.observe import Span
from tests.bench.sizes import CASES, TINY


def check(name: str, answer: Answer) -> None:
    rows = [figure.as_dict() for figure in answer.figures]
    assert len(rows) == CASES[name]
    assert len({row["case"] for row in rows}) == len(rows)
    for row in rows:
        assert row["bench"] == name
        assert math.isfinite(row["ratio"])
        assert row["ok"] is (row["target"] is None or row["ok"])
        assert (row["baseline"] is None) <= (row["target"] is not None)


@pytest.mark.parametrize("name", [name for name in TINY if name != "memory"])
def test_it_runs(name: str) -> None:
    module, sizes = TINY[name]
    said: list[str] = []
    check(name, module.measure(sizes, said.append))
    assert said


def test_every_benchmark_is_tried_here_or_needs_more_than_there_may_be() -> None:
    assert set(NAMES) == {*TINY, "lookup", "mooncake", "state-rows"}


def test_the_step_gives_its_cost_model() -> None:
    module, sizes = TINY["step"]
    notes = module.measure(sizes, lambda _: None).notes
    assert len(notes) == 4
    assert all("µs x blocks" in note for note in notes)


@pytest.mark.parametrize("module", [step, overlap], ids=["step", "overlap"])
def test_a_timeline_shows_actors_workers_and_compute(module: object) -> None:
    class Spans(list[Span]):
        def span(self, span: Span) -> None:
            self.append(span)

    spans = Spans()
    measured, sizes = next(both for both in TINY.values() if both[0] is module)
    measured.measure(sizes, lambda _: None, observer=spans)
    tracks = {span.track for span in spans}
    assert {"coordinator", "group-0", "compute" if module is overlap else "harness"} <= tracks
    assert any(track.startswith("worker-") for track in tracks)


# -- replay ------------------------------------------------------------------------------------------------------------


def test_a_drawn_trace_is_the_same_each_time_and_repeats_prefixes() -> None:
    requests = list(replay.synthetic(200))
    assert requests == list(replay.synthetic(200))
    assert 10_000 < sum(r.input_length for r in requests) / len(requests) < 25_000
    seen: set[int] = set()
    again = 0
    for r in requests:
        again += sum(h in seen for h in r.hash_ids)
        seen.update(r.hash_ids)
    assert 0.5 < again / sum(len(r.hash_ids) for r in requests) < 0.8


def test_a_plan_ends_where_the_store_is_full() -> None:
    layout = TINY["replay"][1].models[0].layout()
    whole = replay.Plan(layout, replay.synthetic(8), 1 << 40)
    part = replay.Plan(layout, replay.synthetic(8), whole.stored_bytes // 2)
    assert len(whole.prompts) == 8
    assert 0 < len(part.prompts) < 8
    assert part.stored_bytes <= whole.stored_bytes // 2
    assert any(prompt.hit_tokens for prompt in whole.prompts)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_samples_after_each_batch() -> None:
    samples = memory.run(160)
    assert len(samples) == 20
    check("memory", memory.answer(160, samples))


def test_memory_runs_in_a_process_of_its_own() -> None:
    check("memory", memory.measure(TINY["memory"][1], lambda _: None))


@pytest.mark.parametrize(("leak_kib", "ok"), [(0, True), (40, False)])
def test_memory_that_grows_misses_its_target(leak_kib: int, ok: bool) -> None:
    samples = [memory.Sample(100_000 + leak_kib * i, 300_000) for i in range(100)]
    at_the_end = memory.answer(800, samples).figures[0]
    assert at_the_end.ok is ok


# -- what needs more than there may be ---------------------------------------------------------------------------------


def test_mooncake_as_figures() -> None:
    seconds = {mooncake.RAW: (1.0,), mooncake.WHOLE: (0.5,), mooncake.ENGINE: (0.6,), mooncake.MEMCPY: (0.1,)}
    row = mooncake.Row(16, Measured(seconds), Measured(seconds))
    figures = mooncake.answer([row], 32).figures
    assert [round(f.ratio, 6) for f in figures] == [0.6, 1.2, 6.0] * 2
    assert [str(f.target) for f in figures] == ["<= 0.7", "None", "None"] * 2


def test_state_rows_as_figures() -> None:
    ways = (state_rows.GATHER, state_rows.SCATTER, state_rows.MEMCPY, state_rows.FRESH_GATHER, state_rows.FRESH_MEMCPY)
    row = state_rows.Row(64, 1 << 30, Measured(dict(zip(ways, ((1.2,), (1.3,), (1.0,), (2.0,), (1.0,)), strict=True))))
    figures = state_rows.answer([row]).figures
    assert [round(f.ratio, 3) for f in figures] == [0.833, 0.769, 0.5]
    assert [f.ok for f in figures] == [True, False, True]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lookup_beside_vllm() -> None:
    try:
        answer = lookup.measure(lookup.Sizes(2000, 3), lambda _: None)
    except Skipped as reason:
        pytest.skip(str(reason))
    assert len(answer.figures) == 4
    for figure in answer.figures:
        assert figure.ratio < 2, figure
