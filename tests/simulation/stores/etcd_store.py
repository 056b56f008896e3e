"""What etcd's members keep: keys with their revisions, and leases. Pure: no clock, no network.

Left out: sorting, limits and old revisions of reads, users and roles, and alarms.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from aiodlock.backends.etcd import exchange as x
from aiodlock.backends.etcd import messages as m


class Refused(Exception):
    """A request cannot be done; ``code`` is gRPC's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Grant(NamedTuple):
    """A lease begins."""

    id: int
    ttl: int


class Revoke(NamedTuple):
    """A lease ends, with its keys."""

    id: int


class Compact(NamedTuple):
    """Changes before this revision are forgotten."""

    revision: int


class Token(NamedTuple):
    """A user's token counts from now on."""

    text: str


class Nothing(NamedTuple):
    """A read, or the first entry of a term: it changes nothing, and is carried out in its place."""


#: What is compared, and how.
_TARGETS = {
    m.VERSION: "version",
    m.CREATE: "create_revision",
    m.MOD: "mod_revision",
    m.LEASE: "lease",
}
_RESULTS: dict[int, Callable[[int, int], bool]] = {
    m.EQUAL: operator.eq,
    m.GREATER: operator.gt,
    m.LESS: operator.lt,
    m.NOT_EQUAL: operator.ne,
}
_NO_KEY = m.KeyValue()


class Store:
    """All keys, as one member has them.

    Mutable state: ``keys``, ``revision``, ``events`` (all of them since ``compacted``), ``leases``
    (seconds, by id), ``attached`` (keys by lease).
    """

    def __init__(self) -> None:
        self.keys: dict[bytes, m.KeyValue] = {}
        self.revision = 1
        self.events: list[m.Event] = []
        self.compacted = 0
        self.leases: dict[int, int] = {}
        self.attached: dict[int, set[bytes]] = {}
        #: Told of the events of each revision.
        self.told: Callable[[list[m.Event]], None] = lambda events: None

    # -- changes ---------------------------------------------------------------------------------------

    def apply(self, change: object) -> m.TxnResponse | Refused | None:
        """Carry out a change; what can be refused is refused by all members alike."""
        try:
            if isinstance(change, m.TxnRequest):
                return self._transact(change)
            if isinstance(change, Grant):
                if change.id in self.leases:
                    raise Refused(x.FAILED_PRECONDITION, "etcdserver: lease already exists")
                self.leases[change.id] = change.ttl
                self.attached[change.id] = set()
            elif isinstance(change, Revoke):
                self._revoke(change.id)
            elif isinstance(change, Compact):
                self.compacted = max(self.compacted, change.revision)
                self.events = [e for e in self.events if _revision_of(e) > change.revision]
        except Refused as refused:
            return refused
        return None

    def _revoke(self, id: int) -> None:
        if id not in self.leases:
            raise Refused(x.NOT_FOUND, "etcdserver: requested lease not found")
        del self.leases[id]
        keys = sorted(self.attached.pop(id))
        if keys:
            self._write([self._deletion(key) for key in keys])

    # -- transactions ------------------------------------------------------------------------------------

    def _transact(self, request: m.TxnRequest) -> m.TxnResponse:
        # Comparisons are all made before anything is written, those of inner transactions too.
        path = self._path_of(request)
        for put in _puts(request, path):
            if put.lease and put.lease not in self.leases:
                raise Refused(x.NOT_FOUND, "etcdserver: requested lease not found")
        events: list[m.Event] = []
        response = self._carry_out(request, path, events)
        if events:
            self._tell(events)
        self._stamp(response)
        return response

    def _path_of(self, request: m.TxnRequest) -> dict[int, bool]:
        """Return by transaction whether it succeeds; inner ones of the path that is taken alone."""
        succeeds = all(self._holds(compare) for compare in request.compare)
        path = {id(request): succeeds}
        for step in request.success if succeeds else request.failure:
            if step.request_txn is not None:
                path |= self._path_of(step.request_txn)
        return path

    def _holds(self, compare: m.Compare) -> bool:
        field, is_true = _TARGETS[compare.target], _RESULTS[compare.result]
        want = getattr(compare, field) or 0
        found = self.range(compare.key, compare.range_end) or [_NO_KEY]
        return all(is_true(getattr(kv, field), want) for kv in found)

    def _carry_out(
        self, request: m.TxnRequest, path: dict[int, bool], events: list[m.Event]
    ) -> m.TxnResponse:
        succeeds = path[id(request)]
        answers = []
        for step in request.success if succeeds else request.failure:
            if step.request_range is not None:
                answers.append(m.ResponseOp(response_range=self.read(step.request_range)))
            elif step.request_put is not None:
                self._put(step.request_put, events)
                answers.append(m.ResponseOp())
            elif step.request_delete_range is not None:
                gone = step.request_delete_range
                keys = [kv.key for kv in self.range(gone.key, gone.range_end)]
                for key in keys:
                    events.append(self._deletion(key))
                    self._remove(key)
                answers.append(m.ResponseOp())
            else:
                assert step.request_txn is not None
                inner = self._carry_out(step.request_txn, path, events)
                answers.append(m.ResponseOp(response_txn=inner))
        return m.TxnResponse(succeeded=succeeds, responses=answers)

    def _put(self, put: m.PutRequest, events: list[m.Event]) -> None:
        before, revision = self.keys.get(put.key), self.revision + 1
        kv = m.KeyValue(
            key=put.key,
            create_revision=before.create_revision if before else revision,
            mod_revision=revision,
            version=before.version + 1 if before else 1,
            value=put.value,
            lease=put.lease,
        )
        if before is not None and before.lease in self.attached:
            self.attached[before.lease].discard(put.key)
        if put.lease:
            self.attached[put.lease].add(put.key)
        self.keys[put.key] = kv
        events.append(m.Event(m.PUT, kv))

    def _deletion(self, key: bytes) -> m.Event:
        return m.Event(m.DELETE, m.KeyValue(key=key, mod_revision=self.revision + 1))

    def _remove(self, key: bytes) -> None:
        kv = self.keys.pop(key)
        if kv.lease in self.attached:
            self.attached[kv.lease].discard(key)

    def _write(self, events: list[m.Event]) -> None:
        for event in events:
            assert event.kv is not None
            self._remove(event.kv.key)
        self._tell(events)

    def _tell(self, events: list[m.Event]) -> None:
        self.revision += 1
        self.events += events
        self.told(events)

    def _stamp(self, response: m.TxnResponse) -> None:
        """Inner answers have a header with the revision."""
        for answer in response.responses:
            if answer.response_range is not None:
                answer.response_range.header = m.Header(revision=self.revision)
            if answer.response_txn is not None:
                answer.response_txn.header = m.Header()
                self._stamp(answer.response_txn)

    # -- reading -----------------------------------------------------------------------------------------

    def range(self, key: bytes, end: bytes) -> list[m.KeyValue]:
        """Return the keys of a range, in their order."""
        keys = self.keys
        if not end:
            return [keys[key]] if key in keys else []
        return [keys[one] for one in sorted([one for one in keys if key <= one < end])]

    def read(self, request: m.RangeRequest) -> m.RangeResponse:
        found = self.range(request.key, request.range_end)
        count = len(found)
        if request.count_only:
            return m.RangeResponse(count=count)
        if request.limit:
            found = found[: request.limit]
        if request.keys_only:
            found = [replace(kv, value=b"") for kv in found]
        return m.RangeResponse(kvs=found, more=len(found) < count, count=count)

    def since(self, revision: int, key: bytes, end: bytes) -> list[m.Event]:
        """Return the events of a range from a revision on."""
        return [e for e in self.events if _revision_of(e) >= revision and _is_in(e, key, end)]


