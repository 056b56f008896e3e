"""What operators ask one server: who holds and waits, which names there are; and break a lock by force."""

from __future__ import annotations

import fnmatch
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..._model import Kind, LockInfo, RecordedInfo, Tokens
from .keys import base_of, keys_of, name_of, parts_of, state_pattern
from .messages import Call
from .replies import holders_of, waiters_of, wrong_shape
from .scripts import BREAK, INSPECT
from .server import Server

#: A server looks at so many keys for one SCAN: some 0.3 ms.
_SCANNED_AT_ONCE = 2000
#: One call of the script inspects so many names: some 0.5 ms.
_INSPECTED_AT_ONCE = 50
#: For so long a break is remembered (ms).
_BREAK_REMEMBERED = 60_000


class Inspection:
    """The calls of ``StoreBase`` that are for people, on one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._prefix = server.settings.prefix

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        link = self._server.link
        wire = link.wire or await link.wait_up(hurry=True)
        parts = [
            names[at : at + _INSPECTED_AT_ONCE] for at in range(0, len(names), _INSPECTED_AT_ONCE)
        ]
        words = (5 if kind == "once" else 4, "queues" if queues else "holders")
        calls = [Call.of(INSPECT, self._inspected_keys(kind, part), words) for part in parts]
        sent = [wire.send_packed(call.packed) for call in calls]
        infos: list[LockInfo] = []
        for part, call, reply in zip(parts, calls, sent, strict=True):
            infos += _infos_of(kind, part, await self._server.result(wire, reply, call))
        return infos

    def _inspected_keys(self, kind: str, names: Sequence[str]) -> tuple[str, ...]:
        keys: list[str] = []
        for name in names:
            base = base_of(self._prefix, kind, name)
            keys += (f"{base}:state", f"{base}:queue", f"{base}:waiters", f"{base}:token")
            if kind == "once":
                keys.append(f"{base}:record")
        return tuple(keys)

    def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        return names_of(self._server, match, kind)

    async def break_lock(self, name: str, kind: Kind = "lock", tokens: Tokens | None = None) -> int:
        keys = keys_of(self._prefix, kind, name)
        wanted = "all" if tokens is None else " ".join(map(str, tokens))
        reply = await self._server.eval(
            BREAK,
            (keys.state, keys.queue, keys.waiters, keys.token, keys.broken),
            (*self._server.to_clients, _BREAK_REMEMBERED, wanted),
            hurry=True,
        )
        if not isinstance(reply, int):
            raise wrong_shape("break", reply)
        return reply

    async def forget(self, name: str) -> bool:
        link = self._server.link
        wire = link.wire or await link.wait_up(hurry=True)
        key = keys_of(self._prefix, "once", name).record
        return bool(await self._server.answer(wire.send("DEL", key)))


async def names_of(server: Server, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
    """Iterate over every name at the server that is held or waited for and that matches the glob."""
    parts = parts_of(match)
    if None not in parts:
        yield "".join(part for part in parts if part)  # one name: no need to search for it
        return
    wire = await server.link.wait_up(hurry=True)
    seen: set[str] = set()
    pattern = state_pattern(server.settings.prefix, kind, match)
    cursor = b"0"
    while True:
        reply = await server.answer(
            wire.send("SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED_AT_ONCE)
        )
        try:
            cursor, keys = reply
            found = [name_of(key.decode())[1] for key in keys]
        except (ValueError, TypeError, AttributeError) as wrong:
            raise wrong_shape("SCAN", reply) from wrong
        for name in found:
            if name not in seen and fnmatch.fnmatchcase(name, match):
                seen.add(name)
                yield name
        if cursor == b"0":
            break


def _infos_of(kind: Kind, names: Sequence[str], reply: Any) -> list[LockInfo]:
    try:
        *found, now_us = reply
        return [
            LockInfo(
                name,
                holders_of(holding, int(now_us)),
                waiters_of(waiting),
                int(token),
                int(closed_ms) / 1000,
                int(closed_places),
                kind,
                RecordedInfo(*(int(ms) / 1000 for ms in recorded)) if recorded else None,
            )
            for name, (token, closed_ms, holding, waiting, closed_places, recorded) in zip(
                names, found, strict=True
            )
        ]
    except (ValueError, TypeError, AttributeError, OverflowError) as wrong:
        raise wrong_shape("inspect", reply) from wrong
