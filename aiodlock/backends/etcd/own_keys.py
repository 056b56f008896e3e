"""The keys of one request: with which leases they end, and how they move from one lease to another. (How
they are made is in ``entering.py``, how they are deleted in ``ending.py``.)

A message that moves them may have no answer. Until the next one has, they may end with either lease, and
the deadline is the earlier one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ..._clock import local_deadline, now
from ..._errors import BackendError, BackendUnavailable, LossReason
from ..stage import HELD, OVER
from . import transactions
from .leases import SharedLease
from .recipe import Queue, Record
from .refusals import LeaseNotFound
from .request import PAUSE, Request

#: A holder's key is moved from the lease of its waiting to that of its ttl after so long: who leaves sooner
#: is spared that write (seconds).
_MOVE_AFTER = 0.05


class OwnKeys:
    """Mutable state:

    ``created`` (the revision in which its key was made, 0 if not known); ``lease`` (that its key ends
    with); ``_maybe`` (leases that it may end with instead: a move to them had no answer); ``written`` (the
    revision in which its key was written last, 0 if it is not known to be there: before, and once it is
    gone); ``alone`` (only one at a time writes the key); ``delay_lease`` (the same as ``lease`` for its
    lock-delay; None without); ``ttl`` (of a holder); ``_deadline`` (the latest that was told); ``_order``
    (that its key was found with, if it had joined).
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.ttl: float = request.terms.ttl
        self.lease: SharedLease | None = None
        self._maybe: tuple[SharedLease, ...] = ()
        self.written: int = 0
        self.alone: asyncio.Lock = asyncio.Lock()
        self.delay_lease: SharedLease | None = None
        self._deadline: float = 0.0
        self._order: int = 0
        self.created: int = 0

    # -- where they are --------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Until when they certainly live. It never comes nearer."""
        if self.lease is not None and self.lease.alive:
            request = self._request
            length = self.ttl if request.stage is HELD else request.terms.waiter_ttl
            end = self.lease.deadline(length)
            for other in self._maybe:
                end = min(end, other.deadline(length)) if other.alive else 0.0
            self._deadline = max(self._deadline, end)
        return self._deadline

    @property
    def settled(self) -> bool:
        """Whether the key is where ``lease`` says: not while it is moved, nor once it is gone."""
        return self.written > 0 and not self.alone.locked() and not self._maybe

    @property
    def outdated(self) -> bool:
        """Whether they have to be moved, and can be: a lease that they end with counts no more, or the
        lease is not known."""
        if not self._request.lives or self.alone.locked() or not self.written:
            return False
        lease, delay = self.lease, self.delay_lease
        if self._maybe or (lease is not None and lease.alive and lease.outdated):
            return True
        return delay is not None and (delay.outdated or not delay.alive)

    def use(self, lease: SharedLease) -> None:
        """The key ends with this lease."""
        self.lease = self._request.cluster.leases.use(lease, self.lease)

    def use_delay(self, delay: SharedLease) -> None:
        """The key of its lock-delay ends with this lease."""
        self.delay_lease = self._request.cluster.leases.use(delay, self.delay_lease)

    def found(self, lease_id: int, written: int) -> None:
        """The key was seen: an earlier message without an answer was carried out."""
        self.written = written
        lease = self._request.cluster.leases.by_id(lease_id)
        if lease is not None:
            self.is_at(lease, written)

    def made(self, revision: int) -> None:
        """The key was made, in that revision."""
        self.created = self.written = revision

    def were_made(self, found: Record) -> SharedLease:
        """Return the lease that the key was found with, which may be that of an earlier attempt."""
        lease = self._request.cluster.leases.by_id(found.lease)
        if lease is None:
            raise BackendUnavailable("a key ends with a lease that is renewed no more: ask again")
        self.created, self.written = found.created, found.written
        return lease

    def is_at(self, lease: SharedLease, written: int) -> None:
        """The key was written with this lease, in that revision."""
        self._maybe = ()
        self.written = written
        self.use(lease)

    def vanished(self) -> None:
        """There is nothing to move any more."""
        self.written, self._maybe = 0, ()

    def forget(self) -> None:
        """Nobody here needs these leases any more."""
        pool = self._request.cluster.leases
        self.lease = pool.use(None, self.lease)
        self.delay_lease = pool.use(None, self.delay_lease)

    # -- which leases they should end with -----------------------------------------------------------

    @property
    def useful(self) -> float:
        """How much of a holder's lease counts as held; a tenth of it at least."""
        return max(self.ttl - self._request.terms.margin, self.ttl / 10)

    def hurry(self) -> None:
        """Renew often enough for the terms of now."""
        if self.lease is not None:
            self._request.cluster.leases.hurry(self.lease, self.useful)

    async def leases(self) -> tuple[SharedLease, SharedLease, SharedLease | None]:
        """Return the leases of a holder, of a waiter and of the lock-delay. The first has time left for a
        body."""
        terms, pool = self._request.terms, self._request.cluster.leases
        holder = await pool.get(self.ttl)
        pool.hurry(holder, self.useful)
        if holder.deadline(self.ttl) - terms.margin - now() < self.useful / 2:
            await pool.renew(holder)
        waiter = holder if terms.waiter_ttl >= self.ttl else await pool.get(terms.waiter_ttl)
        return holder, waiter, await self._delay_after(holder)

    async def _delay_after(self, lease: SharedLease) -> SharedLease | None:
        """Return the lease of the lock-delay of a key that ends with this one; None without."""
        delay = self._request.terms.lock_delay
        return await self._request.cluster.leases.get_longer(lease, delay) if delay else None

    async def wanted(self, *, granted: bool = False) -> tuple[SharedLease, SharedLease | None]:
        """Return the leases that they should end with. The first one promises what was told.

        ``granted``: a waiter is about to hold.
        """
        request, pool = self._request, self._request.cluster.leases
        while True:
            holder, waiter, delay = await self.leases()
            lease, length = holder, self.ttl
            if request.stage is not HELD and not granted:
                lease, length, delay = waiter, request.terms.waiter_ttl, None
            elif (
                self.lease is not None
                and (more := self.deadline - local_deadline(now(), round(self.ttl * 1000))) > 0.0
            ):
                # More was told, before ``extend`` made it shorter: until then by a lease as long as this.
                lease, length = await pool.get(self.lease.asked), self.lease.seconds
                delay = await self._delay_after(lease)
                pool.hurry(lease, self.ttl)
                request.set_timer(max(PAUSE, more), self._move_soon)
            if lease is self.lease or lease.deadline(length) >= self.deadline:
                return lease, delay
            await pool.renew(lease)

    # -- moving them -----------------------------------------------------------------------------

    def move_later(self) -> None:
        """Move a holder's key to the lease of its ttl, if it holds for longer than a moment."""
        self._request.set_timer(_MOVE_AFTER, self._move_soon)

    def _move_soon(self) -> None:
        if self._request.stage is HELD:
            self._request.cluster.start(self._move_until_answered)

    async def _move_until_answered(self) -> None:
        """Have the holder's key end with the lease of its ttl, until that is answered."""
        await self._request.repeat(HELD, self.move)

    async def move(self, *, gather: bool = False) -> None:
        """Move them to the leases that they should end with, if they are elsewhere.

        :param gather: so do others, and there is a moment's time: they go out together.
        """
        request = self._request
        async with self.alone:
            while self.written and request.lives:
                lease, delay = await self.wanted()
                if lease is self.lease and delay is self.delay_lease and not self._maybe:
                    return
                delay_value = request.value(request.token)
                if await self.write(self._value(), delay_value, lease, delay, gather=gather):
                    return

    async def write(
        self,
        value: bytes,
        delay_value: bytes,
        lease: SharedLease,
        delay: SharedLease | None,
        *,
        gather: bool = False,
    ) -> bool:
        """Write the key with another lease; else it is known now where it is, or that it is gone."""
        if not self.written:
            return False  # gone while its lease was asked for: to write it now would make it anew
        request, cluster = self._request, self._request.cluster
        keys, id = request.keys, request.id
        leases = transactions.Leases(lease.id, 0, delay.id if delay else 0)
        message = transactions.move(keys, id, self.written, value, delay_value, leases)
        with self.writing(lease):
            try:
                own = id if gather else ""
                answer = await cluster.transact(keys, message, own=own, gather=gather)
            except LeaseNotFound:
                await cluster.look_for(lease, delay)
                raise
        if request.stage is OVER or not self.written:
            return False  # it was left, or is gone, while this was on its way
        if answer.succeeded:
            self.is_at(lease, answer.revision)
            if delay is not None:
                self.use_delay(delay)
            return True
        found = answer.found()
        if not found:
            request.on_gone("gone")
        else:
            self.found(found[0].lease, found[0].mod_revision)
            mine = Queue(keys, 0, found).find(id)
            if mine is not None and mine.joined:
                self._order = mine.order  # the room may not have heard of that yet
        return False

    def _value(self) -> bytes:
        request = self._request
        order = request.token or self._order
        return request.value(order if order not in (0, self.created) else None)

    @contextmanager
    def writing(self, lease: SharedLease) -> Iterator[None]:
        """Know that the key may end with this lease, too, unless the message was refused."""
        before = self._maybe
        self._maybe += (lease,)
        lease.unused_since = now()
        try:
            yield
        except BackendUnavailable:
            raise
        except BackendError:
            self._maybe = before
            raise

    async def why_gone(self) -> LossReason | None:
        """Return why its key is not there any more; None if it is."""
        request, cluster = self._request, self._request.cluster
        look = transactions.look(request.keys, request.id, cluster.message_key(request.id))
        answer = await cluster.transact(request.keys, look)
        if answer.succeeded:
            return None
        if answer.found():
            return "broken"
        if self.lease is not None and not self.lease.alive:
            return "expired"
        others = list((await cluster.read(request.keys)).holders())
        return "taken_over" if others else "gone"
