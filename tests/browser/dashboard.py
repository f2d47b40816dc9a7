"""The picture of the dashboard in docs/operating.md: its panels as Grafana's own components draw them, from a real Prometheus.

`python -m tests.browser.dashboard FILE` (`make dashboard-picture`) scrapes two replays and a hand-off for two minutes, asks
Prometheus what the panels ask, and lets the page of .ci/dashboard-picture draw the answers in a headless browser. With
`--again` it draws the answers of the last time. No Grafana server takes part.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.live.prometheus import Server, prometheus, tool, until

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / ".ci" / "dashboard-picture"
WORK = ROOT / ".cache" / "dashboard-picture"
"""What npm installs, the bundle, and the last answers of Prometheus."""

FOLDER = ROOT / "kvactors" / "dashboards"
DASHBOARD = FOLDER / "kvactors.json"

SCRAPE_S = 1.0
SHOWN_S = 120.0
TICK_S = 30.0
WIDTH = 1280
DRAW_S = 60.0
SCHEME = "light"

REPLAYS = {
    9400: "--layout gemma-3-27b --scale 4096 --speed 3 --concurrency 4",
    9401: "--layout gemma-3-27b --scale 4096 --speed 3 --capacity 4MB --seed 7",
}
"""Two instances by the port of their live view, each with a store of its own; the second store is small. The ports are those of
docs/live.md: legends show them."""

HANDOFF = 9402
"""The port of the view into a hand-off without a model, see handing_off.py."""

FAULTS = {
    "seed": 7,
    "faults": [
        {"what": "latency", "call": "put_ranges", "latency_s": 0.001},
        {"what": "latency", "call": "get_ranges", "latency_s": 0.001},
        {"what": "outcome", "call": "put_open", "probability": 0.02, "outcome": "no_space"},
        {"what": "outcome", "call": "get_open", "probability": 0.002, "outcome": "not_found"},
        {"what": "outcome", "call": "put_ranges", "probability": 0.0002, "outcome": "transfer_failed"},
        {"what": "outcome", "call": "get_ranges", "probability": 0.0002, "outcome": "transfer_failed"},
    ],
}
"""What both stores do: a little latency, and something that goes wrong every few seconds, so that no panel is without data."""

FONTS = {"Inter-Regular": 400, "Inter-Medium": 500}
"""The files that Grafana's styles ask a server for, and the weight of each."""

DIGEST, DRAWN_WITH = "kvactors-dashboard", "Software"
"""Texts within the picture: what it was drawn from, and what drew it."""


def digest(dashboard: dict[str, Any]) -> str:
    """Of what is drawn: the panels and the variables, however the file is written."""
    drawn = [dashboard["panels"], dashboard["templating"]]
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def filled(expression: str, dashboard: dict[str, Any]) -> str:
    """An expression with what Grafana puts in: everything is chosen, and a rate is over four scrapes.

    Raises:
        KeyError: of a variable that the dashboard does not have.
    """
    values = {variable["name"]: variable.get("allValue", "") for variable in dashboard["templating"]["list"]}
    values["__rate_interval"] = f"{int(4 * SCRAPE_S)}s"
    return re.sub(r"\$\{?(\w+)\}?", lambda match: values[match[1]], expression)


def questions(dashboard: dict[str, Any]) -> dict[str, dict[str, str]]:
    """What the panels ask, by panel and target."""
    return {
        str(panel["id"]): {target["refId"]: filled(target["expr"], dashboard) for target in panel["targets"]}
        for panel in panels(dashboard)
    }


def answers(server: Server, dashboard: dict[str, Any], start_s: float, end_s: float) -> dict[str, dict[str, Any]]:
    """What Prometheus answers, by panel and target."""

    def answer(question: str) -> Any:
        return server.ask("query_range", query=question, start=start_s, end=end_s, step=SCRAPE_S)["result"]

    return {panel: {name: answer(asked) for name, asked in own.items()} for panel, own in questions(dashboard).items()}


@contextmanager
def replays(folder: Path) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """The replays of REPLAYS, until the context ends; what they say goes into files of the folder."""
    with ExitStack() as stack:
        running = {}
        plan = folder / "faults.yaml"
        plan.write_text(yaml.safe_dump(FAULTS))
        for port, words in REPLAYS.items():
            said = stack.enter_context((folder / str(port)).open("wb"))
            command = [sys.executable, "-m", "kvactors", "replay", "examples/sample_trace.jsonl", *words.split()]
            command += ["--faults", str(plan), "--live", f"127.0.0.1:{port}"]
            running[port] = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said))
        try:
            yield running
        finally:
            for replay in running.values():
                replay.send_signal(signal.SIGTERM)
            for replay in running.values():
                try:
                    replay.wait(20)
                except subprocess.TimeoutExpired:
                    replay.kill()


