"""Values that the layers hand to each other. Times are seconds, moments are of ``_clock``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from ._errors import LossReason

Mode = Literal["exclusive", "shared"]
Kind = Literal["lock", "semaphore", "once"]
#: Those of the holders that a break is meant for.
Tokens: TypeAlias = frozenset[int]
#: The owner of who stands in an election: this, and behind a colon its value.
CANDIDATE = "leader:"


@dataclass(slots=True)
class Terms:
    """What a lock asks for: the same for all requests of one ``Lock`` object.

    Nobody changes it. It is not frozen, since one is made for every ``client.lock()``, and making it would
    take five times as long.
    """

    kind: Kind
    name: str
    mode: Mode
    #: With ``kind == "semaphore"``: how many may hold. 0 for locks.
    limit: int
    #: Length of a holder's lease: min(ttl, max_hold).
    ttl: float
    #: Length of the lease while waiting: min(client's waiter_ttl, ttl, max_hold).
    waiter_ttl: float
    lock_delay: float
    #: The lease counts as lost so long before its deadline.
    margin: float
    #: Seconds after its grant past which a lease is never extended.
    max_hold: float | None
    #: Whether a holder's lease is extended. A waiter's always is, and it is brought to the full ttl once.
    auto_extend: bool
    #: For so long after its grant a body that began keeps the name closed.
    hold_at_least: float = 0.0
    #: Whether a body begins with the grant; else, as of a multilock, when the place is told so (``begin``).
    begins: bool = True
    #: Whether ``limit`` is to be in use from now on.
    resize: bool = False
    #: For people.
    note: str = ""
    #: For so long after a body the client keeps the lease for the next one, unless it is recalled.
    linger: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """How a request ends."""

    #: The lease ran out for its holder, whose deadline is earlier than the store's: this leave must not
    #: open a lock-delay.
    lost: bool = False
    #: No body has begun: ``hold_at_least`` keeps nothing closed.
    unused: bool = False
    #: Of kind ``once``: the result of the success that is to be put on record, and the seconds for which.
    record: tuple[bytes, float] | None = None

    @property
    def word(self) -> Literal["ended", "lost", "unused"]:
        """The way without a record, in the word of the protocol."""
        return "lost" if self.lost else "unused" if self.unused else "ended"


#: Its body has ended.
ENDED: End = End()
RAN_OUT: End = End(lost=True)
UNUSED: End = End(unused=True)


#: A task's own owner that ends with this belongs to a request with a timeout.
IMPATIENT = "~"


def first_request(owner: str) -> str | None:
    """Return the id of the request after which a task's owner is named; None for a user's owner."""
    return owner[1:].removesuffix(IMPATIENT) if owner.startswith("t") else None


@dataclass(slots=True, eq=False)
class StoreRequest:
    """What a store with a lease per request is told of one; the same from its first message to its last.

    ``begins`` becomes true when the body of a multilock begins. What stands below it are the store's notes.
    """

    id: str
    terms: Terms
    #: Identity for reentrancy, already made unambiguous: ``t…`` for a task's, ``u…`` for a user's.
    owner: str
    #: Whether the body begins with the grant, or has begun; see ``Terms``.
    begins: bool = True
    #: Whether the client may keep the lease when its body has ended.
    lingers: bool = False
    #: Whether the store has said that it holds.
    granted: bool = False
    #: The connection that an acquire went out on and has not answered.
    sent_on: object | None = None
    #: An acquire went unanswered: a duplicate of it may still be carried out.
    ambiguous: bool = False
    #: Where notices for it alone are listened for, if that is so.
    listening: Any = None
    #: What the nodes of a quorum have said of it.
    tally: Any = None
    #: How it ends, as soon as that is known.
    end: End = ENDED

    @property
    def kind(self) -> Kind:
        """The kind of its name."""
        return self.terms.kind

    @property
    def name(self) -> str:
        """The lock's name."""
        return self.terms.name


@dataclass(slots=True)  # making a frozen one takes 3,800 instructions more, for each acquire
class Granted:
    """The request holds, certainly until ``deadline``. ``recalled``: it must not linger, others want it."""

    token: int
    deadline: float
    recalled: bool = False


@dataclass(slots=True)
class Waiting:
    """The request is queued, certainly until ``deadline``.

    ``look_at`` is set for the head of the queue: the earliest moment at which a blocker may end.
    """

    deadline: float
    look_at: float | None = None
    #: Every grant after this answer has a larger token: a notice with another is stale.
    floor: int = 0


