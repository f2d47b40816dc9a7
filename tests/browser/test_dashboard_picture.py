"""The picture of the dashboard is of the dashboard as it is. Drawing it takes npm and minutes: `make dashboard-picture`."""

from __future__ import annotations

import copy
import json
import re
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.dashboard import DASHBOARD, DIGEST, DRAWN_WITH, ROOT, SOURCE, WIDTH, digest, filled, panels, texts_of

NAME = "images/dashboard-light.png"
PICTURE = (ROOT / "docs" / NAME).read_bytes()
SHOWN = json.loads(DASHBOARD.read_text())
PACKAGES = json.loads((SOURCE / "package.json").read_text())["dependencies"]
MOST_BYTES = 400_000


def test_the_picture_is_of_this_dashboard() -> None:
    same = texts_of(PICTURE)[DIGEST] == digest(SHOWN)
    assert same, "the dashboard has changed since its picture was drawn: make dashboard-picture, look at it, and commit it"


def test_the_picture_is_small_and_drawn_with_what_is_installed() -> None:
    assert struct.unpack_from(">I", PICTURE, 16) == (WIDTH,)
    assert len(PICTURE) < MOST_BYTES
    assert texts_of(PICTURE)[DRAWN_WITH] == f"@grafana/ui {PACKAGES['@grafana/ui']}"


def test_the_page_shows_the_picture_and_says_what_drew_it() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    (text,) = re.findall(rf"!\[([^]]+)\]\({NAME}\)", page)
    assert len(text.split()) > 5
    assert f"`@grafana/ui` {PACKAGES['@grafana/ui']}" in page


def test_every_type_of_panel_can_be_drawn() -> None:
    (known,) = re.findall(r"^const PLUGINS = {(.+)};", (SOURCE / "plugins.jsx").read_text(), re.MULTILINE)
    assert {panel["type"] for panel in panels(SHOWN)} <= set(re.findall(r"\w+", known))


def test_versions_are_exact() -> None:
    assert [version for version in PACKAGES.values() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []


@pytest.mark.parametrize(
    ("change", "other"),
    [
        (lambda d: d.update(version=2, refresh="1m"), False),
        (lambda d: d["panels"][1].update(title="x"), True),
        (lambda d: d["panels"][1]["targets"][0].update(expr="up"), True),
        (lambda d: d["panels"].pop(), True),
        (lambda d: d["templating"]["list"][1].update(allValue=".+"), True),
    ],
)
def test_a_digest_is_of_what_is_drawn(change: Callable[[dict[str, Any]], object], other: bool) -> None:
    changed = copy.deepcopy(SHOWN)
    change(changed)
    assert (digest(changed) != digest(SHOWN)) is other


def test_variables_are_filled_in() -> None:
    asked = filled('sum(rate(a{job=~"$job", rank=~"${rank}"}[$__rate_interval]))', SHOWN)
    assert asked == 'sum(rate(a{job=~".*", rank=~".*"}[4s]))'
    with pytest.raises(KeyError, match="nobody"):
        filled("$nobody", SHOWN)
