"""What the functions' answers mean: from the server's words and milliseconds to our values and moments.

Others can write into the tables, and every role can notify. So nothing that is read here can raise anything
but ``BackendError``, or ``ValueError`` from ``number_of`` and ``token_of``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any
from urllib.parse import unquote_to_bytes

from ..._clock import local_deadline, now
from ..._errors import BackendError, BackendUnavailable
from ..._model import Gone, Granted, Left, Refused, Waiting

#: A number has so many digits at the most, and a token less than 2**53.
_DIGITS, _LARGEST_TOKEN = 18, 2**53
#: An answer that says only that a success is on record: its result is long, and has to be read apart.
LONG_RECORD = "done"


class Extended:
    """The answer to an extension. Unlike a coroutine it may be dropped.

    :param recorded: asks for a long result.
    """

    __slots__ = ("_answer", "_recorded", "_sent")

    def __init__(
        self, answer: asyncio.Future[str], sent: float, recorded: Callable[[], Awaitable[str]]
    ) -> None:
        self._answer = answer
        self._sent = sent
        self._recorded = recorded

    def __await__(self) -> Generator[Any, None, Granted | Waiting | Gone]:
        text = yield from self._answer
        if text == LONG_RECORD:
            text = yield from self._recorded().__await__()
        answer = outcome_of(text, self._sent)
        return Gone("gone", answer.result) if isinstance(answer, Refused) else answer


def number_of(text: str) -> int:
    """Return a number that the server sent; ValueError where it is none."""
    digits = text.removeprefix("-")
    if len(digits) > _DIGITS or not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"not a number: {text:.40}")
    return int(text)


def token_of(text: str) -> int:
    """Return a fencing token that the server sent; ValueError where it is none."""
    token = number_of(text)
    if not 0 < token < _LARGEST_TOKEN:
        raise ValueError(f"not a token: {token}")
    return token


def outcome_of(answer: str, sent: float) -> Granted | Waiting | Refused | Gone:
    try:
        return _outcome_of(answer, sent)
    except ValueError as wrong:
        raise BackendError(f"an answer of the wrong shape: {answer!r:.200}") from wrong


def _outcome_of(answer: str, sent: float) -> Granted | Waiting | Refused | Gone:
    match answer.split(" "):
        case ["granted" | "held" | "recalled" as word, token, left]:
            return Granted(
                token_of(token), local_deadline(sent, number_of(left)), word == "recalled"
            )
        case ["waiting", left, look, floor]:
            look_in = number_of(look)
            look_at = now() + look_in / 1000 if look_in >= 0 else None
            return Waiting(local_deadline(sent, number_of(left)), look_at, number_of(floor))
        case ["done", result]:
            return Refused("recorded", result=unquote_to_bytes(result))
        case [("busy" | "deadlock") as why]:
            return Refused(why)
        case ["limit", used]:
            return Refused("limit", number_of(used[1:] or "0"))
        case ["gone", ("broken" | "expired" | "taken_over" | "gone") as reason]:
            return Gone(reason)
        case ["closed", *left]:
            raise BackendUnavailable(
                "the server has crashed, and its unlogged tables are empty: nothing is granted until every "
                f"lease of before has ended, in {number_of(left[0]) / 1000 if left and left[0] else '?'} s"
            )
    raise ValueError(answer)


def left_of(answer: str) -> Left:
    match answer.split(" "):
        case [("released" | "withdrawn" | "recorded") as what]:
            return Left(what)
        case ["gone", ("broken" | "expired" | "gone") as reason]:
            return Left("gone", reason)
    raise BackendError(f"an answer of the wrong shape: {answer!r:.200}")
