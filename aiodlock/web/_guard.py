"""Which requests are refused before the page sees them, and what every answer says to the browser.

The page shows names that strangers may have chosen, and may break locks. So:

- a host name that is not expected is refused: another site's name could lead to 127.0.0.1 (DNS rebinding);
- a request that another site's page has caused is refused, unless somebody follows a link to a page;
- with ``allow``, a request for which it does not return True is refused; without, every request inside of a
  FastAPI app with dependencies, which protect nothing that is mounted;
- a form counts only with a code that was made for this browser, this name and these holders.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import ipaddress
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TypeAlias

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not "no-referrer": browsers would send "Origin: null" with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

#: Says of a request whether it may see the page.
Allow: TypeAlias = Callable[[Request], bool | Awaitable[bool]]

_logger = logging.getLogger("aiodlock")
_AROUND = "aiodlock.dependencies_around"
_UNPROTECTED = (
    "This page is closed: the dependencies of a FastAPI app (a login, say) do not run for what is mounted. "
    "Say who may see the page: aiodlock.web.app(client, allow=...)."
)
_COOKIE = "aiodlock_web"
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@?#\s]+)(:[0-9]{1,5})?")


class Guard:
    """Middleware that refuses what no viewer of this page can have sent, and adds ``HEADERS``."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], allow: Allow | None) -> None:
        self._app = app
        self._allow = allow
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope) or await self._answer_to_strangers(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_expected(hosts[0]):
            return PlainTextResponse(
                "This host name is not expected here. If it is yours, give it to "
                "aiodlock.web.app(client, hosts=[...]).\n",
                400,
            )
        if _is_from_elsewhere(scope["method"], headers, hosts[0]):
            return PlainTextResponse("A page of another site has sent this request.\n", 403)
        return None

    async def _answer_to_strangers(self, scope: Scope) -> Response | None:
        if self._allow is None:
            if not scope.get(_AROUND):
                return None
            _logger.error(_UNPROTECTED, extra={"event": "page_unprotected"})
            return PlainTextResponse(f"{_UNPROTECTED}\n", 403)
        try:
            allowed = self._allow(Request(scope))
            if inspect.isawaitable(allowed):
                allowed = await allowed
        except HTTPException as refused:
            return PlainTextResponse(f"{refused.detail}\n", refused.status_code, refused.headers)
        return None if allowed is True else PlainTextResponse("You may not see this page.\n", 403)

    def _is_expected(self, host: str) -> bool:
        """Tell whether a page of ours can have this host: an address, this machine, or one that was given.

        An address is safe: for DNS rebinding the other site needs a name of its own.
        """
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].lower().rstrip(".")
        return "*" in self._hosts or name in self._hosts or _is_local(name)


def remember_around(scope: Scope) -> None:
    """Note whether an app around the page has dependencies, as FastAPI's may: none runs for a mount.

    To be called before the page's own app replaces the one around it in the scope.
    """
    included = scope.get("fastapi", {}).get("included_router")
    around = [
        scope.get("router"),  # of the outermost app
        getattr(scope.get("app"), "router", None),
        getattr(included, "original_router", None),
        getattr(included, "include_context", None),
    ]
    scope[_AROUND] = any(getattr(one, "dependencies", ()) for one in around)


def is_name(host: str) -> bool:
    """Tell whether a request can name this host, as browsers write it: without scheme and port."""
    found = _HOST.fullmatch(host)
    return found is not None and found[2] is None and host.isascii() and "*" not in host


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_from_elsewhere(method: str, headers: Headers, host: str) -> bool:
    site = headers.get("sec-fetch-site", "none")
    if method in ("GET", "HEAD"):
        follows_a_link = headers.get("sec-fetch-mode") == "navigate"
        return site in ("cross-site", "same-site") and not follows_a_link
    origin = headers.get("origin")
    return site not in ("none", "same-origin") or (
        origin is not None and origin.partition("://")[2].lower() != host.lower()
    )


# -- forms -----------------------------------------------------------------------------------------


def secret_of(request: Request) -> str | None:
    """Return the secret that this browser was given, None if it has none."""
    secret = request.cookies.get(_COOKIE, "")
    return secret if _SECRET.fullmatch(secret) else None


def new_secret() -> str:
    """Return a secret for a browser."""
    return secrets.token_urlsafe(32)


def remember(secret: str, request: Request, response: Response) -> None:
    """Give the browser its secret."""
    response.set_cookie(
        _COOKIE,
        secret,
        path=None,  # the folder of the page as the browser knows it: a proxy may have changed the path
        httponly=True,
        samesite="Strict",  # type: ignore[arg-type]  # as it is written in the standard
        secure=request.scope.get("scheme") == "https",  # the URL may have bytes that are no text
    )


def code_for(secret: str, *about: object) -> str:
    """Return the code that a form must bring along; it is worth nothing for anything else."""
    return hmac.new(secret.encode(), _joined(map(str, about)), hashlib.sha256).hexdigest()


def is_code_for(code: str, secret: str | None, *about: object) -> bool:
    """Tell whether a form brought the right code."""
    return secret is not None and hmac.compare_digest(
        code.encode(errors="replace"), code_for(secret, *about).encode()
    )


def _joined(parts: Iterable[str]) -> bytes:
    return b"".join(f"{len(data)}:".encode() + data for data in (part.encode() for part in parts))
