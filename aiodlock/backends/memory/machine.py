"""The protocol for one name in plain Python: the queue, the grants, and what is remembered of them.

Over 400 lines: a protocol that is read in one go.

This is the readable form of the scripts in ``../redis/lua``; ``tests/model`` holds the scripts against it.
The machine is pure. It has no clock, no I/O and no event loop: the caller hands the time in, and each call
decides and writes in one step, then returns its reply and the messages that it causes.

Times are milliseconds of the store's clock. Tokens are microseconds of it, at least.

A *live* request is one whose deadline is still to come. A request that is overdue is gone: nothing revives
it. An overdue holder blocks what it blocked alive until its lock-delay has passed too, its own owner
included. Every call that may grant first sweeps, then grants from the head of the queue on, then acts.

A request with a *hold* closes its name for that long after its grant, if its body began. What is left of
such a request when it leaves blocks as an overdue holder does.

A holder that *lingers* may be idle: its client keeps the lease for its next body. Who queues behind it, or
is refused because of it, recalls it: one message to the client, and each later answer about that holder
says so too. While anybody waits, every holder that lingers is recalled, also one that is overdue: if the
clock is set back, it may be live again.

A name of kind *once* has a record: the result of the one success, for as long as that is kept. While it is
there, nobody holds and nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Mode = Literal["exclusive", "shared"]
Loss = Literal["broken", "expired", "taken_over", "gone"]

#: The request holds: its token, and the milliseconds that are left of its lease. ``recalled``: it must not
#: linger, others want the name.
Held: TypeAlias = tuple[Literal["held", "recalled"], int, int]
#: The request is queued: the milliseconds left of its lease; for the head of the queue, the milliseconds
#: until the first of its blockers ends, else None; and the floor: every later grant has a larger token.
Waits: TypeAlias = tuple[Literal["waiting"], int, int | None, int]
#: Not queued: others hold or wait, the owner would wait for itself, or the semaphore has this other limit.
Refused: TypeAlias = tuple[Literal["busy", "deadlock"]] | tuple[Literal["limit"], int]
Gone: TypeAlias = tuple[Literal["gone"], Loss]
#: A success is on record, with this result.
Done: TypeAlias = tuple[Literal["done"], bytes]
Left: TypeAlias = tuple[Literal["released", "withdrawn", "recorded"]] | Gone
#: How a request ends. ``lost``: the lease ran out for its holder. ``unused``: no body has begun.
End = Literal["ended", "lost", "unused"]


class Message(NamedTuple):
    """What a client is told without having asked.

    ``granted`` is a notice: the waiter holds, with this token. ``look`` is a hint: the waiter at the head
    should ask again. ``broken``: an operator has ended this lease. ``done``: a success is on record; all
    waiters of this client should ask. ``recall``: others want what this holder has; it must not linger.
    """

    word: Literal["granted", "look", "broken", "done", "recall"]
    client: str
    #: With ``done``, all ids of the client that waited, with commas between them.
    id: str
    token: int = 0
    #: With ``granted``: recalled from the first moment, since others wait behind it.
    recalled: bool = False


class Asked(NamedTuple):
    """What a request asks for."""

    id: str
    mode: Mode
    #: How many may hold a semaphore; 0 for locks.
    limit: int
    #: The owner is a task's (``t…``) or a name that the user gave (``u…``).
    owner: str
    client: str
    #: The length of the lease of a holder, and that of a waiter.
    ttl: int
    waiter_ttl: int
    delay: int
    #: For so long after the grant the name stays closed at least.
    hold: int = 0
    #: Whether the body begins with the grant that answers the acquire. (If not, an extension says so.)
    begins: bool = False
    #: Whether ``limit`` is the one in use from now on; the others follow it.
    resize: bool = False
    #: Whether the client may keep the lease when its body has ended.
    lingers: bool = False
    #: For people.
    note: str = ""
    description: str = ""


class Seen(NamedTuple):
    """A name at one moment."""

    #: The live holders: with the token, the milliseconds left, and the length of the lease.
    holders: list[tuple[Asked, int, int, int]]
    #: The live waiters in the order of the queue: with the milliseconds that they have waited.
    waiters: list[tuple[Asked, int]]
    #: The last token; 0 when it is forgotten.
    token: int
    #: For so many milliseconds lock-delays and holds still keep the name closed.
    closed: int
    #: So many holders' places they keep closed.
    closed_places: int
    #: The milliseconds since a success was recorded, and for which it stays on record.
    recorded: tuple[int, int] | None = None
    #: The store's time in microseconds.
    now_us: int = 0


@dataclass(slots=True)
class Entry:
    """One request, waiting or holding."""

    asked: Asked
    since: int
    deadline: int
    #: No more than this is ever left of the lease.
    length: int
    token: int = 0
    #: Since the grant: until when the hold keeps the name closed, once the body has begun.
    hold_until: int = 0
    began: bool = False
    #: Others want the name; the client was told, or is told with the grant.
    recalled: bool = False
    #: It has left, and keeps the name closed for so long after ``deadline``; 0 while it is here.
    rest: int = 0

    @property
    def closed_until(self) -> int:
        """When a holder stops blocking others, if it is never heard of again."""
        if self.rest:
            return self.deadline + self.rest
        return max(self.deadline + self.asked.delay, self.hold_until if self.began else 0)

    def promise(self, length: int, now: int) -> None:
        """Push the deadline into the future, never nearer."""
        self.deadline = max(self.deadline, now + length)
        self.length = max(length, self.deadline - now)


@dataclass(slots=True)
class Owned:
    """What one owner holds by live requests: their common token, and whether one is exclusive."""

    token: int
    exclusive: bool


class Name:
    """One name of one kind.

    Mutable state: ``holders`` and ``waiters`` by request id, the waiters in order of arrival; ``token``,
    the last one, remembered until ``token_until``; ``limit``, that of a semaphore while anybody holds or
    waits, and ``resized``, whether the others follow it; ``record``, the id of the success and its result,
    kept until ``record_until``; ``markers`` (ids whose late duplicates are refused) and ``broken`` (ids of
    leases that an operator broke), each with the end of that; ``now`` and ``now_us``, the time of the last
    call. During a call also ``_owners`` and ``_exclusive`` (of the holders), ``_messages``, and
    ``_retention`` (for how long the caller wants a token to be remembered).
    """

    def __init__(self) -> None:
        self.holders: dict[str, Entry] = {}
        self.waiters: dict[str, Entry] = {}
        self.token: int = 0
        self.token_until: int = 0
        self.limit: int = 0
        self.resized: bool = False
        self.record: tuple[str, bytes] | None = None
        self.record_until: int = 0
        self.recorded_at: int = 0
        self.markers: dict[str, int] = {}
        self.broken: dict[str, int] = {}
        self.now: int = 0
        self.now_us: int = 0
        self._retention: int = 0
        self._owners: dict[str, Owned] = {}
        self._exclusive = False
        self._messages: list[Message] = []

    # -- the calls ---------------------------------------------------------------------------------

    def acquire(
        self, now_us: int, asked: Asked, *, wait: bool, retention: int
    ) -> tuple[Held | Waits | Refused | Gone | Done, list[Message]]:
        """Grant, queue or (``wait=False``) refuse a request. Repeating it is harmless."""
        self._begin(now_us, retention)
        if (done := self._on_record()) is not None:
            return done, self._messages
        if self._remembers(self.markers, asked.id):
            return ("gone", "gone"), self._messages  # a late duplicate: its client has left
        changed = self._sweep_and_grant()
        reply: Held | Waits | Refused | Gone | None = self._known(asked)
        if reply is None and asked.limit:
            if asked.resize or not (self.holders or self.waiters):
                self.limit, self.resized = asked.limit, asked.resize
                changed = self._sweep_and_grant() or changed
            elif asked.limit != self.limit and not self.resized:
                reply = ("limit", self.limit)
        if reply is None:
            reply = self._acquire(asked, wait, changed)
        if changed:
            self._hint(unless=asked.id)
        return reply, self._messages

    def _known(self, asked: Asked) -> Held | Waits | Gone | None:
        """Return the present state of a request that is repeated."""
        known = self.holders.get(asked.id)
        if known is not None:
            if self.now >= known.deadline:
                return ("gone", "expired")
            known.began = known.began or asked.begins
            return self._held(known)
        known = self.waiters.get(asked.id)
        if known is not None and self.now < known.deadline:
            return self._waits(known)
        self.waiters.pop(asked.id, None)  # overdue: it queues again, at the end
        return None

    def _acquire(self, asked: Asked, wait: bool, changed: bool) -> Held | Waits | Refused:
        now = self.now
        entry = Entry(asked, now, now + asked.ttl, asked.ttl, 0, now + asked.hold, asked.begins)
        own = self._owners.get(asked.owner)
        if own is not None:
            if asked.mode == "exclusive" and not own.exclusive:
                return ("deadlock",)
            # The owner holds already: the request gets in past every waiter.
            sooner = entry.closed_until < self._earliest_end()
            self._admit(entry, own.token)
            entry.recalled = asked.lingers and bool(self.waiters)
            if sooner and not changed:
                self._hint()  # the head would look too late for this one's end
            return self._held(entry)
        if not self.waiters and self._fits(asked):
            self._admit(entry, self._next_token())
            return self._held(entry)
        self._recall()
        if not wait:
            return ("busy",)
        entry = Entry(asked, now, now + asked.waiter_ttl, asked.waiter_ttl)
        self.waiters[asked.id] = entry
        return self._waits(entry)

    def _recall(self) -> None:
        """Tell each holder that lingers, once, that others want the name."""
        for entry in self.holders.values():
            asked = entry.asked
            if asked.lingers and not entry.recalled:
                entry.recalled = True
                self._messages.append(Message("recall", asked.client, asked.id, entry.token))

    def extend(
        self, now_us: int, id: str, length: int, *, begins: bool = False, retention: int
    ) -> tuple[Held | Waits | Gone | Done, list[Message]]:
        """Push the deadline of a holder or a waiter to now + ``length`` at least. A waiter also looks.

        :param begins: if the request holds, its body begins.
        """
        now = self._begin(now_us, retention)
        holder = self.holders.get(id)
        if holder is not None and now < holder.deadline:
            holder.promise(length, now)
            holder.began = holder.began or begins
            return self._held(holder), self._messages
        if (done := self._on_record()) is not None:
            return done, self._messages
        waiter = self.waiters.get(id)
        if waiter is not None and now < waiter.deadline:
            waiter.promise(length, now)
            return self._look(waiter, begins), self._messages
        # If it was the head, and too late, the next one has to be told: nobody else will.
        was_head = self._is_head(id)
        self.waiters.pop(id, None)
        if self._sweep_and_grant() or was_head:
            self._hint()
        if self._remembers(self.broken, id):
            return ("gone", "broken"), self._messages
        if holder is not None:
            return ("gone", "expired"), self._messages
        return ("gone", "taken_over" if self.holders else "gone"), self._messages

    def _look(self, waiter: Entry, begins: bool) -> Held | Waits:
        """Grant a waiter that asks, if it can be granted."""
        id, changed = waiter.asked.id, self._sweep_and_grant()
        if id in self.waiters:
            changed = self._join_owner(waiter) or changed
        if id in self.holders:
            waiter.began = begins
        if changed:
            self._hint(unless=id)
        return self._waits(waiter) if id in self.waiters else self._held(waiter)

    def leave(
        self, now_us: int, id: str, *, end: End = "ended", marker: int = 0, retention: int
    ) -> tuple[Left, list[Message]]:
        """Release a holder or withdraw a waiter, whichever the request is by now, and hand off.

        :param end: ``lost``: the lease ran out for its holder, whose local deadline is the earlier one: a
            holder with a lock-delay or a hold stays where it is. ``unused``: its hold closes nothing.
        :param marker: for so many milliseconds a late duplicate of the acquire is refused.
        """
        now = self._begin(now_us, retention)
        if marker:
            self._remember(self.markers, id, now + marker)
        if not self.waiters:
            return self._remove(id, end), self._messages
        was_head, closed_until = self._is_head(id), self._closed_until(id)
        reply = self._remove(id, end)
        nearer = id in self.holders and self._closed_until(id) < closed_until
        changed = self._sweep_and_grant()
        if changed or nearer or (was_head and reply != ("released",)):
            self._hint()
        return reply, self._messages

    def _closed_until(self, id: str) -> int:
        holder = self.holders.get(id)
        return 0 if holder is None else holder.closed_until

    def _remove(self, id: str, end: End) -> Left:
        holder = self.holders.get(id)
        if holder is not None and self._release(holder, end):
            return ("released",)
        waiter = self.waiters.pop(id, None)
        if waiter is not None and holder is None:
            return ("withdrawn",)
        if self._remembers(self.broken, id):
            return ("gone", "broken")
        return ("gone", "gone" if holder is None else "expired")

    def _release(self, holder: Entry, end: End) -> bool:
        """End a holder, or what is left of it; return whether it held until now."""
        now = self.now
        if holder.rest:
            return now < holder.closed_until  # the leave is repeated: its answer was lost
        if now >= holder.deadline:
            if end == "unused":
                holder.began, holder.hold_until = False, 0  # the grant came too late
            return False
        closes = holder.began and now < holder.hold_until
        if end == "lost" and (holder.asked.delay or closes):
            return False
        if end == "ended" and now < holder.hold_until:
            holder.deadline, holder.length, holder.rest = now, 0, holder.hold_until - now
        else:
            del self.holders[holder.asked.id]
        return True

    def record_success(
        self, now_us: int, id: str, result: bytes, *, keep: int, marker: int = 0, retention: int
    ) -> tuple[Left, list[Message]]:
        """Leave, and put a success on record for ``keep`` milliseconds, if the request still holds."""
        now = self._begin(now_us, retention)
        holder = self.holders.get(id)
        if self.record is not None and self.record[0] == id and now < self.record_until:
            pass  # the answer to an earlier call was lost
        elif holder is None or now >= holder.deadline:
            return self.leave(now_us, id, marker=marker, retention=retention)
        else:
            self._record(id, result, now + keep)
        if marker:
            self._remember(self.markers, id, now + marker)
        return ("recorded",), self._messages

    def _record(self, id: str, result: bytes, until: int) -> None:
        self.record, self.record_until, self.recorded_at = (id, result), until, self.now
        self.holders.clear()
        waiting: dict[str, list[str]] = {}
        for entry in self.waiters.values():
            waiting.setdefault(entry.asked.client, []).append(entry.asked.id)
        self.waiters.clear()
        self._messages += [
            Message("done", client, ",".join(ids)) for client, ids in waiting.items()
        ]

    def forget(self, now_us: int) -> tuple[bool, list[Message]]:
        """Take the record of a success back; return whether there was one."""
        self._begin(now_us, self._retention)
        known, self.record = self._on_record() is not None, None
        return known, self._messages

    def _on_record(self) -> Done | None:
        if self.record is None or self.now >= self.record_until:
            return None
        return ("done", self.record[1])

    def break_(
        self, now_us: int, tokens: frozenset[int] | None = None, *, remember: int, retention: int
    ) -> tuple[list[str], list[Message]]:
        """Release all holders by force; return the ids of the live ones. Lock-delay is ignored.

        :param tokens: release those alone; lock-delay keeps closed then what it keeps closed.
        :param remember: for so many milliseconds at least the broken ids are remembered.
        """
        now = self._begin(now_us, retention)
        live = [
            entry
            for entry in self.holders.values()
            if now < entry.deadline and (tokens is None or entry.token in tokens)
        ]
        if tokens is None:
            self.holders.clear()
        for entry in live:
            asked = entry.asked
            self.holders.pop(asked.id, None)
            self._remember(self.broken, asked.id, max(now + remember, entry.deadline))
            self._messages.append(Message("broken", asked.client, asked.id, entry.token))
        self._sweep_and_grant()
        self._hint()
        return [entry.asked.id for entry in live], self._messages

    def inspect(self, now_us: int, *, queues: bool = True) -> Seen:
        """Return what people want to know of the name; without ``queues``, not who waits.

        Where the clock was set back, it clamps: else a dead holder would have its whole length left at each
        look.
        """
        now = now_us // 1000
        self._follow(now)
        holders, closed, closed_places = [], 0, 0
        for entry in self.holders.values():
            if now < entry.deadline:
                holders.append((entry.asked, entry.token, entry.deadline - now, entry.length))
            elif now < entry.closed_until:
                closed = max(closed, entry.closed_until - now)
                closed_places += 1
        waiters = [
            (entry.asked, max(0, now - entry.since))
            for entry in (self.waiters.values() if queues else ())
            if now < entry.deadline
        ]
        token = self.token if now < self.token_until else 0
        recorded = None
        if self.record is not None and now < self.record_until:
            recorded = max(0, now - self.recorded_at), self.record_until - now
        return Seen(holders, waiters, token, closed, closed_places, recorded, now_us)

    # -- sweeping and granting ---------------------------------------------------------------------

    def _begin(self, now_us: int, retention: int) -> int:
        now = now_us // 1000
        self._follow(now)
        self.now_us, self._retention = now_us, retention
        self._messages = []
        return now

    def _follow(self, now: int) -> None:
        if now < self.now:
            # The clock was set back: nobody may have more left than its length, or the dead would last.
            for entry in (*self.holders.values(), *self.waiters.values()):
                self._clamp(entry, now)
        elif now >= self.record_until:
            self.record = None  # or it would come back when the clock is set back
        self.now = now

    @staticmethod
    def _clamp(entry: Entry, now: int) -> None:
        entry.deadline = min(entry.deadline, now + entry.length)
        entry.hold_until = min(entry.hold_until, now + entry.asked.hold)

    def _sweep_and_grant(self) -> bool:
        """Drop what is overdue, then grant from the head on, as far as the holders allow.

        Nobody passes a head that does not fit. Returns whether the head is a new one. (Overdue waiters
        behind the head stay until they are met there.)
        """
        now, changed = self.now, False
        self.holders = {id: e for id, e in self.holders.items() if now < e.closed_until}
        self._owners, self._exclusive = {}, False
        for entry in self.holders.values():
            self._count(entry)
        granted: list[Entry] = []
        while self.waiters:
            head = next(iter(self.waiters.values()))
            if head.deadline <= now:
                del self.waiters[head.asked.id]
            elif self._gets_in_again(head.asked) or self._fits(head.asked):
                # A granted waiter keeps the deadline it had: a ghost that is granted costs no more than one
                # that waits.
                self._grant(head)
                granted.append(head)
            else:
                break
            changed = True
        for entry in granted:
            asked = entry.asked
            entry.recalled = asked.lingers and bool(self.waiters)
            self._messages.append(
                Message("granted", asked.client, asked.id, entry.token, entry.recalled)
            )
        return changed

    def _join_owner(self, waiter: Entry) -> bool:
        """Let a waiter in whose named owner came to hold by another request; return whether the head has to
        look anew. (A task's own request never waits while the task holds.)"""
        if not waiter.asked.owner.startswith("u") or not self._gets_in_again(waiter.asked):
            return False
        sooner = waiter.closed_until < self._earliest_end()
        self._grant(waiter)
        changed = self._sweep_and_grant() or sooner
        waiter.recalled = waiter.asked.lingers and bool(self.waiters)
        return changed

    def _grant(self, waiter: Entry) -> None:
        del self.waiters[waiter.asked.id]
        own = self._owners.get(waiter.asked.owner)
        self._admit(waiter, self._next_token() if own is None else own.token)

    def _admit(self, entry: Entry, token: int) -> None:
        entry.token, entry.hold_until = token, self.now + entry.asked.hold
        self.holders[entry.asked.id] = entry
        self._count(entry)

    def _count(self, holder: Entry) -> None:
        exclusive = holder.asked.mode == "exclusive"
        self._exclusive = self._exclusive or exclusive
        if self.now < holder.deadline:
            own = self._owners.setdefault(holder.asked.owner, Owned(holder.token, exclusive))
            own.exclusive = own.exclusive or exclusive

    def _fits(self, asked: Asked) -> bool:
        """Whether the holders, and those within their lock-delay, leave room for the request."""
        if asked.mode == "exclusive":
            return not self.holders
        return not self._exclusive and (not asked.limit or len(self.holders) < self.limit)

    def _gets_in_again(self, asked: Asked) -> bool:
        own = self._owners.get(asked.owner)
        return own is not None and (asked.mode == "shared" or own.exclusive)

    # -- tokens, and what is remembered ------------------------------------------------------------

    def _next_token(self) -> int:
        """Return a token above all before. It follows the clock, so none has to be kept for ever."""
        last, until = (self.token, self.token_until) if self.now < self.token_until else (0, 0)
        self.token = max(last + 1, self.now_us)
        # When the clock was set back, the token is ahead of it: for so much longer it is remembered.
        ahead = max(0, -(-self.token // 1000) - self.now)
        self.token_until = max(until, self.now + self._retention + ahead)
        return self.token

    def _remember(self, what: dict[str, int], id: str, until: int) -> None:
        while what and next(iter(what.values())) <= self.now:
            del what[next(iter(what))]
        what[id] = max(until, what.pop(id, 0))

    def _remembers(self, what: dict[str, int], id: str) -> bool:
        return self.now < what.get(id, 0)

    def kept_until(self) -> int:
        """Return from when on nothing is left of this name, if no call comes until then."""
        entries = (*self.holders.values(), *self.waiters.values())
        ends = [entry.closed_until for entry in entries]
        ends.append(self.record_until if self.record is not None else 0)
        return max(self.token_until, *ends, *self.markers.values(), *self.broken.values(), 0)

    # -- what is said ------------------------------------------------------------------------------

    def _held(self, entry: Entry) -> Held:
        word: Literal["held", "recalled"] = "recalled" if entry.recalled else "held"
        return (word, entry.token, entry.deadline - self.now)

    def _waits(self, entry: Entry) -> Waits:
        look = None
        if self._is_head(entry.asked.id):
            look = max(0, self._earliest_end() - self.now)
        floor = max(self.token if self.now < self.token_until else 0, self.now_us)
        return ("waiting", entry.deadline - self.now, look, floor)

    def _is_head(self, id: str) -> bool:
        return next(iter(self.waiters), None) == id

    def _earliest_end(self) -> int:
        """Return when the first of the blockers ends if it is never heard of again."""
        return min((entry.closed_until for entry in self.holders.values()), default=self.now)

    def _hint(self, unless: str | None = None) -> None:
        """Tell the head to look, as it does not know yet when its blockers end; unless it will ask soon
        enough by itself, or is the caller."""
        head = next(iter(self.waiters.values()), None)
        if head is None or head.asked.id == unless:
            return
        next_extension = head.deadline - head.length * 2 / 3
        if self._earliest_end() < next_extension:
            self._messages.append(Message("look", head.asked.client, head.asked.id))
