"""A client for the app's life, and the dependencies that hand it out and hold locks with it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from typing import Annotated, Any

from fastapi import Depends, FastAPI, params
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Host, Mount

from .._client import Client, SourceLike
from .._lease import Lease
from .._lock import Lock
from .._options import LockOptions, check_flag, check_timeout, refuse_keywords
from ._disconnect import Watch
from ._handlers import YIELDS, check_handler, yields
from ._names import RequestTemplate, marker
from ._problems import LockTimedOut, as_problems, responses_with
from ._threads import handler_thread


def lifespan(
    source: SourceLike, **client_options: Any
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan for ``FastAPI(lifespan=...)`` that owns a client, ``app.state.aiodlock``.

    Each worker process of a server enters its own: nothing is connected before a fork. Inside a
    lifespan of your own: ``async with lifespan(source)(app): ...``. Apps that are mounted get the client,
    too. Also adds the three responses to the OpenAPI schema of every route that uses ``Locked``.

    ```python
    from fastapi import FastAPI

    import aiodlock.fastapi

    app = FastAPI(lifespan=aiodlock.fastapi.lifespan("redis://localhost:6379/0"))
    ```

    :param source: where locks live, as of ``Client``.
    :param client_options: as of ``Client``.
    :raises BackendUnavailable: (when the app starts) when the store does not answer within 5 s.
    :raises ValueError: (when the app starts) for a ``Locked`` with a field that no parameter of the route
        fills, for one whose handler yields, for one that would wait for another one of the same request,
        and for a ``Once`` whose run nobody reads.
    """
    client = Client(source, **client_options)

    @asynccontextmanager
    async def own_client(app: FastAPI) -> AsyncIterator[None]:
        _check_routes(app)
        _show_responses(app)
        async with client:
            around = getattr(app.state, "aiodlock", None)
            # Nobody runs a mounted app's own lifespan.
            mounted = [
                one for one in _mounted(app.routes) if getattr(one, "aiodlock", None) is around
            ]
            for state in (app.state, *mounted):
                state.aiodlock = client
            try:
                yield
            finally:
                for state in (app.state, *mounted):
                    state.aiodlock = around  # that of a lifespan around this one

    return own_client


def _mounted(routes: Sequence[BaseRoute]) -> Iterator[State]:
    """Find the state of each app that is mounted."""
    for route in routes:
        if isinstance(route, Mount | Host):
            app = route.app
            while not isinstance(app, Starlette) and hasattr(app, "app"):
                app = app.app  # inside of middleware
            if isinstance(app, Starlette):
                yield app.state
            yield from _mounted(route.routes)
        for included in getattr(route, "effective_route_contexts", tuple)():
            if included.starlette_route is not None:
                yield from _mounted([included.starlette_route])


def _check_routes(app: FastAPI) -> None:
    """Refuse what no request can use: see ``lifespan``."""
    for route, in_path in _all_routes(app.routes):
        before: list[Locked] = []
        for locked in _locked(route.dependant):
            try:
                locked._check(route.dependant, route.endpoint, in_path)
                locked._check_behind(before)
            except ValueError as error:
                raise ValueError(f"{locked!r} at {route.path!r}: {error}") from None
            before.append(locked)


def _show_responses(app: FastAPI) -> None:
    for route, _ in _all_routes(app.routes):
        if isinstance(route, APIWebSocketRoute):
            continue
        for locked in _locked(route.dependant):
            for status, response in responses_with(locked.__dict__["_status"]).items():
                route.responses.setdefault(status, response)
                getattr(route, "original_route", route).responses.setdefault(status, response)


def _locked(dependant: Any) -> Iterator[Locked]:
    for inner in dependant.dependencies:
        if isinstance(inner.call, Locked):
            yield inner.call
        yield from _locked(inner)


def _all_routes(
    routes: Any, in_path: frozenset[str] = frozenset()
) -> Iterator[tuple[Any, frozenset[str]]]:
    """Find the routes of an app and of the apps that it mounts, as requests meet them.

    Each with the fields of its whole path.
    """
    for route in routes:
        fields = in_path | getattr(route, "param_convertors", {}).keys()
        if isinstance(route, APIRoute | APIWebSocketRoute):
            yield route, fields
        elif isinstance(route, Mount | Host):
            yield from _all_routes(route.routes, fields - {"path"})  # the rest, for the app
        # Since 0.137 a router that is included stays one, and says what its routes are there.
        for included in getattr(route, "effective_route_contexts", tuple)():
            if included.starlette_route is not None:
                yield from _all_routes([included.starlette_route], in_path)
            elif isinstance(included.original_route, APIRoute):
                yield included, in_path | included.param_convertors.keys()


