"""A browser, the pages to look at, and what a browser can measure of one.

`python -m tests.browser.looking FOLDER` writes the pictures of docs/report.md.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from kvactors.cli import cli

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")

ROOT = Path(__file__).parents[2]
TRACE = "examples/sample_trace.jsonl"
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
MEASURE = (Path(__file__).parent / "measure.js").read_text(encoding="utf-8")

# A page of a run with failures, of a plain run, and of the figures of a trace. Virtual time makes the first repeatable.
PAGES = {
    "failures": "replay TRACE --layout qwen3.5-9b --scale 4096 --virtual --seed 7 --concurrency 4 --requests 60 "
    "--faults flaky-store --html",
    "replay": "replay TRACE --layout gemma-3-27b --scale 4096 --block-tokens 512 --virtual --concurrency 4 "
    "--requests 60 --html",
    "empty": "replay TRACE --virtual --requests 1 --html",
    "stats": "trace stats TRACE --plot",
}


class Screen(NamedTuple):
    """A device: its name, and the size of its window in CSS pixels."""

    name: str
    width: int
    height: int


DESKTOP = Screen("desktop", 1280, 800)
PHONE = Screen("phone", 390, 844)
SCHEMES = ("light", "dark")


def browser_path() -> str | None:
    """The first browser of this machine that we can drive; None without one."""
    return next((found for found in map(shutil.which, NAMES) if found), None)


def write_pages(folder: Path) -> dict[str, Path]:
    """Runs the commands of PAGES; name to file."""
    made = {}
    for name, command in PAGES.items():
        made[name] = folder / f"{name}.html"
        words = [TRACE if word == "TRACE" else word for word in command.split()]
        with chdir(ROOT):
            result = CliRunner().invoke(cli, [*words, str(made[name].absolute())])
        if result.exit_code:
            raise RuntimeError(f"kvactors {command} ended with {result.exit_code}: {result.output}") from result.exception
    return made


@contextmanager
def browser(path: str) -> Iterator[Any]:
    """A headless browser. As root there is no sandbox for it; it opens nothing but our own files."""
    with sync_api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield running
        finally:
            running.close()


class Looked:
    """A page that is open on a screen, and what the browser said and asked for while it opened."""

    def __init__(self, page: Any, file: Path) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(file.as_uri(), wait_until="load")

    def measure(self) -> dict[str, Any]:
        """What measure.js finds; see there."""
        found: dict[str, Any] = self.page.evaluate(MEASURE)
        return found

    def tab_through(self, most: int = 100) -> list[dict[str, Any]]:
        """What the tab key reaches, in order: the index among the interactive elements, and the outline's width in pixels."""
        stops: list[dict[str, Any]] = []
        for _ in range(most):
            self.page.keyboard.press("Tab")
            stop = self.page.evaluate("window.focused()")
            if stop is None or (stops and stop["index"] == stops[0]["index"]):
                return stops
            stops.append(stop)
        raise RuntimeError(f"{most} times the tab key, and no end")


@contextmanager
def looking(running: Any, file: Path, screen: Screen, scheme: str, scale: float = 1.0) -> Iterator[Looked]:
    context = running.new_context(
        viewport={"width": screen.width, "height": screen.height}, color_scheme=scheme, device_scale_factor=scale
    )
    try:
        yield Looked(context.new_page(), file)
    finally:
        context.close()


PICTURES = (
    ("report-light.png", "replay", DESKTOP, "light"),
    ("report-dark-phone.png", "replay", PHONE, "dark"),
    ("trace-stats-dark.png", "stats", DESKTOP, "dark"),
)
"""The pictures that stand in docs/images: the first screenful of a page."""


def main(folder: Path) -> None:
    path = browser_path()
    if path is None:
        sys.exit(f"no browser: install one of {', '.join(NAMES)}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        pages = write_pages(Path(work))
        with browser(path) as running:
            for name, page, screen, scheme in PICTURES:
                with looking(running, pages[page], screen, scheme) as looked:
                    looked.page.screenshot(path=str(folder / name))
                print(f"{folder / name}: {(folder / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
