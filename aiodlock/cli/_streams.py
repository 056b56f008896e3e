"""Standard output and standard error, whatever stands behind them."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: What was to be printed could not be: none of the codes that say what was found.
OUTPUT_FAILED = 74


class _Forgiving(io.FileIO):
    """Takes what its file does not: the reader has ended, the disk is full, the terminal is gone."""

    def write(self, data: ReadableBuffer, /) -> int:
        everything = memoryview(data).nbytes
        try:
            written: int | None = super().write(data)
        except OSError as error:
            self._failed(error)
            return everything
        return everything if written is None else written  # None: a full pipe that does not wait

    def _failed(self, error: OSError) -> None:
        """The rest of what is printed is lost."""


class _Output(_Forgiving):
    """Ends the command instead, once, and says why on ``stderr``. Mutable state: ``_broken``."""

    _broken = False
    #: Not ``sys.stderr``: a live display of rich turns that into what it prints here.
    stderr: TextIO

    def _failed(self, error: OSError) -> None:
        if self._broken:
            return  # what was still in the buffer
        self._broken = True
        if error.errno != errno.EPIPE:  # the reader has what it wanted
            print(f"aiodlock: cannot write to standard output: {error.strerror}", file=self.stderr)
        raise SystemExit(OUTPUT_FAILED)


def prepare() -> None:
    """Let nothing on standard error raise, and end the command when its output cannot be written.

    Else a message would end ``run`` in the middle of its work, and what could not be written would turn
    the exit code into 1 or 120. Without a standard error, ``print`` would take standard output.
    """
    sys.stderr = _Output.stderr = _around(sys.stderr, _Forgiving, 2)
    sys.stdout = _around(sys.stdout, _Output, 1)


def _around(stream: TextIO | None, kind: type[_Forgiving], descriptor: int) -> TextIO:
    if stream is None:  # closed before we began
        return open(os.devnull, "w")  # to the end of the process
    return io.TextIOWrapper(
        io.BufferedWriter(kind(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        # A terminal that cannot show a name is no reason to show nothing.
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=True,
    )
