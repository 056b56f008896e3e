"""The configurations: what is explored, how far, and which old rules Spin has to refute."""

from __future__ import annotations

from .run import Configuration

QUORUM = (
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
        "liveness: three requests, two of one owner, one fault, a dead node",
        ("LIVENESS", "FAULTS=1", "DEAD=2", "R=3", "OWNED=5", "FIRST_HOLDS"),
    ),
    Configuration(
        "liveness: a lease comes to rest on all nodes, nothing fails",
        ("LIVENESS", "SECURE=1", "STAYS=2", "FAULTS=0"),
        small=True,
    ),
    Configuration(
        "liveness: a lease comes to rest on all nodes, one fault",
        ("LIVENESS", "SECURE=1", "STAYS=2", "FAULTS=1"),
    ),
    Configuration(
        "a lease outlives a node",
        ("FAULTS=0", "DEATHS=1", "STAYS=2", "PATIENCE=8", "NEVER_LOST"),
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
        "two requests, their clients cannot count for a while, twice, a dead node",
        ("FAULTS=0", "BLINDS=2", "DEAD=2"),
        small=True,
    ),
    Configuration("two requests, a client cannot count for a while", ("FAULTS=0", "BLINDS=1")),
    Configuration(
        "two requests, a client cannot count for a while, one fault, a dead node",
        ("FAULTS=1", "BLINDS=1", "DEAD=2"),
    ),
    Configuration(
        "liveness: the older client can never count",
        ("LIVENESS", "FAULTS=0", "BLIND=1"),
        small=True,
    ),
    Configuration(
        "liveness: the older client can never count, one fault, a dead node",
        ("LIVENESS", "FAULTS=1", "BLIND=1", "DEAD=2"),
        small=True,
    ),
    Configuration(
        "liveness: the older client cannot count for a while, one fault, a dead node",
        ("LIVENESS", "FAULTS=1", "BLINDS=1", "DEAD=2"),
    ),
    Configuration(
        "liveness: three requests, the oldest client can never count, a dead node",
        ("LIVENESS", "FAULTS=0", "BLIND=1", "DEAD=2", "R=3"),
        small=True,
    ),
    Configuration(
        "old rule: a client that cannot count takes votes",
        ("LIVENESS", "FAULTS=0", "BLIND=1", "OLD_COUNT"),
        caught=True,
        small=True,
    ),
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
    Configuration(
        "old rule 18: a waiter keeps the vote that a holder lacks",
        ("LIVENESS", "SECURE=1", "STAYS=2", "FAULTS=0", "OLD_HELD"),
        caught=True,
        small=True,
    ),
    Configuration(
        "old rule 18: a lease ends with a node",
        ("FAULTS=0", "DEATHS=1", "STAYS=2", "PATIENCE=8", "NEVER_LOST", "OLD_HELD"),
        caught=True,
        small=True,
    ),
    Configuration(
        "wrong rule: a node gives an open vote on by itself",
        ("FAULTS=0", "CRASHES=1", "DEAD=2", "R=3", "FIRST_HOLDS", "GIVE_ON=2"),
        caught=True,
        small=True,
    ),
    Configuration(
        "wrong rule: a holder's vote is asked back, its place goes by its ticket",
        ("FAULTS=0", "STAYS=2", "WRONG_ORDER"),
        caught=True,
        small=True,
    ),
)

_RENEWAL = "renewal"

RENEWAL = (
    Configuration("etcd: a leader that wakes", (), small=True, model=_RENEWAL),
    Configuration("etcd: two leaders that wake", ("TERMS=3", "MAX=4"), model=_RENEWAL),
    Configuration(
        "etcd: a renewal counts for a lease of an earlier term",
        ("NO_TERM",),
        caught=True,
        small=True,
        model=_RENEWAL,
    ),
    Configuration(
        "etcd: a renewal counts without a read after it",
        ("NO_READ",),
        caught=True,
        small=True,
        model=_RENEWAL,
    ),
    Configuration(
        "etcd: a renewal counts after the end of the lease",
        ("NO_END",),
        caught=True,
        small=True,
        model=_RENEWAL,
    ),
)

_ETCD = "etcd"

