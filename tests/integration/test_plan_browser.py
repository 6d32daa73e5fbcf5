"""The report in a real browser: no error, no request, and the plots can be seen."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from hicache.planning.model_config import read_model
from hicache.planning.pages import page_trace
from hicache.planning.plan import PlanInput, make_plan
from hicache.planning.report import to_html
from hicache.sim.generator import ChatWorkload, generate
from hicache.types import Tier

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium with its chromedriver here")

ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1366,768"),
]

PLOTS = """
return [...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll('.line,.bar,.dot')].map(mark => mark.getBoundingClientRect());
  const inside = marks.filter(m => m.left >= box.left - 9 && m.right <= box.right + 9 && m.top >= box.top - 9
    && m.bottom <= box.bottom + 9);
  return {width: box.width, height: box.height, marks: marks.length, inside: inside.length};
})"""

COLOURS = """
const done = arguments[arguments.length - 1], image = new Image();
image.onload = () => {
  const canvas = document.createElement('canvas'), counts = {};
  canvas.width = image.width; canvas.height = image.height;
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, image.width, image.height).data;
  for (let i = 0; i < pixels.length; i += 4) {
    const name = [pixels[i], pixels[i + 1], pixels[i + 2]].join();
    counts[name] = (counts[name] || 0) + 1;
  }
  done(counts);
};
image.src = 'data:image/png;base64,' + arguments[0];"""


class Browser:
    """A page in Chromium, through the WebDriver protocol."""

    def __init__(self, port: int, profile: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self._session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._call("POST", f"/session/{self._session}{path}", body)

    def get(self, path: str) -> Any:
        return self._call("GET", f"/session/{self._session}{path}")

    def run(self, script: str, *arguments: object) -> Any:
        return self.post("/execute/sync", {"script": script, "args": list(arguments)})

    def colours(self) -> dict[str, int]:
        """Pixels of a screenshot by their colour, "r,g,b"."""
        shot = self.get("/screenshot")
        found: dict[str, int] = self.post("/execute/async", {"script": COLOURS, "args": [shot]})
        return found

    def log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.post("/se/log", {"type": kind})
        return found

    def close(self) -> None:
        self._call("DELETE", f"/session/{self._session}")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)) as answer:
            return json.load(answer)["value"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert DRIVER is not None
    port = free_port()
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                urlopen(f"http://127.0.0.1:{port}/status").close()
                break
            except URLError:
                time.sleep(0.1)
        page = Browser(port, tmp_path_factory.mktemp("profile"))
        try:
            yield page
        finally:
            page.close()
    finally:
        driver.terminate()
        driver.wait(10)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pages = page_trace(generate(ChatWorkload(conversations=30, turns=4.0, seed=5)), 64)
    limits = {Tier.DEVICE: 1 << 30, Tier.HOST: 4 << 30, Tier.STORAGE: 16 << 30}
    plan = make_plan(PlanInput(pages, read_model("Qwen/Qwen3-0.6B"), limits, ("lru", "slru")))
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(to_html(plan, "chats"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(browser: Browser, report: Path) -> Browser:
    browser.post("/url", {"url": "about:blank"})
    browser.log("performance")  # of the page that a new browser shows
    browser.post("/url", {"url": report.as_uri()})
    return browser


def test_it_opens_without_errors_and_asks_the_network_for_nothing(opened: Browser, report: Path) -> None:
    assert [entry for entry in opened.log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    events = [json.loads(entry["message"])["message"] for entry in opened.log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {report.as_uri()}


def test_every_plot_has_marks_within_its_frame(opened: Browser) -> None:
    plots = opened.run(PLOTS)
    assert len(plots) == 10
    for plot in plots:
        assert plot["width"] > 500 and plot["height"] > 200
        assert plot["marks"] == plot["inside"] > 0


def test_no_text_runs_out_of_the_page(opened: Browser) -> None:
    assert opened.run("return document.documentElement.scrollWidth <= window.innerWidth")
    outside = """
    return [...document.querySelectorAll('svg text')].filter(text => {
      const box = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
      return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
    }).map(text => text.textContent)"""
    assert opened.run(outside) == []


@pytest.mark.parametrize(
    ("scheme", "page", "lru"), [("light", "244,244,241", "42,120,214"), ("dark", "18,18,17", "91,159,240")]
)
def test_a_screenshot_shows_the_curves_in_light_and_dark(opened: Browser, scheme: str, page: str, lru: str) -> None:
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    opened.post("/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": feature})
    opened.run("document.querySelectorAll('.card')[0].scrollIntoView()")
    seen = opened.colours()
    assert seen.get(page, 0) > 10_000
    assert seen.get(lru, 0) > 500
    assert base64.b64decode(opened.get("/screenshot"))[:4] == b"\x89PNG"
