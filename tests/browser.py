"""A real Chromium without a window, driven by WebDriver over loopback. No package is needed."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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
    # Nothing but the disk and this machine can be reached.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--window-size=1400,1000",
)


class Browser:
    """A page of a real browser, driven by WebDriver over loopback."""

    def __init__(self, port: int, binary: str, profile: Path) -> None:
        self._base = f"http://127.0.0.1:{port}/session"
        arguments = [*QUIET, f"--user-data-dir={profile}"]
        options = {"args": arguments, "binary": binary}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options}}
        self._id: str = self._call("POST", "", {"capabilities": wanted})["sessionId"]

    def open(self, url: str) -> None:
        self._call("POST", f"/{self._id}/url", {"url": url})

    @property
    def url(self) -> str:
        """Where the browser is."""
        found: str = self._call("GET", f"/{self._id}/url", None)
        return found

    def resize(self, width: int, height: int) -> None:
        """Look like another screen: a phone may be narrower than a window can be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._call(
            "POST", f"/{self._id}/goog/cdp/execute", {"cmd": command, "params": parameters}
        )

    def picture(self, file: Path) -> None:
        """Save what is seen as a PNG."""
        file.write_bytes(base64.b64decode(self._call("GET", f"/{self._id}/screenshot", None)))

    def click(self, selector: str) -> None:
        """Click as a person does, again and again if the element is replaced meanwhile. Where the page is
        drawn anew faster than this machine can click, the page clicks itself."""
        try:
            self._with(selector, lambda path: self._call("POST", f"{path}/click", {}))
        except urllib.error.HTTPError as refused:
            if "stale element" not in "".join(refused.__notes__):
                raise
            self.run("document.querySelector(arguments[0]).click()", selector)

    def type(self, selector: str, text: str) -> None:
        """Type into a field, after what is there was taken out."""

        def write(path: str) -> None:
            self._call("POST", f"{path}/clear", {})
            self._call("POST", f"{path}/value", {"text": text})

        self._with(selector, write)

    def _with(self, selector: str, act: Callable[[str], object]) -> None:
        for attempt in range(50):
            try:
                found = self._call(
                    "POST", f"/{self._id}/element", {"using": "css selector", "value": selector}
                )
                (element,) = found.values()
                act(f"/{self._id}/element/{element}")
                return
            except urllib.error.HTTPError as refused:
                gone = "stale element" in "".join(refused.__notes__)
                if attempt == 49 or not gone:
                    raise
            time.sleep(0.05)  # the page is being drawn anew

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


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Start one; skip the test where there is none.

    :param profile: an empty folder.
    """
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
            browser = Browser(int(found[1]), binary, profile)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            process.terminate()
