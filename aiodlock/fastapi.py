"""Locks for FastAPI: a client for the app's life, and dependencies that hold a lock for a request.

    app = FastAPI(lifespan=aiodlock.fastapi.lifespan("redis://localhost:6379/0"))

    @app.post("/orders/{order_id}/pay")
    async def pay(order_id: int, lease: Annotated[Lease, Locked("orders:{order_id}", timeout=2)]):
        await db.execute(UPDATE, fence=lease.token)

What goes wrong comes out as an ``HTTPException`` whose ``detail`` holds the members of a problem
document (RFC 9457): 423 when the wait timed out, 409 when the lease was lost, 503 when the store is
away. The lock is released before the response is sent. In a handler that is not ``async`` a loss cannot
stop the thread: check ``lease.held``, and hand ``lease.token`` to whatever you write to.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import string
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from enum import Enum
from typing import Annotated, Any, ClassVar, NoReturn, TypeAlias

try:
    from fastapi import FastAPI, Header, HTTPException, Path, Query, Request, params
    from fastapi.routing import APIRoute
    from starlette.requests import HTTPConnection
except ImportError as missing:
    raise ImportError(
        "aiodlock.fastapi needs FastAPI: pip install 'aiodlock[fastapi]'"
    ) from missing

from ._client import Client, SourceLike
from ._errors import (
    AcquireTimeout,
    BackendError,
    ClientClosed,
    LockError,
    LockLost,
    WouldBlock,
)
from ._lease import Lease
from ._lock import Lock
from ._options import LONGEST_NAME, LockOptions, check_flag, check_timeout

__all__ = [
    "ClientGone",
    "LeaseLost",
    "LockClient",
    "LockProblem",
    "LockTimedOut",
    "Locked",
    "NameRefused",
    "StoreAway",
    "lifespan",
    "responses",
]

_LONGEST_RETRY_AFTER = 30
#: How much of a body that nobody reads is kept while its request waits for a lock.
_MOST_KEPT = 64 * 1024
#: What a value may consist of: nothing that separates the parts of a name, or matches others.
_SAFE_VALUE = re.compile(r"[\w.~@+=,-]+")

_Message: TypeAlias = MutableMapping[str, Any]


# -- what goes wrong -------------------------------------------------------------------------------


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


#: For ``responses=`` of a route, router or app. ``lifespan`` adds them to locked routes by itself.
responses = _document(LockTimedOut, LeaseLost, StoreAway)


@contextmanager
def _as_problems(name: str | None, timeout: float | None) -> Iterator[None]:
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


# -- the client ------------------------------------------------------------------------------------


def lifespan(
    source: SourceLike, **client_options: Any
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan for ``FastAPI(lifespan=...)`` that owns a client, ``app.state.aiodlock``.

    Each worker process of a server enters its own: nothing is connected before a fork. Inside a
    lifespan of your own: ``async with lifespan(source)(app): ...``. Also adds the three responses to
    the OpenAPI schema of every route that uses ``Locked``.

    :param source, client_options: as of ``Client``.
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

    __hash__ = object.__hash__

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
        with _as_problems(None, None):
            yield client


#: ``client: Annotated[Client, LockClient]`` gives the app's client. What locks made with it raise and
#: the handler does not catch becomes 423, 409 or 503, as with ``Locked``. Tests may replace it, for
#: ``Locked`` too: ``app.dependency_overrides[LockClient] = lambda: client``.
LockClient = _LockClient(None)


# -- the lock --------------------------------------------------------------------------------------


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
            _template=_Template(name_template),
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
        template: _Template = self.__dict__["_template"]
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
        with _as_problems(name, timeout):
            if not isinstance(connection, Request):
                async with lock as lease:
                    yield lease
                return
            watch = _Watch(connection)
            try:
                async with await watch.acquire(lock) as lease:
                    yield lease
            finally:
                watch.end()


class _Field:
    """One field of a template: where its value comes from, and how to get it."""

    def __init__(self, text: str) -> None:
        place, dot, name = text.partition(".")
        if not dot:
            place, name = "", text
        if place not in ("", "path", "query", "header") or not re.fullmatch(r"[\w-]+", name):
            raise ValueError(
                f"{{{text}}} names no parameter: write {{name}}, {{path.name}}, {{query.name}} or "
                "{header.name}"
            )
        self.place, self.name = place, name
        self.header = name.replace("_", "-").lower()

    def marker(self) -> Any:
        """Return what shows the field in the OpenAPI schema and refuses its absence."""
        match self.place:
            case "path":
                return Path(alias=self.name)
            case "query":
                return Query(alias=self.name)
            case "header":
                return Header(alias=self.header)
        return None

    def value(self, connection: HTTPConnection) -> str:
        if self.place in ("", "path") and self.name in connection.path_params:
            return self._as_handled(connection, "path", str(connection.path_params[self.name]))
        found: list[tuple[str, str]] = []
        if self.place in ("", "query"):
            values = connection.query_params.getlist(self.name)
            found += [("query", value) for value in values]
        if self.place in ("", "header"):
            values = connection.headers.getlist(self.header)
            found += [("header", value) for value in values]
        if not found:
            raise NameRefused(f"The parameter {self.name!r} is missing.")
        if len(found) > 1:
            # Two readers could take different ones.
            raise NameRefused(f"The parameter {self.name!r} is given more than once.")
        return self._as_handled(connection, *found[0])

    def _as_handled(self, connection: HTTPConnection, place: str, raw: str) -> str:
        """Return the value as the handler's own parameter of that name will have it."""
        dependant = getattr(connection.scope.get("route"), "dependant", None)
        alias = self.header if place == "header" else self.name
        for field in getattr(dependant, f"{place}_params", ()):
            if field.alias.lower() == alias.lower():
                value, errors = field.validate(raw, {}, loc=(place, alias))
                if errors:
                    raise NameRefused(f"The parameter {self.name!r} is not valid.")
                if isinstance(value, Enum):
                    value = value.value
                if not isinstance(value, list | tuple | set | dict):
                    return str(value)
        return raw


