"""The recipe: who holds a name is decided by which keys there are. Pure: no I/O, no clock.

Each request is a key below its name, made in one transaction. The keys' order is that of their
``create_revision``, which the cluster gives and which is the token, too. A request holds when no
earlier request stands in its way. Nothing that comes later can change that, and what is earlier can
only go. So whoever saw it once, in any state of the store however old, knows it for as long as the own
key lives.

Keys below ``PREFIX/1/KIND/NAME/``:

- ``q/REQUEST``: a request, waiting or holding. It ends with its client's lease.
- ``d/REQUEST``: the lock-delay of a holder, on a lease that is longer by the delay. It blocks what the
  holder blocked, once ``q/REQUEST`` is gone.
- ``h/REQUEST``: the ``hold_at_least`` of a holder, on a lease of its own that nobody renews. It blocks in
  the same way.
- ``x/REQUEST``: a marker that refuses late duplicates of a request that has left.
- ``r``: of kind *once*, the success on record, on a lease of its own that nobody renews. While it is there,
  nobody holds and nobody queues.

The key ``PREFIX/1/w/CLIENT`` is what a client tells of its waits: a serial, and a record. It ends with a
lease of the client.

Keys below ``PREFIX/1/c/CLIENT/`` are messages to a client: ``REQUEST`` says that an operator broke that
one's lease, ``recall`` that others want the name of the request in its value, which lingers.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, unquote

from ..._errors import BackendError
from ..._model import Mode, Terms
from .messages import KeyValue

VERSION = "1"
#: Where a client is told that others want the name of a request that lingers: the message is its id.
RECALL = "recall"
_KINDS: dict[str, str] = {"lock": "l", "semaphore": "s", "once": "o"}


# -- keys ------------------------------------------------------------------------------------------


def text_of(key: bytes) -> str:
    """Return a key, or a part of it, as text: also one that others have written, whatever it is."""
    return key.decode(errors="backslashreplace")


def after(prefix: bytes) -> bytes:
    """Return the first key behind those that begin with the prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one name."""

    base: bytes
    end: bytes

    @classmethod
    def of(cls, prefix: str, kind: str, name: str) -> Keys:
        """Return the keys of a name. Percent-encoded, it holds no slash."""
        base = f"{prefix}/{VERSION}/{_KINDS[kind]}/{quote(name, safe='')}/".encode()
        return cls(base, after(base))

    def all(self, what: str) -> tuple[bytes, bytes]:
        """Return the range of all requests (q), lock-delays (d) or ``hold_at_least`` (h)."""
        start = self.base + what.encode() + b"/"
        return start, after(start)

    def request(self, id: str) -> bytes:
        """Return the key of a request."""
        return self.base + b"q/" + id.encode()

    def delay(self, id: str) -> bytes:
        """Return the key of a holder's lock-delay."""
        return self.base + b"d/" + id.encode()

    def hold(self, id: str) -> bytes:
        """Return the key of a holder's ``hold_at_least``."""
        return self.base + b"h/" + id.encode()

    def marker(self, id: str) -> bytes:
        """Return the key that refuses late duplicates of a request."""
        return self.base + b"x/" + id.encode()

    @property
    def record(self) -> bytes:
        """Return the key of the success on record."""
        return self.base + b"r"

    def split(self, key: bytes) -> tuple[str, str]:
        """Return what a key of this name is (q, d, h, x or r), and the request's id."""
        what, _, id = text_of(key[len(self.base) :]).partition("/")
        return what, id


def versions_key(prefix: str) -> bytes:
    """Return the key of the mark that says which versions may work under a prefix."""
    return f"{prefix}/versions".encode()


def mailbox(prefix: str, client: str) -> tuple[bytes, bytes]:
    """Return the range of the messages to a client."""
    start = f"{prefix}/{VERSION}/c/{client}/".encode()
    return start, after(start)


def waits_key(prefix: str, client: str) -> bytes:
    """Return the key under which a client tells what its tasks wait for."""
    return f"{prefix}/{VERSION}/w/{quote(client, safe='')}".encode()


def all_names(prefix: str, kind: str) -> tuple[bytes, bytes]:
    """Return the range of every name of a kind."""
    start = f"{prefix}/{VERSION}/{_KINDS[kind]}/".encode()
    return start, after(start)


def name_of(prefix: str, kind: str, key: bytes) -> str | None:
    """Return the name that the key of a request or a record belongs to; None for other keys."""
    start, _ = all_names(prefix, kind)
    quoted, _, rest = text_of(key[len(start) :]).partition("/")
    return unquote(quoted) if rest.startswith("q/") or rest == "r" else None


