"""A listening port that can be closed while somebody connects.

`asyncio.start_server` hands a connection over a few turns of the loop after it was accepted. A server that
is closed meanwhile forgets it (Python 3.11 leaves its socket open), and a proxy that ends cannot cut what
it has not heard of: a client that connects again, and outlives its proxy, strikes there sooner or later.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine

Serve = Callable[
    [asyncio.StreamReader, asyncio.StreamWriter], Coroutine[object, object, None] | None
]


class Listener:
    """Serves each connection to a port of this machine, a coroutine in a task of its own.

    Mutable state: ``_handing_over`` and ``_serving``, tasks of connections.
    """

    def __init__(
        self, serve: Serve, port: int = 0, *, host: str = "127.0.0.1", backlog: int = 100
    ) -> None:
        self._serve = serve
        self._handing_over: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._socket = socket.create_server((host, port), backlog=backlog)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._loop.add_reader(self._socket, self._accept)

    async def close(self) -> None:
        """Refuse whoever connects from now on. Whoever was accepted has reached `serve`, and lives on."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        await asyncio.gather(*self._handing_over)
        await asyncio.sleep(0)  # tasks that were made for them begin

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # gone already
        self._keep(self._hand_over(accepted), self._handing_over)

    async def _hand_over(self, accepted: socket.socket) -> None:
        served = self._serve(*await asyncio.open_connection(sock=accepted))
        if served is not None:
            self._keep(served, self._serving)

    def _keep(self, work: Coroutine[object, object, None], where: set[asyncio.Task[None]]) -> None:
        task = self._loop.create_task(work)
        where.add(task)
        task.add_done_callback(where.discard)
