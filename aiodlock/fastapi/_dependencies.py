"""A client for the app's life, and the dependencies that hand it out and hold locks with it."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from typing import Annotated, Any

from fastapi import FastAPI, Request, params
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.requests import HTTPConnection

from .._client import Client, SourceLike
from .._lease import Lease
from .._lock import Lock
from .._options import LockOptions, check_flag, check_timeout, refuse_keywords
from ._disconnect import Watch
from ._handlers import YIELDS, check_handler, yields
from ._names import Template
from ._problems import as_problems, responses
from ._threads import handler_thread

_PATH_FIELD = re.compile(r"{(\w+)(?::\w+)?}")


def lifespan(
    source: SourceLike, **client_options: Any
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan for ``FastAPI(lifespan=...)`` that owns a client, ``app.state.aiodlock``.

    Each worker process of a server enters its own: nothing is connected before a fork. Inside a
    lifespan of your own: ``async with lifespan(source)(app): ...``. Also adds the three responses to
    the OpenAPI schema of every route that uses ``Locked``.

    ```python
    from fastapi import FastAPI

    import aiodlock.fastapi

    app = FastAPI(lifespan=aiodlock.fastapi.lifespan("redis://localhost:6379/0"))
    ```

    :param source: where locks live, as of ``Client``.
    :param client_options: as of ``Client``.
    :raises BackendUnavailable: (when the app starts) when the store does not answer within 5 s.
    :raises ValueError: (when the app starts) for a ``Locked`` with a field that its path and handler lack,
        and for one whose handler yields.
    """
    client = Client(source, **client_options)

    @asynccontextmanager
    async def own_client(app: FastAPI) -> AsyncIterator[None]:
        _check_routes(app)
        _show_responses(app)
        async with client:
            app.state.aiodlock = client
            try:
                yield
            finally:
                del app.state.aiodlock

    return own_client


def _check_routes(app: FastAPI) -> None:
    """Refuse a field that no request can fill, such as a misspelt one, and a handler that yields."""
    for route, prefix, more in _all_routes(app.routes):
        for locked in _locked(route.dependant):
            if yields(route.endpoint):
                raise ValueError(f"{locked!r} at {prefix + route.path!r}: {YIELDS}")
            for field in locked.__dict__["_template"].fields:
                known = _parameters_of(route.dependant)
                known["path"] = set(_PATH_FIELD.findall(prefix + route.path))
                if more or field.is_told_by(known):
                    continue
                raise ValueError(
                    f"{locked!r} at {prefix + route.path!r}: neither the path nor the handler "
                    f"{route.endpoint.__name__!r} has the parameter {field.name!r}; declare it in the "
                    f"handler, or write {{query.{field.name}}} or {{header.{field.name}}}"
                )


def _parameters_of(dependant: Any) -> dict[str, set[str]]:
    """Return the names of what a handler and its dependencies read, by place."""
    found: dict[str, set[str]] = {}
    for place in ("query", "header"):
        names = found[place] = set()
        for parameter in getattr(dependant, f"{place}_params"):
            # A model's fields are parameters, one each.
            model = getattr(parameter.field_info.annotation, "model_fields", None)
            names |= {parameter.alias} if model is None else _names_in(model)
        if place == "header":
            found[place] = {name.replace("_", "-").lower() for name in names}
    for inner in dependant.dependencies:
        for place, names in _parameters_of(inner).items():
            found[place] |= names
    return found


def _names_in(model: dict[str, Any]) -> set[str]:
    return {about.alias or name for name, about in model.items()}


def _locked(dependant: Any) -> Iterator[Locked]:
    for inner in dependant.dependencies:
        if isinstance(inner.call, Locked):
            yield inner.call
        yield from _locked(inner)


def _show_responses(app: FastAPI) -> None:
    for route, _, _ in _all_routes(app.routes):
        if isinstance(route, APIRoute) and any(True for _ in _locked(route.dependant)):
            for status, response in responses.items():
                route.responses.setdefault(status, response)


def _all_routes(
    routes: Any, prefix: str = "", more: bool = False, depth: int = 0
) -> Iterator[tuple[APIRoute | APIWebSocketRoute, str, bool]]:
    """Find the routes of an app, also those that newer versions keep in their own routers.

    Each with the path in front of its own, and whether it has dependencies that are not shown here.
    """
    for route in routes:
        if isinstance(route, APIRoute | APIWebSocketRoute):
            yield route, prefix, more
            continue
        router = getattr(route, "original_router", None)
        if router is not None and depth < 20:
            context = getattr(route, "include_context", None)
            inner = prefix + getattr(context, "prefix", "")
            hidden = more or context is None or bool(getattr(context, "dependencies", True))
            yield from _all_routes(router.routes, inner, hidden, depth + 1)


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
    """``lease: Annotated[Lease, Locked("order:{order_id}", timeout=2)]``: hold a lock for the request.

    A field of the template is a parameter of the path, else one that the handler takes from the query or
    a header (``x_tenant`` is ``X-Tenant``); a field that is neither is refused when the app starts.
    ``{path.x}``, ``{query.x}`` and ``{header.x}`` say where it comes from, and show it in
    the OpenAPI schema. When the handler declares the parameter with a type, the name gets the value as
    the handler sees it: ``/orders/1`` and ``/orders/01`` are one order.

    A request without the value, with an empty one, with it in both query and header, or twice, is
    refused (422), and so is a value that holds anything but letters, digits and ``.~@+=,_-``, or a
    character that separates two fields of the template: no value can name another's lock.

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
        if unknown := set(lock_options) - {field.name for field in fields(LockOptions)}:
            refuse_keywords("Locked()", unknown)
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
        yield parameter("client", Annotated[Client, LockClient])
        template: Template = self.__dict__["_template"]
        for number, field in enumerate(template.fields):
            marker = field.marker()
            if marker is not None:
                yield parameter(f"field{number}", Annotated[str, marker])

    async def __call__(
        self, connection: HTTPConnection, client: Client, **fields: str
    ) -> AsyncIterator[Lease]:
        inner = self.__dict__
        check_handler(connection)
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
                    with handler_thread(connection) as thread:
                        try:
                            yield lease
                        except asyncio.CancelledError:
                            await thread.leave(lease)
                            raise
            finally:
                watch.end()
