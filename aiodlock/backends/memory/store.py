"""One store in memory: its names, its clock, and the clients that are notified.

All event loops and threads of the process may use a store. A lock serves one call at a time.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from ..._clock import now
from ..._tasks import running_loop
from .machine import Message, Name, Seen

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: A name is looked at after so many milliseconds, and forgotten if nothing is left of it.
_LOOK_AFTER = 60_000


class Key(NamedTuple):
    """Names of two prefixes or two kinds never meet."""

    prefix: str
    kind: str
    name: str


class Names:
    """The names of a store. Mutable state: ``_names``, ``_looks`` (a heap: when each is looked at)."""

    def __init__(self) -> None:
        self._names: dict[Key, Name] = {}
        self._looks: list[tuple[int, Key]] = []

    def __iter__(self) -> Iterator[Key]:
        return iter(self._names)

    def get(self, key: Key, now_us: int) -> Name:
        """Return the name, as if it had been there always."""
        self._forget_some(now_us // 1000)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = Name()
            heappush(self._looks, (now_us // 1000 + _LOOK_AFTER, key))
        return name

    def find(self, key: Key) -> Name | None:
        """Return the name if anything is known of it."""
        return self._names.get(key)

    def are_over(self, now: int) -> bool:
        """Whether nothing is left of any name."""
        return all(name.kept_until() <= now for name in self._names.values())

    def _forget_some(self, now: int) -> None:
        """Two at a time: no call pays for the others, and there is no timer."""
        for _ in range(2):
            if not self._looks or self._looks[0][0] > now:
                return
            _, key = heappop(self._looks)
            until = self._names[key].kept_until()
            if until <= now:
                del self._names[key]
            else:
                heappush(self._looks, (max(until, now + _LOOK_AFTER), key))


class Client(NamedTuple):
    """Where messages to one client go: called in its event loop, one after the other."""

    loop: asyncio.AbstractEventLoop
    on_message: Callable[[Key, Message], None]


_Observer = tuple[asyncio.AbstractEventLoop, Callable[[], object]]


class Store:
    """What ``memory://`` names.

    Mutable state: ``names``, ``clients`` by label, ``_observers`` by name, ``_waits`` (what clients tell of
    their waits, by prefix and label: the serial, the record, its end); all under ``_lock``. ``users``
    may still open the store.
    """

    def __init__(self) -> None:
        self.names: Names = Names()
        self.clients: dict[str, Client] = {}
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self.pid: int = os.getpid()
        self._observers: dict[Key, list[_Observer]] = {}
        self._waits: dict[tuple[str, str], tuple[int, bytes, float]] = {}
        self._lock = threading.Lock()
        # Tokens follow the time of day. The clock itself is one that nobody sets.
        self._epoch_us = time.time_ns() // 1000 - int(now() * 1e6)

    def now_us(self) -> int:
        """Return the store's time in microseconds."""
        return self._epoch_us + int(now() * 1e6)

    def call(
        self,
        key: Key,
        method: Callable[Concatenate[Name, int, _P], tuple[_T, list[Message]]],
        *args: _P.args,
        **options: _P.kwargs,
    ) -> _T:
        """Call the machine for one name, deliver its messages, and return its reply."""
        with self._lock:
            moment = self.now_us()
            reply, messages = method(self.names.get(key, moment), moment, *args, **options)
            for message in messages:
                client = self.clients.get(message.client)
                if client is not None:
                    call_in(client.loop, client.on_message, key, message)
        return reply

    def inspect(self, key: Key, *, queues: bool = True) -> Seen:
        """Return what people want to know of a name; without ``queues``, not who waits."""
        with self._lock:
            return (self.names.find(key) or Name()).inspect(self.now_us(), queues=queues)

    def tell_waits(self, client: tuple[str, str], serial: int, record: bytes, keep: float) -> None:
        """Keep what a client tells of its waits, unless it has told something newer."""
        with self._lock:
            if serial >= self._waits.get(client, (0,))[0]:
                self._waits[client] = serial, record, now() + keep
            moment = now()
            over = [one for one, (_, _, until) in self._waits.items() if until <= moment]
            for one in over:
                del self._waits[one]

    def waits_of(self, client: tuple[str, str]) -> bytes:
        """Return what a client has told last; empty if nothing."""
        with self._lock:
            _, record, until = self._waits.get(client, (0, b"", 0.0))
            return record if now() < until else b""

    def known(self) -> tuple[Key, ...]:
        """Return every name of which anything is known."""
        with self._lock:
            return tuple(self.names)

    def changed(self, key: Key) -> None:
        """Call the observers of a name, each in its event loop."""
        with self._lock:
            for loop, changed in self._observers.get(key, ()):
                call_in(loop, changed)

    def observe(self, key: Key, changed: Callable[[], object]) -> Callable[[], None]:
        """Have ``changed`` called in this event loop; return what ends that."""
        observer = (asyncio.get_running_loop(), changed)
        with self._lock:
            self._observers.setdefault(key, []).append(observer)

        def stop() -> None:
            with self._lock:
                self._observers[key].remove(observer)
                if not self._observers[key]:
                    del self._observers[key]

        return stop

    def is_unused(self) -> bool:
        """Whether no client has the store, and nothing is left of any name."""
        with self._lock:
            idle = not self.users and not self.clients
            return idle and self.names.are_over(self.now_us() // 1000)


def call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Call something soon in an event loop, which may be another thread's, or over."""
    if loop is running_loop():
        loop.call_soon(call, *args)
        return
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        pass  # that loop is closed: its requests end with their leases


class _Shared:
    """The named stores of this process. Mutable state: ``stores``, ``_many`` (how many are too many)."""

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}
        self.lock = threading.Lock()
        self._many = _MANY

    def get(self, name: str, user: object) -> Store:
        with self.lock:
            store = self.stores.get(name)
            if store is None:
                self._drop_unused()
                store = self.stores[name] = Store()
            store.users.add(user)
        return store

    def _drop_unused(self) -> None:
        if len(self.stores) >= self._many:
            self.stores = {name: one for name, one in self.stores.items() if not one.is_unused()}
            self._many = max(_MANY, 2 * len(self.stores))


_MANY = 64
_shared = _Shared()
if hasattr(os, "register_at_fork"):
    # Another thread may have held it.
    os.register_at_fork(after_in_child=lambda: setattr(_shared, "lock", threading.Lock()))


def shared_store(name: str, user: object) -> Store:
    """Return the store of that name, which all clients of the process share.

    :raises RuntimeError: in a process that was forked from the one where the store is.
    """
    store = _shared.get(name, user)
    check_process(store.pid, f"memory://{name}")
    return store


def check_process(pid: int, what: str) -> None:
    """Raise RuntimeError in a fork: what it sees is a copy, and locks nothing between the processes."""
    if pid != os.getpid():
        raise RuntimeError(
            f"{what} belongs to the process before the fork, and locks nothing between processes: use a "
            "server, or make the client after the fork, with another name"
        )
