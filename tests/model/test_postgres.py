"""The functions in PostgreSQL against the machine of ``memory://``: any sequence of calls, the same answers
and messages."""

from __future__ import annotations

import pytest

from ..postgres import PostgresServer
from .test_scripts import FEWEST, STEPS, USUAL, Locks, Semaphores, take_steps
from .turns import Database, VirtualTurns


@pytest.mark.timeout(300 + STEPS / 10)
@pytest.mark.parametrize("machine", [Locks, Semaphores])
def test_functions_answer_and_tell_as_the_machine(
    postgres: PostgresServer, machine: type[Locks]
) -> None:
    steps = STEPS if machine is Locks else STEPS // 3  # there is less to go wrong with one mode
    machine.steps = 0
    database = Database(postgres.url)
    try:
        take_steps(lambda: machine(VirtualTurns(database, machine.kind)), steps)
    finally:
        database.close()
    assert machine.steps > steps // USUAL * FEWEST
