"""``aiodlock web``: the page on 127.0.0.1."""

from __future__ import annotations

import asyncio
import socket
import sys
from types import FrameType

from .. import Client
from ._source import read_source

#: Whoever can open the page sees every name: only this machine can.
ADDRESS = "127.0.0.1"


async def serve(url: str, prefix: str, port: int, *, read_only: bool) -> None:
    """Serve the page until SIGINT or SIGTERM.

    :raises BackendError: if the store cannot be reached.
    :raises ValueError: if the port is taken.
    :raises ImportError: if a package is missing.
    """
    try:
        import uvicorn
    except ImportError:
        raise ImportError("web needs uvicorn: pip install 'aiodlock[web]'") from None
    from .. import web

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # Streams last as long as somebody looks: they have to be ended.
            loop.call_soon_threadsafe(page.state.pages.ended.set)
            super().handle_exit(sig, frame)

    loop = asyncio.get_running_loop()
    with _listen(port) as listening:
        async with Client(read_source(url), prefix=prefix) as client:
            page = web.app(client, read_only=read_only)
            port = listening.getsockname()[1]
            print(f"http://{ADDRESS}:{port}/", flush=True)
            print("aiodlock: press Ctrl-C to stop", file=sys.stderr, flush=True)
            config = uvicorn.Config(
                page,
                log_level="warning",
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=2,
            )
            await Server(config).serve(sockets=[listening])


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((ADDRESS, port))
    except OSError as taken:
        raise ValueError(f"port {port} on {ADDRESS} cannot be used: {taken.strerror}") from None
