"""Processes that run a module as ``python -m`` does, forked from the tests, which have imported it already.

A Python that begins takes half a second to import what a command needs, and the tests start some hundred
of them. What is forked is a process like the other ones, with a pid, pipes, signals and an environment of
its own; the loop, the log, the warnings and the files of the test are left behind. The modules are the
test's: what that has patched is patched here, too, and SQLite takes the test's locks for its own, so no
connection may be open then. What a Python does at its start and at its end is asked of those that are
started by `sys.executable`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread
import contextlib
import contextvars
import gc
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TextIO

Environment = Mapping[str, str] | None


async def start(
    module: str, *arguments: str, env: Environment = None, **options: Any
) -> asyncio.subprocess.Process:
    """Start one, with the options of `asyncio.create_subprocess_exec`."""
    with _threads_beside_it():
        return await asyncio.create_subprocess_exec(
            module, preexec_fn=lambda: _become(module, arguments, env), **options
        )


def run(
    module: str, *arguments: str, env: Environment = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run one to its end, with the options of `subprocess.run`; what it prints is text."""
    with _threads_beside_it():
        return subprocess.run(
            [module],
            preexec_fn=lambda: _become(module, arguments, env),
            check=False,
            text=True,
            **options,
        )


@contextlib.contextmanager
def _threads_beside_it() -> Iterator[None]:
    """Take no offence at them, as Python 3.12 does: xdist's threads hold no lock that a child needs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        yield


def _become(module: str, arguments: tuple[str, ...], env: Environment) -> NoReturn:
    """Run the module in this process, which was to execute a program."""
    code = 1
    try:
        _leave_the_test()
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        sys.argv = [module, *arguments]
        code = contextvars.Context().run(_code_of, module)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _leave_the_test() -> None:
    gc.freeze()  # what is collected here closes files, by numbers that are others' by then
    gc.enable()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # among them what tells that a program runs
    sys.stdin, sys.stdout, sys.stderr = (
        _input(),
        _output(1, sys.__stdout__),
        _output(2, sys.__stderr__),
    )
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(None)
    atexit._clear()
    getattr(concurrent.futures.thread, "_threads_queues").clear()  # noqa: B009 - none of them is here
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("aiodlock").setLevel(logging.NOTSET)
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__


def _input() -> Any:
    """Return standard input as Python opens it; nothing where it is closed."""
    with contextlib.suppress(OSError):
        return io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    return None


def _output(descriptor: int, first: Any) -> Any:
    """Return a stream as Python opens it, with the encoding of this Python's first one."""
    with contextlib.suppress(OSError):
        raw = io.FileIO(descriptor, "w", closefd=False)
        return io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=first.encoding,
            errors=first.errors,
            line_buffering=descriptor == 2 or raw.isatty(),
        )
    return None


def _code_of(module: str) -> int:
    """Run the module; return the code with which Python ends."""
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    getattr(threading, "_shutdown")()  # noqa: B009 - waits for threads, as Python does
    atexit._run_exitfuncs()
    gc.collect()  # says what has been left open
    return code if all([_flushed(sys.stdout), _flushed(sys.stderr)]) else 120


def _flushed(stream: TextIO | None) -> bool:
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.flush()
        return True
    return False
