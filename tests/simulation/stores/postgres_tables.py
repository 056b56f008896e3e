"""The functions of ``schema.sql`` in plain Python: lines in, lines out, the time handed in.

What is decided about one name is the machine of ``memory://``. Here are the words of the lines, what is
notified to whom, what a transaction has to wait for, unlogged tables, and histories. The same calls at the
same times make the same tables, so a log of calls is a log of states. ``test_postgres_fake.py`` holds this
against the real functions.

Left out: rows (short ways, versions, ``sweep``'s pages), semaphores' names in ``inspect`` beyond what a
client reads, a wait of two names with one hash, and everything that the machine has no room for: tokens of
a free name are forgotten at their time, not by the sweep after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from aiodlock.backends.memory.machine import Asked, Entry, Message, Name
from aiodlock.backends.postgres.notifications import channel
from aiodlock.backends.postgres.schema import VERSION

_DAY = 86_400_000
#: A result that is longer is read apart.
_LONG = 256
_MOST_HEARD, _MOST_IDS = 16_000, 7_900


class Notified(NamedTuple):
    """A notification, told when its transaction is committed."""

    channel: str
    payload: str


class Turned(NamedTuple):
    """What a call of ``turn`` comes to. ``durable``: its commit is waited for."""

    answer: str
    told: list[Notified]
    durable: bool


class Row(dict[str, Any]):
    """A row as asyncpg gives it: by the names of columns, and in their order."""

    def __iter__(self) -> Any:
        return iter(self.values())


class Tables:
    """All tables of the schema. Mutable state is listed in ``__init__``.

    :param unlogged: so were they installed.
    """

    #: What broken variants leave out: what tells a record is waited for, and grants are told as hints.
    records_are_durable, hints = True, True

    def __init__(self, *, unlogged: bool) -> None:
        self.unlogged = unlogged
        self.names: dict[str, Name] = {}
        #: Of unlogged tables: the longest lease that is known through a name, in all, and since when grants
        #: are made (None: a crash has emptied the tables, and nobody has called yet).
        self.noted: dict[str, int] = {}
        self.longest = 0
        self.opened_at: int | None = 0
        #: By timeline: the id, and when it was made.
        self.histories: dict[int, tuple[str, int]] = {}
        self.waits: dict[str, tuple[int, bytes, int]] = {}
        #: Whether there is a synchronous standby: grants are told to others as hints then.
        self.hints_only = False

    def crash(self) -> None:
        """The server was killed: unlogged tables are empty."""
        self.waits.clear()
        if self.unlogged:
            self.names.clear()
            self.noted.clear()
            self.opened_at = None

    # -- messages ------------------------------------------------------------------------------------

    def turn(self, now_us: int, caller: str, retention: int, text: str) -> Turned:
        """Carry messages out, one a line."""
        answers: list[str] = []
        heard: list[str] = []
        told: list[Notified] = []
        durable = False
        for line in text.split("\n"):
            fields = line.split("\t")
            key = fields[1]
            if fields[0] == "announce":
                told.append(Notified(channel(f"changes {key}"), key))
                answers.append("announced")
                continue
            answer, messages, lasts = self._one(now_us, caller, retention, fields)
            answers.append(answer)
            durable = durable or lasts
            for message in messages:
                payload = _payload(message, key)
                if message.client == caller:
                    heard.append(payload)
                else:
                    if self.hints_only and self.hints and message.word == "granted":
                        payload = "look" + payload.removeprefix("granted")
                    told.append(Notified(channel(message.client), payload))
        if sum(len(one) + 1 for one in heard) > _MOST_HEARD:
            heard = [f"look * {key}"]
        return Turned("\n".join((*answers, *heard)), told, durable)

    def _one(
        self, now_us: int, caller: str, retention: int, fields: list[str]
    ) -> tuple[str, list[Message], bool]:
        """Return the answer to a message, what it causes, and whether it has to last."""
        verb, key, now = fields[0], fields[1], now_us // 1000
        name = self.names.get(key)
        if name is None:
            name = self.names[key] = Name()
        if verb == "acquire":
            return self._acquire(name, now_us, caller, retention, fields)
        if verb == "extend":
            length = int(fields[3])
            reply, messages = name.extend(
                now_us, fields[2], length, begins=len(fields) > 4, retention=retention
            )
            holder = name.holders.get(fields[2])
            if self.unlogged and holder is not None and reply[0] in ("held", "recalled"):
                self._note(holder.length + holder.asked.delay)
            answer = _answer(reply, "held")
            return answer, messages, self.records_are_durable or reply[0] != "done"
        if verb == "leave":
            return self._leave(name, now_us, retention, fields)
        if verb == "break":
            tokens = frozenset(map(int, fields[3].split(" "))) if len(fields) > 3 else None
            broken, messages = name.break_(
                now_us, tokens, remember=int(fields[2]), retention=retention
            )
            return f"broke {len(broken)}", messages, True
        if verb == "forget":
            known, messages = name.forget(now_us)
            return f"forgot {int(known)}", messages, True
        assert verb == "look", verb
        name._follow(now)
        return "looked", [], False

    def _acquire(
        self, name: Name, now_us: int, caller: str, retention: int, fields: list[str]
    ) -> tuple[str, list[Message], bool]:
        _, key, id, mode, owner, ttl, waiter_ttl, delay, patience, *more = fields
        note, description, hold, how = (*more, *("", "", "0", "")[len(more) :])
        asked = Asked(
            id,
            "exclusive" if mode == "x" else "shared",
            int(mode[1:] or 0),
            owner,
            caller,
            int(ttl),
            int(waiter_ttl),
            int(delay),
            int(hold),
            how.startswith("begins"),
            how.endswith("resize"),
            how == "linger",
            note,
            description,
        )
        now = now_us // 1000
        on_record = name.record is not None and now < name.record_until
        marked = now < name.markers.get(id, 0)
        if self.unlogged and not on_record and not marked:
            ends = max(asked.ttl + asked.delay, asked.hold)
            self._note(ends)
            if not self.noted.get(key):
                opened_at = self._opened(now)
                if now < opened_at:
                    return f"closed {opened_at - now}", [], True
            self.noted[key] = max(ends, self.noted.get(key, 0))
        reply, messages = name.acquire(now_us, asked, wait=patience == "wait", retention=retention)
        if reply[0] == "gone":
            return "gone gone", messages, not marked
        if reply[0] == "limit":
            return f"limit s{reply[1]}", messages, True
        return _answer(reply, "granted"), messages, self.records_are_durable or reply[0] != "done"

    @staticmethod
    def _leave(
        name: Name, now_us: int, retention: int, fields: list[str]
    ) -> tuple[str, list[Message], bool]:
        _, _, id, marker, end, *more = fields
        options: dict[str, Any] = {"marker": int(marker), "retention": retention}
        if end == "recorded":
            keep, result = more
            reply, messages = name.record_success(
                now_us, id, unquote_to_bytes(result), keep=int(keep), **options
            )
        else:
            reply, messages = name.leave(now_us, id, end=end, **options)  # type: ignore[arg-type]
        holder = name.holders.get(id)
        rests = holder is not None and holder.rest > 0
        granted = any(message.word == "granted" for message in messages)
        durable = marker != "0" or reply[0] == "recorded" or granted or rests
        return " ".join(reply), messages, durable

    # -- unlogged tables -----------------------------------------------------------------------------

    def _note(self, wished: int) -> None:
        self.longest = max(self.longest, min(wished, _DAY))

    def _opened(self, now: int) -> int:
        self.meet(now)
        assert self.opened_at is not None
        self.opened_at = min(self.opened_at, now + self.longest)
        return self.opened_at

    def meet(self, now: int) -> None:
        """A client says hello: if a crash has emptied the tables, it is seen now."""
        if self.opened_at is None:
            self.opened_at = now + self.longest

    # -- what is read --------------------------------------------------------------------------------

    def page(self, after: str, until: str, most: int) -> list[Row]:
        keys = sorted(key for key in self.names if after < key < until)[:most]
        return [
            Row(key=key, used=bool(name.holders or name.waiters or name.record))
            for key, name in ((key, self.names[key]) for key in keys)
        ]

    def tell_waits(
        self, now_us: int, by: str, serial: int, record: bytes | None, keep: int
    ) -> bool:
        before = self.waits.get(by)
        until = now_us // 1000 + keep
        if record is None:
            if before is None or before[0] < serial:
                return False
            self.waits[by] = (*before[:2], until)
        elif before is None or before[0] <= serial:
            self.waits[by] = (serial, record, until)
        return True

    def waits_of(self, now_us: int, asked: Sequence[str]) -> list[Row]:
        found = [(one, self.waits[one]) for one in asked if one in self.waits]
        return [
            Row(client=client, record=record)
            for client, (_, record, until) in found
            if now_us // 1000 < until and record
        ]

    def sweep(self, now_us: int, locked: Collection[str] = ()) -> None:
        """Delete what has had its time, and is not locked."""
        now = now_us // 1000
        for key in [key for key, name in self.names.items() if name.kept_until() <= now]:
            if key not in locked:
                del self.names[key]
                self.noted.pop(key, None)
        self.waits = {by: told for by, told in self.waits.items() if now < told[2]}


def recorded(name: Name | None, now_us: int) -> str | None:
    """Return the success on record for a name, as ``aiodlock.recorded`` does."""
    if name is None or name.record is None or now_us // 1000 >= name.record_until:
        return None
    return quote_from_bytes(name.record[1], safe="")


def inspected(name: Name | None, now_us: int, *, queues: bool) -> list[Row]:
    """Return the rows of ``aiodlock.inspect``, as far as a client reads them."""
    if name is None:
        return []
    seen, now = name.inspect(now_us, queues=queues), now_us // 1000
    rows = []
    for asked, token, left, length in seen.holders:
        more: dict[str, Any] = {
            "client": asked.client,
            "ago_ms": int((now_us - token) / 1000),
            "length_ms": length,
        }
        rows.append(_row("holder", left, asked=asked, token=token, **more))
    mode = f"s{name.limit}" + "r" * name.resized
    about: dict[str, Any] = {"token": seen.token, "places": seen.closed_places, "mode": mode}
    rows.append(_row("name", seen.closed, **about))
    if seen.recorded is not None and now < name.record_until:
        rows.append(_row("record", seen.recorded[1], ago_ms=seen.recorded[0]))
    for asked, waiting in seen.waiters:
        rows.append(_row("waiter", waiting, asked=asked, client=asked.client))
    return rows


def _row(what: str, left: int, *, asked: Asked | None = None, **more: Any) -> Row:
    row = Row(
        what=what, owner=None, mode=None, token=0, left_ms=left, client=None, places=0, note=None,
        description=None, ago_ms=0, length_ms=0,
    )  # fmt: skip
    if asked is not None:
        mode = f"s{asked.limit}" if asked.limit else "x" if asked.mode == "exclusive" else "s"
        row.update(owner=asked.owner, mode=mode, note=asked.note, description=asked.description)
    row.update(more)
    return row


def hello(tables: Tables, **of_server: Any) -> Row:
    """Return what ``aiodlock.hello`` tells, and what else a client asks on a new connection."""
    durability = "unlogged" if tables.unlogged else "logged"
    return Row(oldest=VERSION, newest=VERSION, version=VERSION, durability=durability, **of_server)


def _answer(reply: tuple[Any, ...], held: str) -> str:
    match reply:
        case ("held" | "recalled" as word, token, left):
            return f"{held if word == 'held' else word} {token} {left}"
        case ("waiting", left, look, floor):
            return f"waiting {left} {-1 if look is None else look} {floor}"
        case ("done", result):
            text = quote_from_bytes(result, safe="")
            return f"done {text}" if len(text) <= _LONG else "done"
    return " ".join(map(str, reply))


def _payload(message: Message, key: str) -> str:
    ids = message.id
    if message.word == "done" and len(ids) + len(key) >= _MOST_IDS:
        ids = "*"
    text = f"{message.word} {ids} {key}"
    if message.word in ("granted", "broken"):
        text += f" {message.token}"
    return text + "r" if message.word == "granted" and message.recalled else text


_fields = attrgetter(*Entry.__slots__)


def copy_of(name: Name | None, *, deep: bool) -> Name | None:
    """Return a name as it is now; unless ``deep``, only who holds and waits is certain to stay so."""
    if name is None:
        return None
    twin = Name.__new__(Name)
    twin.__dict__.update(name.__dict__)
    if deep:
        twin.holders = {id: Entry(*_fields(entry)) for id, entry in name.holders.items()}
        twin.waiters = {id: Entry(*_fields(entry)) for id, entry in name.waiters.items()}
    else:
        twin.holders, twin.waiters = dict(name.holders), dict(name.waiters)
    twin.markers, twin.broken = dict(name.markers), dict(name.broken)
    return twin
