"""The first nodes to ask, from a URL or a client of redis-py; and addresses that nodes tell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from redis.asyncio import ConnectionPool, RedisCluster
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from ...._errors import BackendError, BackendUnavailable
from ...._patience import Further, Patience
from ..dialing import Dialling
from ..refusals import ReplyError, Unusable, code_of, is_refusal, will_pass
from ..source import Source
from .identity import Told, told_on

Address = tuple[str, int]


def seeds_of(source: str | RedisCluster) -> list[Source]:
    """Return the nodes to ask first: those of a URL or of a client, or raise ValueError."""
    if isinstance(source, RedisCluster):
        remap = getattr(source.nodes_manager, "address_remap", None)
        return [
            Source(
                ConnectionPool(connection_class=node.connection_class, **node.connection_kwargs),
                f"{type(source).__name__} at {node.host}:{node.port}",
                remap,
            )
            for node in source.nodes_manager.startup_nodes.values()
        ]
    # By hand: several hosts with ports are no host to urllib, and it may refuse IPv6 ones.
    scheme, _, rest = source.partition("://")
    place, mark, query = rest.partition("?")
    netloc, _, path = place.partition("/")
    login, at, named = netloc.rpartition("@")
    hosts = [host.strip() for host in named.split(",")]
    if not all(hosts):
        raise ValueError("name the nodes: redis+cluster://host1:6379,host2:6379")
    if path.strip("/") not in ("", "0"):
        raise ValueError("a cluster has database 0 and no other")
    plain = scheme.lower().partition("+")[0]
    return [Source.from_url(f"{plain}://{login}{at}{host}{mark}{query}") for host in hosts]


def host_in(primary: Sequence[Any], asked: str) -> str:
    """Return the host of a node in CLUSTER SLOTS.

    A node that does not know its own address leaves it out. One that is to be called by a name and has none
    says "?", and tells its address elsewhere.
    """
    host: bytes | None = primary[0]
    if host == b"?" and len(primary) > 3:
        besides = primary[3]
        host = dict(zip(besides[::2], besides[1::2], strict=True)).get(b"ip")
    return asked if not host or host == b"?" else host.decode()


@lru_cache(1000)
def _address(host: str, port: int) -> Address:
    """Return always the same one: the owners of all slots are compared with those before."""
    return host, port


def owners_in(slots: Any, asked: str) -> tuple[list[Address | None], dict[Address, None]]:
    """Return who owns each slot, and all owners in the order of their slots, as CLUSTER SLOTS says."""
    if not slots:
        raise BackendUnavailable("the cluster has given no slots to its nodes yet")
    owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    present: dict[Address, None] = {}
    try:
        for first, last, primary, *_ in slots:
            address = _address(host_in(primary, asked), int(primary[1]))
            owners[int(first) : int(last) + 1] = [address] * (int(last) - int(first) + 1)
            present[address] = None
    except (ValueError, TypeError, AttributeError, IndexError) as wrong:
        raise BackendError(f"CLUSTER SLOTS has the wrong shape: {slots!r:.200}") from wrong
    return owners, present


async def ask_seed(seed: Source, further: Further) -> Told:
    """Ask an address that the user has named for the owners of slots.

    :param further: is told how far this has come.
    """
    connection, dialling = seed.make_connection(), Dialling(Patience(), further)
    try:
        wire = await dialling.open(connection, seed.look_up)
        try:
            return await told_on(wire)
        finally:
            dialling.came_further(wire)
            await wire.closed()
    except TimeoutError as silent:
        raise BackendUnavailable(f"{seed.described} does not answer") from silent
    finally:
        await connection.disconnect(nowait=True)


def refusal_of(seed: Source, failed: Exception) -> BackendError | None:
    """Return what a client that enters is told, if asking a node again will not help."""
    if isinstance(failed, Unusable):
        why = ""
    elif isinstance(failed, BackendError):
        return None
    elif is_refusal(failed) or code_of(failed) == "NOAUTH":
        why = " refuses this client"
    elif isinstance(failed, ReplyError) and failed.code == "NOPERM":
        why = ": the server's ACL does not allow what aiodlock needs"
    elif isinstance(failed, ReplyError) and not will_pass(failed):
        why = " is no cluster"
    else:
        return None
    refusal = BackendError(f"{seed.described}{why}: {failed}")
    refusal.__cause__ = failed
    return refusal


class SeedAnswers:
    """What the seeds have told a client that enters, and which cluster it is.

    Mutable state: ``told`` (by their places in the list), ``refusals``, ``_asked`` (how many have told or
    failed), ``first`` (set when one has told, or all have failed), ``settled`` (set when no other answer
    changes anything).
    """

    def __init__(self, seeds: Sequence[Source]) -> None:
        self._seeds = seeds
        self.told: dict[int, Told] = {}
        self.refusals: list[BackendError] = []
        self._asked = 0
        self.first: asyncio.Event = asyncio.Event()
        self.settled: asyncio.Event = asyncio.Event()

    def take(self, index: int, told: Told) -> None:
        """A seed has told."""
        self.told[index] = told
        self.first.set()
        chosen = self._most()
        if chosen is not None and 2 * chosen[1] > len(self._seeds):
            self.settled.set()
        self._count()

    def failed(self, refusal: BackendError | None) -> None:
        """A seed has not told, and perhaps refuses this client."""
        if refusal is not None:
            self.refusals.append(refusal)
        self._count()

    def _count(self) -> None:
        self._asked += 1
        if self._asked == len(self._seeds):
            self.first.set()
            self.settled.set()

    def chosen(self) -> int:
        """Return the answer whose cluster most seeds belong to; raise if two have as many."""
        chosen = self._most()
        if chosen is None:
            places = ", ".join(self._seeds[index].described for index in sorted(self.told))
            raise BackendError(
                f"{places} are nodes of different clusters, and as many addresses belong to one as to "
                "another: name those of one cluster alone"
            )
        return chosen[0]

    def _most(self) -> tuple[int, int] | None:
        """Return that answer, and how many seeds belong to it; None if two have as many."""
        best = max(self.told, key=self._belonging)
        identity, number = self.told[best].identity, self._belonging(best)
        rivals = (
            self._belonging(one)
            for one, told in self.told.items()
            if not told.identity.is_of(identity)
        )
        return None if number in rivals else (best, number)

    def _belonging(self, index: int) -> int:
        """Count the seeds of its cluster; one that is silent belongs to one that names its address."""
        told, identity = self.told, self.told[index].identity
        return sum(
            told[other].identity.is_of(identity)
            if other in told
            else seed.place in identity.addresses
            for other, seed in enumerate(self._seeds)
        )


def unlike(seeds: Sequence[Source]) -> list[Source]:
    """Return the seeds, each address once."""
    return list({seed.place: seed for seed in seeds}.values())
