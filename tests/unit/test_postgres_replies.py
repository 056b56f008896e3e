"""What others wrote into PostgreSQL is read in one place, and raises nothing but what callers expect."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiodlock import BackendError
from aiodlock.backends.postgres.dialing import Prepared
from aiodlock.backends.postgres.inspection import _info
from aiodlock.backends.postgres.notifications import Notifications
from aiodlock.backends.postgres.replies import left_of, outcome_of
from aiodlock.backends.postgres.store import PostgresBackend

_WORDS = st.sampled_from(
    [
        *(
            "granted",
            "held",
            "recalled",
            "waiting",
            "done",
            "busy",
            "limit",
            "gone",
            "closed",
            "recall",
        ),
        *("released", "withdrawn", "recorded", "broken", "look", "expired", "s5", "r", "*", "-1"),
    ]
)
_NUMBERS = st.integers(-(10**30), 10**30).map(str) | st.sampled_from(["9" * 5000, "٣", "1_0", "1r"])
TEXTS = st.lists(_WORDS | _NUMBERS | st.text(max_size=5), max_size=6).map(" ".join)


@given(TEXTS)
@example("granted 1 " + "9" * 5000)
@example("limit s²")
def test_answers_of_any_shape_are_read_or_refused(text: str) -> None:
    for read in (lambda: outcome_of(text, 1.0), lambda: left_of(text)):
        try:
            read()
        except BackendError:
            pass


class _Ear:
    """Hears everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@given(TEXTS)
@example("granted id key " + "9" * 5000)
@example("broken id key -1")
def test_notifications_of_any_shape_are_heard_or_ignored(text: str) -> None:
    notifications = Notifications.__new__(Notifications)
    notifications.listener = _Ear()
    logging.disable(logging.CRITICAL)
    try:
        notifications.hear([text])
    finally:
        logging.disable(logging.NOTSET)


def test_notification_of_a_connection_that_was_not_probed_is_not_heard() -> None:
    """It may be of another database: what is said there starts no body here."""
    heard: list[str] = []
    calls, known = cast(Any, SimpleNamespace(messages=None, label="one")), cast(Any, None)
    notifications = Notifications(calls, "postgresql://host/db", "there", known, sessions=True)
    notifications.hear = heard.extend  # type: ignore[method-assign,assignment]
    notifications._hear_one("granted id key 7")
    notifications._hear_one("probe 0")
    notifications._hear_one("granted id key 8")
    assert heard == ["granted id key 8"]
    notifications.listening.link.connection = cast(Any, object())
    notifications._hear_one("granted id key 9")
    assert heard == ["granted id key 8"]


def test_waiters_look_when_a_probe_comes_that_nobody_waits_for_any_more() -> None:
    """What was notified before it was not heard."""
    looks: list[str | None] = []
    calls, known = cast(Any, SimpleNamespace(messages=None, label="one")), cast(Any, None)
    notifications = Notifications(calls, "postgresql://host/db", "there", known, sessions=True)
    notifications.listener = cast(Any, SimpleNamespace(on_look=looks.append))
    notifications._hear_one("granted id key 7")
    notifications._hear_one("probe 0")
    assert looks == [None]


async def test_quick_greeting_does_not_take_back_what_slow_commits_have_taught() -> None:
    """Each answer would come on a connection that was given up for it, for ever."""
    backend = PostgresBackend(
        "postgresql://host/db",
        "there",
        listen_source=None,
        create=False,
        prefix="aiodlock",
        token_retention=3600.0,
        unavailable_after=30.0,
    )
    patience, link = backend._messages.patience, backend._messages.link
    backend._on_connected(Prepared(None, None, 0.005), False)
    assert patience.knows
    patience.ran_out()
    learned = patience.learned
    backend._on_connected(Prepared(None, None, 0.005), False)
    assert (patience.learned, link.connection) == (learned, None)


_CELL = st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=4) | st.booleans()
_COLUMNS = ("what", "owner", "mode", "token", "left_ms", "client", "places", "note", "description")


@given(
    st.lists(
        st.fixed_dictionaries(
            dict.fromkeys((*_COLUMNS, "ago_ms", "length_ms"), _CELL)
            | {"what": st.sampled_from(["name", "holder", "waiter", "record", "", None])}
        ),
        max_size=4,
    )
)
def test_rows_of_any_shape_are_shown_or_refused(rows: list[dict[str, Any]]) -> None:
    try:
        _info("lock", "name", rows)
    except BackendError:
        pass


@pytest.mark.parametrize("text", ["granted 17 x", "held x 1", "waiting 1 2", "closed", "closed x"])
def test_answer_of_the_wrong_shape_is_told(text: str) -> None:
    with pytest.raises(BackendError):
        outcome_of(text, 1.0)
