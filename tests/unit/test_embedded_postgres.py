"""The demo's own PostgreSQL."""

from __future__ import annotations

import socket

import pytest

from aiodlock import _embedded_postgres
from aiodlock._embedded import EmbeddedServerError, _free_port
from aiodlock._embedded_postgres import EmbeddedPostgres, find_postgres


def test_server_whose_port_was_taken_meanwhile_takes_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        find_postgres()
    except EmbeddedServerError:
        pytest.skip("there is no PostgreSQL")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], _free_port()])
        monkeypatch.setattr(_embedded_postgres, "_free_port", lambda: next(ports))
        with EmbeddedPostgres() as server:
            assert str(taken.getsockname()[1]) not in server.url
