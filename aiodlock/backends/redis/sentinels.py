"""Which server is the primary: all sentinels are queried, for every new connection and once a second.

Two sentinels may name two servers: during a failover, and while one of them is cut off. Each failover has
an epoch, a number that a majority of the sentinels agreed on. So the answer with the largest epoch
counts, not the first one. `SENTINEL MASTER` tells the epoch, but names the old address until all replicas
follow the new primary. So the address comes from `SENTINEL GET-MASTER-ADDR-BY-NAME`.

An old primary may live on: a planned failover leaves it writable for ten seconds, a cut network for ever.
So the client queries the sentinels while it is connected, and closes connections to a server that is not
the primary any more.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import anyio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    SentinelConnectionPool,
    SentinelManagedConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from ..._errors import BackendUnavailable
from ..._patience import LONGEST
from .._addresses import resolve
from .deployment import Deployment
from .dialing import within
from .refusals import code_of, is_refusal
from .sentinel import Address, Named, Sentinel
from .wire import Wire

_logger = logging.getLogger("aiodlock")

#: How long a new connection waits for a first sentinel that comes further: less than a step of a dial, so
#: that the failure says what each sentinel said. And after the first answer for the others (seconds).
_FIRST, _GRACE = 3.6, 0.05
#: Each sentinel is asked so often while a client is entered; sooner when something is suspicious (seconds).
_ASK_EVERY, _ASK_AGAIN = 1.0, 0.1
#: The answer of a sentinel that does not answer any more counts for so long (seconds).
_REMEMBERED = 10.0
#: The resolver is waited for so long; what it said is not asked again for so long (seconds).
_RESOLVING_FOR, _RESOLVED_FOR = 0.5, 5.0


class PrimaryLookup:
    """Stands in for the pool that redis-py's Sentinel connections ask for the primary's address.

    Mutable state: ``_sentinels``, ``_distrusted`` (an address whose server said that it is no primary),
    ``_dialled`` (the address used last), ``_peers`` (for an address: the server that was reached there, and
    until when that is taken for true), ``_silent`` (whether the log says that no sentinel answers).
    """

    is_master = True
    check_connection = False

    def __init__(
        self,
        addresses: Sequence[Address],
        service: str,
        for_sentinels: dict[str, Any],
        *,
        min_other_sentinels: int = 0,
        force_master_ip: str | None = None,
    ) -> None:
        self._addresses = list(addresses)
        self._service = service
        # There is another sentinel to ask; and without a password HELLO would not say what is missing.
        self._for_sentinels = for_sentinels | {"retry": Retry(NoBackoff(), 0), "protocol": 2}
        self._min_other_sentinels = min_other_sentinels
        self._force_master_ip = force_master_ip
        self._dial: Callable[[Address, dict[str, Any]], AbstractConnection] | None = None
        self._sentinels: list[Sentinel] = []
        self._distrusted: Address | None = None
        self._dialled: Address | None = None
        self._peers: dict[Address, tuple[frozenset[Any], float]] = {}
        self._silent = False
        self._deployment = Deployment(service)

    @classmethod
    def of_pool(cls, pool: SentinelConnectionPool) -> PrimaryLookup:
        """Query the sentinels that a client of redis-py's ``Sentinel.master_for`` queries."""
        manager = pool.sentinel_manager
        known = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
        return cls(
            [(one["host"], one["port"]) for one in known],
            pool.service_name,
            dict(manager.sentinel_kwargs),
            min_other_sentinels=manager.min_other_sentinels,
            force_master_ip=getattr(manager, "_force_master_ip", None),
        )

    def dial_with(self, dial: Callable[[Address, dict[str, Any]], AbstractConnection]) -> None:
        """Say how a connection to a sentinel is made."""
        self._dial = dial

    # -- for a new connection ------------------------------------------------------------------------

    async def get_master_address(self) -> Address:
        """Return host and port, or raise a ConnectionError that says what each sentinel said."""
        named = await self._ask_all()
        self._dialled = named.address
        host, port = named.address
        return self._force_master_ip or host, port

    async def _ask_all(self) -> Named:
        sentinels = self._sentinels or self._make_sentinels()
        failures: dict[Address, Exception] = {}
        answered: list[Sentinel] = []
        news = asyncio.Event()

        async def ask(sentinel: Sentinel) -> None:
            try:
                await sentinel.ask(self._service, self._min_other_sentinels)
            except (RedisError, OSError) as failed:
                failures[sentinel.address] = failed
            else:
                news.set()
            answered.append(sentinel)
            if len(answered) == len(sentinels):
                news.set()

        async with anyio.create_task_group() as tasks:
            for sentinel in sentinels:
                tasks.start_soon(ask, sentinel)
            try:
                await self._wait_for(sentinels, answered, news)
            except TimeoutError as silent:
                failures |= {one.address: silent for one in sentinels if one not in answered}
            tasks.cancel_scope.cancel()
        return self._choose(sentinels, failures)

    async def _wait_for(
        self, sentinels: Sequence[Sentinel], answered: Sequence[Sentinel], news: asyncio.Event
    ) -> None:
        """Wait for a first answer, then a moment for the others, then until they settle the primary."""
        # Those that are asked all the time go on: what they answer later counts at the next attempt.
        limit = LONGEST
        if self._sentinels:
            known = any(one.dialling.patience.knows for one in sentinels)
            limit = max(one.dialling.patience.usual for one in sentinels) if known else _FIRST
        async with within(limit, lambda: self.further_at):
            await news.wait()
            with anyio.move_on_after(_GRACE):
                while len(answered) < len(sentinels):  # noqa: ASYNC110
                    await asyncio.sleep(_GRACE / 10)
        async with within(max(one.dialling.patience.usual for one in sentinels)):
            # A sentinel of another deployment may have been the quickest.
            while len(answered) < len(sentinels) and not self._deployment.settled(  # noqa: ASYNC110
                self._heard(sentinels), len(sentinels)
            ):
                await asyncio.sleep(_GRACE)

    def _choose(
        self, sentinels: Iterable[Sentinel], failures: dict[Address, Exception] | None = None
    ) -> Named:
        """Return what the newest answer names, or raise a ConnectionError that says why not."""
        named_last = self._named_last(sentinels, learns=True)
        good = [named for named in named_last if named.objection is None]
        if good:
            return min(good, key=self._rank)
        failures = failures or {}
        said = [f"{host}:{port}: {why}" for (host, port), why in failures.items()]
        said += [
            f"{named.address[0]}:{named.address[1]}: {named.objection}" for named in named_last
        ]
        refused = len(failures) == len(self._addresses) and all(map(_refuses, failures.values()))
        raise (AuthenticationError if refused else MasterNotFoundError)(
            f"no sentinel can name the primary of {self._service!r} ({'; '.join(said)})"
        )

    def _named_last(self, sentinels: Iterable[Sentinel], *, learns: bool = False) -> list[Named]:
        """Return the answers since the last failover; that of a silent sentinel counts for a while."""
        heard = self._deployment.believed(self._heard(sentinels), learns=learns)
        newest = max((named.epoch for named in heard), default=0)
        return [named for named in heard if named.epoch == newest]

    @staticmethod
    def _heard(sentinels: Iterable[Sentinel]) -> dict[Address, Named]:
        since = asyncio.get_running_loop().time() - _REMEMBERED
        return {
            one.address: one.heard[0] for one in sentinels if one.heard and one.heard[1] >= since
        }

    def _rank(self, named: Named) -> tuple[bool, bool]:
        return named.address == self._distrusted, named.address != self._dialled

    def distrust(self, address: Address) -> None:
        """Prefer another address, should one be named since the same failover."""
        self._distrusted = address

    def reached(self, address: Address, peer: object) -> None:
        """Know from now on which server an address leads to."""
        if isinstance(peer, tuple):
            until = asyncio.get_running_loop().time() + _RESOLVED_FOR
            self._peers[address] = frozenset((peer[:2],)), until

    # -- while connected -----------------------------------------------------------------------------

    async def watch(
        self, wires: Callable[[], Iterable[Wire]], may_hold: Callable[[], bool], silence: float
    ) -> None:
        """Ask every sentinel once a second; close wires to a server that is not the primary any more.

        :param may_hold: whether a lease can be held still.
        :param silence: seconds without any known sentinel after which others are believed, if none can.
        """
        self._deployment.may_hold, self._deployment.silence = may_hold, silence
        self._sentinels = self._make_sentinels()
        try:
            async with anyio.create_task_group() as tasks:
                for sentinel in self._sentinels:
                    sentinel.kept = True
                    tasks.start_soon(self._poll, sentinel, wires)
        finally:
            for sentinel in self._sentinels:
                sentinel.close()
            self._sentinels = []

    @property
    def further_at(self) -> float:
        """When a new connection to a sentinel has come further than ever."""
        return max((one.dialling.further.at for one in self._sentinels), default=0.0)

    def suspect(self) -> None:
        """Ask at once: the server behaves as one that was replaced does."""
        for sentinel in self._sentinels:
            sentinel.hurry.set()

    def _make_sentinels(self) -> list[Sentinel]:
        dial = self._dial
        assert dial is not None
        return [
            Sentinel(address, lambda address=address: dial(address, self._for_sentinels))  # type: ignore[misc]
            for address in self._addresses
        ]

    async def _poll(self, sentinel: Sentinel, wires: Callable[[], Iterable[Wire]]) -> None:
        while True:
            sentinel.hurry.clear()
            try:
                await sentinel.ask(self._service, self._min_other_sentinels)
            except (RedisError, OSError) as failed:
                _logger.debug("%s:%s: %s", *sentinel.address, failed)
            self._log_silence()
            await self._close_others(wires)
            await asyncio.sleep(_ASK_AGAIN)
            with suppress(TimeoutError):
                async with asyncio.timeout((_ASK_EVERY - _ASK_AGAIN) * random.uniform(0.8, 1.0)):
                    await sentinel.hurry.wait()

    def _log_silence(self) -> None:
        silent = all(sentinel.failure is not None for sentinel in self._sentinels)
        if silent and not self._silent:
            _logger.warning(
                "no sentinel of %r answers (%s): a failover would go unnoticed",
                self._service,
                self._sentinels[0].failure,
                extra={"event": "no_sentinel"},
            )
        self._silent = silent

    async def _close_others(self, wires: Callable[[], Iterable[Wire]]) -> None:
        named_last = self._named_last(self._sentinels)
        if not named_last:
            return
        # Also when that server is down: the others are not the primary either.
        host, port = min(named_last, key=self._rank).address
        address = self._force_master_ip or host, port
        for wire in tuple(wires()):
            if not await self._leads_to(address, wire.peer):
                wire.close(BackendUnavailable(f"Sentinel names {host}:{port} as the primary now"))

    async def _leads_to(self, address: Address, peer: object) -> bool:
        """Tell whether a server is the one at an address, which may be a name."""
        if not isinstance(peer, tuple) or peer[:2] == address:
            return True
        moment = asyncio.get_running_loop().time()
        peers, until = self._peers.get(address, (frozenset[Any](), 0.0))
        if moment < until and peer[:2] in peers:
            return True
        if moment >= until:
            try:
                async with asyncio.timeout(_RESOLVING_FOR):
                    found = await resolve(*address)
            except OSError:
                return True  # not known; the name may be resolved the next time
            peers = frozenset(one[4][:2] for one in found)
            self._peers[address] = peers, moment + _RESOLVED_FOR
        return peer[:2] in peers


def _refuses(failure: Exception) -> bool:
    """Tell whether a sentinel refuses this user: asking again will not help."""
    return is_refusal(failure) or code_of(failure) in ("NOPERM", "NOAUTH")


class _OnlyPrimary(SentinelManagedConnection):
    """Refuses a server that is not a primary (any more): a sentinel's answer may be old."""

    async def connect_to(self, address: tuple[str, int]) -> None:
        lookup: PrimaryLookup = self.connection_pool
        try:
            await resolve(*address)
            await super().connect_to(address)  # type: ignore[no-untyped-call]
        except BaseException:  # given up, too: another sentinel may name one that can be reached
            lookup.distrust(address)
            raise
        role = await self._role()
        if self._writer is not None:
            lookup.reached(address, self._writer.get_extra_info("peername"))
        if role not in (b"master", None):
            lookup.distrust(address)
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
