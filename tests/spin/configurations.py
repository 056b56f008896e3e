"""The configurations: what is explored, how far, and which old rules Spin has to refute."""

from __future__ import annotations

from .run import Configuration

CONFIGURATIONS = (
    Configuration("two requests, nothing fails", ("FAULTS=0",), small=True),
    Configuration("two requests, one fault", ("FAULTS=1",)),
    Configuration("two requests, two faults, a dead node", ("FAULTS=2", "DEAD=2")),
    Configuration("two requests, a restart", ("FAULTS=0", "RESTARTS=1")),
    Configuration(
        "a holder and a waiter, one fault, a restart, clocks that differ",
        ("FAULTS=1", "RESTARTS=1", "CLOCKS_DIFFER", "FIRST_HOLDS"),
    ),
    Configuration(
        "three requests, nothing fails, a dead node", ("FAULTS=0", "DEAD=2", "R=3"), small=True
    ),
    Configuration("three requests, one fault, a dead node", ("FAULTS=1", "DEAD=2", "R=3")),
    Configuration(
        "three requests, two of one owner, one fault, a dead node",
        ("FAULTS=1", "DEAD=2", "R=3", "OWNED=5", "FIRST_HOLDS"),
    ),
    Configuration(
        "liveness: two requests, one fault, a dead node",
        ("LIVENESS", "FAULTS=1", "DEAD=2", "GIVE_UP=1"),
        small=True,
    ),
    Configuration(
        "liveness: three requests, two of one owner, a dead node",
        ("LIVENESS", "FAULTS=0", "DEAD=2", "R=3", "OWNED=5", "FIRST_HOLDS"),
        small=True,
    ),
    Configuration(
        "supertrace: a holder and a waiter, two faults, clocks that differ",
        ("FAULTS=2", "RESTARTS=1", "CLOCKS_DIFFER", "FIRST_HOLDS"),
        bits=33,
    ),
    Configuration(
        "supertrace: two requests, two faults, two restarts", ("FAULTS=2", "RESTARTS=2"), bits=33
    ),
    Configuration("supertrace: three requests, two faults", ("FAULTS=2", "R=3"), bits=33),
    Configuration(
        "old rule 15: a lost yield is not repeated",
        ("LIVENESS", "FAULTS=1", "DEAD=2", "GIVE_UP=1", "OLD_YIELD"),
        caught=True,
        small=True,
    ),
    Configuration(
        "old rule 16: a vote by owner is never asked back",
        ("LIVENESS", "FAULTS=0", "DEAD=2", "R=3", "OWNED=5", "FIRST_HOLDS", "OLD_OWNER"),
        caught=True,
        small=True,
    ),
    Configuration(
        "old rule 17: an answer is older than a confirmed vote",
        ("FAULTS=2", "RESTARTS=1", "CLOCKS_DIFFER", "FIRST_HOLDS", "OLD_WAITING"),
        caught=True,
        small=True,
    ),
)
