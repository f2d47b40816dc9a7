"""The exporter's text: what Prometheus' own parser reads, against the one list of metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvactors.core import metrics, sessions
from kvactors.core.metrics import FAMILIES, REVOKE_CAUSES
from kvactors.core.stats import cause_label
from kvactors.core.store import Outcome
from kvactors.live.client import get, read_snapshot
from kvactors.live.exposition import exposition
from kvactors.live.snapshot import Snapshot
from kvactors.simulate.run import scenario
from kvactors.simulate.world import World
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import Rig, hashes
from tests.live.asking import viewed

BY_NAME = {family.name: family for family in FAMILIES.values()}


def families(text: str) -> Iterator[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]:
    """(name with its suffix, type, help, samples) of each family, as Prometheus' own parser reads it."""
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        yield name, family.type, family.documentation, [(s.name, s.labels, s.value) for s in family.samples]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an engine that has saved, loaded, failed and revoked, with an owner that counts by every name."""

    async def play(folder: Path) -> str:
        faults = [Fault(what="outcome", call="put_ranges", outcome=Outcome.TRANSFER_FAILED, times=1)]
        async with Rig(None, faults) as rig:
            plain = {key for key, metric in metrics.COUNTERS.items() if not metric.label}
            with viewed(rig.engine, folder, totals=lambda: dict.fromkeys(plain, 2), gauges=lambda: {"pinned": 1}) as view:
                await rig.engine.lookup(hashes(4), 65)
                await rig.save("a", hashes(4))
                view.note_waits({"exposed_wait_s": 0.02, "save_wait_s": 40.0})
                return get(view.address, "/metrics").decode()

    return asyncio.run(play(tmp_path_factory.mktemp("live")))


def test_every_metric_of_the_list_is_exported_as_it_says(text: str) -> None:
    found = {name: (kind, meaning, samples) for name, kind, meaning, samples in families(text)}
    assert set(found) == set(BY_NAME)
    for name, (kind, meaning, samples) in found.items():
        family = BY_NAME[name]
        assert (kind, meaning) == (family.kind, family.meaning)
        assert samples, name
        for sample, labels, value in samples:
            extra = {"le"} if sample.endswith("_bucket") else set()
            assert set(labels) == {*family.labels, *extra}, sample
            assert labels["rank"] == "0"
            assert value >= 0


def test_names_are_unique_and_say_their_unit() -> None:
    lists = (metrics.COUNTERS, metrics.LIVE_COUNTERS, metrics.WAITS, metrics.GAUGES, metrics.LIVE_GAUGES)
    assert len(BY_NAME) == len(FAMILIES) == sum(map(len, lists)), "no key and no name stands twice"
    for name, family in BY_NAME.items():
        assert re.fullmatch(r"kvactors_[a-z][a-z_]*[a-z]", name)
        assert name.endswith("_total") == (family.kind == "counter")
        assert not re.search(r"_(ms|us|milliseconds|kb|mb|percent)(_|$)", name)
        assert len(set(family.labels)) == len(family.labels)


def test_the_numbers_are_the_snapshots(text: str) -> None:
    samples = {(n, *sorted(labels.items())): v for _, _, _, s in families(text) for n, labels, v in s}

    def value(name: str, **labels: str) -> float:
        return samples[(name, *sorted({"rank": "0", **labels}.items()))]

    assert value("kvactors_lookups_total") == 3
    assert (
        value("kvactors_saved_blocks_total", group="0") + value("kvactors_revoked_blocks_total", cause="transfer failed") >= 4
    )
    assert value("kvactors_state", state="running") == 1
    assert value("kvactors_state", state="dead") == 0
    assert value("kvactors_open_put_sessions", group="0", state="committing") == 0
    assert value("kvactors_exposed_wait_seconds_bucket", le="0.01") == 0
    assert value("kvactors_exposed_wait_seconds_bucket", le="0.025") == 1
    assert value("kvactors_save_wait_seconds_bucket", le="30") == 0
    assert value("kvactors_save_wait_seconds_bucket", le="+Inf") == value("kvactors_save_wait_seconds_count") == 1
    assert value("kvactors_save_wait_seconds_sum") == 40


def test_the_usual_causes_of_revokes_are_there_before_their_first(text: str) -> None:
    def causes(text: str) -> dict[str, float]:
        samples = [one for _, _, _, s in families(text) for one in s if one[0] == "kvactors_revoked_blocks_total"]
        return {labels["cause"]: value for _, labels, value in samples}

    fresh = Snapshot(name="", rank="0", pid=1, version="1", model="m", at_s=0, uptime_s=0, state="running")
    assert causes(exposition(fresh)) == dict.fromkeys(REVOKE_CAUSES, 0)
    assert causes(text) == {**dict.fromkeys(REVOKE_CAUSES, 0), "transfer failed": causes(text)["transfer failed"]}
    assert causes(text)["transfer failed"] > 0


def test_the_usual_causes_are_what_engines_count_and_what_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: set[str] = set()

    def noted(cause: str) -> str:
        counted.add(cause_label(cause))
        return cause_label(cause)

    monkeypatch.setattr(sessions, "cause_label", noted)
    for seed in range(80):
        World(scenario(seed, "all")).run()
        if counted >= set(REVOKE_CAUSES):
            break
    assert set(REVOKE_CAUSES) - counted == set()
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert [cause for cause in REVOKE_CAUSES if f"`{cause}`" not in page] == []


@pytest.mark.parametrize("text_", ['quo"te', "back\\slash", "new\nline", "ünï", "\udcff", "{}"])
def test_any_text_is_a_label(text_: str) -> None:
    snapshot = Snapshot(name=text_, rank="0", pid=1, version="1", model="m", at_s=0, uptime_s=0)
    ((labels, _),) = [
        (labels, v) for n, _, _, s in families(exposition(snapshot)) if n == "kvactors_info" for _, labels, v in s
    ]
    assert labels["name"] == text_.encode("utf-8", "replace").decode()


async def test_a_view_without_an_engine_exports_what_its_owner_counts(tmp_path: Path) -> None:
    with viewed(None, tmp_path, rank="scheduler", totals=lambda: {"lookups": 4, "hit_tokens": 64}) as view:
        found = {name: samples for name, _, _, samples in families(get(view.address, "/metrics").decode())}
        assert found["kvactors_lookups_total"] == [("kvactors_lookups_total", {"rank": "scheduler"}, 4)]
        assert not any("group" in labels for samples in found.values() for _, labels, _ in samples)
        assert read_snapshot(view.address).state == ""
