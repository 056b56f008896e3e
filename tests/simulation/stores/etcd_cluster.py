"""etcd's members, above HTTP/2: calls and streams, the leader's clock of leases, watches, terms.

A member of before 3.5.23 answers renewals as long as it takes itself for the leader: that is what clients
have to live with, so that is what these do. A member that looks for a leader fails the calls on it, or is
silent about them. Users have simple tokens, which each member forgets with its process, and a password
takes a member ``hashing`` seconds of its processor. Left out: roles, other alarms than NOSPACE, and
learners.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import exchange as x
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.exchange import Exchange, Lost, NotSent

from ..world import World
from . import consensus
from .consensus import Proposed
from .etcd_store import Compact, Grant, Nothing, Refused, Revoke, Store, Token, check, those_in
from .wire import Stream, Wire

#: The least that a lease is granted for, in seconds.
LEAST_TTL = 1
#: Instead of a status: HTTP/2 refuses the stream.
REFUSED = -1
_CLUSTER = 0xC1


class Call:
    """A member's side of a call."""

    def __init__(
        self, client: Client, id: int, path: str, of_leader: bool, token: str | None
    ) -> None:
        self.client = client
        self.token = token
        self.id = id
        self.path = path
        #: It is ended when the member has no leader.
        self.of_leader = of_leader
        self.over = False
        #: Ranges that are watched, by number.
        self.watches: dict[int, tuple[bytes, bytes]] = {}

    @property
    def streams(self) -> bool:
        return self.path in (api.WATCH.path, api.KEEP_ALIVE.path)

    def say(self, message: m.Message) -> None:
        if not self.over:
            self.client.stream.send(("message", self.id, message.encode()))

    def answer(self, message: m.Message) -> None:
        self.say(message)
        self.end(0, "")

    def end(self, code: int, text: str) -> None:
        if not self.over:
            self.over = True
            self.client.calls.pop(self.id, None)
            self.client.stream.send(("end", self.id, code, text))


class Client:
    """A member's side of a connection."""

    def __init__(self, member: Member, stream: Stream) -> None:
        self.member = member
        self.stream = stream
        self.calls: dict[int, Call] = {}
        member.clients.add(self)

    def received(self, data: Any) -> None:
        self.member.do(self._receive, data)

    def ended(self) -> None:
        for call in self.calls.values():
            call.over = True
        self.calls.clear()
        self.member.clients.discard(self)

    def _receive(self, data: Any) -> None:
        if data[0] == "preface":
            self.stream.send(("settings",))
        elif data[0] == "begin":
            _, id, path, of_leader, token, message = data
            call = self.calls[id] = Call(self, id, path, of_leader, token)
            if of_leader and not self.member.serves:
                call.end(x.UNAVAILABLE, "etcdserver: no leader")
            elif message is not None:
                self.member.on_message(call, message)
        elif data[0] == "message" and data[1] in self.calls:
            self.member.on_message(self.calls[data[1]], data[2])
        elif data[0] == "cancel" and data[1] in self.calls:
            call = self.calls.pop(data[1])
            call.over = True


