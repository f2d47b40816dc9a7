"""The report of a replay and the figures of a trace in a real browser: wide and narrow, light and dark, with the keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.looking import (
    DESKTOP,
    NAMES,
    PAGES,
    PHONE,
    PICTURES,
    SCHEMES,
    Screen,
    browser,
    browser_path,
    looking,
    write_pages,
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser_path() is None, reason=f"no browser: install one of {', '.join(NAMES)}"),
]

LEAST_TEXT_PX = 10.0
LEAST_TEXT_CONTRAST = 4.5
LEAST_SHAPE_CONTRAST = 3.0
"""What WCAG 2 asks for at level AA."""

CHARTS = {"failures": 7, "replay": 6, "empty": 3, "stats": 6}
"""At least so many are drawn on each page."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def running(pages: dict[str, Path]) -> Iterator[Any]:  # noqa: ARG001 (made before)
    """The browser. Its event loop runs in this thread, so that the pages, which need one too, are made before."""
    path = browser_path()
    assert path is not None
    with browser(path) as started:
        yield started


def wrongs(found: dict[str, Any], page: str, scheme: str) -> list[str]:
    """What a person could not read, in words."""
    out = []
    if found["dark"] != (scheme == "dark"):
        out.append(f"the page does not follow prefers-color-scheme: {scheme}")
    if found["tooWide"] > 0:
        out.append(f"the page scrolls sideways by {found['tooWide']} px")
    if found["cutOff"]:
        out.append(f"cut off at the right: {found['cutOff']}")
    if len(found["charts"]) < CHARTS[page]:
        out.append(f"{len(found['charts'])} charts, {CHARTS[page]} expected")
    if found["smallestText"] < LEAST_TEXT_PX or found["faintestText"] < LEAST_TEXT_CONTRAST:
        out.append(f"text of {found['smallestText']:.1f} px, contrast {found['faintestText']:.2f}")
    for chart in found["charts"]:
        what = f"chart {chart['label']!r}"
        if not (chart["width"] > 0 and chart["height"] > 0 and chart["drawn"] > 0 and chart["label"]):
            out.append(f"{what}: not drawn: {chart}")
        if chart["smallestText"] < LEAST_TEXT_PX:
            out.append(f"{what}: text of {chart['smallestText']:.1f} px")
        if chart["outside"] or chart["overlaps"]:
            out.append(f"{what}: text outside {chart['outside']}, texts over each other {chart['overlaps']}")
        if chart["faintest"] < LEAST_SHAPE_CONTRAST or chart["faintestText"] < LEAST_TEXT_CONTRAST:
            out.append(f"{what}: contrast {chart['faintest']:.2f}, of its text {chart['faintestText']:.2f}")
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=lambda screen: screen.name)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_read(running: Any, pages: dict[str, Path], page: str, screen: Screen, scheme: str) -> None:
    with looking(running, pages[page], screen, scheme) as looked:
        assert wrongs(looked.measure(), page, scheme) == []
        assert looked.said == []
        assert looked.asked == [pages[page].as_uri()]


@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=lambda screen: screen.name)
@pytest.mark.parametrize("page", PAGES)
def test_the_keyboard_reaches_everything(running: Any, pages: dict[str, Path], page: str, screen: Screen) -> None:
    with looking(running, pages[page], screen, "light") as looked:
        interactive = looked.measure()["interactive"]
        assert all(e["marked"] and e["named"] for e in interactive), interactive
        stops = looked.tab_through()
        assert [stop["index"] for stop in stops] == list(range(len(interactive)))
        assert all(stop["outline"] >= 2 for stop in stops), stops


def test_a_scrolling_box_scrolls_by_key(running: Any, pages: dict[str, Path]) -> None:
    with looking(running, pages["failures"], PHONE, "light") as looked:
        table = looked.page.locator(".scroll:has(table)")
        table.focus()
        looked.page.keyboard.press("ArrowRight")
        looked.page.wait_for_function("document.querySelector('.scroll:has(table)').scrollLeft > 0")


def test_the_pictures_of_the_docs_are_there_and_small() -> None:
    folder = Path(__file__).parents[2] / "docs"
    text = (folder / "report.md").read_text()
    sizes = {name: (folder / "images" / name).stat().st_size for name, *_ in PICTURES}
    assert all(f"images/{name}" in text for name in sizes)
    assert sum(sizes.values()) < 300_000
