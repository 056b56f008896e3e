"""What pages have said wrongly once: each correction has a test that fails if it becomes wrong again."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiodlock import Client

from ..scenes import STARTING
from ..servers import Store
from .pages import ROOT, blocks, pages, title

AIODLOCK = str(Path(sys.executable).parent / "aiodlock")
#: A URL with a password in it.
_SECRET = re.compile(r"\w+://[^\s/@:]*:[^\s/@]+@")


@pytest.mark.parametrize("page", pages(), ids=title)
def test_page_puts_no_password_on_a_command_line(page: Path) -> None:
    for block in blocks(page.read_text("utf-8")):
        if block.language in ("console", "sh", "crontab"):
            assert not _SECRET.search(block.code), block.code


@pytest.mark.stores("valkey9")
async def test_exit_code_69_also_means_that_the_store_refuses(store: Store) -> None:
    url = store.url.replace("://", "://nobody:wrong@", 1)
    done = await asyncio.to_thread(
        subprocess.run,
        [AIODLOCK, "run", "x", "--", "echo", "ran"],
        env={"AIODLOCK_URL": url},
        capture_output=True,
        text=True,
        timeout=STARTING,
    )
    assert (done.returncode, done.stdout) == (69, "")
    assert "invalid username-password" in done.stderr
    page = (ROOT / "docs/how-to/command-line.md").read_text()
    assert "| 69 | the store is unreachable, or it refuses |" in page


_HOLDING = """
import signal, sys, time
from aiodlock import sync
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
locks = sync.Client(sys.argv[1])
lease = locks.lock("x", ttl=30).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("handler", [False, True])
async def test_plain_sigterm_releases_nothing_and_one_that_exits_does(
    store: Store, handler: bool
) -> None:
    more = ["and exits"] if handler else []
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDING, store.url, *more], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "held\n"
    process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait, STARTING)
    process.stdout.close()
    async with Client(store.url) as client:
        assert bool((await client.inspect("x")).holders) is not handler
        await client.break_lock("x")
    page = (ROOT / "docs/how-to/threads.md").read_text()
    assert "A plain SIGTERM is none" in page


def test_names_that_the_page_about_linger_explains_are_in_the_code() -> None:
    page = (ROOT / "docs/internals/linger.md").read_text()
    code = "".join(path.read_text() for path in ROOT.glob("aiodlock/**/*.*") if _is_text(path))
    for name in set(re.findall(r"`([a-z_]{3,})`", page)):
        assert re.search(rf"\b{name}\b", code), name


def _is_text(path: Path) -> bool:
    return path.suffix in (".py", ".lua", ".sql")


def test_password_in_a_url_is_found() -> None:
    wrong: Any = _SECRET.search("aiodlock ls --url redis://locks:secret@locks:6379/0")
    assert wrong
    assert not _SECRET.search("AIODLOCK_URL=redis://locks:6379/0")
