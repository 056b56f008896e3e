"""The page, asked without a server: as an app that is called, with a host that it expects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest
from starlette.types import ASGIApp

HERE = "http://127.0.0.1"
Visit = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@asynccontextmanager
async def visiting(app: ASGIApp, base: str = HERE) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=base) as http:
        yield http


@pytest.fixture
def visit() -> Visit:
    """Give ``async with visit(app) as http``."""
    return visiting
