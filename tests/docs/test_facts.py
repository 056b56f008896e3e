"""What pages have said wrongly once: each correction has a test that fails if it becomes wrong again."""

# ruff: noqa: PT012

from __future__ import annotations

import asyncio
import inspect
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiodlock import Client, LockLost
from aiodlock.fastapi import Locked, Once
from aiodlock.testing import expire, memory_client

from ..scenes import STARTING, until_cancelled
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


#: What pages say to write.
_EXITS = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))"
_CANCELS = (
    "asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)"
)
_THREADS = """
import signal, sys, time
from aiodlock import sync
HANDLER
locks = sync.Client(sys.argv[1])
lease = locks.lock("x", ttl=30).acquire()
print("held", flush=True)
time.sleep(600)
"""
_TASKS = """
import asyncio, signal, sys
import aiodlock
async def main():
    HANDLER
    async with aiodlock.Client(sys.argv[1]) as client, client.lock("x", ttl=30):
        print("held", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize(
    ("program", "handler"),
    [(_THREADS, ""), (_THREADS, _EXITS), (_TASKS, "pass"), (_TASKS, _CANCELS)],
    ids=["threads", "threads that exit", "tasks", "tasks that are cancelled"],
)
async def test_sigterm_releases_nothing_unless_the_line_of_the_pages_stands_there(
    store: Store, program: str, handler: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", program.replace("HANDLER", handler), store.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "held\n"
    process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait, STARTING)
    process.stdout.close()
    async with Client(store.url) as client:
        assert bool((await client.inspect("x")).holders) is (handler in ("", "pass"))
        await client.break_lock("x")
    for page in ("how-to/threads", "how-to/recipes", "how-to/production"):
        text = (ROOT / f"docs/{page}.md").read_text()
        assert _EXITS in text
        assert _CANCELS in text
    assert _CANCELS in (ROOT / "docs/coming-from/asyncio-lock.md").read_text()


def test_locked_and_once_wait_as_long_as_the_pages_say() -> None:
    for kind in (Locked, Once):
        assert inspect.signature(kind).parameters["timeout"].default == 10.0
        assert "Default: 10 s" in " ".join((inspect.getdoc(kind) or "").split())
    for page in ("how-to/fastapi.md", "do-it-once.md"):
        assert "10 s by default" in (ROOT / "docs" / page).read_text()


async def test_child_that_a_body_created_goes_on_after_a_loss_unless_a_group_has_it() -> None:
    async with memory_client() as client:
        with pytest.raises(LockLost):
            async with client.lock("x") as lease:
                child = asyncio.create_task(asyncio.sleep(600))
                expire(lease)
                await until_cancelled()
        assert not child.done()
        child.cancel()
        with pytest.raises(LockLost):
            async with client.lock("y") as lease, asyncio.TaskGroup() as group:
                grouped = group.create_task(asyncio.sleep(600))
                expire(lease)
        assert grouped.cancelled()
    for page in ("redis-py", "asyncio-lock"):
        text = (ROOT / f"docs/coming-from/{page}.md").read_text()
        assert "asyncio.TaskGroup` inside" in " ".join(text.split())


async def test_release_in_finally_hides_what_the_body_raised_and_a_block_does_not() -> None:
    async with memory_client() as client:
        lock = client.lock("x")
        with pytest.raises(LockLost):
            lease = await lock.acquire()
            try:
                expire(lease)
                raise ValueError("mine")
            finally:
                await lock.release()
        with pytest.raises(ValueError, match="mine"):
            async with client.lock("y", on_lost="flag") as lease:
                expire(lease)
                raise ValueError("mine")


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
