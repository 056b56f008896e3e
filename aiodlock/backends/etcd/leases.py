"""The leases of a client at the cluster: one for each length in whole seconds, all on one keep-alive
stream.

A lease of etcd's belongs to no request: any number of keys end with it. So a client with a thousand
requests renews one lease. The store never ends one request alone; whoever leaves has to delete it.

An answered renewal alone does not prove that a lease lives so much longer. A leader that was stopped does
not know at first that there is a new one. It may confirm renewals that the new leader does not know of, and
it has the cluster revoke leases that the new leader has renewed. So a renewal counts only if

- the lease was made in the term in which it is renewed: no leader of an earlier term knows that lease;
- a linearizable read that began after the answer shows the same term: so the leader of that term was still
  in office when it renewed the lease, and each later leader adds the whole length anew;
- the answer came before the end of the lease: so nobody could be about to revoke it.

A lease that fails this is *outdated*: it is renewed further, to keep its keys, but its deadline does not
move any more. The store moves the keys to another one. The argument is in
``docs/internals/protocol-etcd.md``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable

from ..._backoff import pause_after
from ..._clock import TIMER_STEP, local_deadline, now
from ..._errors import BackendError, BackendUnavailable
from ..base import Unanswered
from . import calls as api
from . import messages as m
from .link import Link
from .refusals import LeaseNotFound

_logger = logging.getLogger("aiodlock")

#: It is looked so often whether renewals are answered; a loop that was blocked for so long listens anew
#: (seconds).
_LOOK = 0.3
#: A lease that no request uses is kept for so long, in case another comes (seconds).
_IDLE = 30.0
#: The first pause before a confirmation that had no answer is asked for again (seconds).
_PAUSE = 0.1
#: So often a lease is made again because the leader changed meanwhile.
_TRIES = 5


class SharedLease:
    """One lease. ``seconds`` is what the server made of the length that was asked for; ``term`` is that in
    which it was made.

    Mutable state: ``renewed_at`` (when the last renewal was sent that counts), ``alive``, ``outdated``
    (renewals do not count any more),
    ``pace`` (it is renewed so often), ``users`` (requests whose keys end with it), ``unused_since``,
    ``_sent`` (when the renewals were sent on this stream), ``silent_since`` (when the first one was
    sent of those without an answer), ``due`` (of the next renewal), ``outlives`` (shorter ones that must
    end before it), ``answered`` (who waits for the next answer).
    """

    def __init__(self, id: int, asked: int, seconds: int, sent: float, term: int = 0) -> None:
        self.id: int = id
        self.asked: int = asked
        self.seconds: int = seconds
        self.term: int = term
        self.renewed_at: float = sent
        self.alive: bool = True
        self.outdated: bool = False
        self.pace: float = seconds / 3
        self.users: int = 0
        self.unused_since: float = sent
        self.due: float = sent + self.pace
        self.outlives: set[SharedLease] = set()
        self.silent_since: float | None = None
        self._sent: deque[float] = deque()
        self._answered: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<SharedLease {self.id:x} of {self.seconds} s, {self.users} users>"

    def deadline(self, length: float) -> float:
        """Return until when a key with this lease certainly lives, if it may live for ``length`` at
        most."""
        return local_deadline(self.renewed_at, round(min(length, self.seconds) * 1000))

    def hurry(self, length: float) -> None:
        """Renew often enough for a request that lives for ``length``."""
        self.pace = length / 3
        self.due = min(self.due, self.renewed_at + self.pace)

    def sent(self, moment: float) -> None:
        """A renewal is on its way."""
        self._sent.append(moment)
        self.due = moment + self.pace
        if self.silent_since is None:
            self.silent_since = moment

    def heard(self, ttl: int) -> float | None:
        """The oldest renewal on its way was answered; return when it was sent."""
        if not self._sent:
            return None
        self.seconds = ttl
        return self._sent.popleft()

    def confirm(self, sent: float) -> None:
        """The renewal that was sent then counts."""
        self.renewed_at = max(self.renewed_at, sent)
        self._answers_came()

    @property
    def unanswered_since(self) -> float | None:
        """When the last renewal was sent, if one on this stream has no answer."""
        return self._sent[-1] if self._sent else None

    def outdate(self) -> None:
        """Count no renewal any more."""
        self.outdated = True
        self._answers_came()

    def _answers_came(self) -> None:
        self.silent_since = self._sent[0] if self._sent else None
        self._wake()

    def begin_stream(self) -> None:
        """No answers come any more to what was sent before: renew at once."""
        self._sent.clear()
        self.due = 0.0

    def end(self) -> None:
        """The lease has ended."""
        self.alive = False
        self._wake()

    def _wake(self) -> None:
        for waiting in self._answered:
            if not waiting.done():
                waiting.set_result(None)
        self._answered.clear()

    async def next_answer(self) -> None:
        """Wait until a renewal is answered, or the lease has ended."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answered.append(waiting)
        await waiting


