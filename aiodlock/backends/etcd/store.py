"""etcd as a store: the client's connection, its leases, what it watches, and its requests.

Over 400 lines: what the core asks, and what people ask of names.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import unquote

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable, LossReason
from ..._model import (
    Capabilities,
    HolderInfo,
    Kind,
    LockInfo,
    Mode,
    Terms,
    WaiterInfo,
    first_request,
)
from ..._tasks import start_soon
from .._label import make_label
from ..base import Listener
from . import link as api
from . import messages as m
from . import recipe, transactions
from .batches import Batches
from .leases import Leases, SharedLease
from .link import Access, LeaseNotFound, Link
from .place import EtcdPlace
from .recipe import Keys, Queue, Record
from .room import Rooms
from .watching import Watch, Watches

_logger = logging.getLogger("aiodlock")

#: For so long a late duplicate of an acquire is refused, and a broken lease known, at the least (seconds).
_REMEMBERED = 60.0
#: A name that nobody waits for any more is followed for so long (seconds).
_LINGER = 2.0
#: The keys of each lease are compared with what this client believes so often, in lengths of the lease, and
#: no more often than this (seconds).
_AUDIT_SHARE, _AUDIT_LEAST = 1 / 3, 1.0
#: Of so many requests with one lease on, that is left out: the answer names each key.
_AUDIT_MOST = 2000
#: So many requests are moved to another lease in one transaction. It is looked so often whether there are
#: such, and again so long after a move that failed (seconds).
_MOVED_TOGETHER, _LOOK_AGAIN, _MOVE_PAUSE = 60, 0.5, 0.1
#: A watch that was refused is tried again after so long (seconds).
_REWATCH = 0.5
_CLOSE_WITHIN = 0.5
_PAGE = 1000
#: A transaction takes 128 steps: four for each holder, and two for each that keeps the name closed.
_BROKEN_TOGETHER = 20

#: The first versions of each line whose leases can be relied on. With older ones a leader that was stopped
#: confirms and revokes the wrong leases when it wakes. What is written here does not depend on it.
HONEST = ((3, 4, 38), (3, 5, 23), (3, 6, 5))


def too_old(version: str) -> str | None:
    """Return the version that a server should have at least, if this one is older."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return None
    mine = tuple(map(int, found.groups()))
    for honest in HONEST:
        if mine[:2] == honest[:2]:
            return None if mine >= honest else ".".join(map(str, honest))
    return None if mine > HONEST[-1] else ".".join(map(str, HONEST[0]))


