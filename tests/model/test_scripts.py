"""The scripts against the machine of ``memory://``: any sequence of calls, the same answers and messages.

The clock is virtual: in the test's copy of the scripts, the time is their last argument. So nothing is
waited for, a run means the same on fakeredis and on a server, and the clock can be set back. Keys live a
thousand times longer than they should, so that none expires by the real clock meanwhile. What the scripts
say to clients goes to lists instead of channels.

``AIODLOCK_MODEL_STEPS`` sets how many steps are taken per machine and store, about (default 2,000).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeVar

import fakeredis
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aiodlock.backends.memory.machine import Asked, End, Entry, Message, Mode, Name
from aiodlock.backends.redis.keys import channel_prefix
from aiodlock.backends.redis.replies import token_of
from aiodlock.backends.redis.scripts import Script

from ..protocol.direct import PREFIX, Direct, words_in
from ..servers import Store

pytestmark = pytest.mark.scripted

STEPS = int(os.environ.get("AIODLOCK_MODEL_STEPS", "2000"))
#: What an example takes at the least, at the most, and on average.
FEWEST, MOST, USUAL = 10, 50, 35
MINUTE = 60_000
TTLS = st.sampled_from([2 * MINUTE, 3 * MINUTE, 5 * MINUTE])
DELAYS = st.sampled_from([0, 0, 0, MINUTE])
WHILES = st.sampled_from([1, MINUTE // 2, MINUTE - 1, MINUTE, MINUTE, 2 * MINUTE])
PLACES = st.integers(0, 1_000)

_TIME = "local clock = redis.call('TIME')"
_VIRTUAL = "local clock = {math.floor(ARGV[#ARGV] / 1000), ARGV[#ARGV] % 1000 * 1000}"
CLIENTS = ("one", "two", "three")


#: A word, and what belongs to it.
Answer = tuple[object, ...]
#: The state, the waiters, the entries of the queue, and the last token.
Stored = tuple[dict[str, str], dict[str, str], list[tuple[str, dict[str, str]]], int]
#: Nothing that is remembered ends within a history: the keys that remember it have the real clock.
_FOR_EVER = 10**15


@dataclass(frozen=True)
class Kept:
    """For how many milliseconds what has ended is remembered."""

    token: int = _FOR_EVER
    marker: int = _FOR_EVER
    broken: int = _FOR_EVER
    record: int = _FOR_EVER


@dataclass(frozen=True)
class Wish:
    """What a request is made of."""

    mode: int
    owner: str
    place: int
    ttl: int
    waiter_ttl: int
    delay: int
    client: str
    wait: bool
    hold: int = 0
    begins: bool = False
    #: For semaphores: another limit, and whether it is to be in use.
    limit: int = 0
    resize: bool = False
    lingers: bool = False


WISHES = st.builds(
    Wish,
    mode=st.integers(0, 1),
    owner=st.sampled_from(["", "", "", "", "uA", "uB", "again"]),
    place=PLACES,
    ttl=TTLS,
    waiter_ttl=st.sampled_from([2 * MINUTE, 10 * MINUTE]),
    delay=DELAYS,
    client=st.sampled_from(CLIENTS),
    wait=st.sampled_from([True, True, True, True, False]),
    hold=st.sampled_from([0, 0, 0, 3 * MINUTE, 11 * MINUTE]),
    begins=st.booleans(),
    limit=st.sampled_from([0, 0, 0, 1, 3]),
    resize=st.sampled_from([False, False, False, True]),
    lingers=st.booleans(),
)
ENDS: st.SearchStrategy[End] = st.sampled_from(
    ["ended", "ended", "ended", "ended", "lost", "unused"]
)

NOBODY = Asked("nobody", "exclusive", 0, "tnobody", "", 2 * MINUTE, 2 * MINUTE, 0)
_names = count()

_T = TypeVar("_T")


# Both in one script, because most of the time would go to and fro. What is said follows the answer.
_HEARD = """
local reply = (function() %s
end)()
local said = {{}, {}, {}}
local channels = {unpack(ARGV, #ARGV - 3, #ARGV - 1)}
if redis.call('EXISTS', unpack(channels)) > 0 then
  for number, channel in ipairs(channels) do
    said[number] = redis.call('LRANGE', channel, 0, -1)
  end
  redis.call('DEL', unpack(channels))
end
return {reply, said}
"""
_LOOK = """
return {
  redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]), redis.call('XRANGE', KEYS[3], '-', '+'),
  redis.call('GET', KEYS[4]),
}
"""


class Calls(Protocol):
    """What a store's protocol is called by. The answers are those of the scripts."""

    time: int
    #: Whether requests may have holds, notes and limits that are to be in use.
    whole: bool
    #: Whether requests may linger.
    lingers: bool

    async def acquire(
        self,
        id: str,
        mode: str,
        *,
        owner: str,
        ttl: int,
        waiter_ttl: int,
        delay: int,
        client: str,
        wait: bool,
        retention: int,
        words: str,
        how: str,
    ) -> list[Any]: ...
    async def extend(self, id: str, length: int, *, owner: str, begins: bool) -> list[Any]: ...
    async def leave(
        self, id: str, *, ambiguous: bool, end: str, recorded: Sequence[Any] = ()
    ) -> list[Any]: ...
    async def forget(self) -> bool: ...
    async def break_lock(self, tokens: Sequence[int] | None = None) -> int: ...
    async def inspect(self) -> list[Any]: ...
    def heard(self) -> list[tuple[str, str, str]]: ...
    def said(self) -> list[tuple[str, str, str]]: ...
    def look(self) -> Stored: ...
    def clear(self) -> None: ...


