"""A network between client and server: a proxy that passes on what comes a moment later.

It runs in a process of its own, and by threads: an event loop counts whole milliseconds.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


@contextmanager
def delayed(url: str, round_trip: float) -> Iterator[str]:
    """Give a URL of the same server, from where its answers take so many seconds longer."""
    server = urlsplit(url)
    where = (str(server.hostname), str(server.port), str(round_trip / 2))
    with subprocess.Popen(
        [sys.executable, "-m", __name__, *where], stdout=subprocess.PIPE, text=True
    ) as proxy:
        assert proxy.stdout is not None
        try:
            port = int(proxy.stdout.readline())
            yield server._replace(netloc=f"127.0.0.1:{port}").geturl()
        finally:
            proxy.terminate()


def main(host: str, port: int, one_way: float) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        server = socket.create_connection((host, port))
        for here, there in ((client, server), (server, client)):
            here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            on_its_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            _start(read, here, on_its_way, one_way)
            _start(write, there, on_its_way)


def _start(*call: object) -> None:
    threading.Thread(target=call[0], args=call[1:], daemon=True).start()  # type: ignore[arg-type]


def read(
    sender: socket.socket, on_its_way: queue.SimpleQueue[tuple[float, bytes]], one_way: float
) -> None:
    data = b"-"
    while data:
        try:
            data = sender.recv(65536)
        except OSError:
            data = b""
        on_its_way.put((time.monotonic() + one_way, data))


def write(receiver: socket.socket, on_its_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    while True:
        due, data = on_its_way.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if not data:
                receiver.shutdown(socket.SHUT_WR)
                return
            receiver.sendall(data)
        except OSError:
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
