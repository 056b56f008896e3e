"""Where a client was entered: its event loop and its process. It works nowhere else."""

from __future__ import annotations

import asyncio
import os

from . import _process
from ._tasks import running_loop

_OTHER_LOOP = "this Client belongs to another event loop: make one per loop"
_OTHER_PROCESS = "this Client was entered before a fork: make a new one in the child"


class Home:
    """The loop that runs now, and this process."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.pid: int = _process.look()

    def check_here(self) -> None:
        """Raise in another loop or process than the client was entered in."""
        self.check_process()
        self.check_loop()

    def check_loop(self) -> None:
        """Raise in another loop than the client was entered in."""
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(_OTHER_LOOP)

    def check_process(self) -> None:
        """Raise in another process than the client was entered in."""
        if os.getpid() != self.pid:
            raise RuntimeError(_OTHER_PROCESS)

    def foreign(self) -> RuntimeError | None:
        """Return why nothing of this client can be left here: for what may run without any loop, too."""
        if os.getpid() != self.pid:
            return RuntimeError(_OTHER_PROCESS)
        return RuntimeError(_OTHER_LOOP) if running_loop() not in (None, self.loop) else None
