"""The scripts against the machine, in the histories by hand. (PostgreSQL's: in ``test_postgres``.)"""

from __future__ import annotations

import pytest

from ..servers import Store
from . import histories
from .histories import Tale
from .test_scripts import Locks, VirtualDirect, connect

pytestmark = pytest.mark.scripted


@pytest.mark.parametrize(
    ("machine", "tale"), histories.ALL, ids=lambda value: getattr(value, "__name__", None)
)
@pytest.mark.stores("fakeredis", "valkey9", "redis62")
def test_scripts_answer_a_history_by_hand_as_the_machine(
    store: Store, machine: type[Locks], tale: Tale
) -> None:
    with connect(store) as connection:
        histories.tell(lambda one: VirtualDirect(connection, one.kind), machine, tale)
