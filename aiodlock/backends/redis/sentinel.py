"""Which server is the primary: asked of Sentinel for every new connection, and checked on that connection.

The look-up is redis-py's. Its connections to the sentinels are made anew each time: there is one look-up
per lost connection, and a sentinel that has not been heard of for hours is better not trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

#: How long one sentinel is waited for, in seconds: several have to fit into one attempt to connect.
_PATIENCE = 0.5


class PrimaryLookup:
    """Stands in for the pool that redis-py's Sentinel connections ask for the primary's address.

    Mutable state: ``_addresses``, the sentinel to ask first in front.
    """

    is_master = True
    check_connection = False

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        service: str,
        for_sentinels: dict[str, Any],
        *,
        min_other_sentinels: int = 0,
        force_master_ip: str | None = None,
    ) -> None:
        self._addresses = list(addresses)
        self._service = service
        self._for_sentinels = for_sentinels | {
            key: min(_PATIENCE, for_sentinels.get(key) or _PATIENCE)
            for key in ("socket_timeout", "socket_connect_timeout")
        }
        # There is another sentinel to ask; and without a password HELLO would not say what is missing.
        self._for_sentinels |= {"retry": Retry(NoBackoff(), 0), "protocol": 2}
        self._min_other_sentinels = min_other_sentinels
        self._force_master_ip = force_master_ip

    @classmethod
    def of_pool(cls, pool: SentinelConnectionPool) -> PrimaryLookup:
        """Ask those whom a client of redis-py's ``Sentinel.master_for`` asks."""
        manager = pool.sentinel_manager
        known = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
        return cls(
            [(one["host"], one["port"]) for one in known],
            pool.service_name,
            dict(manager.sentinel_kwargs),
            min_other_sentinels=manager.min_other_sentinels,
            force_master_ip=getattr(manager, "_force_master_ip", None),
        )

    async def get_master_address(self) -> tuple[str, int]:
        """Return host and port, or raise a ConnectionError that says what each sentinel said."""
        answers: list[str] = []
        for address in tuple(self._addresses):
            try:
                return await self._ask(address)
            except (RedisError, OSError) as failed:
                answers.append(f"{address[0]}:{address[1]}: {failed}")
                self._ask_last(address)
        raise MasterNotFoundError(
            f"no sentinel can name the primary of {self._service!r} ({'; '.join(answers)})"
        )

    def distrust(self) -> None:
        """Ask the sentinel that has just been believed last from now on."""
        self._ask_last(self._addresses[0])

    def _ask_last(self, address: tuple[str, int]) -> None:
        self._addresses.remove(address)
        self._addresses.append(address)

    async def _ask(self, address: tuple[str, int]) -> tuple[str, int]:
        # redis-py's own loop over the sentinels does not tell why one of them failed.
        manager = Sentinel(  # type: ignore[no-untyped-call]
            [address],
            min_other_sentinels=self._min_other_sentinels,
            sentinel_kwargs=self._for_sentinels,
        )
        sentinel = manager.sentinels[0]
        try:
            services: Any = await sentinel.sentinel_masters()
        finally:
            with anyio.move_on_after(_PATIENCE, shield=True):
                await sentinel.aclose()
        state = services.get(self._service)
        if state is None:
            raise MasterNotFoundError("knows no such service")
        if not manager.check_master_state(state, self._service):
            raise MasterNotFoundError("calls it down, or hears of too few other sentinels")
        return self._force_master_ip or state["ip"], int(state["port"])


class _OnlyPrimary(SentinelManagedConnection):
    """Refuses a server that is not a primary (any more): a sentinel's answer may be old."""

    async def connect_to(self, address: tuple[str, int]) -> None:
        await super().connect_to(address)  # type: ignore[no-untyped-call]
        role = await self._role()
        if role not in (b"master", None):
            lookup: PrimaryLookup = self.connection_pool
            lookup.distrust()
            host, port = address
            raise RedisConnectionError(
                f"Sentinel names {host}:{port} as the primary, whose role is {role!r}: it was demoted, "
                "or the sentinel that was asked does not know yet"
            )

    async def _role(self) -> bytes | None:
        # Nearly every user may say HELLO; ROLE and INFO need more permissions.
        await self.send_command("HELLO")
        try:
            about = await self.read_response()
        except ResponseError:
            return None  # a demoted server will refuse the first write
        role: bytes = dict(zip(about[::2], about[1::2], strict=True))[b"role"]
        return role


def only_primaries(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """Return the class of connections to Sentinel services that refuses servers which are no primary."""
    return type(f"Primary{kind.__name__}", (_OnlyPrimary, kind), {})
