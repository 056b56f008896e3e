"""Broken clients and functions of PostgreSQL, in the simulation only: proof that the checkers see what they
are for.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiodlock._clock import now
from aiodlock.backends.postgres import connection, messages, replies, store
from aiodlock.backends.postgres.calls import Calls
from aiodlock.backends.postgres.history import History
from aiodlock.backends.postgres.link import Link
from aiodlock.backends.postgres.notifications import Notifications
from aiodlock.backends.postgres.silence import Silence
from aiodlock.backends.postgres.store import PostgresBackend

from ..scenario import Simulation
from ..variants import Prepare, Variant
from .postgres import PostgresScene
from .postgres_servers import Server
from .postgres_tables import Tables


def _patched(*changes: tuple[object, str, object]) -> Prepare:
    def prepare(simulation: Simulation) -> None:
        for change in changes:
            simulation.patch(*change)

    return prepare


def _no_conflict(self: History, known: History) -> str:
    """Every history counts, also that of a primary that has come back."""
    return ""


def _hears_no_log(self: Calls, connection: Any, message: Any) -> None:
    """Nobody notices that a commit was not waited for."""


async def _never_polls(self: Notifications) -> None:
    """Waiters look only when they extend."""
    await asyncio.Event().wait()


async def _ends_nothing(self: Link, connection: Any) -> None:
    """Sessions that were given up are left to the server."""
    self._given_up = None


_OUTCOME_OF = replies.outcome_of


def _counts_from_the_answer(answer: str, sent: float) -> Any:
    return _OUTCOME_OF(answer, now())


async def _leaves_no_transaction(connection: Any) -> None:
    """A transaction that was aborted is never left."""


_LEAVING = PostgresBackend._leaving


def _no_marker(self: PostgresBackend, request: Any) -> Any:
    """A late duplicate of the acquire is refused by nobody."""
    request.ambiguous, request.sent_on = False, None
    return _LEAVING(self, request)


def _hears_nothing(self: Notifications, message: str) -> None:
    """Only probes are heard."""
    if message == self._probe:
        _HEAR_ONE(self, message)


_HEAR_ONE = Notifications._hear_one


def _believes_silence(self: Silence, *args: Any) -> None:
    """An answer may take for ever."""


def _reads_do_not_wait(simulation: Simulation) -> None:
    """An answer that follows from what was read alone does not wait for the standby."""
    simulation.patch(Server, "reads_wait", False)


def _records_do_not_wait(simulation: Simulation) -> None:
    """That a success is on record is told without waiting for the standby."""
    simulation.patch(Tables, "records_are_durable", False)


def _grants_are_told(simulation: Simulation) -> None:
    """Beside a standby, others are told of grants, not to look."""
    simulation.patch(Tables, "hints", False)


def _nothing_refuses(simulation: Simulation) -> None:
    """What comes late is carried out. That sessions stay is another variant's."""
    simulation.patch(PostgresBackend, "_leaving", _no_marker)
    simulation.patch(Link, "_end_given_up", _ends_nothing)
    checkers: Any = simulation.checkers
    checkers.most_given_up = 99


def _variant(*by: str, prepare: Prepare, seed: int = 0) -> Variant:
    return Variant(prepare, by, seed=seed, kind=PostgresScene)


POSTGRES_VARIANTS = {
    "postgres: a primary that has come back is believed": _variant(
        "exclusion", "honesty", "record", "fairness",
        prepare=_patched((History, "conflict", _no_conflict)),
        seed=5,
    ),
    "postgres: a wait that was ended counts": _variant(
        "exclusion", "honesty", "record", "fairness",
        prepare=_patched((Calls, "on_log", _hears_no_log)),
        seed=44,
    ),
    "postgres: nobody polls where nothing is notified": _variant(
        "idle",
        prepare=_patched((Notifications, "poll", _never_polls)),
        seed=16,
    ),
    "postgres: sessions that were given up stay": _variant(
        "sessions",
        prepare=_patched((Link, "_end_given_up", _ends_nothing)),
        seed=4,
    ),
    "postgres: deadlines count from the answer": _variant(
        "honesty", "exclusion",
        prepare=_patched(
            (store, "outcome_of", _counts_from_the_answer),
            (replies, "outcome_of", _counts_from_the_answer),
        ),
        seed=1,
    ),
    "postgres: a transaction that was aborted is never left": _variant(
        "sessions",
        prepare=_patched(
            (connection, "_leave_transaction", _leaves_no_transaction),
            (messages, "STUCK", "no such code"),
        ),
        seed=19,
    ),
    "postgres: answers that only read do not wait": _variant(
        "exclusion", "honesty", "record", "fairness",
        prepare=_reads_do_not_wait,
        seed=20,
    ),
    "postgres: a record is told without waiting": _variant(
        "record",
        prepare=_records_do_not_wait,
    ),
    "postgres: grants are told beside a standby": _variant(
        "exclusion", "honesty", "fairness",
        prepare=_grants_are_told,
    ),
    "postgres: neither a marker nor the end of a session refuses what comes late": _variant(
        "ghost",
        prepare=_nothing_refuses,
    ),
    "postgres: notifications are not heard": _variant(
        "idle",
        prepare=_patched((Notifications, "_hear_one", _hears_nothing)),
    ),
    "postgres: an answer may take for ever": _variant(
        "liveness", "idle",
        prepare=_patched((Silence, "_end_silence", _believes_silence)),
        seed=12,
    ),
}  # fmt: skip
