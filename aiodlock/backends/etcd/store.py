"""etcd as a store: the client's connection, its leases, what it watches, and its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..._backoff import pause_after, pauses
from ..._clock import now
from ..._errors import BackendUnavailable
from ..._model import Capabilities, Kind, Mode, Terms
from .._versions import allows, refused
from ..asked import Asked
from ..base import Listener
from ..stage import HELD
from . import calls as api
from . import messages as m
from . import recipe
from .audit import Audit
from .cluster import Cluster
from .identity import Acquaintance
from .inspection import Inspection
from .leases import SharedLease
from .link import Access, Link
from .moving import Moving
from .place import EtcdPlace
from .refusals import NotEtcd, denied
from .request import Requests
from .versions import too_old
from .waits import Waits
from .watching import Watch

_logger = logging.getLogger("aiodlock")

#: A name that nobody waits for any more is followed for so long (seconds).
_LINGER = 2.0
#: A watch that was refused is tried again after so long (seconds), and an observer's later from time to
#: time: each refusal costs all watches a new stream.
_REWATCH, _REWATCH_MOST = 0.5, 30.0
_CLOSE_WITHIN = 0.5


class EtcdBackend(Asked):
    """One client of a cluster. ``Moving`` and ``Audit`` see to its requests' keys, ``Inspection`` is for
    people.

    Mutable state: ``requests`` that the cluster may know of; ``_observers`` (what is told at the end, by
    what ends that); ``version`` of the member that was met.
    """

    capabilities: Capabilities = Capabilities(
        granularity=1.0, remaining_known=False, hold_at_least=True, once=True, linger=True
    )

    def __init__(
        self,
        access: Access,
        described: str,
        *,
        prefix: str,
        unavailable_after: float,
        description: str = "",
    ) -> None:
        self.version: str = ""
        self.requests: Requests[EtcdPlace] = Requests()
        self._described = described
        self._unavailable_after = unavailable_after
        self._access = access
        # What a client may read in any case, and costs least.
        probe = m.RangeRequest(recipe.versions_key(prefix))
        self._link = Link(
            access,
            described,
            probe=probe,
            examined=self._check_versions,
            silence=unavailable_after,
            may_hold=self._may_hold,
        )
        #: What this client knows of the cluster.
        self.acquaintance: Acquaintance = self._link.acquaintance
        self.acquaintance.on_set_back = self._on_set_back
        self.cluster: Cluster = Cluster(
            self._link,
            probe,
            prefix,
            description=description,
            remembered=unavailable_after,
            on_ended=self._on_lease_ended,
            on_silent=self._on_silent,
            on_outdated=lambda lease: self._moving.on_outdated(lease),
        )
        self._people = Inspection(self.cluster)
        super().__init__(self._people, Waits(self.cluster))
        self._moving = Moving(self.requests)
        self._audit = Audit(self.cluster, self.requests)
        self._observers: dict[Callable[[], object], Callable[[], object]] = {}

    def __repr__(self) -> str:
        return f"<EtcdBackend {self._described}>"

    @property
    def label(self) -> str:
        """What this client is called."""
        return self.cluster.label

    # -- life ------------------------------------------------------------------------------------

    def follow(self, dead: EtcdBackend) -> None:
        """Know the cluster that the backend of the client's dead session knew."""
        self.acquaintance.follow(dead.acquaintance)

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
        cluster = self.cluster
        try:
            async with asyncio.TaskGroup() as tasks:
                cluster.tasks = tasks
                tasks.create_task(cluster.leases.run())
                tasks.create_task(cluster.leases.confirm())
                tasks.create_task(self._moving.run())
                tasks.create_task(cluster.watches.run())
                self._watch_mailbox()
                await cluster.watches.first_answer()
                cluster.is_up = self._link.entered = True
                ready()
                tasks.create_task(self._audit.run())
                try:
                    await self._tidy()
                finally:
                    cluster.is_up = False
                    await self._revoke_leases()
        finally:
            cluster.tasks = None

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
                text = refused(kv.value, self.cluster.prefix, recipe.VERSION)
                raise denied(
                    f"{self._described}: {text}", entered=self._link.entered, elsewhere=False
                )

    async def _revoke_leases(self) -> None:
        # While anybody may believe in a lease nothing is revoked: it ends by itself then.
        if self.requests or self._link.failure is not None:
            return
        try:
            async with asyncio.timeout(_CLOSE_WITHIN):
                for lease in self.cluster.leases.all():
                    await self.cluster.leases.revoke(lease)
        except TimeoutError:
            pass

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.cluster.rooms.close_unused(_LINGER)
            moment = now()
            for lease in self.cluster.leases.all():
                silent = 0.0 if lease.silent_since is None else moment - lease.silent_since
                if silent >= self._unavailable_after:
                    error = self._link.silence(f"no answer for {silent:.1f} s")
                    for place in self._with(lease):
                        place.on_unavailable(error)

    @property
    def failure(self) -> Exception | None:
        """Why the last message had no answer, if it had none."""
        return self._link.failure

    @property
    def further_at(self) -> float:
        """When entering has last come further; see ``StoreBase``."""
        return self._link.further.at

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return self._link.patience.typical

    # -- requests --------------------------------------------------------------------------------

    def place(self, terms: Terms, request_id: str, owner: str, listener: Listener) -> EtcdPlace:
        """Make the place of a request that is about to be asked."""
        return EtcdPlace(self.cluster, self.requests, terms, request_id, owner, listener)

    def _with(self, lease: SharedLease) -> list[EtcdPlace]:
        """Return those whose keys end with this lease."""
        return [place for place in self.requests if place.own.lease is lease]

    def _on_lease_ended(self, lease: SharedLease) -> None:
        for place in self._with(lease):
            place.on_gone("expired")

    def _may_hold(self) -> bool:
        return any(p.stage is HELD and p.deadline > now() for p in self.requests)

    def _on_set_back(self, revision: int) -> None:
        self.cluster.watches.set_back(revision)
        self.cluster.rooms.set_back(revision)
        self._audit.hurry()  # it finds the keys that are lost

    def _on_silent(self, lease: SharedLease, error: Exception) -> None:
        for place in self._with(lease):
            place.on_silent(error)

    # -- what is told to this client -----------------------------------------------------------------

    def _watch_mailbox(self) -> None:
        start, end = recipe.mailbox(self.cluster.prefix, self.label)

        def heard(events: list[m.Event], revision: int) -> None:
            for event in events:
                if event.type != m.PUT or event.kv is None:
                    continue
                id = recipe.text_of(event.kv.key[len(start) :])
                recalled = id == recipe.RECALL
                place = self.requests.find(recipe.text_of(event.kv.value) if recalled else id)
                if place is not None and recalled:
                    place.on_recalled()
                elif place is not None:
                    place.on_gone("broken")

        def missed() -> None:
            self.cluster.later(_REWATCH, self._watch_mailbox)
            self._audit.hurry()  # it finds what was not heard

        self.cluster.watches.watch(start, end, 0, heard, missed)

    # -- for observers -----------------------------------------------------------------------------

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        return await self._people.holds(kind, name, mode, token)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        """Have ``changed`` called when the name's holder may have changed; return what ends that."""
        keys = self.cluster.keys(kind, name)
        watches: list[Watch] = []
        pause = pauses(first=_REWATCH, longest=_REWATCH_MOST)

        def begin() -> None:
            watches.append(self.cluster.watches.watch(keys.base, keys.end, 0, heard, missed))

        def missed() -> None:
            if watches:
                self.cluster.later(next(pause), begin_again)
            changed()

        def begin_again() -> None:
            if watches:
                watches.clear()
                begin()

        def heard(events: list[m.Event], revision: int) -> None:
            nonlocal pause
            pause = pauses(first=_REWATCH, longest=_REWATCH_MOST)
            changed()

        def end() -> None:
            self._observers.pop(end, None)
            while watches:
                self.cluster.watches.end(watches.pop())

        self._observers[end] = changed
        begin()
        return end
