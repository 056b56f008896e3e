"""Broken clients and functions of PostgreSQL, in the simulation only: proof that the checkers see what they
are for.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiodlock._clock import now
from aiodlock._errors import BackendUnavailable
from aiodlock.backends.base import Unanswered
from aiodlock.backends.postgres import connection, messages, replies, store
from aiodlock.backends.postgres.history import History
from aiodlock.backends.postgres.link import Link
from aiodlock.backends.postgres.messages import Messages
from aiodlock.backends.postgres.notifications import Notifications
from aiodlock.backends.postgres.scouts import Scouts
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


def _hears_no_log(self: PostgresBackend, connection: Any, message: Any) -> None:
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


async def _leaves_unmarked(self: PostgresBackend) -> None:
    pass


_LEAVING = PostgresBackend._leaving


def _no_marker(self: PostgresBackend, request: Any) -> Any:
    """A late duplicate of the acquire is refused by nobody."""
    request.ambiguous, request.sent_on = False, None
    return _LEAVING(self, request)


async def _looks_nowhere(self: Scouts) -> None:
    """The other hosts are not looked at."""
    await asyncio.Event().wait()


def _hears_nothing(self: Notifications, message: str) -> None:
    """Only probes are heard."""
    if message == self._probe:
        _HEAR_ONE(self, message)


_HEAR_ONE = Notifications._hear_one


def _believes_silence(self: Messages, *args: Any) -> None:
    """An answer may take for ever."""


def _forgives(self: Any, connection: Any, failed: Exception, answers: Any) -> None:
    """After an answer that was lost, nobody is told that it may have been carried out."""
    _FAILED(self, connection, failed, answers)
    for answer in answers:
        error = answer.exception() if answer.done() and not answer.cancelled() else None
        if isinstance(error, Unanswered):
            error.__class__ = BackendUnavailable  # type: ignore[assignment]


_FAILED = Messages._failed


def _looks_not_after_a_gap(self: Notifications) -> None:
    """What was notified while nobody listened is not looked for."""
    self.known.set()


def _reads_do_not_wait(simulation: Simulation) -> None:
    """An answer that follows from what was read alone does not wait for the standby."""
    simulation.patch(Server, "reads_wait", False)


def _records_do_not_wait(simulation: Simulation) -> None:
    """That a success is on record is told without waiting for the standby."""
    simulation.patch(Tables, "records_are_durable", False)


def _grants_are_told(simulation: Simulation) -> None:
    """Beside a standby, others are told of grants, not to look."""
    simulation.patch(Tables, "hints", False)


def _variant(*by: str, prepare: Prepare, seed: int = 0) -> Variant:
    return Variant(prepare, by, seed=seed, kind=PostgresScene)


POSTGRES_VARIANTS = {
    "postgres: a primary that has come back is believed": _variant(
        "exclusion", "honesty", "record",
        prepare=_patched((History, "conflict", _no_conflict)),
    ),
    "postgres: a wait that was ended counts": _variant(
        "exclusion", "honesty", "record",
        prepare=_patched((PostgresBackend, "_on_log", _hears_no_log)),
    ),
    "postgres: nobody polls where nothing is notified": _variant(
        "idle",
        prepare=_patched((Notifications, "poll", _never_polls)),
    ),
    "postgres: sessions that were given up stay": _variant(
        "sessions", "idle", "liveness",
        prepare=_patched((Link, "_end_given_up", _ends_nothing)),
    ),
    "postgres: deadlines count from the answer": _variant(
        "honesty", "exclusion",
        prepare=_patched(
            (store, "outcome_of", _counts_from_the_answer),
            (replies, "outcome_of", _counts_from_the_answer),
        ),
    ),
    "postgres: a transaction that was aborted is never left": _variant(
        "liveness", "idle",
        prepare=_patched(
            (connection, "_leave_transaction", _leaves_no_transaction),
            (messages, "STUCK", "no such code"),
        ),
    ),
    "postgres: answers that only read do not wait": _variant(
        "exclusion", "honesty", "record",
        prepare=_reads_do_not_wait,
    ),
    "postgres: a record is told without waiting": _variant(
        "record",
        prepare=_records_do_not_wait,
    ),
    "postgres: grants are told beside a standby": _variant(
        "exclusion", "honesty",
        prepare=_grants_are_told,
    ),
    "postgres: no marker after a lost answer": _variant(
        "ghost", "honesty", "idle", "liveness", "fairness",
        prepare=_patched((PostgresBackend, "_leaving", _no_marker)),
    ),
    "postgres: nobody looks at the other hosts": _variant(
        "exclusion", "honesty", "liveness", "idle",
        prepare=_patched((Scouts, "run", _looks_nowhere)),
    ),
    "postgres: notifications are not heard": _variant(
        "idle",
        prepare=_patched((Notifications, "_hear_one", _hears_nothing)),
    ),
    "postgres: an answer may take for ever": _variant(
        "liveness", "idle",
        prepare=_patched((Messages, "_must_answer", _believes_silence)),
    ),
    "postgres: what is unanswered counts as refused": _variant(
        "ghost", "idle", "honesty", "liveness",
        prepare=_patched((Messages, "_failed", _forgives)),
    ),
    "postgres: nobody looks after a gap": _variant(
        "idle", "liveness",
        prepare=_patched((Notifications, "_be_known", _looks_not_after_a_gap)),
    ),
}  # fmt: skip