@dataclass(frozen=True, slots=True)
class Gone:
    """The store has no such request (any more).

    ``result``: of a waiter, because a success with this result is on record.
    """

    reason: LossReason
    result: bytes | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Not queued: held or waited for (``busy``), the owner would wait for itself (``deadlock``), the
    semaphore is in use with another limit (``limit``, with ``used``), or a success is on record
    (``recorded``, with its ``result``)."""

    why: Literal["busy", "deadlock", "limit", "recorded"]
    used: int = 0
    #: A part of it, or an earlier attempt, may still be carried out: it has to be left.
    unsure: bool = False
    result: bytes = b""


@dataclass(frozen=True, slots=True)
class Left:
    """What a leave found. ``gone``: neither a holder nor a waiter any more."""

    what: Literal["released", "withdrawn", "recorded", "gone"]
    reason: LossReason = "gone"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do, for code and tests to ask instead of its type."""

    #: "exact": in order of arrival at the store.
    fair: Literal["exact", "by ticket"] = "exact"
    shared: bool = True
    semaphores: bool = True
    lock_delay: bool = True
    #: Whether names stay closed for ``hold_at_least``, semaphores take ``resize``, and success is recorded.
    hold_at_least: bool = False
    resize: bool = False
    once: bool = False
    #: Whether a client may keep a lease between two bodies: the store recalls it when others want it.
    linger: bool = False
    break_lock: bool = True
    #: The shortest ttl that the store takes, and what lengths are rounded up to, in seconds.
    shortest_ttl: float = 0.05
    granularity: float = 0.001
    #: Whether it is known how long others' leases have left, and how long waiters have waited.
    remaining_known: bool = True
    waiting_known: bool = True
    #: Whether the notice of a grant is a grant, or only a reason to ask.
    notices: Literal["grants", "hints"] = "grants"
    #: Seconds for which a granted waiter's extension to the full ttl may wait: it may have left by then.
    extend_after: float = 0.005


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One attempt to get a lock, as hooks see it. ``token`` is 0 until it is granted."""

    #: The same from the attempt's beginning to the end of its lease, and no other's, anywhere.
    id: str
    kind: Kind
    name: str
    mode: Mode
    owner: str
    token: int


@dataclass(frozen=True, slots=True)
class HolderInfo:
    """One holder: ``remaining`` seconds of its lease, None if the store cannot tell; ``count``
    acquisitions that the store counts."""

    owner: str
    mode: Mode
    token: int
    count: int
    remaining: float | None
    client: str
    #: What the lock's ``note`` and the client's ``description`` say.
    note: str = ""
    description: str = ""
    #: Seconds since the lease was granted, None if the store cannot tell.
    holding: float | None = None
    #: Seconds that the lease has after each extension, None if the store cannot tell.
    ttl: float | None = None

    @property
    def overdue(self) -> bool:
        """Whether nobody has extended the lease in time: a live client does it at a third of the ttl."""
        return (
            self.ttl is not None and self.remaining is not None and self.remaining <= self.ttl / 2
        )

    @property
    def value(self) -> str | None:
        """What a leader stands for, as given to ``Election.lead``; None for who holds a plain lock."""
        return value_of(self.owner)


@dataclass(frozen=True, slots=True)
class WaiterInfo:
    """One waiter: ``position`` 0 is next; ``waiting`` seconds since it was queued, None if the store cannot
    tell."""

    owner: str
    mode: Mode
    position: int
    waiting: float | None
    client: str
    note: str = ""
    description: str = ""


def value_of(owner: str) -> str | None:
    """Return a candidate's value, which stands in its owner; None for an owner that is no candidate."""
    if not owner.startswith(CANDIDATE):
        return None
    return owner[len(CANDIDATE) :].partition(":")[2]


def said_by_users(one: HolderInfo | WaiterInfo) -> dict[str, str]:
    """Return what users have said of it: a candidate's value, an owner that they named, what it is for."""
    value = value_of(one.owner)
    # The default of the owner is made from the client's name.
    named = value is None and not one.owner.startswith(f"{one.client}-")
    owner = one.owner if named else ""
    return {"value": value or "", "owner": owner, "note": one.note, "description": one.description}


def seconds_since(token: int, now_us: int) -> float | None:
    """Return how long ago a grant was, for tokens that are microseconds of the store's clock.

    None where the token is ahead of that clock, which was set back.
    """
    return (now_us - token) / 1e6 if 0 < token <= now_us else None


class RecordedInfo(NamedTuple):
    """A success on record: ``ago`` seconds since it was recorded, and ``remaining`` until it is forgotten.

    ``ago`` is None if the store cannot tell.
    """

    ago: float | None
    remaining: float


@dataclass(frozen=True, slots=True)
class LockInfo:
    """Who holds a name and who waits, as of one moment. ``token`` is the last one given, 0 if unknown."""

    name: str
    holders: tuple[HolderInfo, ...]
    waiters: tuple[WaiterInfo, ...]
    token: int
    #: Seconds for which the lock-delay of a lost holder keeps the name closed.
    closed: float = 0.0
    #: How many holders' places lock-delay keeps closed; of a lock of any mode at most those it had.
    closed_places: int = 0
    kind: Kind = "lock"
    #: Of kind ``once``: the success that is on record.
    recorded: RecordedInfo | None = None