class VirtualDirect(Direct):
    """The scripts on a name of its own, at a time that the test says, by a blocking connection."""

    def __init__(
        self, connection: redis.Redis, kind: str, sources: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(connection, f"name {next(_names)}", kind=kind, sources=sources)
        self.connection = connection
        self.time = 0
        self.whole = self.lingers = True
        self._channels = [channel_prefix(PREFIX) + client for client in CLIENTS]
        self.overheard = [f"{channel}:own" for channel in self._channels]
        self._said: list[tuple[str, str, str]] = []
        self._loaded: dict[str, str] = {}

    async def _run(self, script: Script, keys: list[str], arguments: list[str | int]) -> Any:
        words = ["RPUSH" if word == "PUBLISH" else str(word) for word in arguments]
        reply, said = self._call(
            script.name,
            lambda: self._virtual(script),
            keys,
            *words,
            *self._channels,
            str(self.time),
        )
        self._hear(said)
        return words_in(script, reply)

    def _virtual(self, script: Script) -> str:
        source = self._sources.get(script.name, script.source.decode())
        assert source.count(_TIME) == 1
        return _HEARD % source.replace(_TIME, _VIRTUAL).replace("'PEXPIRE'", "'EXPIRE'")

    def _call(self, name: str, source: Callable[[], str], keys: list[str], *words: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self.connection.script_load(source())
        return self.connection.evalsha(self._loaded[name], len(keys), *keys, *words)

    def _hear(self, said: list[list[str]]) -> None:
        for client, messages in zip(CLIENTS, said, strict=True):
            for message in messages:
                word, state, id, *_ = message.split(" ")
                assert state == self.keys.state
                self._said.append((client, word, id))

    async def forget(self) -> bool:
        return bool(self.connection.delete(self.keys.record))

    def clear(self) -> None:
        """Delete what is stored for the name."""
        self.connection.delete(*self.keys[:6], *self.overheard)

    def heard(self) -> list[tuple[str, str, str]]:
        """Return what ``said`` will return."""
        return self._said

    def said(self) -> list[tuple[str, str, str]]:
        """Return client, word and request id of what was said since the last call."""
        said, self._said = self._said, []
        return said

    def look(self) -> Stored:
        """Return the state, the waiters, the queue and the last token, as stored."""
        keys = self.keys
        state, waiters, queue, token = self._call(
            "look", lambda: _LOOK, [keys.state, keys.waiters, keys.queue, keys.token]
        )
        entries = [(stream_id, _pairs(fields)) for stream_id, fields in queue]
        return _pairs(state), _pairs(waiters), entries, int(token or 0)


def note_in(words: str) -> str:
    """Return the note among the further words of a record."""
    return next((word[2:] for word in words.split(" ") if word.startswith("n=")), "")


def _pairs(flat: list[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def run(call: Coroutine[Any, Any, _T]) -> _T:
    """Run what never really waits."""
    try:
        call.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    raise AssertionError("it waited")


def read(reply: list[Any]) -> Answer:
    """Return a script's reply in the words of the machine.

    Of the reasons only whether it was broken: ``expired``, ``gone`` and ``taken_over`` tell how far the
    sweep has come, which is no promise.
    """
    word, *rest = reply
    if word == "gone":
        return (word, "broken" if rest == ["broken"] else "not broken")
    if (
        word == "released"
    ):  # what is granted to the same client is compared with the machine's messages
        return (word,)
    if word == "done":
        return (word, rest[0].encode())
    if word == "limit":
        return (word, int(rest[0][1:].removesuffix("r")))
    return ("held" if word == "granted" else word, *map(int, rest))


def put(reply: Answer) -> Answer:
    """Return a reply of the machine so that it can be compared."""
    if reply[0] == "gone":
        return ("gone", "broken" if reply[1] == "broken" else "not broken")
    return tuple(-1 if part is None else part for part in reply)


class Model:
    """The machine, at a time that the test says. ``said``: its messages that were not compared yet."""

    def __init__(self, now: int, name: Name) -> None:
        self.now = now
        self.name = name
        self.said: list[tuple[str, str, str]] = []

    @property
    def now_us(self) -> int:
        return self.now * 1000

    def hear(self, answered: tuple[Any, list[Message]]) -> Any:
        reply, messages = answered
        self.said += [(message.client, message.word, message.id) for message in messages]
        return reply

    # -- what is there at this moment --------------------------------------------------------------

    def blockers(self) -> list[Entry]:
        return [e for e in self.name.holders.values() if self.now < e.closed_until]

    def holders(self) -> list[Entry]:
        return [e for e in self.name.holders.values() if self.now < e.deadline]

    def waiters(self) -> list[Entry]:
        return [e for e in self.name.waiters.values() if self.now < e.deadline]

    def find(self, id: str) -> Entry | None:
        return next((e for e in self.holders() + self.waiters() if e.asked.id == id), None)


def wire_mode(asked: Asked, name: Name | None = None) -> str:
    """Return a mode as the scripts are told it; or, of a name, as it is in use."""
    if asked.limit and name is not None:
        return f"s{name.limit}{'r' * name.resized}"
    if asked.limit:
        return f"s{asked.limit}"
    return "x" if asked.mode == "exclusive" else "s"


def words_of(asked: Asked) -> str:
    words = f" h={asked.hold}" if asked.hold else ""
    words += " g=1" if asked.lingers else ""
    return words + (f" n={asked.note}" if asked.note else "")


def how_of(asked: Asked) -> str:
    hold = ("begins" if asked.begins else "later") if asked.hold else ""
    return hold + "resize" * asked.resize


class Locks(RuleBasedStateMachine):
    """Requests, re-entries, extensions, withdrawals, releases, expiries and breaks, in both modes."""

    modes: tuple[Mode, ...] = ("exclusive", "shared")
    limit = 0
    kind = "lock"
    kept = Kept()
    steps = 0

    def __init__(self, scripts: Calls, name: type[Name] = Name) -> None:
        super().__init__()
        self.scripts = scripts
        self.whole: bool = scripts.whole
        self.lingers: bool = scripts.lingers
        self.model = Model(1_700_000_000_000, name())
        self.ids = (f"r{number}" for number in count())
        self.known: list[Asked] = []
        self.left: set[str] = set()
        #: When a waiter will look for the end of its blocker, if it knows, and when it will extend.
        self.looks: dict[str, int] = {}
        self.beats: dict[str, int] = {}
        #: What had run out within its lock-delay when the clock was set back: it may live again, and who
        #: queued meanwhile has not recalled it.
        self.revived: set[str] = set()

    def teardown(self) -> None:
        self.scripts.clear()

    # -- steps -------------------------------------------------------------------------------------

    @initialize(wishes=st.lists(WISHES, min_size=3, max_size=7))
    def many_requests_at_first(self, wishes: list[Wish]) -> None:
        for one in wishes:
            self._request(one)

    @rule(one=WISHES)
    def request(self, one: Wish) -> None:
        self._request(one)

    @rule(wishes=st.lists(WISHES, min_size=2, max_size=4))
    def more_requests(self, wishes: list[Wish]) -> None:
        for one in wishes:
            self._request(one)

    @precondition(lambda self: self.known)
    @rule(place=PLACES, ttl=TTLS)
    def repeat_a_request(self, place: int, ttl: int) -> None:
        """As a client does that has had no reply; also too late, and after the leave that refuses it."""
        self._acquire(self._any(place)._replace(ttl=ttl, waiter_ttl=2 * MINUTE), wait=True)

    @precondition(lambda self: self.known)
    @rule(place=PLACES, length=TTLS, begins=st.booleans())
    def extend(self, place: int, length: int, begins: bool) -> None:
        self._extend(self._any(place), length, begins)

    @precondition(lambda self: self.known)
    @rule(
        place=PLACES,
        ambiguous=st.sampled_from([False, False, True]),
        end=ENDS,
    )
    def leave(self, place: int, ambiguous: bool, end: End) -> None:
        self._leave(self._any(place), ambiguous, end)

    @precondition(lambda self: self.model.holders())
    @rule()
    def break_lock(self) -> None:
        model = self.model
        self.scripts.time = model.now
        broken = model.hear(
            model.name.break_(model.now_us, remember=self.kept.broken, retention=self.kept.token)
        )
        assert run(self.scripts.break_lock()) == len(broken)
        self._compare_what_was_said("")

    @precondition(lambda self: self.model.holders())
    @rule(place=PLACES)
    def break_one(self, place: int) -> None:
        """As a command does that has shown a holder; also one that is gone by now."""
        model = self.model
        self.scripts.time = model.now
        tokens = sorted({entry.token for entry in model.name.holders.values()})
        meant = frozenset(tokens[place % len(tokens) :][:1])
        kept = self.kept
        broken = model.hear(
            model.name.break_(model.now_us, meant, remember=kept.broken, retention=kept.token)
        )
        assert run(self.scripts.break_lock(sorted(meant))) == len(broken)
        self._compare_what_was_said("")

    @rule()
    def inspect(self) -> None:
        self.scripts.time = self.model.now
        token, closed, holding, waiting, closed_places, recorded = run(self.scripts.inspect())
        seen = self.model.name.inspect(self.model.now_us)
        self._same_token(int(token))
        assert int(closed) == seen.closed
        assert closed_places == seen.closed_places
        assert bool(recorded) == (seen.recorded is not None)
        if seen.recorded is not None:
            assert int(recorded[0]) == seen.recorded[0]
        name = self.model.name
        rows = [
            (*row[:5], note_in(row[5]), row[6]) for row in zip(*[iter(holding)] * 7, strict=True)
        ]
        assert sorted(rows) == sorted(
            (
                *(asked.owner, wire_mode(asked, name), str(held), str(left)),
                *(asked.client, asked.note, str(length)),
            )
            for asked, held, left, length in seen.holders
        )
        # A queue entry's time is the real server's.
        rows = [
            (*row[:2], row[3], note_in(row[4])) for row in zip(*[iter(waiting)] * 5, strict=True)
        ]
        assert rows == [
            (asked.owner, wire_mode(asked, name), asked.client, asked.note)
            for asked, _ in seen.waiters
        ]

    @rule(by=WHILES)
    def time_passes(self, by: int) -> None:
        self.model.now += by

    @rule(by=WHILES, which=st.integers(1, 255), length=TTLS)
    def time_passes_and_some_are_heard_of(self, by: int, which: int, length: int) -> None:
        """Some are extended in time, the others are ghosts."""
        present = self.model.holders() + self.model.waiters()
        for number, entry in enumerate(present):
            if which >> number % 8 & 1:
                self._extend(entry.asked, length)
        self.time_passes(by)

    @rule(by=st.sampled_from([11 * MINUTE, 1_000 * MINUTE]))
    def clock_is_set_back(self, by: int) -> None:
        """By more than anything is long; and somebody looks.

        Whoever was overdue has been found out before: an end that no script has met may come again.
        """
        for asked in self.known:
            if self.model.find(asked.id) is None:
                self._leave(asked, ambiguous=False, end="ended")
        self._extend(NOBODY, MINUTE)
        overdue = [e for e in self.model.blockers() if self.model.now >= e.deadline]
        self.revived |= {e.asked.id for e in overdue}
        self.model.now -= by
        # The clients have clocks of their own.
        self.looks = {id: moment - by for id, moment in self.looks.items()}
        self.beats = {id: moment - by for id, moment in self.beats.items()}
        self._extend(NOBODY, MINUTE)

    # -- what must be the same ---------------------------------------------------------------------

    @invariant()
    def same_holders_and_waiters(self) -> None:
        type(self).steps += 1
        model = self.model
        self.scripts.time = model.now
        state, waiters, queue, token = self.scripts.look()
        holding = set()
        if self.lingers:
            marks = {id: " g=1" in text for id, text in state.items() if " g=" in text}
            for e in model.holders():
                assert marks.get(e.asked.id) == (not e.recalled if e.asked.lingers else None)
                told = e.recalled or e.asked.id in self.revived
                assert told or not (e.asked.lingers and model.waiters())
        for id, text in state.items():
            mode, own_token, deadline, _, _, owner, *_ = text.split(" ")
            if model.now < int(deadline):
                holding.add((id, mode, int(own_token), int(deadline), owner))
        assert holding == {
            (e.asked.id, wire_mode(e.asked, model.name), e.token, e.deadline, e.asked.owner)
            for e in model.holders()
        }
        waiting = []
        for stream_id, fields in queue:
            own_entry, deadline, *_ = waiters.get(fields["id"], "- 0 0").split(" ")
            if own_entry == stream_id and model.now < int(deadline):
                waiting.append((fields["id"], int(deadline)))
        assert waiting == [(e.asked.id, e.deadline) for e in model.waiters()]
        self._same_token(token)

    def _same_token(self, token: int) -> None:
        # Every grant of a new owner has a token of its own, so equal tokens are the same order.
        assert token == self.model.name.token

    def _compare_what_was_said(
        self, caller: str, *, by_reply: Sequence[tuple[str, str]] = (), scanned: bool = True
    ) -> None:
        """Hold the messages against the machine's, and see that the head knows when to look.

        ``by_reply``: client and request of the grants that a reply has told.
        """
        model, said = self.model, self.scripts.said()
        said += [(client, "granted", id) for client, id in by_reply]
        assert sorted(said) == sorted(model.said)
        model.said.clear()
        hints = [(client, id) for client, word, id in said if word == "look"]
        head = next(iter(model.waiters()), None)
        for hint in hints:
            assert head is not None
            assert hint == (head.asked.client, head.asked.id) != (head.asked.client, caller)
        assert len(hints) <= 1
        if head is not None and scanned:
            end = min(entry.closed_until for entry in model.blockers())
            if hints:
                self.looks[head.asked.id] = end  # it asks at once, and is told
            beat = self.beats[head.asked.id]
            assert min(self.looks.get(head.asked.id, beat), beat) <= end, "nobody will look in time"

    @invariant()
    def exclusion(self) -> None:
        holders = self.model.holders()
        if any(entry.asked.mode == "exclusive" for entry in holders):
            assert len({entry.asked.owner for entry in holders}) == 1
        # Shrinking throws nobody out.
        limits = [3, self.limit] if self.whole else [self.limit]
        assert not self.limit or len(holders) <= max(limits)

    # -- parts -------------------------------------------------------------------------------------

    def _request(self, wish: Wish) -> None:
        id, owner = next(self.ids), wish.owner
        holders = self.model.blockers()
        if self.kind == "semaphore" or not owner or (owner == "again" and not holders):
            owner = f"t{id}"
        elif owner == "again":  # one that holds, or has lost it a moment ago
            owner = holders[wish.place % len(holders)].asked.owner
        mode = self.modes[wish.mode % len(self.modes)]
        asked = Asked(
            id, mode, self.limit, owner, wish.client, wish.ttl, wish.waiter_ttl, wish.delay
        )
        if self.whole:
            asked = asked._replace(hold=wish.hold, begins=wish.begins, note=f"note-of-{id}")
            if self.limit:
                limit = wish.limit or self.limit
                asked = asked._replace(limit=limit, resize=wish.resize)
            elif self.lingers and not wish.hold:
                asked = asked._replace(lingers=wish.lingers)
        self._acquire(asked, wait=wish.wait)

    def _acquire(self, asked: Asked, *, wait: bool) -> None:
        model = self.model
        self.scripts.time = model.now
        call = self.scripts.acquire(
            asked.id,
            wire_mode(asked),
            owner=asked.owner,
            ttl=asked.ttl,
            waiter_ttl=asked.waiter_ttl,
            delay=asked.delay,
            client=asked.client,
            wait=wait,
            retention=100 * MINUTE,
            words=words_of(asked),
            how=how_of(asked),
        )
        answer = read(run(call))
        expected = model.name.acquire(model.now_us, asked, wait=wait, retention=self.kept.token)
        assert answer == put(model.hear(expected))
        if answer[0] in ("held", "recalled", "waiting") and asked.id not in {
            one.id for one in self.known
        }:
            self.known.append(asked)
        self._note_look(asked.id, answer)
        self._compare_what_was_said(asked.id, scanned=asked.id not in model.name.markers)

    def _extend(self, asked: Asked, length: int, begins: bool = False) -> None:
        model = self.model
        self.scripts.time = model.now
        held = any(entry.asked.id == asked.id for entry in model.holders())
        begins = begins and self.whole
        call = self.scripts.extend(asked.id, length, owner=asked.owner, begins=begins)
        answer = read(run(call))
        expected = model.name.extend(
            model.now_us, asked.id, length, begins=begins, retention=self.kept.token
        )
        assert answer == put(model.hear(expected))
        self._note_look(asked.id, answer)
        self._compare_what_was_said(asked.id, scanned=not held)

    def _leave(self, asked: Asked, ambiguous: bool, end: End) -> None:
        model = self.model
        self.scripts.time = model.now
        self.left.add(asked.id)
        end = end if self.whole or end != "unused" else "ended"
        reply = run(self.scripts.leave(asked.id, ambiguous=ambiguous, end=end))
        expected = model.name.leave(
            model.now_us,
            asked.id,
            end=end,
            marker=self.kept.marker if ambiguous else 0,
            retention=self.kept.token,
        )
        assert read(reply) == put(model.hear(expected))
        own = reply[2:] if reply[0] == "released" else []
        told = {id: token_of(text)[0] for id, text in zip(own[::2], own[1::2], strict=True)}
        holders = model.name.holders
        assert told == {id: holders[id].token for id in told if id in holders}
        by_reply = [(holders[id].asked.client, id) for id in told]
        assert {client for client, _ in by_reply} <= {asked.client}
        if reply[0] == "released":
            assert (asked.client, "granted") not in {said[:2] for said in self.scripts.heard()}
        self._compare_what_was_said(asked.id, by_reply=by_reply)

    def _note_look(self, id: str, answer: Answer) -> None:
        waiter = self.model.find(id)
        if answer[0] != "waiting" or waiter is None:
            return
        self.beats[id] = waiter.deadline - waiter.length * 2 // 3
        if isinstance(answer[2], int) and answer[2] >= 0:
            self.looks[id] = self.model.now + answer[2]

    def _any(self, place: int) -> Asked:
        """Return one of the requests there are, or one of those that ran out or were ended."""
        present = [asked for asked in self.known if self.model.find(asked.id)]
        ran_out = [
            asked for asked in self.known if asked not in present and asked.id not in self.left
        ]
        choice = self.known[-8:] + 2 * present + 2 * ran_out[-6:]
        return choice[place % len(choice)]


class Semaphores(Locks):
    """The same with a limit of two."""

    modes = ("shared",)
    limit = 2
    kind = "semaphore"


class Onces(Locks):
    """The same for what is to be done once. What is on record is kept until it is taken back."""

    modes = ("exclusive",)
    kind = "once"

    @precondition(lambda self: self.known)
    @rule(place=PLACES, ambiguous=st.booleans())
    def leave_and_record(self, place: int, ambiguous: bool) -> None:
        model, asked = self.model, self._any(place)
        self.scripts.time = model.now
        self.left.add(asked.id)
        result = f"result of {asked.id}"
        recorded = (result, self.kept.record)
        reply = run(
            self.scripts.leave(asked.id, ambiguous=ambiguous, end="ended", recorded=recorded)
        )
        expected = model.name.record_success(
            model.now_us,
            asked.id,
            result.encode(),
            keep=self.kept.record,
            marker=self.kept.marker if ambiguous else 0,
            retention=self.kept.token,
        )
        told = model.hear(expected)
        assert read(reply) == put(told)
        if told == ("recorded",):
            assert not model.waiters()
        self._compare_what_was_said(asked.id)

    @rule()
    def forget(self) -> None:
        expected = self.model.hear(self.model.name.forget(self.model.now_us))
        assert run(self.scripts.forget()) == expected


def hold_against_the_machine(
    machine: type[Locks],
    store: Store,
    steps: int = STEPS,
    sources: Mapping[str, str] | None = None,
    name: type[Name] = Name,
    **how: Any,
) -> None:
    """Take about so many steps; raise AssertionError at the first that differs."""
    machine.steps = 0
    with connect(store) as connection:
        take_steps(
            lambda: machine(VirtualDirect(connection, machine.kind, sources), name), steps, **how
        )


def take_steps(make: Callable[[], Locks], steps: int, **how: Any) -> None:
    """Run histories on machines that are made for one each."""
    run_state_machine_as_test(
        make,  # type: ignore[arg-type]
        settings=settings(
            max_examples=max(1, steps // USUAL),
            stateful_step_count=MOST,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **how,
        ),
    )


@pytest.mark.timeout(600 + STEPS / 10)
@pytest.mark.parametrize("machine", [Locks, Semaphores, Onces])
@pytest.mark.stores("fakeredis", "valkey9", "redis62")
def test_scripts_answer_and_tell_as_the_machine(store: Store, machine: type[Locks]) -> None:
    steps = STEPS if machine is Locks else STEPS // 3  # there is less to go wrong with one mode
    hold_against_the_machine(machine, store, steps)
    assert machine.steps > steps // USUAL * FEWEST


@pytest.mark.stores("fakeredis", "valkey9", "redis62")
def test_clock_set_back_costs_a_dead_holder_and_dead_waiters_one_length_each_not_more(
    store: Store,
) -> None:
    """However often somebody looks: the deadline stays where the first look has put it."""
    with connect(store) as connection:
        scripts = VirtualDirect(connection, "lock")
        scripts.time = 1_700_000_000_000
        run(scripts.acquire("dead-holder", ttl=2 * MINUTE))
        for id in ("dead", "dead-too"):
            run(scripts.acquire(id, waiter_ttl=2 * MINUTE))
        run(scripts.acquire("live", waiter_ttl=10 * MINUTE))
        scripts.time -= 60 * MINUTE
        for _ in range(2):
            assert run(scripts.extend("live", 10 * MINUTE))[0] == "waiting"
            scripts.time += MINUTE
        assert run(scripts.extend("live", 10 * MINUTE))[0] == "held"


def test_request_repeated_after_its_lease_ran_out_holds_and_nobody_beside_it(store: Store) -> None:
    """Found by the machine above: the new record was swept up together with the overdue one."""
    with connect(store) as connection:
        scripts = VirtualDirect(connection, "lock")
        run(scripts.acquire("a", ttl=2 * MINUTE))
        scripts.time += 2 * MINUTE
        assert run(scripts.acquire("a", ttl=2 * MINUTE))[0] == "granted"
        assert run(scripts.acquire("b", wait=False)) == ["busy"]


def test_head_is_told_that_it_became_one_also_when_its_blockers_owner_enters_again(
    store: Store,
) -> None:
    """Found with the machine above: the next head would have looked when it extended, and not before."""
    with connect(store) as connection:
        scripts = VirtualDirect(connection, "lock")
        run(scripts.acquire("holder", owner="uA", ttl=2 * MINUTE))
        run(scripts.acquire("ghost", waiter_ttl=2 * MINUTE, client="one"))
        run(scripts.acquire("next", waiter_ttl=2 * MINUTE, client="two"))
        scripts.time += MINUTE
        run(scripts.extend("holder", 2 * MINUTE, owner="uA"))
        run(scripts.extend("next", 10 * MINUTE))
        scripts.time += MINUTE
        assert scripts.said() == []
        assert run(scripts.acquire("again", owner="uA", ttl=5 * MINUTE))[0] == "granted"
        assert scripts.said() == [("two", "look", "next")]


def test_nearer_time_to_look_is_told_also_when_a_waiter_gets_in_as_its_owner(store: Store) -> None:
    """Found by the machine above: the head knew of the owner's first lease alone."""
    with connect(store) as connection:
        scripts = VirtualDirect(connection, "lock")
        run(scripts.acquire("holder", ttl=2 * MINUTE))
        run(scripts.acquire("first", "s", owner="uA", waiter_ttl=10 * MINUTE, client="two"))
        run(scripts.acquire("head", waiter_ttl=10 * MINUTE, client="one"))
        run(scripts.acquire("second", "s", owner="uA", waiter_ttl=2 * MINUTE, client="three"))
        run(scripts.leave("holder"))
        assert scripts.said() == [("two", "granted", "first")]
        assert run(scripts.extend("second", 2 * MINUTE, owner="uA"))[0] == "held"
        assert scripts.said() == [("one", "look", "head")]


def test_inspecting_after_the_clock_was_set_back_writes_what_it_clamps(store: Store) -> None:
    with connect(store) as connection:
        scripts = VirtualDirect(connection, "lock")
        scripts.time = 1_700_000_000_000
        run(scripts.acquire("a", ttl=2 * MINUTE))
        scripts.time -= 60 * MINUTE
        assert len(run(scripts.inspect())[2]) == 7
        scripts.time += 3 * MINUTE
        assert run(scripts.inspect())[2] == [], "dead, and its deadline stood an hour ahead"


def connect(store: Store) -> redis.Redis:
    if store.is_fake:
        return fakeredis.FakeRedis(decode_responses=True)
    # The pool would cost as much again as most calls.
    return redis.Redis.from_url(store.url, decode_responses=True, single_connection_client=True)
