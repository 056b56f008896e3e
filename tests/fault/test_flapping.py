"""A middlebox that lets every connection come up, and cuts it at the first message."""

from __future__ import annotations

import asyncio
import logging

import pytest

from ..conftest import MakeClient
from ..proxy import FaultProxy, named
from .scenes import until


@pytest.mark.stores("valkey9")
async def test_connection_that_comes_up_and_is_cut_is_one_outage_and_not_one_at_each_dial(
    make_unlucky: MakeClient, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_unlucky(unavailable_after=60.0)
    proxy.drop_command(named("EVALSHA"), times=1_000_000)
    waiting = asyncio.create_task(client.lock("name").acquire())
    dialled = proxy.accepted
    await until(lambda: proxy.accepted >= dialled + 8, "eight dials", within=30.0)
    warnings = [
        record
        for record in caplog.records
        if getattr(record, "event", "") == "no_connection" and record.levelno >= logging.WARNING
    ]
    waiting.cancel()
    await asyncio.wait([waiting])
    # One for each of the connections: of the calls, and of the notices.
    assert len(warnings) <= 2
