"""The site as a reader has it: built, opened from the disk, in a browser, without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..browser import Browser, open_browser
from .pages import ROOT

pytestmark = pytest.mark.timeout(400)

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
    "upgrade": "how-to/checklist.html",
    "capacity": "how-to/checklist.html",
    "backup": "how-to/checklist.html",
    "checklist": "how-to/checklist.html",
    "rollout": "how-to/kubernetes.html",
    "Deployment": "how-to/kubernetes.html",
    "rate limit": "concepts/stores.html",
    "queue position": "concepts/stores.html",
    "priority": "concepts/stores.html",
    "Windows": "concepts/stores.html",
    "Python versions": "concepts/stores.html",
    "licence": "concepts/stores.html",
    "docker compose": "how-to/compose.html",
    "Patroni": "how-to/postgresql.html",
    "failover": "concepts/stores.html",
    "py-spy": "help/troubleshooting.html",
    "loop_scope": "how-to/testing.html",
    "doctor user": "how-to/production.html",
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


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
    browser.open((site / "index.html").as_uri())
    found = browser.until(_SEARCH, word)
    pages = [link.removeprefix(site.as_uri() + "/").partition("#")[0] for link in found]
    pages = list(dict.fromkeys(page.partition("?")[0] for page in pages))
    # What a reader sees without moving down.
    assert SEARCHED[word] in pages[:5], pages
    assert "project/changelog.html" not in pages


def test_diagrams_are_drawn_without_a_network(site: Path, browser: Browser) -> None:
    browser.open((site / "concepts" / "leases.html").as_uri())
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
        browser.open((site / page).as_uri())
        browser.until("return document.readyState === 'complete' && window.__index")
    browser.open((site / "index.html").as_uri())
    # No name can be resolved: a request to anybody is an error in the browser's log.
    failed = [entry["message"] for entry in browser.log() if "net::ERR" in entry["message"]]
    assert not failed


def test_types_of_the_standard_library_are_linked(site: Path) -> None:
    page = (site / "reference" / "client.html").read_text()
    for described in (
        "library/functions.html#float",
        "library/stdtypes.html#str",
        "library/collections.abc.html#collections.abc.Callable",
    ):
        assert f'href="https://docs.python.org/3/{described}"' in page


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