class Leases:
    """All leases of a client.

    Mutable state: ``_by_length`` (the lease in use for each length), ``_by_id``, ``_making`` (one at a time
    asks for a lease of a length), ``_wake`` (set when a renewal is due earlier than was planned),
    ``_answered`` (when renewals were sent that were answered, and wait for the proof that they count, by
    the lease's id), ``_to_confirm`` (set when there is one), ``_doubtful`` (leases that were asked for
    without an answer, and when).
    """

    def __init__(
        self,
        link: Link,
        probe: m.RangeRequest,
        on_ended: Callable[[SharedLease], None],
        on_silent: Callable[[SharedLease, Exception], None],
        on_outdated: Callable[[SharedLease], None],
        start: Callable[..., object],
    ) -> None:
        self._link = link
        self._start = start
        self._probe = probe
        self._on_ended = on_ended
        self._on_silent = on_silent
        self._on_outdated = on_outdated
        self._by_length: dict[int, SharedLease] = {}
        self._by_id: dict[int, SharedLease] = {}
        self._making: dict[int, asyncio.Lock] = {}
        self._wake = asyncio.Event()
        self._answered: dict[int, float] = {}
        self._doubtful: dict[int, float] = {}
        self._to_confirm = asyncio.Event()

    def all(self) -> list[SharedLease]:
        """Return the leases that live as far as is known."""
        return list(self._by_id.values())

    # -- having one ------------------------------------------------------------------------------

    async def get(self, length: float) -> SharedLease:
        """Return a lease that lives for at least ``length`` after each renewal."""
        asked = _seconds(length)
        lease = self._by_length.get(asked)
        if lease is None:
            async with self._making.setdefault(asked, asyncio.Lock()):
                lease = self._by_length.get(asked)
                if lease is None:
                    lease = await self._make_in_one_term(asked)
                    self._by_length[asked] = self._by_id[lease.id] = lease
                    self._wake.set()
        lease.unused_since = now()
        self.hurry(lease, length)
        return lease

    async def get_longer(self, lease: SharedLease, more: float) -> SharedLease:
        """Return a lease that ends so much later than this one, whenever the client dies."""
        longer = await self.get(lease.seconds + _seconds(more))
        if lease.id in self._by_id:  # else it is not renewed any more
            longer.outlives.add(lease)
        if longer.renewed_at < lease.renewed_at:
            await self.renew(longer)
        return longer

    def hurry(self, lease: SharedLease, length: float) -> None:
        """Renew a lease often enough for a request that lives for so long."""
        if length / 3 < lease.pace:
            lease.hurry(length)
            self._wake.set()

    async def make(self, seconds: float) -> SharedLease:
        """Return a lease that nobody renews."""
        asked, sent, id = _seconds(seconds), now(), secrets.randbits(62) + 1
        try:
            answer = await self._link.call(api.LEASE_GRANT, m.LeaseGrantRequest(asked, id))
        except BaseException:
            self._doubtful[id] = sent  # it may be made all the same
            raise
        if answer.ttl < 1 or not answer.id:
            raise Unanswered(f"{self._link.described}: a lease of {answer.ttl} s: {answer.error}")
        return SharedLease(answer.id, asked, answer.ttl, sent, _term(answer.header))

    async def _make_in_one_term(self, seconds: float) -> SharedLease:
        """Return a lease of which is known in which term it was made."""
        for _ in range(_TRIES):
            # In the log it stands behind what the first answer has seen, and before what its own has seen.
            # So if both have the same term, it is of that term, whichever members have answered: behind a
            # proxy each call may go to another one.
            before = await self._ask_term()
            lease = await self.make(seconds)
            if lease.term == before:
                return lease
            await self.revoke(lease)
        raise BackendUnavailable(f"{self._link.described}: the leader changes all the time")

    async def _ask_term(self) -> int:
        return _term((await self._link.call(api.RANGE, self._probe)).header)

    def by_id(self, id: int) -> SharedLease | None:
        """Return one of this client's leases."""
        return self._by_id.get(id)

    def use(self, lease: SharedLease | None, before: SharedLease | None) -> SharedLease | None:
        """A key ends with this lease, which is returned, and not with the one before."""
        if lease is not None:
            lease.users += 1
        if before is not None:
            before.users -= 1
            if not before.users:
                before.unused_since = now()
                before.pace = before.seconds / 3
        return lease

    async def renew(self, lease: SharedLease) -> None:
        """Renew a lease now, and wait for the answer.

        :raises Unanswered: if there is none in time.
        """
        lease.due = 0.0
        self._wake.set()
        try:
            async with asyncio.timeout(2 * self._link.within):  # it is answered, then confirmed
                began = now()
                while lease.alive and lease.renewed_at < began:
                    if lease.outdated:
                        raise self._link.silence("the leader has changed")
                    await lease.next_answer()
        except TimeoutError as silent:
            raise self._link.silence("a lease was not renewed in time") from silent

    def ended(self, lease: SharedLease) -> None:
        """The lease has ended at the cluster, with all its keys."""
        if not lease.alive:
            return
        lease.end()
        self._drop(lease)
        self._on_ended(lease)

    def _drop(self, lease: SharedLease) -> None:
        self._by_id.pop(lease.id, None)
        if self._by_length.get(lease.asked) is lease:
            del self._by_length[lease.asked]
        for other in self._by_id.values():
            other.outlives.discard(lease)

    # -- keeping them ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Renew all until cancelled."""
        await self._link.stream(api.KEEP_ALIVE, self._renew_all, self._heard)

    async def _renew_all(self, send: Callable[[m.LeaseKeepAliveRequest], Awaitable[None]]) -> None:
        generation = self._link.generation
        for lease in self._by_id.values():
            lease.begin_stream()
        listening_since = now()
        while True:
            self._wake.clear()
            moment = now()
            self._drop_unused(moment)
            due = self._due(moment)
            # A long one before a short one: a lock-delay must end after the lease that it follows.
            for lease in sorted(self._by_id.values(), key=lambda one: -one.asked):
                last = lease.unanswered_since
                patience = self._link.patience.within(lease.seconds)
                if last is not None and moment - max(last, listening_since) > patience:
                    since = moment - (lease.silent_since or last)
                    error = Unanswered(
                        f"{self._link.endpoint} has not answered a renewal for {since:.1f} s"
                    )
                    self._on_silent(lease, error)
                    if self._link.ran_out(generation, last, error):
                        raise error
                    due.add(lease)  # repeat it
                if lease in due:
                    lease.sent(moment)
                    await send(m.LeaseKeepAliveRequest(lease.id))
            pause = self._until_next(now()) + TIMER_STEP
            look_at = now() + pause
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass
            if now() - look_at > _LOOK:
                listening_since = now()  # the loop was blocked: answers may have come meanwhile

    def _due(self, moment: float) -> set[SharedLease]:
        """Return those to be renewed: also each that outlives one of them."""
        due: set[SharedLease] = set()
        for lease in sorted(self._by_id.values(), key=lambda one: one.asked):
            if lease.due <= moment or not due.isdisjoint(lease.outlives):
                due.add(lease)
        return due

    def _until_next(self, moment: float) -> float:
        due = [lease.due - moment for lease in self._by_id.values()]
        waited = [_LOOK for lease in self._by_id.values() if lease.unanswered_since]
        # The clock of leases goes on while the machine sleeps, that of the loop does not.
        return max(0.0, min((*due, *waited), default=1.0)) if due else 1.0

    def _heard(self, answer: m.LeaseKeepAliveResponse) -> None:
        lease = self._by_id.get(answer.id)
        if lease is None:
            return
        if answer.ttl <= 0:
            self.ended(lease)
            return
        sent = lease.heard(answer.ttl)
        if sent is None:
            return
        self._link.answered(sent)
        term = _term(answer.header)
        self._saw(term)
        if lease.outdated:
            lease.confirm(lease.renewed_at)  # it is not silent
        elif now() >= lease.deadline(lease.seconds):
            self._outdate(lease)
        elif term == lease.term:  # else the member lags behind
            self._answered[lease.id] = sent
            self._to_confirm.set()

    async def confirm(self) -> None:
        """Prove until cancelled that answered renewals count, with one read for several."""
        failures = 0
        while True:
            await self._to_confirm.wait()
            self._to_confirm.clear()
            answered, self._answered = self._answered, {}
            try:
                term = await self._ask_term()
            except BackendError as failed:
                _logger.debug("confirming renewals failed: %s", failed)
                self._answered = answered | self._answered
                for id in answered:
                    if (lease := self._by_id.get(id)) is not None:
                        self._on_silent(lease, failed)
                failures += 1
                await asyncio.sleep(pause_after(failures, first=_PAUSE, longest=api.LONGEST_PAUSE))
                self._to_confirm.set()
                continue
            failures = 0
            self._saw(term)
            for id, sent in answered.items():
                lease = self._by_id.get(id)
                if lease is not None and not lease.outdated and term == lease.term:
                    lease.confirm(sent)

    def _saw(self, term: int) -> None:
        """There is a leader of this term: leases of earlier ones count no more."""
        for lease in self.all():
            if lease.term < term and not lease.outdated:
                self._outdate(lease)

    def _outdate(self, lease: SharedLease) -> None:
        lease.outdate()
        if self._by_length.get(lease.asked) is lease:
            del self._by_length[lease.asked]
        self._on_outdated(lease)

    def _drop_unused(self, moment: float) -> None:
        for lease in self.all():
            if not lease.users and moment - lease.unused_since > _IDLE:
                self._drop(lease)
                self._start(self._revoke_if_empty, lease.id)
        for id, sent in list(self._doubtful.items()):
            if moment - sent > _IDLE:
                del self._doubtful[id]
                self._start(self._revoke_if_empty, id)

    async def _revoke_if_empty(self, id: int) -> None:
        """End a lease that this client renews no more, unless keys end with it: those keep a name closed,
        or refuse late messages."""
        try:
            request = m.LeaseTimeToLiveRequest(id, keys=True)
            found = await self._link.call(api.LEASE_TIME_TO_LIVE, request)
            if found.ttl > 0 and not found.keys:
                await self._link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(id))
        except BackendError as failed:
            _logger.debug("a lease was not revoked, it ends by itself: %s", failed)

    async def revoke(self, lease: SharedLease) -> None:
        """End a lease at the cluster, with whatever still belongs to it."""
        self._drop(lease)
        try:
            await self._link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(lease.id), within=1.0)
        except LeaseNotFound:
            pass
        except BackendError as failed:
            _logger.debug("a lease was not revoked, it ends by itself: %s", failed)


def _term(header: m.Header | None) -> int:
    """Return the term of the last entry that the member had carried out."""
    assert header is not None
    return header.raft_term


def _seconds(length: float) -> int:
    return max(1, math.ceil(length - 1e-9))
