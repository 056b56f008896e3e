"""The statements that clients send, by their text: what each of them does in a session."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiodlock.backends.postgres import inspection, link, store, waits
from aiodlock.backends.postgres.schema import VERSION

from . import postgres_tables as tables
from .postgres_tables import Notified, Row

if TYPE_CHECKING:
    from .postgres_servers import Server, Session, Steps

#: What carries messages out.
TURNS = (store._TURN, store._TURN_MANY, store._ACQUIRE_ONE, store._LEAVE_ONE)
_IDLE = re.compile(r"idle_in_transaction_session_timeout = (\d+)")
_NOTIFY = re.compile(r"pg_notify\('(.*)', '(.*)'\)$")
_SAME = re.compile(r"select where pg_catalog\.pg_backend_pid\(\) = (\d+)$")
_TIMED_OUT = ("25006", "cannot execute INSERT in a read-only transaction")


def run(session: Session, sql: str, args: tuple[Any, ...]) -> Steps:
    """Carry one statement out."""
    if sql in TURNS:
        return (yield from _turn(session, args))
    if sql.startswith("begin; "):
        found = _IDLE.search(sql)
        session.begin(int(found[1]) / 1000 if found else 1.0)
        return "BEGIN"
    if sql == "commit":
        return (yield from _commit(session))
    if sql == "rollback":
        session.roll_back()
        return "ROLLBACK"
    if (same := _SAME.search(sql)) is not None:
        return f"SELECT {int(int(same[1]) == session.pid)}"
    if (notify := _NOTIFY.search(sql)) is not None:
        session.current.told.append(Notified(notify[1], notify[2]))
        return "SELECT 1"
    word, _, channel = sql.partition(" ")
    if word in ("LISTEN", "UNLISTEN"):
        (session.listens.add if word == "LISTEN" else session.listens.discard)(channel)
        return []
    if sql == "select 1":
        return "SELECT 1"
    return _BY_TEXT[sql](session, *args)


def _commit(session: Session) -> Steps:
    if session.current.aborted:
        session.roll_back()
        return "ROLLBACK"
    yield from session.commit()
    return "COMMIT"


def _turn(session: Session, args: tuple[Any, ...]) -> Steps:
    server = session.server
    label, retention, text, *_, version, history = args
    _check_primary(server)
    known = server.tables.histories.get(server.timeline)
    if version != VERSION or known is None or known[0] != history:
        return None
    return (yield from session.turn(label, retention, text))


def _check_primary(server: Server) -> None:
    from .postgres_servers import Refused

    if server.role != "primary":
        raise Refused(*_TIMED_OUT)


def _hello(session: Session) -> Row:
    server = session.server
    told: dict[str, Any] = dict.fromkeys(("timeline", "history", "born_us", "flushed"))
    if server.role == "primary":
        history, born = server.cluster.history_of(server)
        told = {
            "timeline": server.timeline,
            "history": history,
            "born_us": born,
            "flushed": server.flushed_bytes,
        }
        server.tables.meet(server.clock_us() // 1000)
    read_only = "" if server.role == "primary" else "is a standby, which is read-only"
    return tables.hello(
        server.tables,
        system="simulated",
        **told,
        backend_start=session.began,
        read_only=read_only,
    )


def _inspect(session: Session, keys: list[str], queues: bool) -> list[Row]:
    server = session.server
    rows = []
    for number, key in enumerate(keys, 1):
        for row in tables.inspected(server.seen(key), server.clock_us(), queues=queues):
            rows.append(Row(number=number, **row))
    return rows


def _sweep(session: Session, pages: int, most: int, place: str) -> list[Row]:
    _check_primary(session.server)
    following = {"m": "b0", "b": "r0", "r": "n0"}.get(place[0])
    if place[0] == "n":
        session.server.sweep()
    return [Row(place=following)]


def _tell(session: Session, by: str, serial: int, record: bytes | None, keep: int) -> list[Row]:
    server = session.server
    _check_primary(server)
    told = server.tables.tell_waits(server.clock_us(), by, serial, record, keep)
    return [Row(is_there=told)]


def _end_session(session: Session, pid: int, began: float) -> list[Row]:
    other = session.server.sessions.get(pid)
    if other is None or other.began != began:
        return []
    other.terminate()
    return [Row(pg_terminate_backend=True)]


_BY_TEXT: dict[str, Callable[..., Any]] = {
    store._HELLO: _hello,
    "select * from aiodlock.hello()": _hello,
    store._SWEEP: _sweep,
    store._RECORDED: lambda session, key: session.server.recorded(key),
    inspection._INSPECT: _inspect,
    "select aiodlock.names($1) as key": lambda session, beginning: [
        Row(key=key) for key in session.server.tables.keys(beginning)
    ],
    waits._TELL: _tell,
    waits._READ: lambda session, asked: session.server.tables.waits_of(
        session.server.clock_us(), asked
    ),
    link._END_SESSION: _end_session,
}
