"""One sentinel: what it says of a service, over a connection that may be kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import RedisError, ResponseError

from ..._patience import Patience
from .._addresses import resolve
from .dialing import Dialling
from .refusals import ReplyError
from .wire import Wire

Address = tuple[str, int]

#: An answer to the question is further than any step of a login.
_ANSWERED = 100


@dataclass(frozen=True, slots=True)
class Named:
    """What a sentinel says: the primary, since which failover, and why it is of no use, if so.

    :param id: the sentinel's own; empty if this user may not ask for it.
    :param knows: the ids of the sentinels that it knows for this service, its own too.
    """

    address: Address
    epoch: int
    objection: str | None = None
    id: str = ""
    knows: frozenset[str] = frozenset()


class Sentinel:
    """One sentinel, and a connection to it that is kept while a client is entered.

    Mutable state: ``kept`` (whether it is), ``_wire``, ``heard`` (the last answer, and when), ``failure``
    (why there was none the last time), ``hurry`` (set when it is to be asked at once), ``dialling``.
    """

    def __init__(self, address: Address, dial: Callable[[], AbstractConnection]) -> None:
        self.address = address
        self._dial = dial
        self._wire: Wire | None = None
        self._connecting = asyncio.Lock()
        self.kept = False
        self.heard: tuple[Named, float] | None = None
        self.failure: Exception | None = None
        self.hurry: asyncio.Event = asyncio.Event()
        self.dialling: Dialling = Dialling(Patience())

    async def ask(self, service: str, least_others: int) -> Named:
        """Return what it says now, or raise a RedisError or an OSError."""
        try:
            named = await self._ask(service, least_others)
        except (RedisError, OSError) as failed:
            self.failure = failed
            raise
        finally:
            if not self.kept:
                self.close()
        self.heard, self.failure = (named, asyncio.get_running_loop().time()), None
        self.dialling.further.reach(_ANSWERED)
        return named

    async def _ask(self, service: str, least_others: int) -> Named:
        wire = await self._connected()
        return await _said_by(wire, service, least_others)

    async def _connected(self) -> Wire:
        async with self._connecting:
            if self._wire is None or self._wire.lost.done():
                look_up = partial(resolve, *self.address)
                self._wire = await self.dialling.open(self._dial(), look_up)
            return self._wire

    def close(self) -> None:
        """Give the connection up."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None


async def _said_by(wire: Wire, service: str, least_others: int) -> Named:
    about = wire.send("SENTINEL", "MASTER", service)
    naming = wire.send("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
    introducing = wire.send("SENTINEL", "MYID"), wire.send("SENTINEL", "SENTINELS", service)
    for asked in introducing:
        asked.add_done_callback(lambda answered: answered.cancelled() or answered.exception())
    try:
        facts = await about
    except ReplyError as refused:
        if refused.code in ("NOPERM", "NOAUTH"):
            raise
        raise MasterNotFoundError("knows no such service") from refused
    named = None
    with suppress(ReplyError):  # a user who may not ask this way has the other answer
        named = await naming
    said = _read(facts, named, least_others)
    with suppress(ReplyError, ValueError, TypeError, KeyError, AttributeError):
        id = (await introducing[0]).decode()
        others = [dict(zip(one[::2], one[1::2], strict=True)) for one in await introducing[1]]
        return replace(said, id=id, knows=frozenset({id, *(o[b"runid"].decode() for o in others)}))
    return said


def _address(host: str, port: int) -> Address:
    """Return the address, or raise a ValueError if no server can have it."""
    host.encode("idna")  # as the resolver does
    if not host or "\0" in host or not 0 < port < 65536:
        raise ValueError(f"{host!r}:{port} is no address")
    return host, port


def _read(facts: Any, named: Any, least_others: int) -> Named:
    try:
        about = dict(zip(facts[::2], facts[1::2], strict=True))
        host, port = named or (about[b"ip"], about[b"port"])
        flags = set(about[b"flags"].split(b","))
        others = int(about.get(b"num-other-sentinels", 0))
        epoch = int(about.get(b"config-epoch", 0))
        address = _address(host.decode(), int(port))
    except (ValueError, TypeError, KeyError, AttributeError) as wrong:
        raise ResponseError(f"its answer has the wrong shape: {facts!r:.200}") from wrong
    is_down = b"master" not in flags or bool(flags & {b"s_down", b"o_down"})
    if named and named != [about[b"ip"], about[b"port"]]:
        is_down = False  # those flags are the old primary's: the failover is not over yet
    wrong_state = is_down or others < least_others
    objection = "calls it down, or hears of too few other sentinels" if wrong_state else None
    return Named(address, epoch, objection)