class Member(consensus.Member):
    """One member.

    Mutable state besides: ``store``, ``term`` (of the last entry that was carried out), ``clients``; as a
    leader ``expires`` (true times by lease); ``tokens`` that count, ``hashes_until`` (the end of the last
    password's hashing).
    """

    letter = "e"
    ensemble: Cluster

    def __init__(self, ensemble: Cluster, number: int) -> None:
        super().__init__(ensemble, number)
        self.store = Store()
        self.store.told = self._told
        self.term = 0
        self.clients: set[Client] = set()
        self.expires: dict[int, float] = {}
        self.tokens: set[str] = set()
        self.hashes_until = 0.0

    # -- what consensus asks -----------------------------------------------------------------------------

    def apply(self, proposed: Proposed) -> Any:
        change = proposed.change
        self.term = proposed.number >> 32
        if isinstance(change, Token):
            self.tokens.add(change.text)
            return None
        result = self.store.apply(change)
        if isinstance(change, Grant) and result is None and self.role == "leading":
            self._renew(change.id)
        return result

    def begin_to_lead(self) -> None:
        self.expires = {}
        for lease in self.store.leases:
            self._renew(lease)
        self.propose(Nothing(), self.number)

    def drop_clients(self) -> None:
        """It has no leader: streams that want one end; of calls some are told, and some never."""
        for client in self.in_order():
            for call in list(client.calls.values()):
                if call.of_leader:
                    call.end(x.UNAVAILABLE, "etcdserver: no leader")
                elif not call.streams and self.world.random.random() < 0.5:
                    call.end(x.UNAVAILABLE, "etcdserver: leader changed")

    def down(self) -> None:
        for client in self.in_order():
            client.stream.break_off()
        super().down()
        self.tokens.clear()
        self.hashes_until = 0.0
        self.ensemble.wire.listening.pop((self.ensemble.address(self), 2379), None)

    def start(self) -> None:
        if self.role == "down":
            self.ensemble.listen(self)
        super().start()

    def in_order(self) -> list[Client]:
        """Return its clients, oldest first: a set's order is another one in each run."""
        return sorted(self.clients, key=lambda client: client.stream.serial)

    # -- calls -------------------------------------------------------------------------------------------

    def header(self) -> m.Header:
        return m.Header(self.ensemble.id, self.store.revision, self.term)

    def on_message(self, call: Call, data: bytes) -> None:
        method = _METHODS[call.path]
        request = method.request.decode(data)
        if not self._admits(call, method):
            return
        getattr(self, f"_{method.path.rpartition('/')[2].lower()}")(call, request)

    def _admits(self, call: Call, method: api.Method[Any, Any]) -> bool:
        if self.ensemble.password is None or call.token in self.tokens:
            return True
        if method in (api.AUTHENTICATE, api.STATUS, api.KEEP_ALIVE):
            return True
        if method is api.WATCH:
            refused = m.WatchResponse(self.header(), -1, created=True, canceled=True)
            refused.cancel_reason = "rpc error: code = PermissionDenied"
            call.say(refused)
        elif call.token is None:
            call.end(x.INVALID_ARGUMENT, "etcdserver: user name is empty")
        else:
            call.end(x.UNAUTHENTICATED, "etcdserver: invalid auth token")
        return False

    def _authenticate(self, call: Call, request: m.AuthenticateRequest) -> None:
        ensemble = self.ensemble
        if ensemble.password is None:
            call.end(x.FAILED_PRECONDITION, "etcdserver: authentication is not enabled")
            return
        right, token = request.password == ensemble.password, f"token.{ensemble.next_lease()}"
        text = "etcdserver: authentication failed, invalid user ID or password"

        def hashed(token: str = token) -> None:
            if not right:
                call.end(x.INVALID_ARGUMENT, text)
                return
            self._ask(call, Token(token), lambda _: m.AuthenticateResponse(token=token))

        self.hashes_until = max(self.hashes_until, self.world.time) + ensemble.hashing
        self.world.at(self.hashes_until, self.do, hashed)

    def _txn(self, call: Call, request: m.TxnRequest) -> None:
        try:
            check(request)
        except Refused as refused:
            call.end(refused.code, str(refused))
            return
        if self.ensemble.full and _writes(request):
            call.end(*_NO_SPACE)
            return
        self._ask(call, request, lambda result: result)

    def _range(self, call: Call, request: m.RangeRequest) -> None:
        # A read is confirmed by a majority before it is carried out.
        self._ask(call, Nothing(), lambda _: self.store.read(request))

    def _leasegrant(self, call: Call, request: m.LeaseGrantRequest) -> None:
        if self.ensemble.full:
            call.end(*_NO_SPACE)
            return
        grant = Grant(request.id or self.ensemble.next_lease(), max(request.ttl, LEAST_TTL))
        self._ask(call, grant, lambda _: m.LeaseGrantResponse(id=grant.id, ttl=grant.ttl))

    def _leaserevoke(self, call: Call, request: m.LeaseRevokeRequest) -> None:
        self._ask(call, Revoke(request.id), lambda _: m.LeaseRevokeResponse())

    def _ask(self, call: Call, change: Any, answer_of: Callable[[Any], Any]) -> None:
        def answer(result: Any) -> None:
            if isinstance(result, Refused):
                call.end(result.code, str(result))
                return
            message = answer_of(result)
            message.header = self.header()
            call.answer(message)

        self.to_leader("on_request", self.number, change, answer)  # else: its deadline ends it

    def _leasetimetolive(self, call: Call, request: m.LeaseTimeToLiveRequest) -> None:
        ttl = self.store.leases.get(request.id)
        keys = sorted(self.store.attached.get(request.id, ()))
        left = -1 if ttl is None else ttl
        answer = m.LeaseTimeToLiveResponse(self.header(), request.id, left, ttl or 0)
        answer.keys = keys if request.keys else []
        call.answer(answer)

    def _status(self, call: Call, request: m.StatusRequest) -> None:
        leader = self.leader.number + 1 if self.serves and self.leader is not None else 0
        call.answer(m.StatusResponse(self.header(), "3.5.30", 1000, leader))

    # -- leases ------------------------------------------------------------------------------------------

    def _leasekeepalive(self, call: Call, request: m.LeaseKeepAliveRequest) -> None:
        if self.role == "leading":  # or takes itself for it
            self.on_renewed(call, request.id, self._renew(request.id))
        elif not self.to_leader("on_renewal", self.number, call, request.id):
            call.end(x.UNAVAILABLE, "etcdserver: no leader")

    def on_renewal(self, number: int, call: Call, lease: int) -> None:
        self.heard_at[number] = self.world.time
        self.tell(number, "on_renewed", call, lease, self._renew(lease))

    def on_renewed(self, call: Call, lease: int, ttl: int) -> None:
        call.say(m.LeaseKeepAliveResponse(self.header(), lease, ttl))

    def _renew(self, lease: int) -> int:
        """Let a lease live for its whole time from now on; return that, or 0."""
        ttl = self.store.leases.get(lease, 0)
        if not ttl or self.expires.get(lease, self.world.time) < self.world.time:
            return 0  # it is being revoked
        end = self.expires[lease] = self.world.time + ttl / self.rate
        self.world.at(end, self.do, self._end_overdue, lease, self.epoch)
        return ttl

    def _end_overdue(self, lease: int, epoch: int) -> None:
        if self.role != "leading" or epoch != self.epoch:
            return
        if self.expires.get(lease, self.world.time + 1.0) <= self.world.time:
            self.world.log(f"{self!r}: lease {lease} has expired")
            self.expires[lease] = -1.0
            self.propose(Revoke(lease), self.number)
            self.world.after(self.ensemble.tick, self.do, self._pass_on, lease, 10)

    def _pass_on(self, lease: int, tries: int) -> None:
        """A leader that was stopped does not know at first that there is another one. It has that one end
        the leases whose time is over by its own clock."""
        if lease not in self.store.leases:
            return
        if self.role == "following" and self.serves:
            self.to_leader("on_request", self.number, Revoke(lease), lambda _: None)
        elif tries:
            self.world.after(self.ensemble.tick, self.do, self._pass_on, lease, tries - 1)

    def on_request(self, number: int, change: Any, answer: Callable[[Any], None]) -> None:
        self.heard_at[number] = self.world.time
        self.propose(change, number, answer)

    # -- watches -----------------------------------------------------------------------------------------

    def _watch(self, call: Call, request: m.WatchRequest) -> None:
        if (ends := request.cancel_request) is not None:
            call.watches.pop(ends.watch_id, None)
            call.say(m.WatchResponse(self.header(), ends.watch_id, canceled=True))
            return
        begins = request.create_request
        assert begins is not None
        id, key, end = begins.watch_id, begins.key, begins.range_end
        call.say(m.WatchResponse(self.header(), id, created=True))
        if 0 < begins.start_revision <= self.store.compacted:
            compacted = self.store.compacted + 1
            answer = m.WatchResponse(self.header(), id, canceled=True, compact_revision=compacted)
            call.say(answer)
            return
        call.watches[id] = (key, end)
        if begins.start_revision:
            missed = self.store.since(begins.start_revision, key, end)
            if missed:
                call.say(m.WatchResponse(self.header(), id, events=missed))

    def _told(self, events: list[m.Event]) -> None:
        for client in self.in_order():
            for call in client.calls.values():
                for id, (key, end) in call.watches.items():
                    if its := those_in(events, key, end):
                        call.say(m.WatchResponse(self.header(), id, events=its))


