"""Standard error that never fails: what happened is told by the exit code, too."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Forgiving(io.FileIO):
    """Takes what its file does not: the reader has ended, the disk is full, the terminal is gone."""

    def write(self, data: ReadableBuffer, /) -> int:
        everything = memoryview(data).nbytes
        try:
            written: int | None = super().write(data)
        except OSError:
            return everything
        return everything if written is None else written  # None: a full pipe that does not wait


def forgive() -> None:
    """Let nothing that is printed on standard error raise, from now on.

    Else a message would end ``run`` in the middle of its work, and what could not be written would turn
    the exit code into 120. Without a standard error, ``print`` would take standard output.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (to the end of the process)
        return
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(2, "w", closefd=False)),
        encoding=sys.stderr.encoding,
        errors=sys.stderr.errors,
        line_buffering=True,
    )
