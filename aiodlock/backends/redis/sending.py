"""How scripts get to a server: their calls, and their sources on a new connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hiredis

from .refusals import ReplyError
from .scripts import Script, Words
from .wire import Wire

_logger = logging.getLogger("aiodlock")


@dataclass(frozen=True, slots=True)
class Message:
    """A call of a script, packed once for all servers that it is sent to."""

    source: bytes
    call: tuple[bytes | str | int, ...]
    packed: bytes

    @classmethod
    def of(cls, script: Script, keys: tuple[str, ...], arguments: Words) -> Message:
        call = (script.number_of_keys, *keys, *arguments)
        packed = hiredis.pack_command(("EVALSHA", script.sha, *call))  # type: ignore[arg-type]
        return cls(script.source, call, packed)


async def load_scripts(wire: Wire, scripts: Sequence[Script]) -> None:
    """Spare the first calls, and a batch of thousands of extensions, the refusal of an unknown script.

    The server is asked whether it has the last of them: it forgets all of them together, and loads them in
    this order. They are 60 KB, and loading them costs more than the rest of a new connection; asking about
    each would cost a thousand clients that come back together more than all else they send. The scripts are
    on their way when this returns, in front of every call.
    """
    known: Any = None
    try:
        known = await wire.send("SCRIPT", "EXISTS", scripts[-1].sha)
    except ReplyError as refused:  # by an ACL, or for now
        _logger.debug("SCRIPT EXISTS was refused: %s", refused)
    if known != [1]:
        for script in scripts:
            wire.send("SCRIPT", "LOAD", script.source).add_done_callback(_on_loaded)


def _on_loaded(loading: asyncio.Future[Any]) -> None:
    refused = loading.exception()
    if refused is not None:  # EVAL does it when it is needed
        _logger.debug("SCRIPT LOAD was refused: %s", refused)
