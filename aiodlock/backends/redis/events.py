"""Keyspace events tell the waiter at the head that a holder is gone: turning them on, and the probe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count

from redis.exceptions import RedisError

from ..._errors import BackendError, BackendUnavailable
from .link import Link
from .refusals import ReplyError, will_pass
from .wakeups import Wakeups
from .wire import Wire

_logger = logging.getLogger("aiodlock")

_OPTION = "notify-keyspace-events"
#: Classes of events that are used: channel per key, generic, expired, evicted.
_CLASSES = "Kgxe"
_PROBE_AGAIN = 0.5
#: The probe's key lives for 1 ms.
_PROBED_AFTER = 0.003


async def turn_on(link: Link, translate: Callable[[Wire, ReplyError], BackendError]) -> None:
    """Add what is missing to the server's configuration, or raise BackendError when it refuses."""
    while True:
        try:
            await _add_classes(link, translate)
            return
        except BackendUnavailable:  # the connection was lost meanwhile
            await asyncio.sleep(_PROBE_AGAIN)


async def _add_classes(link: Link, translate: Callable[[Wire, ReplyError], BackendError]) -> None:
    wire = await link.wait_up()
    try:
        reply = await wire.send("CONFIG", "GET", _OPTION)
        present = reply[1].decode()
        missing = "".join(c for c in _CLASSES if c not in present.replace("A", "gxe"))
        if missing:
            await wire.send("CONFIG", "SET", _OPTION, present + missing)
    except ReplyError as refused:
        if will_pass(refused):
            raise translate(wire, refused) from refused
        raise BackendError(
            f"configure_notifications=True, but the server refuses CONFIG: {refused}; set "
            f"{_OPTION} to {_CLASSES} on the server, or leave the option out"
        ) from refused


async def arrive(
    link: Link,
    wakeups: Wakeups,
    key: str,
    allowed: asyncio.Event,
    on_round: Callable[[int], object],
) -> bool:
    """See whether events arrive; a subscription alone succeeds also when they do not.

    :param allowed: set when the user may write; the key is not written before.
    :param on_round: called after each question to the server, with the number of them.
    """
    while True:
        try:
            if await _hears_of_an_expiry(link, wakeups, key, allowed, on_round):
                return True
            why: object = "turned off"
        except ReplyError as refused:
            why = refused
        except (BackendUnavailable, RedisError, OSError):
            await asyncio.sleep(_PROBE_AGAIN)  # a connection was lost meanwhile
            continue
        except BackendError as refused:
            why = refused
        _logger.info(
            "the server sends no keyspace events (%s), which are optional: with them "
            "(notify-keyspace-events Kgxe), a waiter notices sooner that somebody has deleted a lock",
            why,
            extra={"event": "no_keyspace_events"},
        )
        return False


async def _hears_of_an_expiry(
    link: Link,
    wakeups: Wakeups,
    key: str,
    allowed: asyncio.Event,
    on_round: Callable[[int], object],
) -> bool:
    try:
        heard = await wakeups.expect(key)
        await allowed.wait()
        wire = await link.wait_up()
        setting = wire.send("SET", key, "1", "PX", 1)
        for asked in count(1):
            # When this arrives the key has expired, unless the network brings both together.
            await asyncio.sleep(_PROBED_AFTER)
            left = wire.send("EXISTS", key)  # touching it makes an expired key fire
            arrived = await wakeups.echo(wire)
            await setting
            gone = not await left
            if not arrived:
                raise BackendUnavailable("a connection was lost")
            on_round(asked)
            if gone:
                break
        return heard.is_set()
    finally:
        wakeups.stop_expecting(key)