ETCD = (
    Configuration("etcd: two requests, three faults", ("FAULTS=3",), small=True, model=_ETCD),
    Configuration(
        "etcd: two requests that stay, three faults",
        ("FAULTS=3", "STAYS=3"),
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd: a reader and a writer, three faults",
        ("FAULTS=3", "SHARED=1"),
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd: two requests of one owner, three faults",
        ("FAULTS=3", "OWNED=3"),
        small=True,
        model=_ETCD,
    ),
    Configuration("etcd: three requests, two faults", ("FAULTS=2", "R=3"), model=_ETCD),
    Configuration(
        "etcd: three requests that stay, two faults", ("FAULTS=2", "R=3", "STAYS=7"), model=_ETCD
    ),
    Configuration(
        "etcd: a writer and two readers that stay, two faults",
        ("FAULTS=2", "R=3", "STAYS=7", "SHARED=6"),
        model=_ETCD,
    ),
    Configuration(
        "etcd: two that stay behind one that gives up, one fault",
        ("FAULTS=1", "R=3", "STAYS=6"),
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd: two readers and a writer, two faults", ("FAULTS=2", "R=3", "SHARED=3"), model=_ETCD
    ),
    Configuration(
        "etcd: three requests, two of one owner, two faults",
        ("FAULTS=2", "R=3", "OWNED=5"),
        model=_ETCD,
    ),
    Configuration(
        "etcd: two readers of one owner and a writer, one fault",
        ("FAULTS=1", "R=3", "OWNED=3", "SHARED=3"),
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd: a waiter behind one that holds for ever, two faults",
        ("FAULTS=2", "STAYS=3", "FOREVER=1"),
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd: one client's request lets in its next one, and one of another client, two faults",
        ("FAULTS=2", "R=3", "ONE=3"),
        model=_ETCD,
    ),
    Configuration(
        "etcd: one client's three requests, each lets in its next one, two of one owner, one fault",
        ("FAULTS=1", "R=3", "ONE=7", "OWNED=5"),
        model=_ETCD,
    ),
    Configuration(
        "etcd: one client's request lets in its next one, its owner has another elsewhere, one fault",
        ("FAULTS=1", "R=3", "ONE=3", "OWNED=5"),
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd: a request lets in the next one though its owner's other one may join it",
        ("FAULTS=0", "R=3", "ONE=3", "OWNED=5", "OLD_PASS"),
        caught=True,
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd's Mutex (#19597): a waiter whose key is gone sleeps on behind its predecessor",
        ("FAULTS=1", "STAYS=3", "FOREVER=1", "OLD_SLEEP"),
        caught=True,
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd's RWMutex (#16221): a waiter whose key is gone gets in",
        ("FAULTS=1", "OLD_OWN_KEY"),
        caught=True,
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd: a writer waits for the nearest reader alone",
        ("FAULTS=0", "R=3", "SHARED=3", "OLD_RW"),
        caught=True,
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd: a reader waits for the end of a reader that holds for ever",
        ("FAULTS=0", "R=3", "STAYS=7", "SHARED=6", "FOREVER=2", "OLD_SIGNAL"),
        caught=True,
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd: a request leaves no marker against its late duplicate",
        ("FAULTS=1", "NO_MARKER"),
        caught=True,
        small=True,
        model=_ETCD,
    ),
    Configuration(
        "etcd: a request joins one of its owner that may be gone",
        ("FAULTS=1", "R=3", "OWNED=5", "OLD_JOIN"),
        caught=True,
        small=True,
        model=_ETCD,
    ),
)

_SESSION = "session"

ZOOKEEPER = (
    Configuration("session: it lives as long as said", (), model=_SESSION, small=True),
    Configuration(
        "session: it lives as long as said, with a new leader",
        ("DEPOSED",),
        model=_SESSION,
        small=True,
    ),
    Configuration(
        "session, naive: ping sent + timeout", ("PING",), model=_SESSION, caught=True, small=True
    ),
    Configuration(
        "session, naive: write sent + timeout", ("WRITE",), model=_SESSION, caught=True, small=True
    ),
    Configuration(
        "session, naive: pings, and write sent + timeout - 2 ticks",
        ("MINUS_TICKS", "T=6", "MAX=13"),
        model=_SESSION,
        caught=True,
        small=True,
    ),
    Configuration(
        "session, naive: two writes a half tick apart",
        ("TWO_WRITES",),
        model=_SESSION,
        caught=True,
        small=True,
    ),
    Configuration(
        "session, naive: three writes without a pause",
        ("NO_GAP",),
        model=_SESSION,
        caught=True,
        small=True,
    ),
    Configuration(
        "session, naive: round trips to a leader that is none any more",
        ("DEPOSED", "SYNC_ONLY"),
        model=_SESSION,
        caught=True,
        small=True,
    ),
)

CONFIGURATIONS = (*QUORUM, *ETCD, *RENEWAL, *ZOOKEEPER)
