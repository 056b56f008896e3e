"""What is known of a request's handler, and a way to be around it: a dependency is told neither."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection

YIELDS = (
    "the handler yields, so FastAPI runs it while the response is sent, when the lock is released already; "
    "take the lock inside the handler, with the client of LockClient"
)


def yields(handler: Any) -> bool:
    """Return whether FastAPI would iterate over what the handler returns, also behind decorators."""
    inner = inspect.unwrap(handler)
    ways = (handler, inner, getattr(inner, "__call__", None))  # noqa: B004 (a method that yields)
    return any(inspect.isasyncgenfunction(way) or inspect.isgeneratorfunction(way) for way in ways)


def route_of(connection: HTTPConnection) -> Any:
    """Return the route of a request as it is used here; None outside of a route of FastAPI.

    It has the handler with all dependencies (``dependant``). Since 0.137 each inclusion of a router has
    routes of its own, with the whole path and the dependencies of the outer routers.
    """
    route = connection.scope.get("route")
    included = connection.scope.get("fastapi", {}).get("effective_route_context")
    if route is not None and getattr(included, "original_route", None) is route:
        return included
    return route


def check_handler(connection: HTTPConnection) -> None:
    """Refuse a request whose handler would run without what is held, also where no lifespan has checked.

    :raises RuntimeError: the handler yields.
    """
    if yields(getattr(connection.scope.get("route"), "endpoint", None)):
        raise RuntimeError(YIELDS)


def go_around(
    connection: HTTPConnection, mark: str, around: Callable[[Callable[[], Any]], Any]
) -> None:
    """Let ``around`` call the handler of this request's route, from now on. It may return an awaitable."""
    if not isinstance(connection.scope.get("route"), APIRoute):
        return
    used = route_of(connection)
    handler = used.dependant.call
    if hasattr(handler, mark):
        return

    @functools.wraps(handler)
    def handled(*args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(handler, *args, **kwargs))

    setattr(handled, mark, True)
    used.dependant.call = handled