# -- records ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """A request as the store has it. ``order``: its place, smaller is earlier; also the token of a holder.

    ``created`` is the revision in which its key was made. A request that joined another one of its
    owner has that one's order.
    """

    id: str
    mode: Mode
    owner: str
    client: str
    limit: int
    order: int
    created: int
    lease: int = 0
    #: The revision in which its key was written last.
    written: int = 0
    #: For people.
    note: str = ""
    description: str = ""
    #: Whether its client may keep its lease for the next body.
    lingers: bool = False

    @property
    def joined(self) -> bool:
        """Whether its owner held by another request when it came."""
        return self.order != self.created


def value_of(terms: Terms, owner: str, client: str, description: str, order: int | None) -> bytes:
    """Return what stands in a request's key, readable for people. ``order``: given for one that joins."""
    fields: dict[str, object] = {"mode": terms.mode, "owner": owner, "client": client}
    if terms.limit:
        fields["limit"] = terms.limit
    if order is not None:
        fields["order"] = order
    if terms.linger:
        fields["lingers"] = True
    if terms.note:
        fields["note"] = terms.note
    if description:
        fields["description"] = description
    return json.dumps(fields, ensure_ascii=False, separators=(", ", ": ")).encode()


def _fields(kv: KeyValue) -> dict[str, object]:
    """Return the fields in a value, in which all texts can be encoded.

    :raises ValueError: if it is no JSON object of such.
    """
    try:
        fields = json.loads(kv.value.decode())
        if b"\\u" in kv.value:  # half a character may be written so
            json.dumps(fields, ensure_ascii=False).encode()
    except RecursionError as wrong:
        raise ValueError("too deep") from wrong
    if isinstance(fields, dict):
        return fields
    raise ValueError("no object")


def read_record(id: str, kv: KeyValue) -> Record:
    """Return what a key says. Fields that are not known are ignored.

    :raises ValueError: if it is no record.
    """
    try:
        fields = _fields(kv)
        mode: Mode = "shared" if fields["mode"] == "shared" else "exclusive"
        return Record(
            id,
            mode,
            str(fields["owner"]),
            str(fields["client"]),
            _number(fields.get("limit", 0)),
            _number(fields.get("order", kv.create_revision)),
            kv.create_revision,
            kv.lease,
            kv.mod_revision,
            str(fields.get("note", "")),
            str(fields.get("description", "")),
            fields.get("lingers") is True,
        )
    except (KeyError, ValueError) as wrong:
        raise ValueError(f"not a record of aiodlock: {kv.value[:200]!r}") from wrong


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("no number that etcd can keep")
    return value


@dataclass(frozen=True, slots=True)
class Success:
    """What is on record: the result, and the request that has it recorded."""

    request: str
    result: bytes
    lease: int = 0


def value_of_success(request: str, result: bytes) -> bytes:
    """Return what stands in the key of a record, readable for people where the result is text."""
    fields = {"request": request}
    try:
        fields["result"] = result.decode()
    except UnicodeDecodeError:
        fields["base64"] = base64.b64encode(result).decode()
    return json.dumps(fields, ensure_ascii=False, separators=(", ", ": ")).encode()


def read_success(kv: KeyValue) -> Success:
    """Return what is on record.

    :raises ValueError: if it is no record.
    """
    try:
        fields = _fields(kv)
        if "base64" in fields:
            result = base64.b64decode(str(fields["base64"]), validate=True)
        else:
            result = str(fields["result"]).encode()
        return Success(str(fields["request"]), result, kv.lease)
    except (KeyError, ValueError) as wrong:
        raise ValueError(f"not a record of aiodlock: {kv.value[:200]!r}") from wrong