def _revision_of(event: m.Event) -> int:
    assert event.kv is not None
    return event.kv.mod_revision


def _is_in(event: m.Event, key: bytes, end: bytes) -> bool:
    assert event.kv is not None
    return key <= event.kv.key < end if end else event.kv.key == key


def those_in(events: list[m.Event], key: bytes, end: bytes) -> list[m.Event]:
    """Return those of a range."""
    return [event for event in events if _is_in(event, key, end)]


def _puts(request: m.TxnRequest, path: dict[int, bool]) -> list[m.PutRequest]:
    puts = []
    for step in request.success if path[id(request)] else request.failure:
        if step.request_put is not None:
            puts.append(step.request_put)
        elif step.request_txn is not None:
            puts += _puts(step.request_txn, path)
    return puts


def check(request: m.TxnRequest) -> None:
    """Refuse what is refused before it is looked at: a key that is written and written or deleted.

    The rules are etcd's ``checkIntervals``.
    """
    for steps in (request.success, request.failure):
        _check_steps(steps)


_Range = tuple[bytes, bytes]


def _check_steps(steps: list[m.RequestOp]) -> tuple[set[bytes], list[_Range]]:
    deletions = [
        (gone.key, gone.range_end)
        for step in steps
        if (gone := step.request_delete_range) is not None
    ]
    written: set[bytes] = set()
    for step in steps:
        if (inner := step.request_txn) is None:
            continue
        then, gone_then = _check_steps(inner.success)
        otherwise, gone_otherwise = _check_steps(inner.failure)
        # Of the two paths one is taken: both may write a key.
        for key in (*then, *(otherwise - then)):
            _check_key(key, written, deletions)
        written |= then | otherwise
        deletions += gone_then + gone_otherwise
    for step in steps:
        if (put := step.request_put) is not None:
            _check_key(put.key, written, deletions)
            written.add(put.key)
    return written, deletions


def _check_key(key: bytes, written: set[bytes], deletions: list[_Range]) -> None:
    gone = any(first <= key < end if end else key == first for first, end in deletions)
    if gone or key in written:
        raise Refused(x.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request")