def parameter(name: str, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


class _Dependency(params.Depends):
    """A marker for ``Annotated`` that is its own dependency, and so the key of an override."""

    def __init__(self, scope: Any, *parameters: inspect.Parameter) -> None:
        super().__init__(dependency=self, scope=scope)
        # Annotations that are strings are not resolved on an object (seen with FastAPI 0.121). Written
        # past __setattr__, as the base is a frozen dataclass.
        connection = parameter("connection", HTTPConnection)
        self.__dict__["__signature__"] = inspect.Signature([connection, *parameters])

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _LockClient(_Dependency):
    """The key of overrides, and as a marker a dependency around it, which maps the errors of both."""

    def __init__(self) -> None:
        super().__init__(None)
        self.__dict__["dependency"] = _Mapped(self)

    def __repr__(self) -> str:
        return "LockClient"

    async def __call__(self, connection: HTTPConnection) -> AsyncIterator[Client]:
        client = getattr(connection.app.state, "aiodlock", None)
        if client is None:
            raise RuntimeError(
                "there is no client at app.state.aiodlock: make the app with "
                "FastAPI(lifespan=aiodlock.fastapi.lifespan(url)), and in tests enter its lifespan"
            )
        with as_problems(connection, client):
            yield client


class _Mapped(_Dependency):
    def __init__(self, handed: _LockClient) -> None:
        super().__init__(None, parameter("client", Annotated[Client, Depends(handed)]))

    async def __call__(self, connection: HTTPConnection, client: Client) -> AsyncIterator[Client]:
        with as_problems(connection, client):
            yield client


LockClient: _LockClient = _LockClient()
"""``client: Annotated[Client, LockClient]`` gives the app's client.

What locks made with it raise and the handler does not catch becomes 423, 409 or 503, as with ``Locked``.
Tests may replace it, for ``Locked`` too: ``app.dependency_overrides[LockClient] = lambda: client``.
"""


class Locked(_Dependency):
    """``lease: Annotated[Lease, Locked("order:{order_id}", timeout=2)]``: hold a lock for the request.

    A field of the template is a parameter of the path, else one that the handler or a dependency takes from
    the query, a header (``x_tenant`` is ``X-Tenant``), a cookie or the body, also as a field of a model;
    what no request could fill is refused when the app starts. ``{path.x}``, ``{query.x}``, ``{header.x}``,
    ``{cookie.x}`` and ``{body.x}`` say where it comes from, and show it in the OpenAPI schema (not so for
    the body).

    The name gets the value as its declared type has it: with ``order_id: int``, ``/orders/1`` and
    ``/orders/01`` are one order. ``aiodlock.name`` makes the same name, and says how values are written.

    A request without the value, with an empty one, or with it twice is refused (422).

    A client that disconnects while it waits leaves the queue, and the handler does not run.

    The object is a key for ``app.dependency_overrides``; overriding ``LockClient`` is often enough.

    ```python
    from typing import Annotated

    from fastapi import FastAPI

    from aiodlock.fastapi import Locked

    app = FastAPI()


    @app.post("/orders/{order_id}/pay")
    async def pay(
        order_id: int, lease: Annotated[aiodlock.Lease, Locked("order:{order_id}", timeout=2)]
    ) -> int:
        return lease.token
    ```

    :param shared: hold the lock in shared mode.
    :param timeout: seconds to wait, then 423; 0 tries once; None waits for ever. Default: 10 s.
    :param status: the status instead of 423, such as 503 for clients that try again by themselves.
    :param lock_options: as of ``Client.lock``.
    """

    def __init__(
        self,
        name_template: str,
        *,
        shared: bool = False,
        timeout: float | None = 10.0,
        status: int = LockTimedOut.status,
        **lock_options: Any,
    ) -> None:
        check_flag("shared", shared)
        if status not in range(400, 600):
            raise ValueError(f"status must be that of an error, 400 to 599, not {status!r}")
        # A wrong option is told at import, not by the first request.
        if unknown := set(lock_options) - {field.name for field in fields(LockOptions)}:
            refuse_keywords("Locked()", unknown)
        LockOptions(**{"ttl": 30.0, **lock_options, "timeout": check_timeout(timeout)})
        self.__dict__.update(
            _template=RequestTemplate(name_template),
            _shared=shared,
            _timeout=timeout,
            _status=status,
            _options=lock_options,
        )
        super().__init__("function", *self._parameters())

    #: What it declares is known by its name only.
    names_a_lock = True

    def __repr__(self) -> str:
        return f"Locked({self.__dict__['_template'].text!r})"

    def _parameters(self) -> Iterator[inspect.Parameter]:
        """What FastAPI is asked for: the client, and the fields whose place is told."""
        yield parameter("client", Annotated[Client, LockClient])
        template: RequestTemplate = self.__dict__["_template"]
        for number, field in enumerate(template.fields):
            shown = marker(field)
            if shown is not None:
                yield parameter(f"field{number}", Annotated[str, shown])

    def _check(self, dependant: Any, endpoint: Any, in_path: Collection[str]) -> None:
        """Raise ValueError when no request of this route could be handled with what is held."""
        if yields(endpoint):
            raise ValueError(YIELDS)
        self.__dict__["_template"].bind(dependant, in_path)

    def _check_behind(self, before: Sequence[Locked]) -> None:
        """Raise ValueError when what the same request has taken before would not let it in."""
        mine = self.__dict__
        shared = [
            its["_shared"]
            for its in (earlier.__dict__ for earlier in before if type(earlier) is type(self))
            if its["_template"].text == mine["_template"].text
            and its["_options"].get("owner") == mine["_options"].get("owner")
        ]
        if shared and all(shared) and not mine["_shared"]:
            raise ValueError(
                "the request holds the name in shared mode already, and would wait for itself "
                "(DeadlockError): declare the exclusive one first"
            )

    async def __call__(
        self, connection: HTTPConnection, client: Client, **fields: str
    ) -> AsyncIterator[Lease]:
        inner = self.__dict__
        check_handler(connection)
        name = await inner["_template"].name(connection)
        timeout = inner["_timeout"]
        lock: Lock = client.lock(name, **{**inner["_options"], "timeout": timeout})
        if inner["_shared"]:
            lock = client.rwlock(name, **{**inner["_options"], "timeout": timeout}).read
        with as_problems(connection, client, name, timeout, inner["_status"]):
            watch = Watch(connection)
            try:
                async with await watch.acquire(lock) as lease:
                    with handler_thread(connection) as thread:
                        try:
                            yield lease
                        except asyncio.CancelledError:
                            await thread.leave(lease)
                            raise
            finally:
                watch.end()
