"""pgbouncer in transaction mode, in front of a PostgreSQL server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from .ports import free_port
from .postgres import PostgresServer

PROGRAM = Path(shutil.which("pgbouncer") or "/usr/sbin/pgbouncer")


class Pooler:
    """Shares four connections among its clients. Refuses to run as root, as the server does."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._port = free_port()
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    def start(self) -> Self:
        """Start, and return when it takes connections."""
        user = "postgres" if os.getuid() == 0 else None
        self._directory = Path(tempfile.mkdtemp(prefix="aiodlock-pooler-"))
        self._directory.chmod(0o755)
        users, settings = self._directory / "users", self._directory / "pgbouncer.ini"
        users.write_text('"postgres" ""\n')
        settings.write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={self._server.port} dbname=postgres\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self._port}\nauth_type = trust\n"
            f"auth_file = {users}\npool_mode = transaction\ndefault_pool_size = 4\nunix_socket_dir =\n"
        )
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [PROGRAM, settings], stdin=subprocess.DEVNULL, stdout=log, stderr=log, user=user
            )
        give_up = time.monotonic() + 20
        while True:
            assert self._process.poll() is None, (self._directory / "log").read_text()
            assert time.monotonic() < give_up, "pgbouncer does not answer"
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
