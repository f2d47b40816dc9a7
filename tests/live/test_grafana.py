"""The dashboard against Grafana's own schema, as its published types have it: all is known there, and of the right type."""

from __future__ import annotations

import copy
import enum
import json
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.live.test_dashboards import DASHBOARD

models = pytest.importorskip(
    "grafana_foundation_sdk.models.dashboard", reason="no grafana-foundation-sdk: pip install -e '.[dev]'"
)
plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason="as above")
encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason="as above")

WRITTEN_BY_THE_PAGE = {"definition"}
"""A variable's query as text: Grafana's page writes it beside the query, and shows it. The schema of 10.1 leaves it out."""


def read(dashboard: dict[str, Any]) -> Any:
    """The dashboard as objects of the schema."""
    plugins.register_default_plugins()
    return models.Dashboard.from_json(copy.deepcopy(dashboard))


def lost(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Where a value is not what the schema made of it: fields that it does not know are gone."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key not in kept:
                yield f"{where}.{key}"
            else:
                yield from lost(value, kept[key], f"{where}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{where}[{index}]")
    elif given != kept:
        yield where


def misfits(value: Any, hint: Any, where: str = "") -> Iterator[str]:
    """Where a value is not of its annotated type, all the way down; objects are checked by the annotations of their classes."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        tried = [list(misfits(value, part, where)) for part in parts]
        if all(tried):
            yield from min(tried, key=len)
    elif origin is list and isinstance(value, list):
        for index, one in enumerate(value):
            yield from misfits(one, parts[0], f"{where}[{index}]")
    elif origin is dict and isinstance(value, dict):
        for key, one in value.items():
            yield from misfits(one, parts[1], f"{where}.{key}")
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in {member.value for member in hint}:
            yield f"{where}: {value!r} is no {hint.__name__}"
    elif origin is typing.Literal:
        if value not in parts:
            yield f"{where}: {value!r} is none of {parts}"
    elif hint not in (Any, object) and not isinstance(value, (origin or hint, int) if hint is float else origin or hint):
        yield f"{where}: {value!r} is no {hint}"
    elif hasattr(value, "to_json"):
        for name, inner in typing.get_type_hints(type(value)).items():
            yield from misfits(getattr(value, name), inner, f"{where}.{name}")


def complaints(dashboard: dict[str, Any]) -> list[str]:
    seen = read(dashboard)
    kept = json.loads(encoder.JSONEncoder().encode(seen))
    gone = [where for where in lost(dashboard, kept) if where.rpartition(".")[2] not in WRITTEN_BY_THE_PAGE]
    return gone + list(misfits(seen, models.Dashboard))


def test_the_dashboard_keeps_the_schema() -> None:
    assert complaints(DASHBOARD) == []


def test_panels_and_queries_are_read_as_what_they_are() -> None:
    kinds = {"stat": "stat", "timeseries": "timeseries"}
    for panel in read(DASHBOARD).panels:
        if panel.type_val != "row":
            assert type(panel.options).__module__.rpartition(".")[2] == kinds[panel.type_val]
            assert {type(target).__module__.rpartition(".")[2] for target in panel.targets} == {"prometheus"}


def panel(dashboard: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in dashboard["panels"] if p["type"] == kind)
    return found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: panel(d, "stat")["options"].update(colorMode="backgrond"), "colorMode|color_mode"),
        (lambda d: panel(d, "stat")["options"].update(colourMode="value"), "colourMode"),
        (lambda d: panel(d, "stat").update(titel="x"), "titel"),
        (lambda d: panel(d, "stat")["gridPos"].update(w="4"), "w: '4'"),
        (lambda d: panel(d, "stat")["fieldConfig"]["defaults"].update(unit=1), "unit"),
        (lambda d: panel(d, "timeseries")["fieldConfig"]["defaults"]["custom"].update(fillOpacity="10"), "fill_opacity"),
        (lambda d: panel(d, "timeseries")["fieldConfig"]["defaults"]["custom"].update(showPoints="no"), "show_points"),
        (lambda d: panel(d, "timeseries")["options"]["tooltip"].update(mode="all"), "mode: 'all'"),
        (lambda d: panel(d, "timeseries")["targets"][0].update(expression="up"), "expression"),
        (lambda d: d["templating"]["list"][1].update(refresh=7), "refresh: 7"),
    ],
)
def test_a_wrong_dashboard_is_found(change: Callable[[dict[str, Any]], None], says: str) -> None:
    changed = copy.deepcopy(DASHBOARD)
    change(changed)
    (complaint, *_) = complaints(changed)
    assert any(word in complaint for word in says.split("|")), complaint
