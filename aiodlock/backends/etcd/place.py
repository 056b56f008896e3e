"""One request's place: its key in the queue, then among the holders, until it is deleted.

Over 400 lines: a request's whole way, each step with what its lost answer means.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..._clock import local_deadline, now
from ..._errors import BackendError, BackendUnavailable, LossReason
from ..._model import LOST, End, Gone, Granted, Left, Refused, Terms, Waiting
from ..base import Listener, Unanswered
from . import messages as m
from . import recipe
from .leases import SharedLease
from .link import LeaseNotFound, NoSpace
from .recipe import Keys, Queue, Record, Turn
from .room import Room

if TYPE_CHECKING:
    from .store import EtcdBackend

_logger = logging.getLogger("aiodlock")

#: A holder's key is moved from the lease of its waiting to that of its ttl after so long: who leaves sooner
#: is spared that write (seconds).
_MOVE_AFTER = 0.05
#: Pauses between repetitions in the background (seconds).
_PAUSE = 0.1
#: So often a single try is repeated when others change the name meanwhile.
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Move:
    """What is to be sent, who takes the answer, and the leases that have to be there."""

    request: m.TxnRequest
    answered: Callable[[m.TxnResponse], object]
    leases: tuple[SharedLease | None, ...]


State = Literal["new", "asking", "waiting", "held", "left"]


class EtcdPlace:
    """A request. Mutable state:

    ``state``; ``token``; ``created`` (the revision in which its key was made, 0 if not known);
    ``_lease`` (that its key ends with); ``_maybe`` (leases that it may end with instead: a move to them
    had no answer); ``_written`` (the revision in which its key was written last); ``_writer`` (held
    while it is being written); ``_delay_lease`` (the same as ``_lease`` for its lock-delay; None without);
    ``_ttl`` (of a holder); ``_until`` (the end of what is not extended by itself); ``_deadline`` (the
    latest that was told); ``_closes`` (its ``hold_at_least`` was written); ``_ambiguous`` (a message that
    makes the key may be carried out later); ``_leaves`` (how many leaves were sent); ``_failed`` (the last
    message had no answer); ``_room`` (while it waits); ``_timer`` (of what is due).
    """

    __slots__ = (
        "_ambiguous",
        "_closes",
        "_deadline",
        "_delay_lease",
        "_failed",
        "_keys",
        "_lease",
        "_leaves",
        "_listener",
        "_maybe",
        "_room",
        "_store",
        "_terms",
        "_timer",
        "_ttl",
        "_until",
        "_writer",
        "_written",
        "created",
        "id",
        "owner",
        "state",
        "token",
    )

    def __init__(
        self, store: EtcdBackend, terms: Terms, request_id: str, owner: str, listener: Listener
    ) -> None:
        self.id: str = request_id
        self.owner: str = owner
        self.state: State = "new"
        self.token: int = 0
        self.created: int = 0
        self._store = store
        self._terms = terms
        self._listener = listener
        self._keys: Keys = store.keys(terms.kind, terms.name)
        self._ttl: float = terms.ttl
        self._lease: SharedLease | None = None
        self._maybe: tuple[SharedLease, ...] = ()
        self._written: int = 0
        self._writer: asyncio.Lock | None = None
        self._delay_lease: SharedLease | None = None
        self._until: float = math.inf
        self._deadline: float = 0.0
        self._ambiguous = False
        self._closes = False
        self._leaves = 0
        self._failed = False
        self._room: Room | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<EtcdPlace {self._terms.name!r} {self.state} id={self.id}>"

    # -- what the core reads ---------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Until when the store certainly honours the request: it lives as long as its lease."""
        if self._lease is not None and self._lease.alive:
            length = self._ttl if self.state == "held" else self._terms.waiter_ttl
            end = min(self._lease.deadline(length), self._until)
            for other in self._maybe:
                end = min(end, other.deadline(length)) if other.alive else 0.0
            self._deadline = max(self._deadline, end)
        return self._deadline

    @property
    def capped(self) -> bool:
        """Whether the deadline is that near because of ``max_hold``."""
        maximum = self._terms.max_hold
        return maximum is not None and not self._terms.auto_extend and self._ttl >= maximum

    @property
    def silent(self) -> bool:
        """Whether the last message had no answer."""
        lease = self._lease
        if lease is not None and lease.silent_since is not None:
            return self._failed or now() - lease.silent_since > _PAUSE
        return self._failed

    @property
    def ends_by(self) -> float:
        """A lease that is shared does not end while the client lives."""
        return math.inf

    @property
    def lease(self) -> SharedLease | None:
        """The lease that its key ends with."""
        return self._lease

    @property
    def settled(self) -> bool:
        """Whether the key is where ``lease`` says: not while it is moved."""
        return not self._is_written and not self._maybe

    @property
    def _is_written(self) -> bool:
        return self._writer is not None and self._writer.locked()

    @property
    def outdated(self) -> bool:
        """Whether its keys have to be moved, and can be: a lease that they end with counts no more, or the
        lease is not known."""
        if self.state not in ("waiting", "held") or self._is_written or not self._written:
            return False
        found = (self._lease, self._delay_lease)
        return bool(self._maybe) or any(
            one is not None and one.alive and one.outdated for one in found
        )

    @property
    def terms(self) -> Terms:
        """What it asks for."""
        return self._terms

    @property
    def key(self) -> bytes:
        """Its key."""
        return self._keys.request(self.id)

    # -- asking ----------------------------------------------------------------------------------

    async def acquire(self, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        """Ask. Repeating it is harmless: the key is made once."""
        if self.state == "left":
            return Gone("gone")
        if self.state == "waiting":
            return Waiting(self.deadline, None)
        try:
            if self.state == "held":
                answer: Granted | Waiting | Refused | Gone = Granted(self.token, self.deadline)
            else:
                self.state = "asking"
                self._store.add(self)
                answer = await self._queue() if wait else await self._try()
            if isinstance(answer, Granted) and self._terms.begins and not await self._close_after():
                answer = Gone("gone")
        except BackendUnavailable:
            self._failed = True
            raise
        except LeaseNotFound as ended:
            # Nothing was written. Another lease is made for the next attempt.
            raise BackendUnavailable(f"a lease ended before it was used: {ended}") from ended
        self._failed = False
        if isinstance(answer, Refused) and not answer.unsure:
            self.abandon()
        return answer

    async def _leases(self) -> tuple[SharedLease, SharedLease, SharedLease | None]:
        terms, pool = self._terms, self._store.leases
        holder = await pool.get(self._ttl)
        waiter = holder if terms.waiter_ttl >= self._ttl else await pool.get(terms.waiter_ttl)
        delay = await pool.get(self._ttl + terms.lock_delay) if terms.lock_delay else None
        return holder, waiter, delay

    def _value(self, order: int | None = None) -> bytes:
        store = self._store
        return recipe.value_of(self._terms, self.owner, store.label, store.description, order)

    def _record(self) -> Record:
        """Return this request as one that comes now."""
        terms = self._terms
        order = self._store.far_future
        return Record(self.id, terms.mode, self.owner, self._store.label, terms.limit, order, order)

    async def _send(self, request: m.TxnRequest, *leases: SharedLease | None) -> m.TxnResponse:
        """Send what may make the key, with one of these leases. Without an answer it may still be carried
        out, now or later."""
        before, self._ambiguous = self._ambiguous, True
        try:
            answer = await self._store.transact(self._keys, request)
        except LeaseNotFound:
            self._ambiguous = before
            await self._store.look_for(*leases)
            raise
        except Unanswered:
            raise
        except BackendError:
            self._ambiguous = before
            raise
        self._ambiguous = before
        return answer

    async def _queue(self) -> Granted | Waiting | Refused | Gone:
        holder, waiter, delay = await self._leases()
        leases = recipe.Leases(holder.id, waiter.id, delay.id if delay else 0)
        room = self._store.rooms.of(self._keys)
        self._room = room
        room.add(self)
        sent = now()
        with room.opening() as opens:
            request = recipe.enter(self._keys, self.id, self._value(), leases, read=opens)
            answer = await self._send(request, holder, waiter, delay)
            assert answer.header is not None
            if opens and not answer.succeeded:
                read = answer.responses[1].response_range
                assert read is not None
                room.begin(Queue(self._keys, answer.header.revision, read.kvs))
        if answer.succeeded:
            self.created = self._written = answer.header.revision
            return self._hold(self.created, holder, delay, sent)
        nested = answer.responses[0].response_txn
        assert nested is not None
        await room.open()
        if nested.succeeded:
            queue = await room.reached(answer.header.revision)
        else:
            # An earlier attempt has made the key, or it has left.
            found = (await self._store.read(self._keys)).find(self.id)
            if found is None:
                return Gone("gone")
            queue = await room.reached(found.created)
        found = queue.find(self.id)
        if found is None:
            return Gone("expired" if not waiter.alive else "gone")
        lease = self._lease_at(found)
        self.created, self._written = found.created, found.written
        self._use(lease)
        return await self._take(queue.turn_of(found), found, queue)

    def _lease_at(self, found: Record) -> SharedLease:
        """Return the lease that the key was found with, which may be that of an earlier attempt."""
        lease = self._store.leases.by_id(found.lease)
        if lease is None:
            raise BackendUnavailable(
                "a key ends with a lease that is renewed no more: ask again then"
            )
        return lease

    def _delay_at(self, queue: Queue) -> SharedLease | None:
        found = queue.delays.get(self.id)
        return None if found is None else self._store.leases.by_id(found.lease)

    async def _take(
        self, turn: Turn, record: Record, queue: Queue
    ) -> Granted | Waiting | Refused | Gone:
        """Do what the state of the queue means for a request that was just queued."""
        match turn.what:
            case "waits":
                self.state = "waiting"
                return Waiting(self.deadline, None)
            case "holds" | "joins":
                held = await self._confirm(turn, record, queue)
                if held is None:
                    self.state = "waiting"  # what it was to join is gone
                    return Waiting(self.deadline, None)
                return Granted(held, self.deadline)
            case "gone":
                return Gone("gone")
            case "deadlock" | "limit":
                pass
        try:
            await self.leave(LOST)
        except BackendError:
            return Refused(turn.what, turn.used, unsure=True)
        return Refused(turn.what, turn.used, unsure=self._ambiguous)

    async def _confirm(self, turn: Turn, record: Record, queue: Queue) -> int | None:
        """Write what a grant needs, if it needs anything; return the token, or None if it is no grant."""
        async with self._alone():
            return await self._confirm_alone(turn, record, queue)

    def _alone(self) -> asyncio.Lock:
        """Only one at a time writes the key."""
        if self._writer is None:
            self._writer = asyncio.Lock()
        return self._writer

    async def _confirm_alone(self, turn: Turn, record: Record, queue: Queue) -> int | None:
        delay: SharedLease | None = None
        order = turn.order
        if turn.what == "joins":
            mate = queue.find(turn.mate)
            holder, _, delay = await self._leases()
            if mate is None:
                return None
            leases = recipe.Leases(holder.id, 0, delay.id if delay else 0)
            joining = recipe.join(
                self._keys, record, self._written, mate, self._value(order), leases
            )
            with self._writing(holder):
                answer = await self._send(joining, holder, delay)
            assert answer.header is not None
            if answer.succeeded:
                self._is_at(holder, answer.header.revision)
            else:
                assert answer.responses[0].response_range is not None
                now_there = Queue(self._keys, 0, answer.responses[0].response_range.kvs)
                mine = now_there.find(self.id)
                if mine is not None:
                    self._found(mine.lease, mine.written)
                    delay = self._delay_at(now_there) or delay
                if mine is None or not mine.joined:
                    return None
                order = mine.order
            self._hold(order, self._lease or holder, delay, now())
            return order
        if self._terms.lock_delay and not record.joined:
            holder, _, delay = await self._leases()
            if not await self._write(self._value(), self._value(order), holder, delay):
                return None
            self._hold(order, holder, delay, now())
            return order
        assert self._lease is not None
        self._hold(order, self._lease, None, now())
        return order

    def _hold(
        self, order: int, lease: SharedLease, delay: SharedLease | None, sent: float
    ) -> Granted:
        """Be the holder."""
        self.created = self.created or order
        self.token, self.state = order, "held"
        self._use(lease)
        if delay is not None:
            self._use_delay(delay)
        self._wait_no_more()
        if not self._terms.auto_extend:
            self._until = local_deadline(sent, round(self._ttl * 1000))
        if lease.seconds < self._ttl:
            self._timer = self._store.later(_MOVE_AFTER, self._move_soon)
        return Granted(order, self.deadline)

    def _use(self, lease: SharedLease) -> None:
        if lease is not self._lease:
            pool, before = self._store.leases, self._lease
            pool.use(lease)
            self._lease = lease
            if before is not None:
                pool.release(before)

    def _wait_no_more(self) -> None:
        if self._room is not None:
            self._room.remove(self)
            self._room = None

    async def _try(self) -> Granted | Refused | Gone:
        """Ask once: be granted at once, or leave nothing behind."""
        await self._store.until_left(self._keys)
        holder, waiter, delay = await self._leases()
        leases = recipe.Leases(holder.id, waiter.id, delay.id if delay else 0)
        sent = now()
        request = recipe.enter_if_free(self._keys, self.id, self._value(), leases)
        joins = 0
        for _ in range(_TRIES):
            answer = await self._send(request, holder, delay)
            assert answer.header is not None
            if answer.succeeded:
                self.created = self._written = answer.header.revision
                return self._hold(joins or self.created, holder, delay, sent)
            read = answer.responses[0].response_range
            assert read is not None
            queue = Queue(self._keys, answer.header.revision, read.kvs)
            mine = queue.find(self.id)
            if mine is not None:  # an earlier attempt was carried out
                lease, delay = self._lease_at(mine), self._delay_at(queue) or delay
                self.created, self._written = mine.created, mine.written
                return self._hold(mine.order, lease, delay, sent)
            joins, record = 0, self._record()
            turn = queue.turn_of(record)
            if turn.what == "deadlock" or turn.what == "limit":
                return Refused(turn.what, turn.used, unsure=self._ambiguous)
            if turn.what == "joins":
                mate = queue.find(turn.mate)
                assert mate is not None
                joining = Record(self.id, record.mode, self.owner, record.client, 0, turn.order, 0)
                request = recipe.join(self._keys, joining, 0, mate, self._value(turn.order), leases)
                joins = turn.order
            elif queue.would_hold(record):
                request = recipe.enter_unless_changed(
                    self._keys, self.id, self._value(), leases, queue.revision
                )
            else:
                break
        return Refused("busy", unsure=self._ambiguous)

    # -- what is heard ---------------------------------------------------------------------------

    def on_turn(self, turn: Turn) -> None:
        """The room has seen that it holds, or may join its owner's other request."""
        if self.state != "waiting":
            return
        closes = self._terms.hold_at_least and self._terms.begins
        if turn.what == "holds" and not self._terms.lock_delay and not closes:
            assert self._lease is not None
            self._hold(turn.order, self._lease, None, now())
            self._tell_granted()
        elif self._timer is None:
            self._timer = self._store.later(0.0, self._confirm_soon)

    def _tell_granted(self) -> None:
        if self.deadline - self._terms.margin > now():
            self._listener.granted()
        else:
            self._store.start(self._extend_first)

    async def _extend_first(self) -> None:
        """Too little is left for a body: renew, and tell then."""
        try:
            await self._move_once()  # if it is at a lease that counts no more
            if self._lease is not None and self.deadline - self._terms.margin <= now():
                await self._store.leases.renew(self._lease)
        except BackendError:
            pass
        lease = self._lease
        if self.state == "held" and lease is not None:
            if lease.alive and self.deadline - self._terms.margin > now():
                self._listener.granted()
            else:
                self._listener.gone("expired")

    def _confirm_soon(self) -> None:
        self._timer = None
        self._store.start(self._confirm_waiting)

    async def _confirm_waiting(self) -> None:
        """Write what the grant of a waiter needs, until that is answered."""
        while self.state == "waiting" and self._room is not None:
            queue = self._room.queue
            record = None if queue is None else queue.find(self.id)
            if queue is None or record is None:
                return  # the room tells when it knows more
            turn = queue.turn_of(record)
            if turn.what not in ("holds", "joins"):
                return
            try:
                token = await self._confirm(turn, record, queue)
            except BackendError as failed:
                self._listener_failed(failed)
            else:
                if token is not None:
                    await self._begin_waiting()
                    return
            await asyncio.sleep(_PAUSE)

    async def _begin_waiting(self) -> None:
        """Tell a waiter its grant, once the name stays closed if it has to."""
        while self.state == "held":
            try:
                if not self._terms.begins or await self._close_after():
                    self._tell_granted()
                else:
                    self.on_gone("gone")
                return
            except BackendError as failed:
                self._listener_failed(failed)
            await asyncio.sleep(_PAUSE)

    async def _close_after(self) -> bool:
        """Keep the name closed for ``hold_at_least`` from now on; False if the key is gone."""
        if self._closes or not self._terms.hold_at_least:
            return True
        # Made after the grant, and never renewed: it ends so long after the grant, or later.
        lease = await self._store.leases.make(self._terms.hold_at_least)
        closing = recipe.close_after(
            self._keys, self.id, self.created, self._value(self.token), lease.id
        )
        answer = await self._store.transact(self._keys, closing)
        if not answer.succeeded:
            found = answer.responses[0].response_range
            if found is None or not found.kvs:
                return False
        self._closes = True
        return True

    def _listener_failed(self, error: BackendError) -> None:
        if self.state in ("waiting", "held"):
            self._failed = isinstance(error, BackendUnavailable)
            self._listener.extension_failed(error)

    def on_vanished(self) -> None:
        """The room has seen that its key is gone."""
        self.on_gone("gone")

    def on_gone(self, reason: LossReason) -> None:
        """The store does not know the request any more."""
        if self.state not in ("waiting", "held"):
            return
        self._stop()
        self._written, self._maybe = 0, ()  # there is nothing to move any more
        self.state = "left" if self.state == "waiting" else "held"
        self._listener.gone(reason)

    def on_silent(self, error: Exception) -> None:
        """What keeps it alive has had no answer."""
        if self.state in ("waiting", "held"):
            self._listener.extension_failed(error)

    def on_unavailable(self, error: BackendUnavailable) -> None:
        """Nothing has answered for too long."""
        if self.state == "waiting":
            self._listener.unavailable(error)

    # -- holding ---------------------------------------------------------------------------------

    def _move_soon(self) -> None:
        self._timer = None
        if self.state == "held":
            self._store.start(self._move_until_answered)

    async def _move_until_answered(self) -> None:
        """Have the holder's key end with the lease of its ttl, until that is answered."""
        while self.state == "held":
            try:
                await self._move_once()
                return
            except BackendError as failed:
                self._listener_failed(failed)
            await asyncio.sleep(_PAUSE)

    async def _move_once(self) -> None:
        async with self._alone():
            while self._written and self.state in ("waiting", "held"):
                lease, delay = await self._wanted()
                if lease is self._lease and delay is self._delay_lease and not self._maybe:
                    return
                if await self._write(self._value_now(), self._value(self.token), lease, delay):
                    return

    def _value_now(self) -> bytes:
        return self._value(self.token if self.token not in (0, self.created) else None)

    async def _wanted(self) -> tuple[SharedLease, SharedLease | None]:
        """Return the leases that its keys should end with. The first one promises what was told."""
        while True:
            holder, waiter, delay = await self._leases()
            lease, length = holder, self._ttl
            if self.state != "held":
                lease, length, delay = waiter, self._terms.waiter_ttl, None
            elif self._lease is not None and now() + length < self.deadline:
                # More was told, before ``extend`` made it shorter: until then by a lease as long as this.
                lease, length = await self._store.leases.get(self._lease.asked), self._lease.seconds
                self._store.leases.hurry(lease, self._ttl)
                self._cancel_timer()
                pause = self.deadline - now() - self._ttl
                self._timer = self._store.later(max(_PAUSE, pause), self._move_soon)
            if lease is self._lease or lease.deadline(length) >= self.deadline:
                return lease, delay
            await self._store.leases.renew(lease)

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[Move | None]:
        """Give what moves its keys to leases that count, to be sent together with others'; None if there
        is nothing to move any more."""
        async with self._alone():
            if not self._written or self.state not in ("waiting", "held"):
                yield None
                return
            lease, delay = await self._wanted()
            if lease is self._lease and delay is self._delay_lease and not self._maybe:
                yield None
                return
            request = self._move(self._value_now(), self._value(self.token), lease, delay)
            with self._writing(lease):
                yield Move(
                    request, lambda answer: self._wrote(answer, lease, delay), (lease, delay)
                )

    async def _write(
        self, value: bytes, delay_value: bytes, lease: SharedLease, delay: SharedLease | None
    ) -> bool:
        """Write the key with another lease; else it is known now where it is, or that it is gone."""
        request = self._move(value, delay_value, lease, delay)
        with self._writing(lease):
            try:
                answer = await self._store.transact(self._keys, request)
            except LeaseNotFound:
                await self._store.look_for(lease, delay)
                raise
        return self._wrote(answer, lease, delay)

    def _move(
        self, value: bytes, delay_value: bytes, lease: SharedLease, delay: SharedLease | None
    ) -> m.TxnRequest:
        leases = recipe.Leases(lease.id, 0, delay.id if delay else 0)
        return recipe.move(self._keys, self.id, self._written, value, delay_value, leases)

    @contextmanager
    def _writing(self, lease: SharedLease) -> Iterator[None]:
        """Know that the key may end with this lease, too, unless the message was refused."""
        before = self._maybe
        self._maybe += (lease,)
        try:
            yield
        except BackendUnavailable:
            raise
        except BackendError:
            self._maybe = before
            raise

    def _wrote(self, answer: m.TxnResponse, lease: SharedLease, delay: SharedLease | None) -> bool:
        """Take the answer; tell whether the key was written."""
        assert answer.header is not None
        if self.state == "left":
            return False
        if answer.succeeded:
            self._is_at(lease, answer.header.revision)
            if delay is not None:
                self._use_delay(delay)
            return True
        read = answer.responses[0].response_range
        if read is None or not read.kvs:
            self.on_gone("gone")
        else:
            self._found(read.kvs[0].lease, read.kvs[0].mod_revision)
        return False

    def _found(self, lease_id: int, written: int) -> None:
        """The key was seen: an earlier message without an answer was carried out."""
        self._written = written
        lease = self._store.leases.by_id(lease_id)
        if lease is not None:
            self._is_at(lease, written)

    def _is_at(self, lease: SharedLease, written: int) -> None:
        self._maybe = ()
        self._written = written
        self._use(lease)

    def _use_delay(self, delay: SharedLease) -> None:
        pool, before = self._store.leases, self._delay_lease
        if delay is not before:
            pool.use(delay)
            self._delay_lease = delay
            if before is not None:
                pool.release(before)

    async def extend(self, ttl: float | None) -> None:
        """Extend now; with ``ttl`` by that from now on."""
        if ttl is not None:
            self._ttl = ttl
        sent = now()
        await self._move_once()
        if self.state != "held" or self._lease is None:
            return
        await self._store.leases.renew(self._lease)
        reason = await self._store.why_gone(self)
        if reason is not None:
            self.on_gone(reason)
        elif not self._terms.auto_extend:
            self._until = local_deadline(sent, round(self._ttl * 1000))

    def reuse(self, terms: Terms) -> None:
        """Never: a lease does not linger here."""

    async def begin(self) -> None:
        """A body begins: keep the name closed for ``hold_at_least`` from now on."""
        if self.state == "held" and not await self._close_after():
            self.on_gone("gone")

    def run_out(self) -> None:
        """The lease counts as lost here. Its key would live on with the client: end it when it is due."""
        if self.state == "held" and self._lease is not None:
            self._cancel_timer()
            pause = max(0.0, self.deadline - now())
            self._timer = self._store.later(pause, lambda: self._store.start(self._end_overdue))

    async def _end_overdue(self) -> None:
        while self.state == "held":
            try:
                await self._leave_once(LOST)
                return
            except BackendError as failed:
                _logger.debug("ending an overdue lease failed: %s", failed)
            await asyncio.sleep(_PAUSE)

    # -- leaving ---------------------------------------------------------------------------------

    async def leave(self, end: End, *, within: float | None = None) -> Left:
        """Delete the key."""
        self._stop()
        if self.state == "new":
            self.state = "left"
            return Left("withdrawn")
        self.state = "left"
        try:
            async with asyncio.timeout(within):
                left = await self._leave_once(end)
        except TimeoutError as silent:
            raise Unanswered(f"no answer for {within:g} s") from silent
        self.abandon()
        return left

    async def _leave_once(self, end: End) -> Left:
        self._leaves += 1
        repeated = self._leaves > 1
        store, message = self._store, self._store.message_key(self.id)
        if end.lost and self._delay_lease is not None:
            return await self._leave_closed(message)
        marker = await store.leases.make(store.marker_ttl) if self._ambiguous else None
        opens = end.unused and self._terms.hold_at_least > 0
        leaving = recipe.leave(
            self._keys,
            self.id,
            message,
            delay=self._terms.lock_delay > 0,
            opens=opens,
            marker_lease=marker.id if marker is not None else 0,
        )
        try:
            answer = await store.transact(self._keys, leaving)
        except NoSpace:
            # Nothing can be written, so no late duplicate either: delete alone.
            delayed = self._terms.lock_delay > 0
            leaving = recipe.leave(self._keys, self.id, message, delay=delayed, opens=opens)
            answer = await store.transact(self._keys, leaving)
        if answer.succeeded:
            return Left("released" if self.token else "withdrawn")
        found = answer.responses[0].response_range
        if found is not None and found.kvs:
            return Left("gone", "broken")
        if repeated:
            return Left("released" if self.token else "withdrawn")
        if self._delay_lease is not None:
            # It ended before, so the name is closed for a while: from now on, as this client keeps that
            # lease.
            await self._leave_closed(message)
        return Left("gone", "gone" if self._lease is None or self._lease.alive else "expired")

    async def _leave_closed(self, message: bytes) -> Left:
        """Delete the key, and have the lock-delay end so much later."""
        store = self._store
        delay = await store.leases.make(self._terms.lock_delay)
        closing = recipe.leave_closed(
            self._keys, self.id, self._value(self.token), message, delay.id
        )
        answer = await store.transact(self._keys, closing)
        found = None if answer.succeeded else answer.responses[1].response_range
        if found is not None and found.kvs:
            return Left("gone", "broken")
        return Left("gone", "expired")

    def leave_soon(self, end: End, done: Callable[[Left | BackendError], object]) -> bool:
        """Send a leave that nobody awaits."""
        if not self._store.is_up:
            return False

        on_its_way = self._store.leaving(self._keys)

        async def leave() -> None:
            try:
                left: Left | BackendError = await self.leave(end)
            except BackendError as failed:
                left = failed
            finally:
                on_its_way.set_result(None)
            done(left)

        if self._store.start(leave):
            return True
        on_its_way.set_result(None)
        return False

    def abandon(self) -> None:
        """Forget what is kept of it here."""
        self._stop()
        self.state = "left"
        self._store.remove(self)
        pool = self._store.leases
        if self._lease is not None:
            pool.release(self._lease)
            self._lease = None
        if self._delay_lease is not None:
            pool.release(self._delay_lease)
            self._delay_lease = None

    def _stop(self) -> None:
        self._wait_no_more()
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
