"""The statements that clients send, by their text: what each of them does in a session."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiodlock.backends.postgres import (
    calls,
    history,
    inspection,
    link,
    meeting,
    store,
    sweeping,
    waits,
)
from aiodlock.backends.postgres.schema import VERSION

from . import postgres_tables as tables
from .postgres_tables import Notified, Row

if TYPE_CHECKING:
    from .postgres_servers import Server, Session, Steps

_IDLE = re.compile(r"idle_in_transaction_session_timeout = (\d+)")
_NOTIFY = re.compile(r"pg_notify\('(.*?)', '(.*?)'\) where .* = (\d+) and .* -2\) = '(.*?)'")
_SAME = re.compile(r"select where pg_catalog\.pg_backend_pid\(\) = (\d+)$")
#: Where the rows of the history are.
_PLACE = "1/2"
_TIMED_OUT = ("25006", "cannot execute INSERT in a read-only transaction")


def run(session: Session, sql: str, args: tuple[Any, ...]) -> Steps:
    """Carry one statement out."""
    if sql == calls.TURN:
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
        is_known = _is_known(session.server, int(notify[3]), notify[4])
        if is_known:
            session.current.told.append(Notified(notify[1], notify[2]))
        return f"SELECT {int(is_known)}"
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
    label, retention, text, version, told = args
    if not _is_known(server, version, told):
        return None
    return (yield from session.turn(label, retention, text))


def _is_known(server: Server, version: int, told: str) -> bool:
    _check_primary(server)
    known = server.tables.histories.get(server.timeline)
    return version == VERSION and known is not None and f"{known[0]}/{_PLACE}" == told


def _checked(call: Callable[..., list[Row]]) -> Callable[..., str | None]:
    """Return what answers with rows, if the server is the known one."""

    def answer(session: Session, *args: Any) -> str | None:
        *given, version, told = args
        if not _is_known(session.server, version, told):
            return None
        return json.dumps([dict(row.items()) for row in call(session, *given)])

    return answer


def _check_primary(server: Server) -> None:
    from .postgres_servers import Refused

    if server.role != "primary":
        raise Refused(*_TIMED_OUT)


def _hello(session: Session) -> Row:
    server = session.server
    told: dict[str, Any] = dict.fromkeys(("timeline", "history", "born_us", "flushed"))
    if server.role == "primary":
        made, born = server.cluster.history_of(server)
        told = {
            "timeline": server.timeline,
            "history": made,
            "born_us": born,
            "flushed": server.flushed_bytes,
        }
        server.tables.meet(server.clock_us() // 1000)
    read_only = "" if server.role == "primary" else "is a standby, which is read-only"
    return tables.hello(
        server.tables,
        system=server.cluster.system,
        place=_PLACE,
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


def _waits(session: Session, asked: list[str]) -> list[Row]:
    rows = session.server.tables.waits_of(session.server.clock_us(), asked)
    return [Row(client=row["client"], record=row["record"].hex()) for row in rows]


_BY_TEXT: dict[str, Callable[..., Any]] = {
    meeting._HELLO: _hello,
    history._HELLO: _hello,
    link._END_SESSION: _end_session,
    calls.rows_of(sweeping._SWEEP, 3): _checked(_sweep),
    calls.rows_of(store._RECORDED, 1): _checked(
        lambda session, key: [Row(result=session.server.recorded(key))]
    ),
    calls.rows_of(inspection._INSPECT, 2): _checked(_inspect),
    calls.rows_of(inspection._NAMES, 3): _checked(
        lambda session, after, until, most: session.server.tables.page(after, until, most)
    ),
    calls.rows_of(waits._TELL, 4): _checked(_tell),
    calls.rows_of(waits._READ, 1): _checked(_waits),
}