class _Template:
    """A lock's name with fields in it."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"name_template must be a str, not {text!r}")
        if not text:
            raise ValueError("name_template must not be empty")
        self.text = text
        self.literals: list[str] = []
        self.fields: list[_Field] = []
        for literal, field, form, conversion in string.Formatter().parse(text):
            self.literals.append(literal)
            if field is None:
                continue
            if form or conversion:
                raise ValueError(f"{text!r}: a field takes no format and no conversion")
            self.fields.append(_Field(field))
        between = self.literals[1 : len(self.fields)]
        for literal in between:
            if not re.search(r"\W", literal):
                raise ValueError(f"{text!r}: put a separator, such as ':', between two fields")
        #: What separates fields may not be part of one.
        self.separators = set(re.sub(r"\w", "", "".join(between)))

    def fill(self, connection: HTTPConnection) -> str:
        values = [self._safe(field, field.value(connection)) for field in self.fields]
        name = "".join(
            literal + (values[index] if index < len(values) else "")
            for index, literal in enumerate(self.literals)
        )
        if len(name.encode()) > LONGEST_NAME:
            raise NameRefused("The parameters are too long for a lock's name.")
        return name

    def _safe(self, field: _Field, value: str) -> str:
        if not value:
            raise NameRefused(f"The parameter {field.name!r} is empty.")
        if not _SAFE_VALUE.fullmatch(value) or self.separators & set(value):
            raise NameRefused(
                f"The parameter {field.name!r} has characters that no lock's name may get from outside."
            )
        return value


# -- clients that go away --------------------------------------------------------------------------


class _Watch:
    """Listens to ``receive`` for a disconnect, and gives every message it took to the next reader.

    Mutable state: ``_gone``; ``_waiting`` (the scope that a disconnect ends); ``_kept`` (messages taken,
    not read yet); ``_size`` of their bodies; ``_asked`` (a receive on its way, which is not cancelled
    while its message might be lost).
    """

    def __init__(self, request: Request) -> None:
        self._receive = request.receive
        self._gone = False
        self._waiting: asyncio.Timeout | None = None
        self._kept: deque[_Message] = deque()
        self._size = 0
        self._asked: asyncio.Task[_Message] | None = None
        # Starlette has no public way to put a message back.
        request._receive = self.receive

    async def acquire(self, lock: Lock) -> Lease:
        """Acquire, or leave the queue when the client disconnects: servers do not cancel a handler.

        The lock is acquired in this task, for reentrancy goes by task; what is cancelled is only the
        waiting, as ``asyncio.timeout`` does it.
        """
        self._waiting = scope = asyncio.Timeout(None)
        gone = ClientGone("The client closed its request.", name=lock.name)
        try:
            async with scope:
                self._ask()
                lease = await lock.acquire()
        except TimeoutError as error:
            if not self._gone or isinstance(error, LockError):
                raise
            raise gone from None
        finally:
            self._waiting = None
        if self._gone:  # just as the lock was granted
            await lease.release()
            raise gone
        return lease

    def _ask(self) -> None:
        async def ask() -> _Message:
            return await self._receive()

        self._asked = asyncio.create_task(ask(), name="aiodlock: is the client still there")
        self._asked.add_done_callback(self._on_message)

    def _on_message(self, asked: asyncio.Task[_Message]) -> None:
        if self._asked is asked:
            self._asked = None
        if asked.cancelled() or asked.exception() is not None:
            return
        message = asked.result()
        self._kept.append(message)
        if message["type"] == "http.disconnect":
            self._gone = True
            if self._waiting is not None:
                self._waiting.reschedule(asyncio.get_running_loop().time())
            return
        self._size += len(message.get("body", b""))
        if self._waiting is not None and self._size < _MOST_KEPT:
            self._ask()

    async def receive(self) -> _Message:
        """Stand in for the request's own ``receive``."""
        while self._asked is not None and not self._kept:
            await asyncio.wait({self._asked})
            await asyncio.sleep(0)  # its callback keeps the message
        if self._kept:
            return self._kept.popleft()
        return await self._receive()

    def end(self) -> None:
        """The handler is done: nobody reads any more."""
        if self._asked is not None:
            self._asked.cancel()
