"""Which request something was done for, in a short text: the same when the same request is sent again."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress

from fastapi import Request, params
from starlette.datastructures import UploadFile
from starlette.requests import HTTPConnection

from ._handlers import route_of

#: A body that FastAPI has not read is read up to this length: the handler may want a longer one in pieces.
_LONGEST = 1024 * 1024


async def fingerprint_of(connection: HTTPConnection) -> str:
    """Return a hash of the method, path, query and body.

    JSON counts as what it says, and a form as its fields, since its boundary differs each time. A body that
    the handler reads by itself counts if its length is known and at most 1 MiB.
    """
    about = connection.scope
    parts: list[str | bytes] = [about.get("method", ""), about["path"], about["query_string"]]
    if isinstance(connection, Request):
        parts += await _body(connection)
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode(errors="surrogatepass")
        digest.update(b"%d:%b" % (len(data), data))
    return digest.hexdigest()[:32]


async def _body(request: Request) -> list[str | bytes]:
    field = getattr(route_of(request), "body_field", None)
    if field is not None and isinstance(field.field_info, params.Form):
        return await _form(request)
    if field is None and not _is_short(request):
        return []
    body = await request.body()
    with suppress(ValueError, RecursionError):
        return [json.dumps(json.loads(body), sort_keys=True)]
    return [body]


def _is_short(request: Request) -> bool:
    length = request.headers.get("content-length", "")
    return length.isdecimal() and int(length) <= _LONGEST


async def _form(request: Request) -> list[str | bytes]:
    """Return the fields of a form, which FastAPI has read; of a file, the name and a hash."""
    parts: list[str | bytes] = []
    for key, value in (await request.form()).multi_items():
        parts.append(key)
        if isinstance(value, UploadFile):
            content = hashlib.sha256()
            await value.seek(0)
            while piece := await value.read(_LONGEST):
                content.update(piece)
            await value.seek(0)
            parts += [value.filename or "", content.digest()]
        else:
            parts.append(value)
    return parts