class EtcdBackend:
    """One client of a cluster.

    Mutable state: ``_places`` by request id, from the first message until the leave was answered;
    ``_mates`` (how many of them have an owner that another request has named);
    ``_audits`` (when the keys of a lease were compared last); ``_tasks`` while it runs; ``version`` of
    the member that was met.
    """

    capabilities: Capabilities = Capabilities(
        granularity=1.0, remaining_known=False, hold_at_least=True, once=True, linger=True
    )
    #: No revision comes later.
    far_future = (1 << 63) - 1

    def __init__(
        self,
        access: Access,
        described: str,
        *,
        prefix: str,
        unavailable_after: float,
        description: str = "",
    ) -> None:
        self.label: str = make_label()
        self.description: str = description
        self.version: str = ""
        self.marker_ttl: float = max(unavailable_after, _REMEMBERED)
        self._described = described
        self._prefix = prefix
        self._unavailable_after = unavailable_after
        self._access = access
        self._link = Link(access, described)
        #: What a client may read in any case, and costs least.
        self._probe = m.RangeRequest(*recipe.mailbox(prefix, self.label), limit=1, keys_only=True)
        self.leases: Leases = Leases(
            self._link, self._probe, self._on_lease_ended, self._on_silent, self._on_outdated
        )
        self._outdated = asyncio.Event()
        self._batches = Batches(self._link, self.start)
        self.watches: Watches = Watches(self._link)
        self.rooms: Rooms = Rooms(self.label, self.watches, self.read, self.start)
        self._places: dict[str, EtcdPlace] = {}
        self._mates: Counter[str] = Counter()
        self._leaving: dict[bytes, set[asyncio.Future[None]]] = {}
        self._observers: dict[Callable[[], object], Callable[[], object]] = {}
        self._audits: dict[int, float] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._up = False

    def __repr__(self) -> str:
        return f"<EtcdBackend {self._described}>"

    # -- life ------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[], None]) -> None:
        """Keep everything running until cancelled."""
        async with asyncio.TaskGroup() as outermost:
            linking = outermost.create_task(self._link.run())
            try:
                await self._link.opened()
                await self._serve(ready)
            finally:
                linking.cancel()  # after everything that uses it
                for changed in tuple(self._observers.values()):
                    changed()

    async def _serve(self, ready: Callable[[], None]) -> None:
        await self._meet()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self.leases.run())
                self._tasks.create_task(self.leases.confirm())
                self._tasks.create_task(self._move_outdated())
                self._tasks.create_task(self.watches.run())
                self._watch_mailbox()
                await self.watches.first_answer()
                self._up = True
                ready()
                self._tasks.create_task(self._audit())
                try:
                    await self._tidy()
                finally:
                    self._up = False
                    await self._revoke_leases()
        finally:
            self._tasks = None

    async def _meet(self) -> None:
        """Wait until the cluster answers; look at its version."""
        pause = api.FIRST_PAUSE
        while True:
            try:
                status = await self._link.call(api.STATUS, m.StatusRequest(), within=1.0)
                if status.leader:
                    break
                self._link.failed(
                    self._link.generation,
                    BackendUnavailable(f"{self._link.endpoint} knows no leader"),
                )
            except BackendUnavailable as away:
                _logger.debug("etcd: %s", away)
            await asyncio.sleep(pause)
            pause = min(2 * pause, api.LONGEST_PAUSE)
        # Who may not read is told now.
        await self._link.call(api.RANGE, self._probe)
        self.version = status.version
        if (honest := too_old(status.version)) is not None:
            _logger.warning(
                "%s runs etcd %s: before %s, a leader that was stopped confirms and revokes the wrong "
                "leases when it wakes. aiodlock does not rely on them, others do (see aiodlock doctor)",
                self._described,
                status.version,
                honest,
                extra={"event": "old_server"},
            )

    async def _revoke_leases(self) -> None:
        # While anybody may believe in a lease nothing is revoked: it ends by itself then.
        if self._places or self._link.failure is not None:
            return
        try:
            async with asyncio.timeout(_CLOSE_WITHIN):
                for lease in self.leases.all():
                    await self.leases.revoke(lease)
        except TimeoutError:
            pass

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.rooms.close_unused(_LINGER)
            moment = now()
            for lease in self.leases.all():
                silent = 0.0 if lease.silent_since is None else moment - lease.silent_since
                if silent >= self._unavailable_after:
                    error = BackendUnavailable(
                        f"{self._described} has not answered for {silent:.1f} s"
                    )
                    for place in self._of(lease):
                        place.on_unavailable(error)

    @property
    def is_up(self) -> bool:
        """Whether messages can be sent."""
        return self._up

    @property
    def failure(self) -> Exception | None:
        """Why the last message had no answer, if it had none."""
        return self._link.failure

    def start(self, call: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> bool:
        """Run something in the background; False when that is over."""
        return start_soon(self._tasks, call(*args))

    def later(self, pause: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        """Call something after a while."""
        return asyncio.get_running_loop().call_later(pause, call)

    # -- calls -----------------------------------------------------------------------------------

    async def transact(
        self, keys: Keys, request: m.TxnRequest, *, own: bool = False, gather: bool = False
    ) -> m.TxnResponse:
        """Carry out a transaction about one name. ``own``: it looks at its own request's keys alone;
        ``gather``: and there is a moment's time for it."""
        return await self._batches.transact(keys.base, request, own=own, gather=gather)

    async def read(self, keys: Keys) -> Queue:
        """Read a name."""
        answer = await self._link.call(api.RANGE, m.RangeRequest(keys.base, keys.end))
        assert answer.header is not None
        return Queue(keys, answer.header.revision, answer.kvs)

    # -- requests --------------------------------------------------------------------------------

    def keys(self, kind: str, name: str) -> Keys:
        """Return the keys of a name."""
        return Keys.of(self._prefix, kind, name)

    def place(self, terms: Terms, request_id: str, owner: str, listener: Listener) -> EtcdPlace:
        """Make the place of a request that is about to be asked."""
        return EtcdPlace(self, terms, request_id, owner, listener)

    def add(self, place: EtcdPlace) -> None:
        """A request is about to be sent."""
        if place.id not in self._places:
            self._places[place.id] = place
            if first_request(place.owner) != place.id:
                self._mates[place.owner] += 1

    def remove(self, place: EtcdPlace) -> None:
        """The store knows nothing of a request any more."""
        if self._places.pop(place.id, None) is None or first_request(place.owner) == place.id:
            return
        self._mates[place.owner] -= 1
        if not self._mates[place.owner]:
            del self._mates[place.owner]

    def has_mates(self, owner: str) -> bool:
        """Whether requests of this client may get in beside one that has named this owner."""
        return owner in self._mates

    def leaving(self, keys: Keys) -> asyncio.Future[None]:
        """Note that a leave is on its way, until the future is done: whoever asks next asks after it."""
        on_its_way: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leaves = self._leaving.setdefault(keys.base, set())
        leaves.add(on_its_way)

        def arrived(leave: asyncio.Future[None]) -> None:
            leaves.discard(leave)
            if not leaves and self._leaving.get(keys.base) is leaves:
                del self._leaving[keys.base]

        on_its_way.add_done_callback(arrived)
        return on_its_way

    async def until_left(self, keys: Keys) -> None:
        """Wait for the leaves of a name that this client has sent before."""
        if leaves := self._leaving.get(keys.base):
            await asyncio.wait(leaves, timeout=_CLOSE_WITHIN)

    def _of(self, lease: SharedLease) -> list[EtcdPlace]:
        return [place for place in self._places.values() if place.lease is lease]

    def _on_lease_ended(self, lease: SharedLease) -> None:
        for place in self._of(lease):
            place.on_gone("expired")

    def _on_outdated(self, lease: SharedLease) -> None:
        level = logging.INFO if lease.users else logging.DEBUG
        _logger.log(
            level,
            "etcd: the leader has changed, or a renewal was answered too late: a lease of %d s counts no "
            "more. Moving %d requests to another one",
            lease.seconds,
            lease.users,
        )
        self._outdated.set()

    async def _move_outdated(self) -> None:
        """Move the keys of requests whose lease counts no more to one that does."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_AGAIN):  # a request may come to such a lease later
                    await self._outdated.wait()
            except TimeoutError:
                pass
            self._outdated.clear()
            while places := [place for place in self._places.values() if place.outdated]:
                some = places[:_MOVED_TOGETHER]
                try:
                    await self._move_together(some)
                except BackendError as failed:
                    _logger.debug("moving requests to another lease failed: %s", failed)
                if any(place.outdated for place in some):
                    await asyncio.sleep(_MOVE_PAUSE)

    async def _move_together(self, places: list[EtcdPlace]) -> None:
        async with AsyncExitStack() as stack:
            found = [await stack.enter_async_context(place.moving()) for place in places]
            moves = [move for move in found if move is not None]
            if not moves:
                return
            request = transactions.together([move.request for move in moves])
            try:
                answer = await self._link.call(api.TXN, request)
            except LeaseNotFound:
                await self.look_for(*(lease for move in moves for lease in move.leases))
                raise
            for move, step in zip(moves, answer.responses, strict=True):
                assert step.response_txn is not None
                step.response_txn.header = answer.header
                move.answered(step.response_txn)

    async def look_for(self, *leases: SharedLease | None) -> None:
        """Find out which of these leases have ended: the cluster does not know one of them."""
        for lease in {lease for lease in leases if lease is not None}:
            request = m.LeaseTimeToLiveRequest(lease.id)
            if (await self._link.call(api.LEASE_TIME_TO_LIVE, request)).ttl < 0:
                self.leases.ended(lease)

    def _on_silent(self, lease: SharedLease, error: Exception) -> None:
        for place in self._of(lease):
            place.on_silent(error)

    # -- what is told to this client -----------------------------------------------------------------

    def message_key(self, request_id: str) -> bytes:
        """Return the key by which a break of one of this client's requests is told."""
        return recipe.mailbox(self._prefix, self.label)[0] + request_id.encode()

    async def recall(self, keys: Keys, holder: Record) -> None:
        """Tell a holder that lingers that somebody wants its name who does not queue. One attempt: who
        tries again tells it again."""
        try:
            await self.transact(keys, transactions.recall(keys, self._prefix, holder))
        except BackendError as failed:
            _logger.debug("recalling a lease that lingers failed: %s", failed)

    def _watch_mailbox(self) -> None:
        start, end = recipe.mailbox(self._prefix, self.label)

        def heard(events: list[m.Event], revision: int) -> None:
            for event in events:
                if event.type != m.PUT or event.kv is None:
                    continue
                id = event.kv.key[len(start) :].decode()
                recalled = id == recipe.RECALL
                place = self._places.get(event.kv.value.decode() if recalled else id)
                if place is not None and recalled:
                    place.on_recalled()
                elif place is not None:
                    place.on_gone("broken")

        def missed() -> None:
            self.later(_REWATCH, self._watch_mailbox)
            self._audits.clear()  # what was not heard is found there

        self.watches.watch(start, end, 0, heard, missed)

    async def why_gone(self, place: EtcdPlace) -> LossReason | None:
        """Return why a request has no key any more; None if it has."""
        keys = self.keys(place.terms.kind, place.terms.name)
        look = transactions.look(keys, place.id, self.message_key(place.id))
        answer = await self.transact(keys, look)
        if answer.succeeded:
            return None
        found = answer.responses[0].response_range
        if found is not None and found.kvs:
            return "broken"
        if place.lease is not None and not place.lease.alive:
            return "expired"
        others = list((await self.read(keys)).holders())
        return "taken_over" if others else "gone"

    async def _audit(self) -> None:
        """Compare the keys of each lease with what this client believes.

        A watch tells what waiters need. This finds holders whose key was deleted by others, and keys of
        requests that this client does not have: both for as long as their lease lives, which is as long
        as the client does.
        """
        while True:
            await asyncio.sleep(_AUDIT_LEAST / 2)
            for lease in self.leases.all():
                pause = max(_AUDIT_LEAST, lease.pace * 3 * _AUDIT_SHARE)
                if now() - self._audits.get(lease.id, lease.unused_since) < pause:
                    continue
                self._audits[lease.id] = now()
                if lease.users <= _AUDIT_MOST:
                    try:
                        await self._audit_one(lease)
                    except BackendError as failed:
                        _logger.debug("comparing the keys of a lease failed: %s", failed)
            alive = {lease.id for lease in self.leases.all()}
            self._audits = {id: at for id, at in self._audits.items() if id in alive}

    async def _audit_one(self, lease: SharedLease) -> None:
        before = {
            place.key: place
            for place in self._of(lease)
            if place.state in ("waiting", "held") and place.settled
        }
        request = m.LeaseTimeToLiveRequest(lease.id, keys=True)
        answer = await self._link.call(api.LEASE_TIME_TO_LIVE, request)
        if answer.ttl < 0:
            self.leases.ended(lease)
            return
        there = set(answer.keys)
        for key, place in before.items():
            known = place.state in ("waiting", "held") and place.lease is lease
            if key not in there and known and place.settled:
                reason = await self.why_gone(place)
                if reason is not None:
                    place.on_gone(reason)
        for key in there:
            id = key.rpartition(b"/")[2].decode()
            if id not in self._places and id.startswith(self.label):
                await self._delete_unknown(key)

    async def _delete_unknown(self, key: bytes) -> None:
        _logger.info("etcd: deleting a key of a request that is over: %r", key)
        deletion = m.RequestOp(request_delete_range=m.DeleteRangeRequest(key))
        await self._link.call(api.TXN, m.TxnRequest(success=[deletion]))

    # -- for observers -----------------------------------------------------------------------------

    def announce(self, kind: str, name: str) -> None:
        """Do nothing: observers watch the name itself."""

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        """Have ``changed`` called when the name's holder may have changed; return what ends that."""
        keys = self.keys(kind, name)
        watches: list[Watch] = []

        def begin() -> None:
            watches.append(self.watches.watch(keys.base, keys.end, 0, heard, missed))

        def missed() -> None:
            if watches:
                self.later(_REWATCH, begin_again)
            changed()

        def begin_again() -> None:
            if watches:
                watches.clear()
                begin()

        def heard(events: list[m.Event], revision: int) -> None:
            changed()

        def end() -> None:
            self._observers.pop(end, None)
            while watches:
                self.watches.end(watches.pop())

        self._observers[end] = changed
        begin()
        return end

    async def settle(self) -> None:
        """Every answer is waited for by a call."""

    # -- for people --------------------------------------------------------------------------------

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        """Return who holds and who waits."""
        keys = self.keys(kind, name)
        await self.until_left(keys)
        queue = await self.read(keys)
        closed = 0.0
        gone = queue.closed()
        for lease in queue.closing():
            request = m.LeaseTimeToLiveRequest(lease)
            answer = await self._link.call(api.LEASE_TIME_TO_LIVE, request)
            # Whole seconds, rounded down: what is closed has some time left.
            closed = max(closed, float(answer.ttl), 1.0)
        holders = list(queue.holders())
        token = max((record.order for record in (*holders, *gone)), default=0)
        return LockInfo(
            name,
            _holders(holders),
            tuple(
                WaiterInfo(
                    _owner(waiter),
                    waiter.mode,
                    position,
                    None,
                    waiter.client,
                    waiter.note,
                    waiter.description,
                )
                for position, waiter in enumerate(queue.waiters())
            ),
            token,
            closed,
            len(gone),
            kind=kind,
        )

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        """Return whether this grant holds still.

        Who knows a token has it of a grant, which lasts until its key is gone. It may stand behind one of
        the same client still, which has left, and whose key is about to be deleted.
        """
        queue = await self.read(self.keys(kind, name))
        there = (*queue.requests.values(), *queue.joined.values())
        return any(record.order == token and record.mode == mode for record in there)

    async def inspect_all(self, kind: Kind, names: Sequence[str]) -> list[LockInfo]:
        """Return the same for several names."""
        return [await self.inspect(kind, name) for name in names]

    async def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        """Iterate over every name of the kind that is held or waited for and matches the glob."""
        key, end = recipe.all_names(self._prefix, kind)
        last: str | None = None
        while True:
            request = m.RangeRequest(key, end, limit=_PAGE, keys_only=True)
            answer = await self._link.call(api.RANGE, request)
            for kv in answer.kvs:
                name = recipe.name_of(self._prefix, kind, kv.key)
                if name is not None and name != last:
                    last = name
                    if fnmatch.fnmatchcase(name, match):
                        yield name
            if not answer.more:
                return
            key = answer.kvs[-1].key + b"\0"

    async def forget(self, name: str) -> bool:
        """Take the record of a success back; return whether there was one."""
        keys = self.keys("once", name)
        answer = await self.transact(keys, transactions.forget(keys))
        read = answer.responses[0].response_range
        if read is None or not read.kvs:
            return False
        lease = read.kvs[0].lease  # of this record alone
        self.start(self._revoke_id, lease)
        return True

    async def _revoke_id(self, lease: int) -> None:
        try:
            await self._link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(lease))
        except BackendError as failed:
            _logger.debug("a lease was not revoked, it ends by itself: %s", failed)

    async def break_lock(self, name: str, kind: Kind = "lock") -> int:
        """Release all holders of a name by force; return their number."""
        keys = self.keys(kind, name)
        told = await self.leases.make(_REMEMBERED)
        broken = 0
        while True:
            queue = await self.read(keys)
            holders, closed = list(queue.holders()), queue.closed()
            if not holders and not closed:
                return broken
            some, gone = holders[:_BROKEN_TOGETHER], closed[:_BROKEN_TOGETHER]
            request = transactions.break_holders(
                keys, self._prefix, some, gone, queue.revision, told.id
            )
            if (await self.transact(keys, request)).succeeded:
                broken += len(some)
                if (some, gone) == (holders, closed):
                    return broken


def _owner(record: Record) -> str:
    """Return the owner as the user named it, or the task's id."""
    return unquote(record.owner[1:]) if record.owner.startswith("u") else record.owner[1:]


def _holders(records: Sequence[Record]) -> tuple[HolderInfo, ...]:
    """One entry per owner and mode, with the number of its acquisitions that the store counts."""
    found: dict[tuple[str, str], HolderInfo] = {}
    for record in records:
        before = found.get((record.owner, record.mode))
        found[record.owner, record.mode] = HolderInfo(
            owner=_owner(record),
            mode=record.mode,
            token=record.order,
            count=before.count + 1 if before else 1,
            remaining=None,
            client=record.client,
            note=record.note,
            description=record.description,
        )
    return tuple(found.values())