def ask(dashboard: dict[str, Any], path: str) -> dict[str, Any]:
    """Scrapes the replays and the hand-off for SHOWN_S, and asks: what the page is given."""
    from tests.browser.handing_off import handing_off

    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        rules = FOLDER / "alerts.yaml"
        with (
            handing_off(HANDOFF),
            replays(folder) as running,
            prometheus(path, folder, [*REPLAYS, HANDOFF], rules, SCRAPE_S) as server,
        ):

            def scraped() -> bool:
                for port, replay in running.items():
                    if replay.poll() is not None:
                        raise RuntimeError(f"the replay at {port} ended: {(folder / str(port)).read_text()}")
                # So that a rate has what it needs at the very start of the picture.
                return server.has(f"min(count_over_time(kvactors_steps_total[1h])) >= {int((SHOWN_S + 10) / SCRAPE_S)}")

            until(f"both replays are scraped for {SHOWN_S:.0f} s", scraped, SHOWN_S + 60)
            # Between two ticks of the time axis, those of a wide panel too, so that the picture's edge cuts no label.
            end_s = (time.time() // TICK_S + 1.75) * TICK_S
            until("the last scrape is there", lambda: scraped() and time.time() > end_s + SCRAPE_S, 2 * TICK_S)
            given = {"from": end_s - SHOWN_S, "to": end_s, "step": SCRAPE_S, "width": WIDTH, "scheme": SCHEME}
            return {"dashboard": dashboard, "answers": answers(server, dashboard, end_s - SHOWN_S, end_s), **given}


def bundle(out: Path) -> str:
    """Installs Grafana's libraries, and puts the page into a folder; what it draws with.

    Raises:
        RuntimeError: no npm here.
        subprocess.CalledProcessError: npm or esbuild fails; it has said why.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("no npm: install Node.js 20 or newer")
    WORK.mkdir(parents=True, exist_ok=True)
    shutil.copy(SOURCE / "package.json", WORK)
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
    subprocess.run([npm, "install", *quiet], cwd=WORK, check=True)
    words = [
        "--bundle",
        "--format=esm",
        "--jsx=automatic",
        "--minify",
        '--define:process.env.NODE_ENV="production"',
        f"--outdir={out}",
    ]
    words += ["--loader:.ttf=file"]
    environment = {**os.environ, "NODE_PATH": str(WORK / "node_modules")}
    command = [str(WORK / "node_modules" / ".bin" / "esbuild"), str(SOURCE / "page.jsx"), *words, "--log-level=warning"]
    subprocess.run(command, check=True, env=environment)
    shutil.copy(SOURCE / "index.html", out)
    modules = WORK / "node_modules"
    shutil.copytree(modules / "@grafana/ui/dist/public/img/icons", out / "public/build/img/icons")
    (out / "public/fonts/inter").mkdir(parents=True)
    for name, weight in FONTS.items():
        shutil.copy(
            modules / f"@fontsource/inter/files/inter-latin-{weight}-normal.woff2", out / f"public/fonts/inter/{name}.woff2"
        )
    version = json.loads((SOURCE / "package.json").read_text())["dependencies"]["@grafana/ui"]
    return f"@grafana/ui {version}"


def screenshot(folder: Path) -> bytes:
    """The page of a folder, whole, when all of its panels are drawn.

    Raises:
        RuntimeError: the browser complains, or panels are not drawn within DRAW_S; says which.
    """
    from tests.browser.looking import browser, browser_path, sync_api

    path = browser_path()
    if path is None:
        raise RuntimeError("no browser: .ci/install-browser")
    said: list[str] = []
    with browser(path) as running:
        page = running.new_page(viewport={"width": WIDTH, "height": 800})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("requestfailed", lambda request: said.append(f"no {request.url}"))
        # Files of the folder alone, under a name that is nobody's: nothing leaves this process.
        page.route("**/*", lambda route: serve(route, folder))
        page.goto("http://dashboard.invalid/index.html")
        try:
            page.wait_for_function("window.drawn", timeout=DRAW_S * 1000)
        except sync_api.TimeoutError:
            said.append(f"not drawn: {page.evaluate('window.missing')}")
        if said:
            raise RuntimeError("\n".join(said))
        taken: bytes = page.locator("#dashboard").screenshot()
        return taken


def serve(route: Any, folder: Path) -> None:
    file = folder / route.request.url.split("/", 3)[3].split("?")[0]
    if file.is_file():
        route.fulfill(path=file)
    else:
        route.fulfill(status=404)


def small(picture: bytes, texts: dict[str, str]) -> bytes:
    """A PNG of 256 colours, with texts."""
    from PIL import Image, PngImagePlugin

    info, out = PngImagePlugin.PngInfo(), io.BytesIO()
    for key, text in texts.items():
        info.add_text(key, text)
    colours = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    colours.save(out, "PNG", optimize=True, pnginfo=info)
    return out.getvalue()


def texts_of(picture: bytes) -> dict[str, str]:
    """The texts of a PNG."""
    found, at = {}, 8
    while at < len(picture):
        (length,) = struct.unpack_from(">I", picture, at)
        if picture[at + 4 : at + 8] == b"tEXt":
            key, _, text = picture[at + 8 : at + 8 + length].partition(b"\0")
            found[key.decode("latin-1")] = text.decode("latin-1")
        at += 12 + length
    return found


def main(file: Path, again: bool) -> None:
    """Draws the picture; `again` from the answers of the last time."""
    dashboard = json.loads(DASHBOARD.read_text())
    path = tool("prometheus")
    if path is None:
        sys.exit("no Prometheus: .ci/install-prometheus VENV")
    last = WORK / "given.json"
    if again:
        given = json.loads(last.read_text())
        if questions(given["dashboard"]) != questions(dashboard):
            sys.exit("the dashboard asks other questions than the last time: draw it without --again")
        given["dashboard"] = dashboard
    else:
        given = ask(dashboard, path)
        WORK.mkdir(parents=True, exist_ok=True)
        last.write_text(json.dumps(given))
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        software = bundle(folder)
        (folder / "given.js").write_text(f"window.given = {json.dumps(given)};")
        picture = small(screenshot(folder), {DIGEST: digest(dashboard), DRAWN_WITH: software})
    file.write_bytes(picture)
    print(f"{file}: {len(picture):,} bytes, drawn with {software}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--again" in sys.argv)
