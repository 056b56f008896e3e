"""The scripts, called directly: what one client would send, and a look at what the store has then.

Time is not waited for: `age` makes one record older, as if its process had not been heard of for that
long, and `set_clock_back` gives a record the deadline it would have after the server's clock stepped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiodlock.backends.redis import scripts
from aiodlock.backends.redis.keys import Keys, channel_prefix, keys_of
from aiodlock.backends.redis.scripts import Script

PREFIX = "aiodlock"
RETENTION = 60_000
MARKER_TTL = 60_000
#: They have one key more for a name of kind ``once``.
_ONCE = (scripts.ACQUIRE, scripts.EXTEND, scripts.LEAVE)


@dataclass(frozen=True)
class Holder:
    """A record of the state, as stored."""

    mode: str
    token: int
    deadline: int
    length: int
    delay: int
    owner: str
    client: str
    #: Further words; of a quorum's node also ticket and stage.
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Waiter:
    """A record of the waiters, as stored."""

    stream_id: str
    deadline: int
    length: int


class Direct:
    """The scripts on one name. `sources` replaces the source of scripts, by their names."""

    #: Which word of a waiter's record is its deadline.
    _deadline_of_waiter = 1

    def __init__(
        self,
        # Its stubs say `bytes | str` of every reply; here all are text.
        redis: Any,
        name: str = "name",
        *,
        kind: str = "lock",
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.redis = redis
        self.keys: Keys = keys_of(PREFIX, kind, name)
        self._sources = sources or {}
        self._record = [self.keys.record] if kind == "once" else []

    # -- scripts -----------------------------------------------------------------------------------

    async def acquire(
        self,
        id: str,
        mode: str = "x",
        *,
        owner: str | None = None,
        ttl: int = 100_000,
        waiter_ttl: int = 50_000,
        delay: int = 0,
        client: str | None = None,
        wait: bool = True,
        retention: int = RETENTION,
        words: str = "",
        how: str = "",
    ) -> list[Any]:
        keys = self.keys
        return await self._run(  # type: ignore[no-any-return]
            scripts.ACQUIRE,
            [keys.state, keys.queue, keys.waiters, keys.token, keys.marker + id, *self._record],
            [
                id,
                mode,
                owner or f"t{id}",
                ttl,
                waiter_ttl,
                delay,
                client or f"client-of-{id}",
                channel_prefix(PREFIX),
                retention,
                "PUBLISH",
                "wait" if wait else "nowait",
                words,
                how,
            ],
        )

    async def extend(
        self, id: str, length: int = 100_000, *, owner: str | None = None, begins: bool = False
    ) -> list[Any]:
        keys = self.keys
        speaking = (channel_prefix(PREFIX), RETENTION, "PUBLISH")
        return await self._run(  # type: ignore[no-any-return]
            scripts.EXTEND,
            [keys.state, keys.queue, keys.waiters, keys.token, keys.broken, *self._record],
            [id, length, owner or f"t{id}", *speaking, *(["begins"] if begins else [])],
        )

    async def leave(
        self, id: str, *, ambiguous: bool = False, end: str = "ended", recorded: Sequence[Any] = ()
    ) -> list[Any]:
        """End the request. ``recorded``: its result, and for how many milliseconds that is kept."""
        keys = self.keys
        names = [keys.state, keys.queue, keys.waiters, keys.token, keys.marker + id, keys.broken]
        return await self._run(  # type: ignore[no-any-return]
            scripts.LEAVE,
            [*names, *self._record],
            [
                id,
                channel_prefix(PREFIX),
                RETENTION,
                "PUBLISH",
                MARKER_TTL if ambiguous else 0,
                "recorded" if recorded else end,
                *recorded,
            ],
        )

    async def forget(self) -> bool:
        return bool(await self.redis.delete(self.keys.record))

    async def break_lock(self, tokens: Sequence[int] | None = None) -> int:
        keys = self.keys
        meant = "all" if tokens is None else " ".join(map(str, tokens))
        return await self._run(  # type: ignore[no-any-return]
            scripts.BREAK,
            [keys.state, keys.queue, keys.waiters, keys.token, keys.broken],
            [channel_prefix(PREFIX), RETENTION, "PUBLISH", MARKER_TTL, meant],
        )

    async def inspect(self) -> list[Any]:
        keys = self.keys
        about = [keys.state, keys.queue, keys.waiters, keys.token, *self._record]
        seen, _ = await self._run(scripts.INSPECT, about, [len(about)])
        return seen  # type: ignore[no-any-return]

    async def _run(self, script: Script, keys: list[str], arguments: list[str | int]) -> Any:
        source = self._sources.get(script.name, script.source.decode())
        assert len(keys) == int(script.number_of_keys) + (
            len(self._record) if script in _ONCE else 0
        )
        return words_in(script, await self.redis.eval(source, len(keys), *keys, *arguments))

    # -- what the store has --------------------------------------------------------------------------

    async def now(self) -> int:
        """Return the server's time in milliseconds."""
        seconds, microseconds = await self.redis.time()
        return int(seconds * 1000 + microseconds // 1000)

    async def timed(self, call: Awaitable[list[Any]]) -> tuple[list[Any], range]:
        """Return the reply, and the moments (the server's milliseconds) at which it was made."""
        before = await self.now()
        reply = await call
        return reply, range(before, await self.now() + 1)

    async def holders(self) -> dict[str, Holder]:
        records = await self.redis.hgetall(self.keys.state)
        return {id: _holder(text) for id, text in records.items()}

    async def waiters(self) -> dict[str, Waiter]:
        records = await self.redis.hgetall(self.keys.waiters)
        return {id: _waiter(text) for id, text in records.items()}

    async def queue(self) -> list[str]:
        """Return the request ids in the stream, in its order."""
        return [fields["id"] for _, fields in await self.redis.xrange(self.keys.queue)]

    async def all_keys(self) -> set[str]:
        """Return the last part of every key in the store: state, queue, waiters, token, marker:id."""
        base = self.keys.state.removesuffix("state")
        return {key.removeprefix(base) for key in await self.redis.keys("*")}

    async def contents(self) -> dict[str, object]:
        """Return everything that is stored, to compare; without TTLs."""
        found: dict[str, object] = {}
        for key in sorted(await self.redis.keys("*")):
            match await self.redis.type(key):
                case "hash":
                    found[key] = await self.redis.hgetall(key)
                case "stream":
                    found[key] = await self.redis.xrange(key)
                case "zset":
                    found[key] = await self.redis.zrange(key, 0, -1, withscores=True)
                case _:
                    found[key] = await self.redis.get(key)
        return found

    # -- what time and accidents do --------------------------------------------------------------------

    async def age(self, *ids: str, by: int) -> None:
        """Bring the deadlines of these requests nearer."""
        for id in ids:
            await self._move(id, -by)

    async def set_clock_back(self, *ids: str, by: int) -> None:
        """Give these requests the deadlines they have after the server's clock was set back."""
        for id in ids:
            await self._move(id, by)

    async def _move(self, id: str, by: int) -> None:
        holding = await self.redis.hget(self.keys.state, id)
        waiting = await self.redis.hget(self.keys.waiters, id)
        assert holding or waiting, f"{id} is neither a holder nor a waiter"
        if holding:
            words = holding.split(" ")
            words[2] = str(int(words[2]) + by)
            await self.redis.hset(self.keys.state, id, " ".join(words))
        if waiting:
            words = waiting.split(" ")
            at = self._deadline_of_waiter
            words[at] = str(int(words[at]) + by)
            await self.redis.hset(self.keys.waiters, id, " ".join(words))


def words_in(script: Script, reply: Any) -> Any:
    """Return the words of a line; other scripts answer tables."""
    if script not in _ONCE or not isinstance(reply, str):  # a pipeline has none yet
        return reply
    return reply.split(" ", 1) if reply.startswith("done ") else reply.split(" ")


def waiting(reply: list[Any]) -> tuple[int, int]:
    """Return the milliseconds left and until the look, of a reply that says `waiting`."""
    assert reply[0] == "waiting", reply
    return int(reply[1]), int(reply[2])


def _holder(text: str) -> Holder:
    mode, token, deadline, length, delay, owner, client, *words = text.split(" ")
    return Holder(
        mode, int(token), int(deadline), int(length), int(delay), owner, client, tuple(words)
    )


def _waiter(text: str) -> Waiter:
    stream_id, deadline, length = text.split(" ")[:3]
    return Waiter(stream_id, int(deadline), int(length))


class Heard:
    """Messages on channels, in order. A message of our own marks the end of what is there by now."""

    def __init__(self, redis: Any, pubsub: Any) -> None:
        self._redis = redis
        self._pubsub = pubsub

    @classmethod
    async def on(cls, redis: Any, *channels: str) -> Heard:
        pubsub = redis.pubsub()
        await pubsub.psubscribe("end of what is there", *channels)
        for _ in range(len(channels) + 1):
            assert await pubsub.get_message(timeout=5.0) is not None
        return cls(redis, pubsub)

    async def so_far(self) -> list[tuple[str, str]]:
        """Return channel and payload of each message since the last call."""
        await self._redis.publish("end of what is there", "")
        found: list[tuple[str, str]] = []
        while True:
            message = await self._pubsub.get_message(timeout=5.0)
            assert message is not None
            if message["channel"] == "end of what is there":
                return found
            found.append((message["channel"], message["data"]))

    async def notices(self) -> list[tuple[str, str, str]]:
        """Return client, word and request id of each notice and hint since the last call."""
        words = [
            (channel.rpartition(":")[2], *data.split(" ")) for channel, data in await self.so_far()
        ]
        return [(client, word, id) for client, word, _, id, _ in words]

    async def aclose(self) -> None:
        await self._pubsub.aclose()


CLIENTS = channel_prefix(PREFIX) + "*"