_METHODS: dict[str, api.Method[Any, Any]] = {
    method.path: method for method in vars(api).values() if isinstance(method, api.Method)
}


_NO_SPACE = x.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded"


def _writes(request: m.TxnRequest) -> bool:
    """Tell whether a transaction may write, by either of its paths: it is refused then, if there is no
    space."""
    return any(
        step.request_put is not None or (step.request_txn is not None and _writes(step.request_txn))
        for step in (*request.success, *request.failure)
    )


class Cluster(consensus.Ensemble):
    """All members. Mutable state besides: ``leases`` (the last id), ``password`` (None: nobody is asked),
    ``hashing`` (seconds), ``full`` (the alarm NOSPACE is on)."""

    member_class = Member

    def __init__(self, world: World, wire: Wire, members: int, tick: float) -> None:
        self.id = _CLUSTER
        self.leases = 1000
        self.password: str | None = None
        self.hashing = 0.1
        self.full = False
        super().__init__(world, wire, members, tick)
        for member in self.members:
            self.listen(member)

    def listen(self, member: Member) -> None:
        self.wire.listening[self.address(member), 2379] = _Accept(member)

    def next_lease(self) -> int:
        self.leases += 1
        return self.leases

    @property
    def truth(self) -> Store:
        """The newest state that any member has applied."""
        store: Store = self.newest.store
        return store

    def compact(self) -> None:
        """Forget what was changed until a moment ago."""
        leader = self.leader
        if leader is not None and leader.role == "leading" and not leader.paused:
            leader.propose(Compact(leader.store.revision - 1), leader.number)


