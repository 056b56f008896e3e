"""A signal handler raises while a block is entered or left: nothing stays held, no thread is inside."""

from __future__ import annotations

import itertools
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import pytest

from aiodlock import sync
from aiodlock.sync._block import Entered
from aiodlock.sync._holds import here

Block: TypeAlias = AbstractContextManager[Any]

SYNC = str(Path(sync.__file__).parent)

BLOCKS: dict[str, Callable[[sync.Client, str], Block]] = {
    "lock": lambda client, name: client.lock(name, timeout=5),
    "shared": lambda client, name: client.rwlock(name, timeout=5).read,
    "semaphore": lambda client, name: client.semaphore(name, limit=1, timeout=5),
    "multilock": lambda client, name: client.multilock(name, f"{name} too", timeout=5),
    "once": lambda client, name: client.once(name, keep=600, timeout=5),
    "election": lambda client, name: client.election(name, timeout=5).lead("here"),
    "lease": lambda client, name: client.lock(name, timeout=5).acquire(),
    "leases": lambda client, name: client.multilock(name, f"{name} too", timeout=5).acquire(),
}


@pytest.fixture
def url() -> str:
    return f"memory://interrupts-{uuid.uuid4().hex}"


@pytest.fixture
def client(url: str) -> Iterator[sync.Client]:
    with sync.Client(url, ttl=60) as client:
        yield client


@pytest.fixture
def other(url: str) -> Iterator[sync.Client]:
    with sync.Client(url, ttl=60) as client:
        yield client


def run(block: Block, interrupt_at: int) -> bool:
    """Enter and leave the block; return whether there was such a step to interrupt it at.

    A step is where a function of ``aiodlock.sync`` begins, calls a function, goes on behind it, or returns.
    """
    steps = 0

    def step(frame: FrameType, event: str, _: object) -> None:
        nonlocal steps
        if not frame.f_code.co_filename.startswith(SYNC):
            return
        # Python code cannot notice the first; the interpreter does not look for signals at the other.
        place = (frame.f_code.co_name, event)
        if place in (("__exit__", "call"), ("__enter__", "return")) and called_by_run(frame):
            return
        steps += 1
        if steps == interrupt_at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(step)
    try:
        with block:
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def called_by_run(frame: FrameType) -> bool:
    return frame.f_back is not None and frame.f_back.f_code is run.__code__


# A lease that came when its call had been interrupted already is dropped.
@pytest.mark.filterwarnings("ignore:.*forgotten:ResourceWarning")
@pytest.mark.parametrize("kind", BLOCKS)
def test_block_that_is_interrupted_at_any_step_is_left(
    client: sync.Client, other: sync.Client, kind: str
) -> None:
    make = BLOCKS[kind]
    with make(client, "connects"):
        pass
    for number in itertools.count(1):
        block = make(client, f"x{number}")
        if not run(block, number):
            break
        if isinstance(block, sync.Lease | sync.MultiLease):
            with suppress(sync.NotHeld):  # interrupted on its way in, it is this thread's as before
                block.release()
        del block
        assert not here().blocks
        with make(other, f"x{number}"):
            pass
    assert number > 30


def test_once_that_is_done_already_is_left_when_it_is_interrupted_at_any_step(
    client: sync.Client,
) -> None:
    with client.once("x", keep=600):
        pass
    once = client.once("x", keep=600)
    for number in itertools.count(1):
        if not run(once, number):
            break
        assert not once._entered._open
    assert number > 15


def entered_meanwhile(at: int) -> bool:
    """Undo a block, and enter another one at that instruction; return whether there was such a one."""
    entered = Entered()
    undone: Any = object()
    other: Any = object()
    steps = 0
    entered.add(undone, None)

    def step(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        if not frame.f_code.co_filename.startswith(SYNC):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == at:
                entered.add(other, None)
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        entered.discard(undone)
    finally:
        sys.settrace(before)
    assert [lease for _, lease, _ in entered._open] == [other] * (steps >= at)
    return steps >= at


def test_block_that_another_thread_enters_while_one_is_undone_is_kept() -> None:
    assert entered_meanwhile(5)
    assert not all(entered_meanwhile(number) for number in range(1, 1000))
