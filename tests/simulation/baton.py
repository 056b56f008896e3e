"""Threads of a simulated process: each runs only while the world waits for it.

They are real threads, with locals and a trace function of their own. One lock for each direction passes the
turn, so what they do depends on the seed alone. A thread gives its turn back when it sleeps or waits for a
``Lock`` of this module, and, as the operating system would, in the middle of the library: before any
of its lines (``preempts``). There a signal may strike, too: ``interrupt`` raises KeyboardInterrupt in it.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import aiodlock

from .world import Process, World

_LIBRARY = str(Path(aiodlock.__file__).parent)
#: How long a thread stands still before a line, in true seconds.
_PREEMPTED = (0.0, 1e-5, 0.001, 0.02)
#: A stopped process is looked at again so much later.
_STOPPED = 0.001
#: A thread that does not give its turn back within so many real seconds waits for something real.
_HANGS = 30.0


class Gone(BaseException):
    """The process is dead: its threads end, wherever they are."""


class _Mine(threading.local):
    thread: Thread | None = None


_mine = _Mine()


def current() -> Thread:
    """Return the calling thread."""
    assert _mine.thread is not None, "this is not a thread of a simulated process"
    return _mine.thread


class Thread:
    """One of them. ``run`` is what it does.

    Mutable state: ``serial`` (of the wait that is under way: a wake-up of an earlier one does nothing),
    ``ended``, ``error``, ``struck`` (a signal is to raise), ``_gone``.
    """

    def __init__(
        self, process: Process, run: Callable[[], object], name: str, preempts: float = 0.0
    ) -> None:
        self.process = process
        self.world: World = process.world
        self.name = name
        self.preempts = preempts
        self.serial = 0
        self.ended = False
        self.error: BaseException | None = None
        self.struck = False
        #: Whether signals strike it before any line, or only while it waits.
        self.strikes_anywhere = False
        self._gone = False
        self._run = run
        self._my_turn, self._given_back = threading.Lock(), threading.Lock()
        self._my_turn.acquire()
        self._given_back.acquire()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self.wake(self.serial)

    def __repr__(self) -> str:
        return f"{self.process}/{self.name}"

    # -- in the world ------------------------------------------------------------------------------

    def wake(self, serial: int, delay: float = 0.0) -> None:
        """Let it go on, unless it waits for something else by then."""
        self.world.after(delay, self._go_on, serial)

    def interrupt(self) -> None:
        """A signal arrives whose handler raises KeyboardInterrupt."""
        if not self.ended and not self.process.dead:
            self.struck = True
            self.wake(self.serial)

    def _go_on(self, serial: int) -> None:
        if serial != self.serial or self.ended or self.process.dead:
            return
        if not self.process.running:
            self.world.after(_STOPPED, self._go_on, serial)
            return
        self._switch()
        if self.error is not None:
            raise self.error

    def _switch(self) -> None:
        with self.world.as_process(self.process):
            self._my_turn.release()
            if not self._given_back.acquire(timeout=_HANGS):
                raise RuntimeError(f"{self!r} does not give its turn back")

    def end(self) -> None:
        """Unwind it, at the end of the seed."""
        if not self.ended:
            self._gone = True
            self._switch()
            assert self.ended, f"{self!r} swallows its end"

    # -- in the thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        self._my_turn.acquire()
        _mine.thread = self
        try:
            self._check_gone()
            if self.preempts:
                sys.settrace(self._enter)
            self._run()
        except Gone:
            pass
        except BaseException as error:
            if not self._gone:
                self.error = error
        finally:
            sys.settrace(None)
            del self._run  # with what it refers to
            self.ended = True
            self._given_back.release()

    def wait(self, timeout: float | None = None) -> None:
        """Give the turn back, until it is woken or the time is over."""
        self._check_gone()
        self.serial += 1
        if timeout is not None:
            self.wake(self.serial, timeout)
        self._given_back.release()
        self._my_turn.acquire()
        self.serial += 1
        self._check_gone()

    def sleep(self, seconds: float) -> None:
        """As ``time.sleep``, in virtual time."""
        ends = self.world.time + seconds
        while (left := ends - self.world.time) > 0:
            self.wait(left)
            self.check_signal()

    def collect(self) -> None:
        """Run the collector here. What it finds of other seeds must not take a turn of this one."""
        sys.settrace(None)
        gc.collect()
        if self.preempts:
            sys.settrace(self._enter)

    def check_signal(self) -> None:
        """Raise here if a signal has arrived."""
        if self.struck:
            self.struck = False
            self.world.log(f"{self!r}: KeyboardInterrupt")
            raise KeyboardInterrupt

    def _check_gone(self) -> None:
        if self._gone:
            sys.settrace(None)
            raise Gone

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        # A module is loaded by one thread alone, with a lock that others wait for.
        if code.co_filename.startswith(_LIBRARY) and code.co_name != "<module>":
            return self._before_line
        return None

    def _before_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and not self._gone:
            rng = self.world.random
            if rng.random() < self.preempts:
                self.wait(rng.choice(_PREEMPTED))
            if self.strikes_anywhere:
                self.check_signal()
        return self._before_line


class Lock:
    """Stands for ``threading.Lock``: a thread waits in virtual time. Loops take it only when it is free.

    Mutable state: ``_locked``, ``_waiting``, ``_woken`` (who was given it, and does not know yet).
    """

    def __init__(self) -> None:
        self._locked = False
        self._waiting: deque[Thread] = deque()
        self._woken: set[Thread] = set()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._locked:
            self._locked = True
            return True
        if not blocking:
            return False
        me = current()
        ends = None if timeout < 0 else me.world.time + timeout
        self._waiting.append(me)
        try:
            while me not in self._woken:
                left = None if ends is None else ends - me.world.time
                if left is not None and left <= 0:
                    self._waiting.remove(me)
                    return False
                me.wait(left)
                if me not in self._woken:
                    me.check_signal()
        except BaseException:
            if me in self._woken:
                self._woken.discard(me)
                self._hand_on()
            else:
                self._waiting.remove(me)
            raise
        self._woken.discard(me)
        return True

    def release(self) -> None:
        assert self._locked
        self._hand_on()

    def locked(self) -> bool:
        return self._locked

    def _hand_on(self) -> None:
        if not self._waiting:
            self._locked = False
            return
        thread = self._waiting.popleft()
        self._woken.add(thread)
        # The kernel takes its time to let it run.
        rng = thread.world.random
        thread.wake(thread.serial, rng.choice((0.0, 1e-5, 1e-4, 0.003)))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
