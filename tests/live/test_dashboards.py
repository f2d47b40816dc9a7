"""The dashboard and the alert rules ask for metrics that the exporter has, by labels that these have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

import kvactors
from kvactors.core.metrics import FAMILIES, Family

FOLDER = Path(kvactors.__file__).parent / "dashboards"
DASHBOARD = json.loads((FOLDER / "kvactors.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

SCRAPED = {"job", "instance"}
"""Labels that Prometheus itself gives."""

VARIABLES = {"$__rate_interval": "5m"}
"""What Grafana puts in, outside of texts."""

RATES = {"rate", "irate", "increase"}


def expressions() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def parsed(text: str) -> Any:
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    return promql.parse(text)


def used(node: Any, rated: bool = False, by: frozenset[str] = frozenset()) -> Iterator[tuple[Any, bool, frozenset[str]]]:
    """Each selector of an expression, whether a rate is taken of it, and by which labels it is kept."""
    match node:
        case promql.VectorSelector():
            yield node, rated, by
        case promql.MatrixSelector():
            yield node.vector_selector, rated, by
        case promql.Call():
            for argument in node.args:
                yield from used(argument, rated or node.func.name in RATES, by)
        case promql.AggregateExpr():
            kept = frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
            yield from used(node.expr, rated, by | kept)
        case promql.BinaryExpr():
            yield from used(node.lhs, rated, by)
            yield from used(node.rhs, rated, by)
        case promql.ParenExpr() | promql.UnaryExpr():
            yield from used(node.expr, rated, by)
        case promql.NumberLiteral():
            return
        case _:
            raise AssertionError(f"{type(node).__name__} is not known to this test")


def family_of(name: str) -> tuple[Family, str]:
    """The family that exports a series, and the series' suffix."""
    by_name = {family.name: family for family in FAMILIES.values()}
    if name in by_name:
        return by_name[name], ""
    stem, _, suffix = name.rpartition("_")
    assert suffix in ("bucket", "sum", "count"), f"{name}: no such metric"
    assert by_name[stem].kind == "histogram", name
    return by_name[stem], suffix


def check(text: str) -> None:
    """Fails if the expression asks for what the exporter does not have, or in a way that makes no sense for its type."""
    selectors = list(used(parsed(text)))
    assert selectors
    for selector, rated, by in selectors:
        family, suffix = family_of(selector.name)
        labels = {*family.labels, *SCRAPED, *({"le"} if suffix == "bucket" else ())}
        assert {m.name for m in selector.matchers.matchers} <= labels, f"{selector.name} has only {sorted(labels)}"
        assert by <= labels, f"{selector.name} has only {sorted(labels)}"
        assert suffix or family.kind != "histogram", f"{selector.name} is no series"
        counts = family.kind == "counter" or bool(suffix)
        assert rated == counts, f"{selector.name}: a rate is for what only grows, and what only grows is for a rate"


@pytest.mark.parametrize(("where", "text"), list(expressions()), ids=[where for where, _ in expressions()])
def test_an_expression_asks_for_what_is_there(where: str, text: str) -> None:  # noqa: ARG001 - where: for the reader
    check(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kvactors_no_such_thing", "no such metric"),
        ("rate(kvactors_saved_bytes[5m])", "no such metric"),
        ("rate(kvactors_queue_depth_sum[5m])", "no such metric|queue_depth"),
        ("kvactors_saved_bytes_total", "what only grows"),
        ("rate(kvactors_sessions_open[5m])", "what only grows"),
        ("kvactors_exposed_wait_seconds", "is no series"),
        ('kvactors_state{stat="dead"}', "has only"),
        ("sum by (cause) (rate(kvactors_saved_bytes_total[5m]))", "has only"),
        ("sum by (le) (rate(kvactors_exposed_wait_seconds_sum[5m]))", "has only"),
    ],
)
def test_a_bad_expression_is_found(text: str, says: str) -> None:
    with pytest.raises((AssertionError, KeyError), match=says):
        check(text)


def test_legends_and_texts_name_labels_that_are_kept() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = set().union(*(by for _, _, by in used(parsed(target["expr"]))))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]
    for rule in RULES:
        kept = set.intersection(
            *(set(by) or {*family_of(s.name)[0].labels, *SCRAPED} for s, _, by in used(parsed(rule["expr"])))
        )
        texts = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", texts)) <= kept, rule["alert"]


def test_the_dashboard_can_be_imported() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "job", "instance", "rank"}
    assert set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(DASHBOARD))) <= names
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        g = panel["gridPos"]
        own = {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        assert not own & cells, f"{panel['title']} covers another panel"
        assert g["x"] + g["w"] <= 24
        cells |= own


def test_the_rules_are_whole_and_cover_what_was_promised() -> None:
    for rule in RULES:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Kvactors[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+m", rule["for"])
    names = {rule["alert"].removeprefix("Kvactors") for rule in RULES}
    assert {"HitRateFalling", "RevokesGrowing", "ExposedWaits", "PoolFull", "LeasesExpire", "StoreUnreachable"} <= names
    assert "SessionsOpenTooLong" in names


def test_the_dashboard_shows_every_metric_but_a_few() -> None:
    shown = {family_of(s.name)[0].name for _, text in expressions() for s, _, _ in used(parsed(text))}
    left = {name.removeprefix("kvactors_") for name in {f.name for f in FAMILIES.values()} - shown}
    known = {"info", "uptime_seconds", "stories", "queue_depth", "hit_tokens_total", "no_block_table_total"}
    assert left == known | {"get_sessions_opened_total", "get_sessions_closed_total", "handoff_fenced_blocks_total"}
