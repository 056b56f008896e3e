"""Forks, interruptions and the end of a process: each in a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from aiodlock import sync

from ..servers import Store, embedded
from .process import SCENARIOS

pytestmark = pytest.mark.stores("valkey9")

_AT_THE_END = (
    "the_end_of_the_process_releases",
    "used_by_other_handlers_of_atexit",
    "first_used_when_the_main_thread_has_ended",
    "threads_at_the_end",
    "a_waiter_that_is_a_daemon_at_the_end",
    "the_parent_ends_and_the_child_goes_on",
    "first_used_by_what_the_interpreter_collects_at_its_end",
    "used_again_by_what_the_interpreter_collects_at_its_end",
)
_INTERRUPTED = "interrupted_at_any_moment"


def run(scenario: str, url: str, *, quiet: bool = True) -> str:
    """Run one to its end, with every warning shown; return what it printed."""
    done = subprocess.run(
        # Python 3.12 and later warn of every fork with threads, which is what is tried here.
        [
            *(sys.executable, "-Wdefault", "-Wignore:This process:DeprecationWarning"),
            *("-m", "tests.sync.process", scenario, url),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or not quiet
    assert "ok" in done.stdout.splitlines()
    return done.stdout


@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - {*_AT_THE_END, _INTERRUPTED}))
def test_process(store: Store, scenario: str) -> None:
    run(scenario, store.url)


def test_process_that_is_interrupted_at_any_moment(store: Store) -> None:
    # An interruption in the `with` statement itself may leave a hold, which closing the client tells.
    run(_INTERRUPTED, store.url, quiet=False)


def test_the_end_of_a_process_releases_what_it_holds(store: Store) -> None:
    assert "held" in run("the_end_of_the_process_releases", store.url)
    with sync.Client(store.url) as client:
        assert not client.lock("x").locked()


def test_handlers_of_atexit_may_use_it(store: Store) -> None:
    printed = run("used_by_other_handlers_of_atexit", store.url)
    assert printed.count("held at the end") == 2


def test_threads_that_outlive_the_main_thread_connect_by_name() -> None:
    server = embedded(
        "valkey9", tcp=True
    )  # an address is looked up in an executor, a socket is not
    server.start()
    try:
        url = server.url.replace("127.0.0.1", "localhost")
        assert "localhost" in url
        printed = run("first_used_when_the_main_thread_has_ended", url)
    finally:
        server.stop()
    assert "held by a thread" in printed
    assert "held at the end" in printed


def test_the_end_waits_for_threads_but_not_for_daemons(store: Store) -> None:
    started = time.monotonic()
    assert "done" in run("threads_at_the_end", store.url, quiet=False)
    assert time.monotonic() - started < 20
    with sync.Client(store.url) as client:
        client.lock("x").acquire(timeout=1).release()


def test_a_daemon_that_waits_does_not_keep_the_process(store: Store) -> None:
    started = time.monotonic()
    assert "held" in run("a_waiter_that_is_a_daemon_at_the_end", store.url, quiet=False)
    assert time.monotonic() - started < 20
    with sync.Client(store.url) as client:
        client.lock("x").acquire(timeout=1).release()


@pytest.mark.parametrize("when", ["first_used", "used_again"])
def test_what_the_interpreter_collects_at_its_end_is_refused(store: Store, when: str) -> None:
    # No thread can be started any more, and the one that was runs no more.
    printed = run(f"{when}_by_what_the_interpreter_collects_at_its_end", store.url)
    assert "refused: " in printed


async def test_a_child_outlives_its_parent(store: Store) -> None:
    printed = await asyncio.to_thread(run, "the_parent_ends_and_the_child_goes_on", store.url)
    assert "the child was in" in printed
