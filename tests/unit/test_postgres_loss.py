"""What the log says when a connection to PostgreSQL was lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import asyncpg
import pytest

from aiodlock.backends.postgres.link import Link


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (None, "closed by the server"),
        (
            asyncpg.InternalClientError("cannot switch to state 12; another operation (2) …"),
            "closed by the server",
        ),
        (TimeoutError("no answer in time"), "no answer in time"),
    ],
)
def test_loss_is_told_in_words_of_ours(
    caplog: pytest.LogCaptureFixture, failure: Exception | None, words: str
) -> None:
    link = SimpleNamespace(_good_until=0.0, failure=failure, described="postgresql://db/app")
    Link._log_loss(cast("Any", link))
    assert caplog.messages == [f"the connection to postgresql://db/app was lost: {words}"]
