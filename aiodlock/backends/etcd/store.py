"""etcd as a store: the client's connection, its leases, what it watches, and its requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from ..._backoff import pause_after
from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._model import Capabilities, Kind, LockInfo, Mode, Terms, Tokens, first_request
from ..._tasks import start_soon
from .._label import make_label
from .._versions import allows, refused
from ..base import Listener
from . import link as api
from . import messages as m
from . import recipe, transactions
from .audit import Audit
from .batches import Batches
from .inspection import Inspection
from .leases import Leases, SharedLease
from .link import Access, Link
from .moving import Moving
from .place import EtcdPlace
from .recipe import Keys, Queue, Record
from .refusals import NotEtcd, denied
from .room import Rooms
from .versions import too_old
from .waits import Waits
from .watching import Watch, Watches

_logger = logging.getLogger("aiodlock")

#: For so long a late duplicate of an acquire is refused, at the least (seconds).
_REMEMBERED = 60.0
#: A name that nobody waits for any more is followed for so long (seconds).
_LINGER = 2.0
#: A watch that was refused is tried again after so long (seconds).
_REWATCH = 0.5
_CLOSE_WITHIN = 0.5


class EtcdBackend:
    """One client of a cluster. ``Moving`` and ``Audit`` see to its requests' keys, ``Inspection`` is for
    people.

    Mutable state: ``_places`` by request id, from the first message until the leave was answered;
    ``_mates`` (how many of them have an owner that another request has named); ``_leaving`` (leaves on
    their way, by the keys' base); ``_observers`` (what is told at the end, by what ends that); ``_tasks``
    while it runs, ``_up`` (messages can be sent); ``version`` of the member that was met.
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
        #: What a client may read in any case, and costs least.
        self._probe = m.RangeRequest(recipe.versions_key(prefix))
        self._link = Link(
            access,
            described,
            probe=self._probe,
            examined=self._check_versions,
            silence=unavailable_after,
            may_hold=self._may_hold,
        )
        self._moving = Moving(self, self._link)
        self.leases: Leases = Leases(
            self._link,
            self._probe,
            self._on_lease_ended,
            self._on_silent,
            self._moving.on_outdated,
            self.start,
        )
        self._batches = Batches(self._link, self.start)
        self.watches: Watches = Watches(self._link)
        self.rooms: Rooms = Rooms(self.label, self.watches, self.read, self.start)
        self._audit = Audit(self, self._link)
        self._link.on_set_back = self._on_set_back
        self._inspection = Inspection(self, self._link, prefix)
        self._waits = Waits(self, self._link, prefix)
        self._places: dict[str, EtcdPlace] = {}
        self._mates: Counter[str] = Counter()
        self._leaving: dict[bytes, set[asyncio.Future[None]]] = {}
        self._observers: dict[Callable[[], object], Callable[[], object]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._up = False

    def __repr__(self) -> str:
        return f"<EtcdBackend {self._described}>"

    # -- life ------------------------------------------------------------------------------------

    def follow(self, dead: EtcdBackend) -> None:
        """Know the cluster that the backend of the client's dead session knew."""
        self._link.follow(dead._link)

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
                self._tasks.create_task(self._moving.run())
                self._tasks.create_task(self.watches.run())
                self._watch_mailbox()
                await self.watches.first_answer()
                self._up = self._link.entered = True
                ready()
                self._tasks.create_task(self._audit.run())
                try:
                    await self._tidy()
                finally:
                    self._up = False
                    await self._revoke_leases()
        finally:
            self._tasks = None

    async def _meet(self) -> None:
        """Wait until a member answers that can read and write; look at its version.

        Each connection is examined by a read. A learner and a member without a leader do not answer it, and
        who may not read is told: at once by etcd, by what is not etcd if it stands at all endpoints.
        """
        failures, refused = 0, set[str]()
        while True:
            endpoint = self._link.endpoint
            try:
                status = await self._link.call(api.STATUS, m.StatusRequest())
                break
            except BackendUnavailable as away:
                _logger.debug("etcd: %s", away)
            except NotEtcd as foreign:
                refused.add(endpoint)
                if len(refused) == len(self._access.endpoints):
                    raise
                _logger.warning("%s", foreign, extra={"event": "other_store"})
            failures += 1
            await asyncio.sleep(
                pause_after(failures, first=api.FIRST_PAUSE, longest=api.LONGEST_PAUSE)
            )
        self._link.came_further()
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

    def _check_versions(self, answer: m.RangeResponse) -> None:
        """Refuse to work where other versions do."""
        for kv in answer.kvs:
            if not allows(kv.value, recipe.VERSION):
                text = refused(kv.value, self._prefix, recipe.VERSION)
                raise denied(
                    f"{self._described}: {text}", entered=self._link.entered, elsewhere=False
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
                    for place in self.places_with(lease):
                        place.on_unavailable(error)

    @property
    def is_up(self) -> bool:
        """Whether messages can be sent."""
        return self._up

    @property
    def failure(self) -> Exception | None:
        """Why the last message had no answer, if it had none."""
        return self._link.failure

    @property
    def further_at(self) -> float:
        """When entering has last come further; see ``Backend``."""
        return self._link.further.at

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return self._link.patience.typical

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

    def knows(self, request_id: str) -> bool:
        """Whether the store may know of this request of the client."""
        return request_id in self._places

    def all_places(self) -> Iterable[EtcdPlace]:
        """Return those of the requests that the store may know of."""
        return self._places.values()

    def places_with(self, lease: SharedLease) -> list[EtcdPlace]:
        """Return those whose keys end with this lease."""
        return [place for place in self._places.values() if place.lease is lease]

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

    def _on_lease_ended(self, lease: SharedLease) -> None:
        for place in self.places_with(lease):
            place.on_gone("expired")

    async def look_for(self, *leases: SharedLease | None) -> None:
        """Find out which of these leases have ended: the cluster does not know one of them."""
        for lease in {lease for lease in leases if lease is not None}:
            request = m.LeaseTimeToLiveRequest(lease.id)
            if (await self._link.call(api.LEASE_TIME_TO_LIVE, request)).ttl < 0:
                self.leases.ended(lease)

    def _may_hold(self) -> bool:
        return any(p.state == "held" and p.deadline > now() for p in self._places.values())

    def _on_set_back(self, revision: int) -> None:
        self.watches.set_back(revision)
        self.rooms.set_back(revision)
        self._audit.hurry()  # it finds the keys that are lost

    def _on_silent(self, lease: SharedLease, error: Exception) -> None:
        for place in self.places_with(lease):
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
                id = recipe.text_of(event.kv.key[len(start) :])
                recalled = id == recipe.RECALL
                place = self._places.get(recipe.text_of(event.kv.value) if recalled else id)
                if place is not None and recalled:
                    place.on_recalled()
                elif place is not None:
                    place.on_gone("broken")

        def missed() -> None:
            self.later(_REWATCH, self._watch_mailbox)
            self._audit.hurry()  # it finds what was not heard

        self.watches.watch(start, end, 0, heard, missed)

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
        return await self._inspection.inspect(kind, name)

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        return await self._inspection.holds(kind, name, mode, token)

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        return await self._inspection.inspect_all(kind, names)

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        await self._waits.tell(serial, record, keep)

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        return await self._waits.read(labels)

    def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        return self._inspection.names(match, kind)

    async def break_lock(self, name: str, kind: Kind = "lock", tokens: Tokens | None = None) -> int:
        return await self._inspection.break_lock(name, kind, tokens)

    async def forget(self, name: str) -> bool:
        return await self._inspection.forget(name)
