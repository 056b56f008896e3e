"""Which address of a server's name is dialled.

A name may have several (a headless service), of which one may be silent. Who dials the first one again and
again never gets in, and name servers turn them round at each question, so "the next one" may be the same.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter


class Addresses:
    """What a client knows of the addresses of its servers.

    Mutable state: ``_in_vain`` (how often each was dialled, or lost, since it served).
    """

    def __init__(self) -> None:
        self._in_vain: Counter[str] = Counter()

    async def choose(self, host: str, port: int) -> str:
        """Return the address to dial: of those of the name, the one that failed least.

        It counts as failed until it ``served``.

        :raises OSError: if the name cannot be looked up.
        """
        address = host
        if not _is_address(host):
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
            address = min((str(one[4][0]) for one in found), key=self._in_vain.__getitem__)
        self._in_vain[address] += 1
        return address

    def served(self, address: str) -> None:
        """A server has answered there."""
        del self._in_vain[address]

    def lost(self, address: str) -> None:
        """The connection to a server there is over: another one is tried first."""
        self._in_vain[address] += 1


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
