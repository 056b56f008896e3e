"""The Lua scripts, each a file of its own with the clock and the shared prelude; how a server gets them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from .refusals import ReplyError
from .wire import Wire

_logger = logging.getLogger("aiodlock")

#: Where a script wants what is shared, if not in front of all.
_TIME = b"-- (time)\n"
_RECORDS = b"-- (records)\n"
_PRELUDE = b"-- (prelude)\n"
_HOLDERS = b"-- (holders)\n"

#: The arguments of a script.
Words = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """One script; the head of its file says what KEYS, ARGV and result are."""

    name: str
    source: bytes
    sha: bytes
    #: Of one name; ``inspect`` takes several, and a name of kind ``once`` has one more.
    number_of_keys: bytes


def _load(
    name: str,
    number_of_keys: int,
    *,
    voting: bool = False,
    reading_only: bool = False,
    alone: bool = False,
) -> Script:
    folder = files(__package__) / "lua"

    def read(*parts: str) -> bytes:
        return b"\n".join((folder / f"{part}.lua").read_bytes() for part in parts)

    text = read(name)
    first = ["clock", *([] if _TIME in text else ["time"])]
    first += [*([] if _RECORDS in text else ["records"]), *(["tokens"] if voting else [])]
    prelude = ["reading"] if reading_only else ["reading", "prelude"]
    if voting:
        prelude.append("tickets")
    if _HOLDERS not in text:
        prelude.insert(0, "holders")
    if _PRELUDE not in text:
        first, prelude = [*first, *prelude], []
    places = {_TIME: ["time"], _RECORDS: ["records"], _HOLDERS: ["holders"], _PRELUDE: prelude}
    for word, parts in places.items():
        text = text.replace(word, read(*parts))
    source = text if alone else b"\n".join((read(*first), text))
    sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
    return Script(name, source, sha, str(number_of_keys).encode())


ACQUIRE = _load("acquire", 5)
EXTEND = _load("extend", 5)
LEAVE = _load("leave", 6)
BREAK = _load("break", 5)
INSPECT = _load("inspect", 4, reading_only=True)
TELL = _load("tell", 1, alone=True)
ALL = (ACQUIRE, EXTEND, LEAVE, BREAK, INSPECT, TELL)

# What the nodes of a quorum run.
VOTE = _load("vote", 6, voting=True)
UNVOTE = _load("unvote", 6, voting=True)
BREAK_VOTES = _load("break_votes", 5, voting=True)
INSPECT_VOTES = _load("inspect_votes", 4, voting=True)
LENGTHS = _load("lengths", 1, reading_only=True)
VOTING = (VOTE, UNVOTE, BREAK_VOTES, INSPECT_VOTES, TELL, LENGTHS)


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
