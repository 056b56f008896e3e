"""Which addresses a server's name has, and which of them is dialled.

A resolver may hang for longer than a dial may take. So each name is asked for once at a time, in a thread
of its own: dials that are given up meanwhile would take all threads that the loop has for its user.

A name may have several (a headless service), of which one may be silent. Who dials the first one again and
again never gets in, and name servers turn them round at each question, so "the next one" may be the same.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections import Counter
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

_Found = list[tuple[Any, ...]]

_asked: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Future[_Found]]
] = WeakKeyDictionary()


async def resolve(host: str, port: int) -> _Found:
    """Return what ``socket.getaddrinfo`` tells of a name. Whoever asks while it is asked, waits, too.

    :raises OSError: if the name cannot be looked up, or can be none.
    """
    if is_address(host):
        return [(None, None, None, "", (host, port))]
    loop = asyncio.get_running_loop()
    asked = _asked.setdefault(loop, {})
    found = asked.get((host, port))
    if found is None:
        found = loop.create_future()
        asking = threading.Thread(
            target=_ask, args=(loop, found, host, port), name="aiodlock: resolver", daemon=True
        )
        try:
            asking.start()
        except RuntimeError as exhausted:  # no thread can be started
            raise OSError(f"{host!r} cannot be looked up: {exhausted}") from None
        asked[host, port] = found
        found.add_done_callback(lambda done: (asked.pop((host, port)), done.exception()))
    return await asyncio.shield(found)


def _ask(
    loop: asyncio.AbstractEventLoop, found: asyncio.Future[_Found], host: str, port: int
) -> None:
    with suppress(RuntimeError):  # the loop has ended meanwhile
        try:
            told: _Found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as unknown:
            loop.call_soon_threadsafe(found.set_exception, unknown)
        except ValueError as wrong:
            no_name = OSError(f"{host!r} can be no name: {wrong}")
            loop.call_soon_threadsafe(found.set_exception, no_name)
        else:
            loop.call_soon_threadsafe(found.set_result, told)


class Addresses:
    """What a client knows of the addresses of its servers.

    Mutable state: ``number`` (of those that the name asked last has), ``_in_vain`` (how often each was
    dialled, or lost, since it served).
    """

    def __init__(self) -> None:
        self.number: int = 0
        self._in_vain: Counter[str] = Counter()

    async def choose(self, host: str, port: int) -> str:
        """Return the address to dial: of those of the name, the one that failed least.

        It counts as failed until it ``served``.

        :raises OSError: if the name cannot be looked up.
        """
        found = await resolve(host, port)
        self.number = len(found)
        address = min((str(one[4][0]) for one in found), key=self._in_vain.__getitem__)
        self._in_vain[address] += 1
        return address

    def served(self, address: str) -> None:
        """A server has answered there."""
        del self._in_vain[address]

    def lost(self, address: str) -> None:
        """The connection to a server there is over: another one is tried first."""
        self._in_vain[address] += 1


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
