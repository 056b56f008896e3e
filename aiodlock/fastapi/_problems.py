"""What goes wrong, as HTTP errors that need no handler, and how they look in the OpenAPI schema."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from fastapi import HTTPException, WebSocket, WebSocketException
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketState

from .._client import Client, core_of
from .._errors import (
    AcquireTimeout,
    BackendError,
    ClientClosed,
    LockError,
    LockLost,
    WouldBlock,
)

_logger = logging.getLogger("aiodlock")
_LONGEST_RETRY_AFTER = 30


class LockProblem(HTTPException):
    """The base of every error here; ``detail`` holds the members of a problem document."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Lock problem"

    def __init__(
        self,
        detail: str,
        *,
        name: str | None = None,
        retry_after: int | None = None,
        status: int | None = None,
    ):
        problem: dict[str, Any] = {
            "type": "about:blank",
            "title": self.title,
            "status": status or self.status,
            "detail": detail,
        }
        if name is not None:
            problem["lock"] = name
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status or self.status, problem, headers)


class LockTimedOut(LockProblem):
    """423, or what ``status=`` says: somebody else holds the lock.

    ``Retry-After`` tells the client when to come back.
    """

    status = 423
    title = "Locked"


class LeaseLost(LockProblem):
    """409: the lease was lost while the handler ran; what it did may be half done."""

    status = 409
    title = "Lock lost"


class StoreAway(LockProblem):
    """503: the place where locks live does not answer."""

    status = 503
    title = "Lock store unavailable"


class NameRefused(LockProblem):
    """422: the request lacks a part of the lock's name, or has one that is not valid."""

    status = 422
    title = "No lock can be named by this request"


class KeyReused(LockProblem):
    """422: what was done under this key was another request; see ``fingerprint`` of ``Once``."""

    status = 422
    title = "This key belongs to another request"


class ClientGone(LockProblem):
    """499: the client has disconnected while it waited. Nobody reads this answer."""

    status = 499
    title = "Client closed request"


def _document(
    *problems: type[LockProblem], status: int | None = None
) -> dict[int | str, dict[str, Any]]:
    schema = {
        "type": "object",
        "required": ["detail"],
        "properties": {
            "detail": {
                "type": "object",
                "required": ["type", "title", "status", "detail"],
                "properties": {
                    "type": {"type": "string"},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string"},
                    "lock": {"type": "string", "description": "The lock's name"},
                },
            }
        },
    }
    seconds = {"description": "Seconds to wait before the next try", "schema": {"type": "integer"}}
    found: dict[int | str, dict[str, Any]] = {}
    for problem in problems:
        entry: dict[str, Any] = {
            "description": problem.title,
            "content": {"application/json": {"schema": schema}},
        }
        if problem is not LeaseLost:
            entry["headers"] = {"Retry-After": seconds}
        found[status or problem.status] = entry
    return found


def responses_with(status: int) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route whose waiting ends with this status."""
    return _document(LeaseLost, StoreAway) | _document(LockTimedOut, status=status)


responses: dict[int | str, dict[str, Any]] = _document(LockTimedOut, LeaseLost, StoreAway)
"""For ``responses=`` of a route, router or app. ``lifespan`` adds them to locked routes by itself."""


@contextmanager
def as_problems(
    connection: HTTPConnection,
    client: object,
    name: str | None = None,
    timeout: float | None = None,
    status: int = LockTimedOut.status,
) -> Iterator[None]:
    """Turn what the library raises about the lock (None: about any) into HTTP errors."""
    try:
        yield
    except LockError as error:
        if name is not None and error.name not in (None, name):
            raise  # about another lock, which the handler uses by itself
        problem = _problem(error, timeout, status)
        if problem is None or is_closed(connection):
            raise  # if it is closed, only the log can tell
        if isinstance(problem, StoreAway):
            _log(client, error)
        raise told_to(connection, problem) from error


def _log(client: object, error: LockError) -> None:
    """Log why a request gets 503, bounded as all that the client logs: the caller is not told.

    :param client: the one of the request, or what a test has put in its place.
    """
    session = core_of(client).session if isinstance(client, Client) else None
    event, text = "request_refused", "a request gets 503: %s"
    if session is None:
        _logger.warning(text, error, extra={"event": event, "lock": error.name})
    else:
        session.telling.log.tell(logging.WARNING, event, error.name or "", text, error)


def is_closed(connection: HTTPConnection) -> bool:
    """Return whether this is a WebSocket that nobody can be told anything by."""
    return isinstance(connection, WebSocket) and WebSocketState.DISCONNECTED in (
        connection.client_state,
        connection.application_state,
    )


def told_to(connection: HTTPConnection, problem: LockProblem) -> Exception:
    """Return what tells a problem to this client.

    A WebSocket that is accepted can get no HTTP response: it is closed, with 4000 and the status as code.
    So is one whose server cannot send a response instead of accepting it.
    """
    if not isinstance(connection, WebSocket) or (
        connection.application_state is WebSocketState.CONNECTING
        and problem.status_code != ClientGone.status  # no server knows it
        and "websocket.http.response" in connection.scope.get("extensions", {})
    ):
        return problem
    return WebSocketException(4000 + problem.status_code, problem.title)


def _problem(error: LockError, timeout: float | None, status: int) -> LockProblem | None:
    match error:
        case AcquireTimeout() | WouldBlock():
            # The messages of errors are for who writes the program.
            after = min(max(1, math.ceil(timeout or 0)), _LONGEST_RETRY_AFTER)
            detail = f"Somebody else holds {error.name!r}; try again in {after} s."
            return LockTimedOut(detail, name=error.name, retry_after=after, status=status)
        case LockLost():
            detail = f"The lock on {error.name!r} was lost; the work may be half done."
            return LeaseLost(detail, name=error.name)
        case BackendError() | ClientClosed():
            # The message of a backend's error names hosts: that is for the log.
            detail = "The store where locks live does not answer."
            return StoreAway(detail, name=error.name, retry_after=1)
    return None
