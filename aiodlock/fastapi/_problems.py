"""What goes wrong, as HTTP errors that need no handler, and how they look in the OpenAPI schema."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

from fastapi import HTTPException

from .._errors import (
    AcquireTimeout,
    BackendError,
    ClientClosed,
    LockError,
    LockLost,
    WouldBlock,
)

_LONGEST_RETRY_AFTER = 30


class LockProblem(HTTPException):
    """The base of every error here; ``detail`` holds the members of a problem document."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Lock problem"

    def __init__(self, detail: str, *, name: str | None = None, retry_after: int | None = None):
        problem: dict[str, Any] = {
            "type": "about:blank",
            "title": self.title,
            "status": self.status,
            "detail": detail,
        }
        if name is not None:
            problem["lock"] = name
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(self.status, problem, headers)


class LockTimedOut(LockProblem):
    """423: somebody else holds the lock. ``Retry-After`` tells the client when to come back."""

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
    """422: the request lacks a part of the lock's name, or has one that could break out of it."""

    status = 422
    title = "No lock can be named by this request"


class ClientGone(LockProblem):
    """499: the client has disconnected while it waited. Nobody reads this answer."""

    status = 499
    title = "Client closed request"


def _document(*problems: type[LockProblem]) -> dict[int | str, dict[str, Any]]:
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
        found[problem.status] = entry
    return found


responses: dict[int | str, dict[str, Any]] = _document(LockTimedOut, LeaseLost, StoreAway)
"""For ``responses=`` of a route, router or app. ``lifespan`` adds them to locked routes by itself."""


@contextmanager
def as_problems(name: str | None, timeout: float | None) -> Iterator[None]:
    """Turn what the library raises about the lock (None: about any) into HTTP errors."""
    try:
        yield
    except LockError as error:
        if name is not None and error.name not in (None, name):
            raise  # about another lock, which the handler uses by itself
        _raise_problem(error, timeout)


def _raise_problem(error: LockError, timeout: float | None) -> NoReturn:
    match error:
        case AcquireTimeout() | WouldBlock():
            after = min(max(1, math.ceil(timeout or 0)), _LONGEST_RETRY_AFTER)
            raise LockTimedOut(str(error), name=error.name, retry_after=after) from error
        case LockLost():
            raise LeaseLost(str(error), name=error.name) from error
        case BackendError() | ClientClosed():
            # The message of a backend's error names hosts: that is for the log.
            detail = "The store where locks live does not answer."
            raise StoreAway(detail, name=error.name, retry_after=1) from error
    raise error
