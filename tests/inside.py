"""What tests know of the inside of a client: one place that changes when the core does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiodlock import Client
from aiodlock._linger import Lingering
from aiodlock._model import Kind
from aiodlock._register import Holds
from aiodlock._request import Request, check
from aiodlock._session import Session
from aiodlock.backends.kept import Kept, Schedule


def session_of(client: Client) -> Session:
    assert client._core.session is not None
    return client._core.session


def lingering_of(client: Client) -> Lingering:
    return session_of(client).lingering


def holds_of(session: Session) -> Holds:
    """Return what the session has of each task."""
    return session.register.holds_of


def holds_of_task(client: Client, name: str) -> Sequence[Request]:
    """Return what the current task holds of a lock's name."""
    kind: Kind = "lock"
    return session_of(client).register.holds(kind, name, asyncio.current_task())


def check_request(session: Session, request: Request) -> None:
    """Assert what is promised of each request at every moment."""
    check(
        request,
        is_kept=session.lingering.kept.get(request.name) is request,
        is_listed=session.requests.get(request.id) is request,
    )


def schedule_of(place: object) -> Schedule:
    """Return when something is due about a place that a keeper keeps."""
    assert isinstance(place, Kept)
    return place.planned()