class _Accept:
    def __init__(self, member: Member) -> None:
        self._member = member

    def __call__(self, stream: Stream) -> Client:
        return Client(self._member, stream)


# -- the client's side -----------------------------------------------------------------------------------


class SimConnection(asyncio.Protocol):
    """What ``aiodlock.backends.etcd.connection.Connection`` is to its link, without the bytes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[Exception] = self._loop.create_future()
        self._calls: dict[int, Exchange] = {}
        self._next = 1
        self._transport: Any = None
        self._gone = asyncio.Event()
        #: Done when the member has sent its settings: it waits for the client's first bytes.
        self.ready: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._say("preface")

    def data_received(self, data: Any) -> None:
        if data[0] == "settings":
            self.ready.set_result(None)
            return
        call = self._calls.get(data[1])
        if call is None:
            return
        if data[0] == "message":
            try:
                call._heard(data[2])
            except Exception as wrong:  # whoever waits for the end hears it
                self._calls.pop(data[1])
                self._say("cancel", call.id)
                call.end(wrong)
        else:
            del self._calls[data[1]]
            _, _, code, text = data
            failed = NotSent(text) if code == REFUSED else x.Status(code, text)
            call.end(failed if code else None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.close(Lost(f"the connection was closed: {exc}"))
        self._gone.set()

    def begin(
        self,
        path: str,
        heard: Callable[[bytes], object],
        message: bytes | None = None,
        *,
        within: float | None = None,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Exchange:
        if self.over.done():
            raise NotSent(str(self.over.result()))
        call = Exchange(b"", heard, self._loop.create_future())
        call.id, self._next = self._next, self._next + 2
        self._calls[call.id] = call
        said = dict(metadata)
        # A call and its only message are one packet.
        self._say("begin", call.id, path, "hasleader" in said, said.get("token"), message)
        return call

    def send(self, call: Exchange, message: bytes) -> None:
        if call.ended.done():
            raise Lost("the stream has ended")
        self._say("message", call.id, message)

    def cancel(self, call: Exchange, error: Exception | None = None) -> None:
        if self._calls.pop(call.id, None) is not None:
            self._say("cancel", call.id)
        call.end(error or Lost("the call was given up"))

    def _say(self, *what: Any) -> None:
        if self._transport is not None:
            self._transport._stream.write(what)

    def close(self, reason: Exception, code: int = 0) -> None:
        if not self.over.done():
            self.over.set_result(reason)
        if not self.ready.done():
            self.ready.set_exception(reason)
            self.ready.exception()
        if self._transport is not None:
            self._transport.close()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(Lost(str(reason)))

    async def until_idle(self, within: float) -> None:
        calls = [call.ended for call in self._calls.values()]
        if calls:
            await asyncio.wait(calls, timeout=within)

    async def until_closed(self, within: float) -> None:
        await self._gone.wait()


async def connect(
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    *,
    address: str | None = None,
    accepted: Callable[[], object] = lambda: None,
) -> Any:
    """Stand in for the function of this name: a connection without HTTP/2."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(SimConnection, address or host, port)
    accepted()
    try:
        await connection.ready
    except BaseException:
        connection.close(Lost("the connection was given up"))
        raise
    return connection
