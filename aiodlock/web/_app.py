"""The routes of the page."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .._client import Client, core_of
from .._clock import now
from .._errors import LockError
from .._model import LockInfo
from .._options import check_flag, check_text
from .._text import plural, printable
from . import _guard, _view
from ._sightings import Key
from ._watch import Viewer, Watch

_logger = logging.getLogger("aiodlock")

#: So many pages are kept up to date at the same time.
MOST_VIEWERS = 100
#: Seconds that a stream lasts. For the next one, the app around us asks for its login anew.
_STREAM_LASTS = 60.0
_LONGEST_FORM = 64 * 1024
_EVENTS = "text/event-stream"
_STATIC = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}


def app(
    client: Client,
    *,
    read_only: bool = True,
    hosts: Sequence[str] = (),
    allow: _guard.Allow | None = None,
) -> Starlette:
    """Make a page that shows the locks of a client's store, as an ASGI app to mount.

    ```python
    from starlette.applications import Starlette
    from starlette.routing import Mount

    import aiodlock.web

    admin = Starlette(routes=[Mount("/locks", aiodlock.web.app(client, hosts=["admin.example.com"]))])
    ```

    It shows names, holders, waiters, ages and tokens to everyone who can open it. It has no login: mount it
    behind yours, or give ``allow``. Dependencies of a FastAPI app do not protect what is mounted: in an app
    with dependencies, the page answers 403 to everyone until there is an ``allow``. While nobody looks, the
    store is not asked.

    :param client: an ``aiodlock.Client`` (not one of ``aiodlock.sync``), entered while the page is used, in
        the same event loop.
    :param read_only: with False, the page can break locks, after a confirmation.
    :param hosts: host names under which the page is reached, without ports. ``localhost`` and IP addresses
        are always accepted. ``"*"`` accepts every name: only where the app around it checks them.
    :param allow: a function, async or not, that gets each ``Request`` and returns True if it may see the
        page. Others get 403, or the response of the ``HTTPException`` that it raises.
    :raises TypeError: for input of a wrong type.
    :raises ValueError: for a host that no request can name.
    """
    if not isinstance(client, Client):
        raise TypeError(
            f"web.app() needs an aiodlock.Client, which runs in the app's event loop, not {client!r}: make "
            "one, and enter it in the app's lifespan"
        )
    check_flag("read_only", read_only)
    if isinstance(hosts, str) or not all(isinstance(host, str) for host in hosts):
        raise TypeError(f"hosts must be a list of host names, not {hosts!r}")
    if wrong := [host for host in hosts if host != "*" and not _guard.is_name(host)]:
        raise ValueError(
            f"hosts must be names such as 'admin.example.com', without scheme and port, not {wrong}"
        )
    if allow is not None and not callable(allow):
        raise TypeError(f"allow must be a function that gets a Request, not {allow!r}")
    pages = _Pages(client, read_only)
    routes = [
        Route("/", pages.names),
        Route("/name", pages.one),
        Route("/events", pages.events),
        *(Route(f"/{name}", _static(name, kind)) for name, kind in _STATIC.items()),
    ]
    if not read_only:
        routes += [
            Route("/break", pages.confirm, methods=["GET"]),
            Route("/break", pages.break_, methods=["POST"]),
        ]
    guard = Middleware(_guard.Guard, hosts=hosts, allow=allow)
    made = _Page(routes=routes, middleware=[guard])
    made.state.pages = pages
    return made


class _Page(Starlette):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _guard.remember_around(scope)
        await super().__call__(scope, receive, send)


def _static(name: str, kind: str) -> Callable[[Request], Response]:
    content = (files(__package__) / "static" / name).read_bytes()

    def serve(request: Request) -> Response:
        return Response(content, media_type=kind)

    return serve


class _Pages:
    """What one app shows.

    Mutable state: that of its ``watch``; ``ended``, which is set when all streams have to end; ``_made``,
    the parts of lists that were made since the last look, for viewers who see the same.
    """

    def __init__(self, client: Client, read_only: bool) -> None:
        self._client = client
        self.watch = Watch(client)
        self.ended = asyncio.Event()
        self._made: dict[_view.Query, tuple[int, dict[str, str], tuple[Key, ...]]] = {}
        # Whatever stands in a name: as text it harms nobody.
        self._templates = Environment(
            loader=PackageLoader(__package__),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals.update(
            read_only=read_only,
            sorts=_view.SORTS,
            kinds=core_of(client).kinds(),
            store=printable(core_of(client).named),
        )

    # -- pages -----------------------------------------------------------------------------------

    async def names(self, request: Request) -> Response:
        query = _view.Query.read(request.query_params)
        with self.watch.viewer():
            await self.watch.look()
        about, _ = _view.names(self.watch, query)
        return self._page("names.html", title="Locks", **about)

    async def one(self, request: Request) -> Response:
        info = await self._asked_for(request)
        if isinstance(info, Response):
            return info
        broken = request.query_params.get("broken", "")
        return self._page(
            "one.html",
            title=printable(info.name),
            broken=plural(int(broken), "holder") if re.fullmatch("[0-9]{1,6}", broken) else None,
            **_view.one(info, self.watch),
        )

    async def confirm(self, request: Request) -> Response:
        """Show who loses the lock, and ask."""
        info = await self._asked_for(request)
        if isinstance(info, Response):
            return info
        secret = _guard.secret_of(request) or _guard.new_secret()
        held = _held(info)
        response = self._page(
            "break.html",
            title=f"Break {printable(info.name)}",
            held=held,
            code=_guard.code_for(secret, info.kind, info.name, held),
            **_view.one(info, self.watch),
        )
        _guard.remember(secret, request, response)
        return response

    async def _asked_for(self, request: Request) -> LockInfo | Response:
        """Return what the store knows of the name in the address, or the page of what is wrong."""
        key = self._key(request)
        if key is None:
            return self._problem(
                400, "There is no such name", "A name has 1 to 512 bytes, and a kind of this store."
            )
        try:
            return await self.watch.inspect(*key)
        except LockError as error:
            return self._problem(503, "The store does not answer", str(error))

    def _key(self, request: Request) -> Key | None:
        wanted = request.query_params.get("kind", "lock")
        kind = next((kind for kind in core_of(self._client).kinds() if kind == wanted), None)
        try:
            return kind and (kind, check_text("name", request.query_params["n"]))
        except (KeyError, ValueError):
            return None

    async def break_(self, request: Request) -> Response:
        """Do it, if the holders are still those that were confirmed."""
        # The name comes in the address: browsers change line breaks in what a form sends.
        key, form = self._key(request), await _form(request)
        held = form.get("held", "")
        if key is None or not _guard.is_code_for(
            form.get("code", ""), _guard.secret_of(request), *key, held
        ):
            return self._problem(
                403, "This form is not valid any more", "Open the page of the name again."
            )
        kind, name = key
        try:
            info = await self._client.inspect(name, kind=kind)
            # Only these holders: one that comes while the answer is on its way keeps the lock. What only
            # keeps the name closed has no token.
            tokens = [holder.token for holder in info.holders]
            count = 0
            if meant := _held(info) == held and bool(tokens or info.closed):
                count = await self._client.break_lock(name, kind=kind, tokens=tokens or None)
            if not meant or (tokens and not count):
                return self._problem(
                    409,
                    "The holders have changed",
                    "Nothing was broken. Look again who holds it now.",
                    _view.link(info),
                )
            await self.watch.inspect(kind, name)
        except LockError as error:
            link = _view.link(LockInfo(name, (), (), 0, kind=kind))
            return self._problem(503, "The store does not answer", str(error), link)
        _logger.warning(
            "the %s %r was broken on the web page: %s lost it",
            kind,
            name,
            plural(count, "holder"),
            extra={"event": "broken_by_hand", "lock": name},
        )
        return RedirectResponse(f"name{_view.link(info)}&broken={count}", 303)

    # -- live ------------------------------------------------------------------------------------

    async def events(self, request: Request) -> Response:
        if self.watch.viewers >= MOST_VIEWERS:
            return PlainTextResponse("Too many pages are open.\n", 503, {"Retry-After": "10"})
        if request.method == "HEAD":  # a stream would keep the connection, and tell nobody
            return Response(media_type=_EVENTS)
        one = self._key(request)
        if one is None and "n" in request.query_params:
            return PlainTextResponse("There is no such name.\n", 400)
        return _Stream(self, _view.Query.read(request.query_params), one)

    def parts(self, viewer: Viewer, query: _view.Query) -> dict[str, str]:
        """Return the parts of a page that change, as HTML."""
        if viewer.one is None:
            parts, viewer.listed = self._list(query)
            return parts
        kind, name = viewer.one
        about = _view.one(viewer.info or LockInfo(name, (), (), 0, kind=kind), self.watch)
        return {"one": self._templates.get_template("requests.html").render(about)}

    def _list(self, query: _view.Query) -> tuple[dict[str, str], tuple[Key, ...]]:
        looks, parts, names = self._made.get(query, (-1, {}, ()))
        if looks != self.watch.looks:
            about, names = _view.names(self.watch, query)
            parts = {
                part: self._templates.get_template(f"{part}.html").render(about)
                for part in ("summary", "plot", "rows", "losses")
            }
            self._made = {q: made for q, made in self._made.items() if made[0] == self.watch.looks}
            self._made[query] = (self.watch.looks, parts, names)
        return parts, names

    # -- answers ---------------------------------------------------------------------------------

    def _page(self, template: str, **about: Any) -> HTMLResponse:
        return HTMLResponse(self._templates.get_template(template).render(about))

    def _problem(self, status: int, title: str, why: str, link: str = "") -> HTMLResponse:
        response = self._page(
            "problem.html", title=title, why=printable(why), link=link, state=None
        )
        response.status_code = status
        return response


class _Stream(Response):
    """Server-sent events: the parts of a page that change, at each look at the store."""

    def __init__(self, pages: _Pages, query: _view.Query, one: Key | None) -> None:
        super().__init__(
            media_type=_EVENTS,
            # A proxy in front must pass each event on at once.
            headers={"X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._pages = pages
        self._query = query
        self._one = one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch, gone = self._pages.watch, asyncio.ensure_future(_gone(receive))
        ended = asyncio.ensure_future(self._pages.ended.wait())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            until = now() + _STREAM_LASTS
            with watch.viewer(self._one) as viewer:
                while not (gone.done() or ended.done()) and now() < until:
                    await watch.look()
                    await watch.show(viewer)
                    parts = self._pages.parts(viewer, self._query)
                    event = f"retry: 500\nevent: look\ndata: {json.dumps(parts)}\n\n"
                    # A viewer that reads no more must not keep its place for ever.
                    async with asyncio.timeout(max(1.0, until - now())):
                        await send(
                            {
                                "type": "http.response.body",
                                "body": event.encode(),
                                "more_body": True,
                            }
                        )
                    pause = max(0.05, watch.due_in)
                    await asyncio.wait(
                        {gone, ended}, timeout=pause, return_when=asyncio.FIRST_COMPLETED
                    )
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (OSError, ClientDisconnect):
            pass  # the viewer has left, or reads no more (TimeoutError)
        finally:
            gone.cancel()
            ended.cancel()
            await asyncio.wait({gone, ended})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _held(info: LockInfo) -> str:
    """Return what tells these holders from all others, as short for thousands as for one."""
    each = sorted(f"{one.token} {one.mode} {one.count} {one.owner}" for one in info.holders)
    return hashlib.sha256("\n".join(each).encode()).hexdigest()


async def _form(request: Request) -> dict[str, str]:
    """Read a form; what is too long, or no form, is an empty one."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != (
        "application/x-www-form-urlencoded"
    ):
        return {}
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LONGEST_FORM:
            return {}
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=10)
    except ValueError:
        return {}
    return {field: values[0] for field, values in fields.items()}
