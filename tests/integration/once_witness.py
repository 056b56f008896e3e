"""A witness outside of the store: a process that hears of effects and writes down what it hears.

    python -m tests.integration.once_witness SOCKET LOG

It answers each line when that is in the log. So what a worker has told has happened, whatever becomes of
the worker.
A line of the log: the time on CLOCK_MONOTONIC, the worker's process id, a word, a key, a value.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time


async def main(path: str, log: str) -> None:
    with open(log, "a", buffering=1) as written:

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):  # the worker was killed
                while line := await reader.readline():
                    written.write(f"{time.monotonic():.6f} {line.decode()}")
                    writer.write(b"\n")
            writer.close()

        server = await asyncio.start_unix_server(hear, path)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
