"""One of the processes of ``benchmarks.storms``: many clients, each with a lease.

Reads words on its standard input and answers each with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiodlock

#: So many clients enter at once; a handshake of TLS takes some ten times as long as the rest.
_AT_ONCE, _AT_ONCE_WITH_TLS = 16, 2
_TRIES = 20


def links_of(client: aiodlock.Client) -> list[Any]:
    """Return the links of a client of one server."""
    backend: Any = client._core.session.backend.store  # type: ignore[union-attr]
    return [backend.server.commands, backend.server.wakeups.link]


async def main(url: str, number: int, clients: int, extra: int) -> None:
    """Enter the clients, take a lease for each (and ``extra`` more), and do what is asked."""
    async with AsyncExitStack() as stack:
        has_tls = url.startswith("rediss:")
        entering = asyncio.Semaphore(_AT_ONCE_WITH_TLS if has_tls else _AT_ONCE)

        async def enter() -> aiodlock.Client:
            async with entering:
                for _ in range(_TRIES):  # what is measured begins later
                    with suppress(aiodlock.BackendUnavailable):
                        return await stack.enter_async_context(aiodlock.Client(url, ttl=30.0))
                raise RuntimeError("the server cannot be reached")

        entered = await asyncio.gather(*(enter() for _ in range(clients)))
        leases = [
            await entered[index % clients].lock(f"storm:{number}:{index}").acquire()
            for index in range(clients + extra)
        ]
        links = [link for client in entered for link in links_of(client)]
        _tell(ready=True)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while word := (await reader.readline()).decode().strip():
            if word == "remember":
                before = [link.wire for link in links]
                cpu = time.process_time()
                _tell(up=sum(wire is not None for wire in before))
            elif word == "back":
                back = sum(
                    link.wire is not None and link.wire is not old
                    for link, old in zip(links, before, strict=True)
                )
                _tell(back=back, of=len(links), cpu=time.process_time() - cpu)
            elif word == "leases":
                _tell(held=sum(lease.held for lease in leases), of=len(leases))
            else:
                break
        for lease in leases:
            if lease.held:
                await lease.release()


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
