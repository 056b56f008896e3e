"""The site as a reader has it: built, opened from the disk, in a browser, without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT

pytestmark = pytest.mark.timeout(400)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Nothing but the disk can be reached.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--window-size=1400,1000",
)
#: What newcomers search for, and the page that has to be among the results.
SEARCHED = {
    "heartbeat": "help/glossary.html",
    "watchdog": "help/glossary.html",
    "renewal": "help/glossary.html",
    "mutex": "help/glossary.html",
    "deadlock": "help/glossary.html",
    "critical section": "help/glossary.html",
    "idempotent": "do-it-once.html",
    "Redisson": "coming-from/redisson.html",
    "aioredlock": "coming-from/aioredlock.html",
    "systemd": "how-to/systemd.html",
    "Kubernetes": "how-to/kubernetes.html",
    "Django": "how-to/recipes.html",
    "Celery": "how-to/recipes.html",
    "Grafana": "how-to/observability.html",
    "belongs to another event loop": "help/errors.html",
}
_LINK = re.compile(r'(?:href|src)="([^"]*)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the site, built for this test."""
    pytest.importorskip("material", reason="building the site needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="building the site needs the extra docs")
    home = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(home)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return home


class Browser:
    """A page of a real browser, driven by WebDriver over loopback."""

    def __init__(self, port: int, binary: str, profile: Path) -> None:
        self._base = f"http://127.0.0.1:{port}/session"
        arguments = [*QUIET, f"--user-data-dir={profile}"]
        options = {"args": arguments, "binary": binary}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options}}
        self._id: str = self._call("POST", "", {"capabilities": wanted})["sessionId"]

    def open(self, page: Path) -> None:
        self._call("POST", f"/{self._id}/url", {"url": page.as_uri()})

    def run(self, script: str, *arguments: str) -> Any:
        return self._call(
            "POST", f"/{self._id}/execute/sync", {"script": script, "args": list(arguments)}
        )

    def until(self, script: str, *arguments: str, within: float = 30.0) -> Any:
        """Run the script again and again until what it returns is true."""
        deadline = time.monotonic() + within
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < deadline, f"{script} {arguments} stayed {found!r}"
            time.sleep(0.05)
        return found

    def log(self) -> list[dict[str, Any]]:
        """Return what the pages have complained of since the last call."""
        entries: list[dict[str, Any]] = self._call(
            "POST", f"/{self._id}/se/log", {"type": "browser"}
        )
        return entries

    def close(self) -> None:
        self._call("DELETE", f"/{self._id}", None)

    def _call(self, method: str, path: str, body: object) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as refused:
            refused.add_note(refused.read().decode())
            raise


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("this machine has no chromium with chromedriver")
    # Port 0: the driver chooses one, and says which.
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            while not (found := re.search(r"successfully on port (\d+)", said)):
                said = process.stdout.readline()
                assert said, "chromedriver did not start"
            profile = tmp_path_factory.mktemp("profile")
            browser = Browser(int(found[1]), binary, profile)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            process.terminate()


_SEARCH = """
const box = document.querySelector("[data-md-component=search-query]");
if (box.value !== arguments[0]) {
    const toggle = document.querySelector("[data-md-toggle=search]");
    if (!toggle.checked) toggle.click();
    box.focus();
    box.value = arguments[0];
    box.dispatchEvent(new Event("input", {bubbles: true}));
    box.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
    return null;
}
const shown = [...document.querySelectorAll(".md-search-result__link")].map(a => a.href);
const text = document.querySelector(".md-search-result__meta").textContent;
return shown.length && /found|document/.test(text) ? shown : null;
"""


@pytest.mark.parametrize("word", SEARCHED)
def test_search_finds_from_the_disk(site: Path, browser: Browser, word: str) -> None:
    browser.open(site / "index.html")
    found = browser.until(_SEARCH, word)
    pages = [link.removeprefix(site.as_uri() + "/").partition("#")[0] for link in found]
    wanted = SEARCHED[word]
    assert wanted in [page.partition("?")[0] for page in pages]


def test_diagrams_are_drawn_without_a_network(site: Path, browser: Browser) -> None:
    browser.open(site / "concepts" / "leases.html")
    # The theme puts each drawing into a closed shadow; an element of its own remains, with a size.
    browser.until(
        "const found = [...document.querySelectorAll('div.mermaid')];"
        "return found.length > 0 && found.every(one => one.offsetHeight > 100)"
    )
    assert browser.run("return document.querySelectorAll('pre.mermaid').length") == 0


def test_every_page_opens_from_the_disk(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 40
    for page in pages:
        for link in _LINK.findall(page.read_text("utf-8")):
            path = link.partition("#")[0].partition("?")[0]
            if path and not re.match(r"[a-z]+:", path):
                target = (page.parent / path).resolve()
                assert target.is_file(), f"{page.relative_to(site)}: {link}"


def test_pages_ask_no_other_host(site: Path, browser: Browser) -> None:
    for page in ("index.html", "concepts/leases.html", "reference/locks.html"):
        browser.open(site / page)
        browser.until("return document.readyState === 'complete' && window.__index")
    browser.open(site / "index.html")
    # No name can be resolved: a request to anybody is an error in the browser's log.
    failed = [entry["message"] for entry in browser.log() if "net::ERR" in entry["message"]]
    assert not failed


def test_site_has_what_readers_need_and_nothing_else(site: Path) -> None:
    assert not list(site.rglob("__pycache__")) + list(site.rglob("*.py"))
    front = (site / "index.html").read_text("utf-8")
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f"aiodlock {version[1]}" in front
    assert "project/changelog.html" in front
    assert "project/contributing.html" in front
    assert "github.com/aiodlock" in front
    assert "_UNSET" not in "".join(
        page.read_text("utf-8") for page in (site / "reference").glob("*.html")
    )
