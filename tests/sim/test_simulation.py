"""Seeded simulations: no invariant breaks, the log is the same in every process, and failing runs get smaller."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from kvactors.engine import Engine
from kvactors.errors import ConfigError, StoreError
from kvactors.simulate.faults import PRESETS
from kvactors.simulate.run import Totals, command, run_seeds, scenario, shrink
from kvactors.simulate.store import Mishap, SimulatedPool, SimulatedStore
from kvactors.simulate.world import Outcomes, Scenario, World
from tests.sim.corpus import CORPUS
from tests.sim.mutants import MUTANTS, Patch

pytestmark = pytest.mark.sim

SEEDS = 1000


def test_a_thousand_seeds_over_all_presets_break_nothing() -> None:
    totals = Totals()
    for outcomes in run_seeds([scenario(seed, "all") for seed in range(SEEDS)], jobs=2):
        assert outcomes.violations == [], command(outcomes.scenario)
        totals.add(outcomes)
    assert set(totals.presets) == set(PRESETS)
    assert totals.events / SEEDS >= 200
    assert totals.saved > 0
    assert totals.loaded > 0
    assert totals.joined > SEEDS, "layers ride in each other's calls"
    assert totals.paused > 0, "some store stayed full"
    kinds = set(totals.injected)
    assert kinds >= {"key", "short", "raises", "dies", "spike", "freeze", "evict", "full", "kill", "event_lost", "slow"}
    assert "crash" in kinds


@pytest.mark.parametrize("regression", CORPUS, ids=lambda s: f"{s.faults}-{s.seed}")
def test_seeds_that_found_something_once_stay_good(regression: Scenario) -> None:
    assert World(regression).run().violations == []


@pytest.mark.parametrize("model", ["worked-example", "windows", "latent", "pp2", "tp2", "qwen3.5-9b"])
def test_every_model_serves_requests(model: str) -> None:
    requests = 6 if model == "qwen3.5-9b" else 20
    runs = [World(scenario(seed, "none", requests=requests, model=model)).run() for seed in range(3, 6)]
    assert [run.violations for run in runs] == [[], [], []]
    assert all(run.saved for run in runs)
    assert sum(run.loaded for run in runs) > 0


def test_a_layout_with_a_boundary_of_many_blocks_is_loaded_too() -> None:
    runs = [World(scenario(seed, "none", model="deepseek-v4-flash", requests=10)).run() for seed in range(3)]
    assert [run.violations for run in runs] == [[], [], []]
    assert sum(run.loaded for run in runs) > 0


def test_a_lost_answer_is_that_of_a_call_that_was_carried_out() -> None:
    pool = SimulatedPool(bytearray(256), 128, 128, lambda: 0.0, random.Random(0), lease_s=10.0)
    store = SimulatedStore(pool, 0, lambda _call, _keys: Mishap({}, lost_answer=StoreError("lost")))
    with pytest.raises(StoreError, match="lost"):
        store.put_open(["k"], [8])
    assert store.open_sessions() == ["put k"]
    assert pool.touched == {"k"}


def _runs_until_it_raises() -> None:
    for seed in range(20):
        World(scenario(seed, "none")).run()


def test_a_load_outside_a_step_that_raises_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(*_: object) -> None:
        raise RuntimeError("injected by the test")

    monkeypatch.setattr(Engine, "load", load)
    with pytest.raises(RuntimeError, match="injected by the test"):
        _runs_until_it_raises()


LOGS = """
from kvactors.simulate.run import scenario
from kvactors.simulate.world import World
print([World(scenario(seed, "all")).run().log_hash for seed in range(8)])
"""


def test_the_same_seed_gives_the_same_log_whatever_the_hash_seed() -> None:
    logs = [
        subprocess.run(
            [sys.executable, "-c", LOGS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "4242")
    ]
    assert logs[0] == logs[1]
    assert logs[0].count("'") == 16


def test_another_seed_gives_another_log() -> None:
    assert World(scenario(1, "none")).run().log_hash != World(scenario(2, "none")).run().log_hash


def test_a_failing_run_gets_smaller_and_is_repeated_by_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    patch, preset = MUTANTS["coverage_counts_failed_ranges"]
    patch(Patch(monkeypatch))
    failing = next(s for s in (scenario(seed, preset) for seed in range(100)) if World(s).run().violations)
    small = shrink(failing)
    again = World(small).run()
    assert again.violations
    assert small.requests < failing.requests
    assert small.most_faults is not None
    most_faults = "" if small.most_faults is None else f" --most-faults {small.most_faults}"
    assert command(small) == (
        f"kvactors simulate --seeds {small.seed}:{small.seed + 1} --faults {preset} --requests {small.requests}{most_faults}"
    )
    assert any("committed" in line for line in again.story)
    assert again.log_tail


def test_a_limit_of_faults_is_kept() -> None:
    limited = replace(scenario(5, "flaky-store"), most_faults=3)
    assert sum(World(limited).run().injected.values()) == 3


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such preset"):
        scenario(0, "gremlins")


def test_summary_counts_runs() -> None:
    totals = Totals()
    s = scenario(0, "none")
    totals.add(Outcomes(s, events=5, saved=2))
    totals.add(Outcomes(s, violations=["I1: bad"]))
    assert totals.line().startswith("2 seeds over 1 preset(s): 5 events")
    assert "1 failing" in totals.line()