# -- who holds -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """What a request is told by the state of its name.

    ``holds``: it holds, with ``order`` as token. ``joins``: its owner holds by the request ``mate``,
    which has that order: it may get in beside it. ``waits``: it stands behind others. ``deadlock``: its
    owner holds in shared mode, and it asks exclusively. ``limit``: the semaphore is in use with another
    limit.
    """

    what: Literal["holds", "joins", "waits", "deadlock", "limit"]
    order: int = 0
    mate: str = ""
    used: int = 0


class Queue:
    """The requests of one name at one revision.

    Mutable state: ``requests`` that have a place of their own, by id in the order of arrival;
    ``joined``, those that got in beside another one of their owner; ``delays`` and ``holds`` by request id;
    ``success`` on record; ``clients`` (how many of the requests are theirs); ``foreign``, the keys that
    cannot be read, with the revision in which each was made; ``revision``.

    What is written in a foreign key is not known. It may be the key of a holder that somebody has written
    over, so nobody behind it holds. Who stands before it does not mind: what comes later does not count.
    """

    def __init__(self, keys: Keys, revision: int = 0, kvs: Iterable[KeyValue] = ()) -> None:
        self._keys = keys
        self.requests: OrderedDict[str, Record] = OrderedDict()
        self.joined: dict[str, Record] = {}
        self.delays: dict[str, Record] = {}
        self.holds: dict[str, Record] = {}
        self.success: Success | None = None
        self.clients: Counter[str] = Counter()
        self.foreign: dict[bytes, int] = {}
        self.revision: int = revision
        for kv in sorted(kvs, key=lambda kv: kv.create_revision):
            self.put(kv)

    def put(self, kv: KeyValue) -> str | None:
        """Take a key that was written; return the id if it is that of a request."""
        self.foreign.pop(kv.key, None)
        try:
            return self._put(kv)
        except ValueError:
            # What it was before counts still: it was not deleted.
            self.foreign[kv.key] = kv.create_revision
            return None

    def _put(self, kv: KeyValue) -> str | None:
        what, id = self._keys.split(kv.key)
        if what == "q":
            record = read_record(id, kv)
            if self.find(id) is None:
                self.clients[record.client] += 1
            if record.joined:
                self.requests.pop(id, None)
                self.joined[id] = record
            else:
                self.requests[id] = record  # a new one is the latest; an old one keeps its place
                if self.joined.pop(id, None) is not None:  # and this one gets its place back
                    earliest = sorted(self.requests.values(), key=lambda one: one.order)
                    self.requests = OrderedDict((one.id, one) for one in earliest)
            return id
        if what == "d":
            self.delays[id] = read_record(id, kv)
        if what == "h":
            self.holds[id] = read_record(id, kv)
        if what == "r":
            self.success = read_success(kv)
        return None

    def delete(self, key: bytes) -> str | None:
        """Take a key that was deleted; return the id if it is that of a request."""
        self.foreign.pop(key, None)
        what, id = self._keys.split(key)
        if what == "q":
            record = self.requests.pop(id, None) or self.joined.pop(id, None)
            if record is not None:
                self.clients[record.client] -= 1
                if not self.clients[record.client]:
                    del self.clients[record.client]
            return id
        if what == "d":
            self.delays.pop(id, None)
        if what == "h":
            self.holds.pop(id, None)
        if what == "r":
            self.success = None
        return None

    def find(self, id: str) -> Record | None:
        """Return a request."""
        return self.requests.get(id) or self.joined.get(id)

    def check(self) -> None:
        """Be sure that nobody waits for a key that is not aiodlock's.

        :raises BackendError: if there are such. It names one.
        """
        for key in self.foreign:
            raise BackendError(
                f"the key {text_of(key)!r} in etcd is not aiodlock's, or was written over, so nobody can "
                "be let in behind it. Delete it, once you know that no holder goes on with it"
            )

    def closed(self) -> list[Record]:
        """Return the holders that are gone, and keep the name closed."""
        closing = self.holds | self.delays
        return [record for id, record in closing.items() if self.find(id) is None]

    def closing(self) -> set[int]:
        """Return the leases that the name is closed by."""
        closing = (*self.holds.items(), *self.delays.items())
        return {record.lease for id, record in closing if self.find(id) is None}

    def holders(self) -> Iterator[Record]:
        """Iterate over the requests that hold. The others that have a place of their own stand behind
        them."""
        yield from self.joined.values()
        blockers = [*self.joined.values(), *self.closed()]
        exclusive = shared = False
        taken = len(blockers)
        foreign = min(self.foreign.values(), default=None)
        for record in self.requests.values():
            if foreign is not None and foreign < record.order:
                return
            if record.limit:
                if taken >= record.limit:
                    return
                taken += 1
            else:
                earlier = [other.mode for other in blockers if other.order < record.order]
                if exclusive or "exclusive" in earlier:
                    return
                if record.mode == "exclusive":
                    if shared or "shared" in earlier:
                        return
                    exclusive = True
                shared = True
            yield record

    def waiters(self) -> list[Record]:
        """Return the requests that wait, the head first."""
        holding = {record.id for record in self.holders()}
        return [record for record in self.requests.values() if record.id not in holding]

    def turn_of(self, record: Record) -> Turn:
        """Return how it stands with a request, which need not be in the queue yet."""
        if record.limit:
            for other in self.requests.values():
                if other.limit != record.limit and other.order < record.order:
                    return Turn("limit", used=other.limit)
                break
        holders = list(self.holders())
        return self.turn_among(record, holders)

    def turn_among(self, record: Record, holders: list[Record]) -> Turn:
        """Return the same, where the holders are known."""
        if record.joined:
            return Turn("holds", record.order)
        if not record.limit:
            # Of those that are let in together the first one holds, and the others join it.
            mates = [r for r in holders if r.owner == record.owner and r.order < record.order]
            if mates:
                best = min(mates, key=lambda mate: (mate.mode != "exclusive", mate.order))
                if best.mode == "exclusive" or record.mode == "shared":
                    return Turn("joins", best.order, best.id)
                return Turn("deadlock")
        if any(holder.id == record.id for holder in holders):
            return Turn("holds", record.order)
        return Turn("waits")

    def would_hold(self, record: Record) -> bool:
        """Whether a request that comes now would hold at once."""
        self.requests[record.id] = record
        try:
            return any(holder.id == record.id for holder in self.holders())
        finally:
            del self.requests[record.id]
