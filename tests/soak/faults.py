"""The faults of a soak: each is one coroutine that does harm, waits, and mends it again.

The server loses nothing that it acknowledged (it writes every command to its append-only file), so all
of the promises stand, whatever happens here.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import redis.asyncio
from redis.exceptions import RedisError

from aiodlock._embedded import EmbeddedServer

from ..proxy import FaultProxy, named

Fault = Callable[[], Awaitable[None]]


class Tormentor:
    """Does one thing after the other to the workers, the network and the server.

    :param victims: process ids of the workers of now; the first ones of them are never killed.
    :param kill_one: kills a worker that may be killed, and starts another.
    """

    def __init__(
        self,
        server: EmbeddedServer,
        proxy: FaultProxy,
        rng: random.Random,
        *,
        victims: Callable[[], Sequence[int]],
        signal_one: Callable[[int, signal.Signals], None],
        kill_one: Callable[[], Awaitable[None]],
    ) -> None:
        self._server, self._proxy, self._rng = server, proxy, rng
        self._victims, self._signal_one, self._kill_one = victims, signal_one, kill_one
        self._server_is_mine = asyncio.Lock()
        self.counts: Counter[str] = Counter()

    async def run(self, pause: float) -> None:
        """Go on until cancelled: three kinds of harm beside each other."""
        async with asyncio.TaskGroup() as group:
            for faults in (self._of_workers(), self._of_network(), self._of_server()):
                group.create_task(self._one_after_the_other(faults, pause))

    async def _one_after_the_other(self, faults: dict[str, Fault], pause: float) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / pause))
            name = self._rng.choice(list(faults))
            self.counts[name] += 1
            try:
                await faults[name]()
            except (RedisError, OSError):
                self.counts["did not get through"] += 1  # another fault was in the way
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # Cleaning up met that fault, and its error has taken the place of the cancellation.
                    raise asyncio.CancelledError from None

    def _up_to(self, seconds: float) -> float:
        return self._rng.uniform(0.1, seconds)

    # -- workers ---------------------------------------------------------------------------------

    def _of_workers(self) -> dict[str, Fault]:
        return {"SIGSTOP of a worker": self._stop_worker, "SIGKILL of a worker": self._kill_one}

    async def _stop_worker(self) -> None:
        victim = self._rng.choice(self._victims())
        self._signal_one(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._up_to(5.0))
        finally:
            self._signal_one(victim, signal.SIGCONT)

    # -- network ---------------------------------------------------------------------------------

    def _of_network(self) -> dict[str, Fault]:
        return {
            "connections cut": self._cut,
            "replies lost": self._lose_replies,
            "commands lost": self._lose_commands,
            "slow network": self._delay,
            "trickle": self._trickle,
            "half-open connections": self._half_open,
            "stalled network": self._stall,
            "connections refused": self._refuse,
        }

    async def _cut(self) -> None:
        self._proxy.cut()

    async def _lose_replies(self) -> None:
        self._proxy.drop_reply(named("EVALSHA"), times=self._rng.randint(1, 5))

    async def _lose_commands(self) -> None:
        self._proxy.drop_command(named("EVALSHA"), times=self._rng.randint(1, 5))

    async def _delay(self) -> None:
        self._proxy.delay(self._up_to(0.5))
        await self._heal_after(self._up_to(3.0))

    async def _trickle(self) -> None:
        self._proxy.trickle()
        await self._heal_after(self._up_to(2.0))

    async def _half_open(self) -> None:
        self._proxy.half_open()
        await self._heal_after(self._up_to(4.0))

    async def _stall(self) -> None:
        self._proxy.stall()
        await self._heal_after(self._up_to(4.0))

    async def _refuse(self) -> None:
        await self._proxy.refuse()
        self._proxy.cut()
        await self._heal_after(self._up_to(2.0))

    async def _heal_after(self, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            await self._proxy.heal()
            # It remembers every connection for tests that look at them; here they are too many.
            self._proxy.connections[:] = self._proxy.open_connections

    # -- server ----------------------------------------------------------------------------------

    def _of_server(self) -> dict[str, Fault]:
        return {
            "CLIENT KILL": self._kill_clients,
            "all connections killed at once": self._kill_all_clients,
            "CLIENT PAUSE": self._pause_clients,
            "SCRIPT FLUSH": self._flush_scripts,
            "DEBUG SLEEP": self._sleep,
            "notifications changed": self._change_notifications,
            "SIGSTOP of the server": self._stop_server,
            "server killed and restarted": self._restart,
        }

    async def _ask(self, *command: str | int) -> None:
        async with redis.asyncio.Redis.from_url(self._server.url) as client:
            await client.execute_command(*command)  # type: ignore[no-untyped-call]

    async def _kill_clients(self) -> None:
        await self._ask("CLIENT", "KILL", "TYPE", self._rng.choice(("normal", "pubsub")))

    async def _kill_all_clients(self) -> None:
        for kind in ("normal", "pubsub"):
            await self._ask("CLIENT", "KILL", "TYPE", kind)

    async def _pause_clients(self) -> None:
        await self._ask("CLIENT", "PAUSE", self._rng.randint(100, 2000))

    async def _flush_scripts(self) -> None:
        await self._ask("SCRIPT", "FLUSH")

    async def _sleep(self) -> None:
        await self._ask("DEBUG", "SLEEP", f"{self._up_to(1.0):.2f}")

    async def _change_notifications(self) -> None:
        events = self._rng.choice(("", "Kgxe"))
        await self._ask("CONFIG", "SET", "notify-keyspace-events", events)

    async def _stop_server(self) -> None:
        self._server.pause()
        try:
            await asyncio.sleep(self._up_to(2.0))
        finally:
            self._server.resume()

    async def _restart(self) -> None:
        await asyncio.to_thread(self._server.kill)
        starting = asyncio.ensure_future(asyncio.to_thread(self._server.start))
        await asyncio.shield(starting)
