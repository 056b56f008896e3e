"""What the functions' answers mean: from the server's words and milliseconds to our values and moments."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any
from urllib.parse import unquote_to_bytes

from ..._clock import local_deadline, now
from ..._errors import BackendError, BackendUnavailable
from ..._model import Gone, Granted, Left, Refused, Waiting


class Extended:
    """The answer to an extension. Unlike a coroutine it may be dropped."""

    __slots__ = ("_answer", "_sent")

    def __init__(self, answer: asyncio.Future[str], sent: float) -> None:
        self._answer = answer
        self._sent = sent

    def __await__(self) -> Generator[Any, None, Granted | Waiting | Gone]:
        text = yield from self._answer
        answer = outcome_of(text, self._sent)
        return Gone("gone", answer.result) if isinstance(answer, Refused) else answer


def outcome_of(answer: str, sent: float) -> Granted | Waiting | Refused | Gone:
    match answer.split(" "):
        case ["granted" | "held" | "recalled" as word, token, left]:
            return Granted(int(token), local_deadline(sent, int(left)), word == "recalled")
        case ["waiting", left, look, floor]:
            look_at = now() + int(look) / 1000 if int(look) >= 0 else None
            return Waiting(local_deadline(sent, int(left)), look_at, int(floor))
        case ["done", result]:
            return Refused("recorded", result=unquote_to_bytes(result))
        case ["busy"]:
            return Refused("busy")
        case ["deadlock"]:
            return Refused("deadlock")
        case ["limit", used]:
            return Refused("limit", int(used[1:] or 0))
        case ["gone", ("broken" | "expired" | "taken_over" | "gone") as reason]:
            return Gone(reason)
        case ["closed", *left]:
            raise BackendUnavailable(
                "the server has crashed, and its unlogged tables are empty: nothing is granted until every "
                f"lease of before has ended, in {int(left[0]) / 1000 if left and left[0] else '?'} s"
            )
    raise BackendError(f"an answer of the wrong shape: {answer!r:.200}")


def left_of(answer: str) -> Left:
    match answer.split(" "):
        case ["released"]:
            return Left("released")
        case ["withdrawn"]:
            return Left("withdrawn")
        case ["recorded"]:
            return Left("recorded")
        case ["gone", ("broken" | "expired" | "gone") as reason]:
            return Left("gone", reason)
    raise BackendError(f"an answer of the wrong shape: {answer!r:.200}")
