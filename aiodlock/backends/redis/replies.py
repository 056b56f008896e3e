"""What the scripts' answers mean: from the server's words and milliseconds to our values and moments."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from ..._clock import local_deadline as local_deadline
from ..._clock import now
from ..._errors import BackendError
from ..._model import (
    Gone,
    Granted,
    HolderInfo,
    Left,
    Mode,
    Refused,
    WaiterInfo,
    Waiting,
    seconds_since,
)

_logger = logging.getLogger("aiodlock")

_RELEASED = Left("released")


def mode_of(wire_mode: bytes) -> Mode:
    """Read the mode of a record."""
    return "exclusive" if wire_mode == b"x" else "shared"


def owner_of(wire_owner: bytes) -> str:
    """Read the owner of a record, as the user named it or as the task's id."""
    text = wire_owner.decode()
    return unquote(text[1:]) if text.startswith("u") else text[1:]


def for_people(words: bytes) -> dict[str, str]:
    """Return the note and the description among the further words of a record."""
    if not words:  # as of most, and there may be thousands
        return {}
    found = dict(word.partition("=")[::2] for word in words.decode().split(" "))
    return {"note": unquote(found.get("n", "")), "description": unquote(found.get("d", ""))}


_PROMISES = (b"granted ", b"held ", b"recalled ", b"waiting ")


def words_in(reply: Any) -> list[Any]:
    """Return the words of the line that acquire, extend or leave answers; a result on record is one."""
    if not isinstance(reply, bytes):
        raise wrong_shape("script", reply)
    return reply.split(b" ", 1 if reply.startswith(b"done ") else -1)


def promises(reply: Any) -> bool:
    """Tell whether an answer promises something. A refusal or a loss does not."""
    return isinstance(reply, bytes) and reply.startswith(_PROMISES)


def outcome_of(reply: Any, sent: float) -> Granted | Waiting | Refused | Gone:
    try:
        match words_in(reply):
            case [b"granted" | b"held" | b"recalled" as word, token, left]:
                return Granted(int(token), local_deadline(sent, int(left)), word == b"recalled")
            case [b"waiting", left, look, floor]:
                look_ms = int(look)
                look_at = now() + look_ms / 1000 if look_ms >= 0 else None
                return Waiting(local_deadline(sent, int(left)), look_at, int(floor))
            case [b"done", result]:
                return Refused("recorded", result=result)
            case [b"busy"]:
                return Refused("busy")
            case [b"deadlock"]:
                return Refused("deadlock")
            case [b"limit", used]:
                return Refused("limit", int(used[1:] or 0))
            case [b"gone"]:
                return Gone("gone")
            case [b"gone", b"broken" | b"expired" | b"taken_over" | b"gone" as reason]:
                return Gone(reason.decode())
    except (ValueError, TypeError, OverflowError) as wrong:
        raise wrong_shape("script", reply) from wrong
    raise wrong_shape("script", reply)


def left_in(reply: Any) -> Left:
    """Read the line that leave answers."""
    if reply == b"released":  # as mostly
        return _RELEASED
    return left_of(words_in(reply))


def left_of(reply: Any) -> Left:
    match reply:
        case [b"released", *_]:  # what was granted thereby is read as it arrives
            return _RELEASED
        case [b"withdrawn"]:
            return Left("withdrawn")
        case [b"recorded"]:
            return Left("recorded")
        case [b"gone", b"broken" | b"expired" | b"gone" as reason]:
            return Left("gone", reason.decode())
    raise wrong_shape("leave", reply)


def token_of(text: str) -> tuple[int, bool]:
    """Return the token in the notice of a grant, and whether that is recalled at once."""
    number = text.removesuffix("r")
    return int(number), number != text


def grants_of(reply: bytes) -> list[tuple[str, int, str, bool]]:
    """Return what a release granted to others of its client: request id, token, the state's key, and
    whether it is recalled at once."""
    try:
        _, state_key, *pairs = words_in(reply)
        ids, tokens = pairs[::2], pairs[1::2]
        return [
            (id.decode(), number, state_key.decode(), recalled)
            for id, token in zip(ids, tokens, strict=True)
            for number, recalled in (token_of(token.decode()),)
        ]
    except (ValueError, TypeError, AttributeError, OverflowError):
        # No request is lost by it: waiters ask again.
        _logger.warning(
            "grants of the wrong shape ignored: %.200r", reply, extra={"event": "bad_notice"}
        )
        return []


def wrong_shape(what: str, reply: object) -> BackendError:
    return BackendError(f"the server's answer to {what} has the wrong shape: {reply!r:.200}")


def holders_of(flat: Sequence[bytes], now_us: int) -> tuple[HolderInfo, ...]:
    """One entry per owner and mode, with the number of its acquisitions that the server counts."""
    found: dict[tuple[bytes, bytes], HolderInfo] = {}
    for owner, mode, token, left, client, words, length in zip(*[iter(flat)] * 7, strict=True):
        before = found.get((owner, mode))
        found[owner, mode] = HolderInfo(
            owner=owner_of(owner),
            mode=mode_of(mode),
            token=int(token),
            count=before.count + 1 if before else 1,
            remaining=max(int(left) / 1000, (before and before.remaining) or 0.0),
            client=client.decode(),
            holding=seconds_since(int(token), now_us),
            ttl=max(int(length) / 1000, (before and before.ttl) or 0.0),
            **for_people(words),
        )
    return tuple(found.values())


def waiters_of(flat: Sequence[bytes]) -> tuple[WaiterInfo, ...]:
    if not flat:
        return ()
    rows = zip(*[iter(flat)] * 5, strict=True)
    return tuple(
        WaiterInfo(
            owner_of(owner),
            mode_of(mode),
            position,
            int(waited) / 1000,
            client.decode(),
            **for_people(words),
        )
        for position, (owner, mode, waited, client, words) in enumerate(rows)
    )
