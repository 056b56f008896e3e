"""A client for the app's life, and the dependencies that hand it out and hold locks with it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Request, params
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection

from .._client import Client, SourceLike
from .._lease import Lease
from .._lock import Lock
from .._options import LockOptions, check_flag, check_timeout
from ._disconnect import Watch
from ._names import Template
from ._problems import as_problems, responses


def lifespan(
    source: SourceLike, **client_options: Any
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan for ``FastAPI(lifespan=...)`` that owns a client, ``app.state.aiodlock``.

    Each worker process of a server enters its own: nothing is connected before a fork. Inside a
    lifespan of your own: ``async with lifespan(source)(app): ...``. Also adds the three responses to
    the OpenAPI schema of every route that uses ``Locked``.

    :param source: where locks live, as of ``Client``.
    :param client_options: as of ``Client``.
    :raises BackendUnavailable: (when the app starts) when the store does not answer within 5 s.
    """
    client = Client(source, **client_options)

    @asynccontextmanager
    async def own_client(app: FastAPI) -> AsyncIterator[None]:
        _show_responses(app)
        async with client:
            app.state.aiodlock = client
            try:
                yield
            finally:
                del app.state.aiodlock

    return own_client


def _show_responses(app: FastAPI) -> None:
    for route in _all_routes(app.routes):
        if _is_locked(route.dependant):
            for status, response in responses.items():
                route.responses.setdefault(status, response)


def _all_routes(routes: Any, depth: int = 0) -> Iterator[APIRoute]:
    """Find the routes of an app, also those that newer versions keep in their own routers."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        else:
            router = getattr(route, "original_router", None)
            if router is not None and depth < 20:
                yield from _all_routes(router.routes, depth + 1)


def _is_locked(dependant: Any) -> bool:
    return any(
        isinstance(inner.call, Locked) or _is_locked(inner) for inner in dependant.dependencies
    )


def _parameter(name: str, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


class _Dependency(params.Depends):
    """A marker for ``Annotated`` that is its own dependency, and so the key of an override."""

    def __init__(self, scope: Any, *parameters: inspect.Parameter) -> None:
        super().__init__(dependency=self, scope=scope)
        # Annotations that are strings are not resolved on an object (seen with FastAPI 0.121). Written
        # past __setattr__, as the base is a frozen dataclass.
        connection = _parameter("connection", HTTPConnection)
        self.__dict__["__signature__"] = inspect.Signature([connection, *parameters])

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _LockClient(_Dependency):
    def __repr__(self) -> str:
        return "LockClient"

    async def __call__(self, connection: HTTPConnection) -> AsyncIterator[Client]:
        client = getattr(connection.app.state, "aiodlock", None)
        if client is None:
            raise RuntimeError(
                "there is no client at app.state.aiodlock: make the app with "
                "FastAPI(lifespan=aiodlock.fastapi.lifespan(url)), and in tests enter its lifespan"
            )
        with as_problems(None, None):
            yield client


LockClient: _LockClient = _LockClient(None)
"""``client: Annotated[Client, LockClient]`` gives the app's client.

What locks made with it raise and the handler does not catch becomes 423, 409 or 503, as with ``Locked``.
Tests may replace it, for ``Locked`` too: ``app.dependency_overrides[LockClient] = lambda: client``.
"""


class Locked(_Dependency):
    """``lease: Annotated[Lease, Locked("orders:{order_id}", timeout=2)]``: hold a lock for the request.

    A field of the template is a parameter of the path, else of the query or a header (``x_tenant`` is
    ``X-Tenant``). ``{path.x}``, ``{query.x}`` and ``{header.x}`` say where it comes from, and show it in
    the OpenAPI schema. When the handler declares the parameter with a type, the name gets the value as
    the handler sees it: ``/orders/1`` and ``/orders/01`` are one order.

    A request without the value, with an empty one, with it in both query and header, or twice, is
    refused (422), and so is a value that holds anything but letters, digits and ``.~@+=,_-``, or a
    character that separates two fields of the template: no value can name another's lock.

    A client that disconnects while it waits leaves the queue, and the handler does not run.

    The object is a key for ``app.dependency_overrides``; overriding ``LockClient`` is often enough.

    :param shared: hold the lock in shared mode.
    :param timeout: seconds to wait, then 423; 0 tries once; None waits for ever.
    :param lock_options: as of ``Client.lock``.
    """

    def __init__(
        self,
        name_template: str,
        *,
        shared: bool = False,
        timeout: float | None = 10.0,
        **lock_options: Any,
    ) -> None:
        check_flag("shared", shared)
        # A wrong option is told at import, not by the first request.
        LockOptions(**{"ttl": 30.0, **lock_options, "timeout": check_timeout(timeout)})
        self.__dict__.update(
            _template=Template(name_template),
            _shared=shared,
            _timeout=timeout,
            _options=lock_options,
        )
        super().__init__("function", *self._parameters())

    def __repr__(self) -> str:
        return f"Locked({self.__dict__['_template'].text!r})"

    def _parameters(self) -> Iterator[inspect.Parameter]:
        """What FastAPI is asked for: the client, and the fields whose place is told."""
        yield _parameter("client", Annotated[Client, LockClient])
        template: Template = self.__dict__["_template"]
        for number, field in enumerate(template.fields):
            marker = field.marker()
            if marker is not None:
                yield _parameter(f"field{number}", Annotated[str, marker])

    async def __call__(
        self, connection: HTTPConnection, client: Client, **fields: str
    ) -> AsyncIterator[Lease]:
        inner = self.__dict__
        name = inner["_template"].fill(connection)
        timeout = inner["_timeout"]
        lock: Lock = client.lock(name, **{**inner["_options"], "timeout": timeout})
        if inner["_shared"]:
            lock = client.rwlock(name, **{**inner["_options"], "timeout": timeout}).read
        with as_problems(name, timeout):
            if not isinstance(connection, Request):
                async with lock as lease:
                    yield lease
                return
            watch = Watch(connection)
            try:
                async with await watch.acquire(lock) as lease:
                    yield lease
            finally:
                watch.end()
