"""What the scripts of a quorum's node decide, in plain Python: for seeds that need not run Lua.

Line by line what ``vote.lua``, ``unvote.lua``, ``break_votes.lua`` and ``inspect_votes.lua`` do, and what
they share; without their short ways. ``test_votes.py`` holds it against the scripts on random histories:
replies, messages, records and the TTLs of keys. Times are milliseconds, tokens and tickets microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: Told of each write before it is done, and whether it may need memory; raises when it is refused.
Touch = Callable[[bool], None]
#: A channel's client, and a message to it.
Say = Callable[[str, str], None]


class Refused(Exception):
    """The server refuses to write."""


@dataclass(slots=True)
class Vote:
    """A vote, or a waiter's place: a record of ``tickets.lua``."""

    id: str
    mode: str
    token: int
    deadline: int
    length: int
    delay: int
    owner: str
    client: str
    ticket: int
    stage: str
    words: str
    live: bool = True
    set_back: bool = False
    closed_until: int = 0

    def __str__(self) -> str:
        parts = (self.mode, self.token, self.deadline, self.length, self.delay, self.owner)
        return " ".join(map(str, (*parts, self.client, self.ticket, self.stage))) + self.words

    @property
    def is_open(self) -> bool:
        return self.stage in ("v", "p")

    @property
    def order(self) -> tuple[int, bytes]:
        resting = 4_000_000_000_000_000 if self.stage == "w" else 0
        return 0 if self.stage == "h" else self.ticket + resting, self.id.encode()

    def close(self) -> None:
        self.closed_until = self.deadline + (0 if self.is_open else self.delay)


@dataclass(slots=True)
class Hash:
    """A hash with a TTL: gone with its last field. ``until`` is None without one."""

    fields: dict[str, Vote] = field(default_factory=dict)
    until: int | None = None

    def expire(self, now: int) -> None:
        if self.until is not None and self.until < now:
            self.fields.clear()
            self.until = None

    def remove(self, id: str) -> bool:
        found = self.fields.pop(id, None) is not None
        if not self.fields:
            self.until = None
        return found

    def left(self, now: int) -> int:
        if not self.fields:
            return -2
        return -1 if self.until is None else self.until - now

    def keep(self, now: int, left: int) -> None:
        if self.fields:
            self.until = now + left
            if left <= 0:
                self.fields.clear()
                self.until = None


class Name:
    """What one node knows of one name.

    Mutable state: ``state`` (votes), ``waiters`` (the queue is their order), ``token`` and until when it is
    kept, ``markers`` (until when each refuses its request), ``broken`` (tokens by request) and until when.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.state = Hash()
        self.waiters = Hash()
        self.token: int | None = None
        self.token_until = 0
        self.markers: dict[str, int] = {}
        self.broken: dict[str, int] = {}
        self.broken_until = 0
        self._now_us = self._now = self._retention = 0
        self._touch: Touch = lambda _: None
        self._say: Say = lambda *_: None

    # -- the calls ---------------------------------------------------------------------------------

    def begin(self, now_us: int, retention: int, touch: Touch, say: Say) -> None:
        """Let a script begin: what has expired is gone."""
        self._now_us, self._now = now_us, now_us // 1000
        self._retention, self._touch, self._say = retention, touch, say
        now = self._now
        self.state.expire(now)
        self.waiters.expire(now)
        if self.token is not None and self.token_until < now:
            self.token = None
        if self.broken and self.broken_until < now:
            self.broken.clear()
        for id in [id for id, until in self.markers.items() if until < now]:
            del self.markers[id]

    def vote(
        self,
        id: str,
        mode: str,
        owner: str,
        length: int,
        delay: int,
        client: str,
        ticket: int,
        what: str,
        fence: int,
        words: str,
        known: int,
    ) -> list[object]:
        now, state, waiters = self._now, self.state, self.waiters
        ahead = ticket - self._now_us - 1_000_000
        if what == "held" or id in state.fields or id in waiters.fields:
            self._touch(False)
        if id in self.markers:
            return self._gone("gone")
        writes = what in ("fence", "held")
        if writes and id in self.broken and fence <= self.broken[id]:
            return self._gone("broken")

        def push(record: Vote) -> None:
            record.ticket = max(record.ticket, ticket)
            record.deadline = max(record.deadline, now + length)
            record.length = max(length, record.deadline - now)

        held = self._decode(state.fields[id]) if what == "held" and id in state.fields else None
        if held is not None and held.live and (held.stage == "c" or held.token == known):
            push(held)
            held.token, held.stage = fence, "c"
            self._remember(fence)
            held.close()
            self._put(held)
            self._keep_until(held.closed_until)
            return self._answer(id, [held], None, None)

        alone = what == "fence" and not waiters.fields
        votes, dead = self._load(id if alone else None)
        vote = _find(votes, id)
        overdue = vote is not None and not vote.live
        if id in dead:
            self._touch(False)
            state.remove(id)
            dead.remove(id)
            overdue = overdue or writes
        if overdue or (what == "fence" and vote is None):
            return self._gone("expired" if overdue else "gone")

        waiter = None
        if vote is not None:
            push(vote)
            if what == "fence" and fence >= vote.token:
                others = state.fields.values() if mode == "s" and fence != vote.token else ()
                if any(one.token == fence and one.owner != owner for one in others):
                    vote.token, vote.stage = self._next_token(), "v"
                else:
                    vote.token, vote.stage = fence, "c"
                    self._remember(fence)
            elif what in ("ask", "wait") and vote.stage == "c" and fence >= vote.token:
                vote.stage = "v"
            vote.close()
            self._put(vote)
            self._keep_until(vote.closed_until)
        else:
            token, exclusive = _confirmed_hold(owner, votes)
            deadlock = token is not None and mode == "x" and not exclusive
            waiter = self._waiter(id)
            if waiter is not None and waiter.live:
                push(waiter)
            elif deadlock:
                return ["deadlock", self._now_us]
            else:
                waiter = Vote(
                    id, mode, 0, now + length, length, delay, owner, client, ticket, "v", words
                )
            waiter.stage = {"held": "h", "wait": "w"}.get(what, "v")
            if token is not None and not deadlock and what != "wait":
                waiter.token, waiter.stage = token, "a"
                waiter.closed_until = waiter.deadline + waiter.delay
                self._put(waiter)
                self._withdraw(id)
                votes.append(waiter)
                self._keep_state(votes)
            else:
                self._stand(waiter)
        if what in ("ask", "wait") and ahead > 0:
            self._remember(ticket)
        head_before = self._head()
        oldest = None if alone else self._vote_for_oldest(votes, id)
        self._bury(dead)
        if what == "try" and _find(votes, id) is None:
            self._withdraw(id)
            self._find_oldest()
            return ["busy", self._now_us]
        if oldest is not None and (oldest.id == id or oldest.id != head_before):
            self._inquire(votes, oldest)
            if oldest.id != id:
                self._hint(oldest, votes)
        return self._answer(id, votes, oldest, waiter)

    def unvote(self, id: str, what: str, marker: int, token: int) -> list[object]:
        self._touch(False)
        if marker:
            self._touch(True)
            self.markers[id] = self._now + marker
        head_before = self._head()
        gives_back = what in ("yield", "rest")
        alone = not gives_back and not self.waiters.fields and len(self.state.fields) > 8
        votes, dead = self._load(id if alone else None)
        vote = _find(votes, id)
        if gives_back:
            oldest = self._find_oldest()
            meant = vote is not None and vote.live and vote.is_open and vote.token == token
            stays = what == "yield" and vote is not None and not _in_the_way(vote, oldest)
            if vote is not None and meant and stays:
                vote.token, vote.stage = self._next_token(), "v"
                self._put(vote)
            elif vote is not None and meant:
                votes.remove(vote)
                vote.token, vote.stage = 0, "w" if what == "rest" else "v"
                self._stand(vote)
                oldest = self._vote_for_oldest(votes, id)
                if _find(votes, id) is None:
                    dead.append(id)
            self._bury(dead)
            waiter = self._waiter(id)
            if _find(votes, id) is not None or (waiter is not None and waiter.live):
                return self._answer(id, votes, oldest, waiter)
            return self._gone("gone")

        result: list[object] = ["gone", "gone"]
        if self._withdraw(id):
            result = ["withdrawn"]
        if vote is not None and vote.live and (what != "lost" or vote.delay == 0):
            votes.remove(vote)
            dead.append(id)
            result = ["released"]
        elif vote is not None:
            result = ["gone", "expired"]
        oldest = None if alone else self._vote_for_oldest(votes, None, token)
        self._bury(dead)
        if oldest is not None and oldest.id != head_before:
            self._inquire(votes, oldest)
            self._hint(oldest, votes)
        if result[0] == "gone" and id in self.broken:
            return ["gone", "broken"]
        return result

    def break_votes(self, remember: int, which: str) -> list[object]:
        self._touch(False)
        votes, dead = self._load()
        ids: list[object] = []
        kept = []
        for vote in votes:
            is_meant = (
                vote.stage != "v" if which == "all" else vote.live and vote.id in which.split(" ")
            )
            if not is_meant:
                kept.append(vote)
                continue
            if vote.live:
                ids.append(vote.id)
                remember = max(remember, vote.deadline - self._now)
                self._touch(True)
                if not self.broken:
                    self.broken_until = -1
                self.broken[vote.id] = vote.token
                self._tell("broken", vote, vote.token)
            dead.append(vote.id)
        if ids:
            left = self.broken_until - self._now if self.broken_until >= 0 else -1
            if left < remember:
                self._touch(False)
                self.broken_until = self._now + remember + 2
        oldest = self._vote_for_oldest(kept, None)
        self._bury(dead)
        if oldest is not None:
            self._inquire(kept, oldest)
            self._hint(oldest, kept)
        return ids

    def inspect_votes(self) -> list[object]:
        voted: list[object] = []
        closed = 0
        votes, _ = self._load()
        for v in votes:
            if v.live:
                left = v.deadline - self._now
                voted += [v.id, v.owner, v.mode, v.token, left, v.client, v.stage, v.ticket]
                voted += [v.words, v.length]
            else:
                closed = max(closed, v.closed_until - self._now)
        waiting: list[object] = []
        for one in sorted(self.waiters.fields.values(), key=lambda vote: vote.order):
            w = self._decode(one)
            if w.live:
                if w.set_back and self._may_write():
                    self.waiters.fields[w.id] = w
                waiting += [w.id, w.owner, w.mode, w.client, w.ticket, w.words]
        return [self.token or 0, closed, voted, waiting, self._now_us]

    # -- what they share ---------------------------------------------------------------------------

    def _gone(self, why: str) -> list[object]:
        return ["gone", why, self._now_us]

    def _decode(self, stored: Vote) -> Vote:
        v = stored
        deadline = min(v.deadline, self._now + v.length)
        closed = deadline if v.is_open else deadline + v.delay
        live, set_back = self._now < deadline, deadline < v.deadline
        # By position: it is made for each record that any script looks at.
        return Vote(
            v.id, v.mode, v.token, deadline, v.length, v.delay, v.owner, v.client, v.ticket, v.stage,
            v.words, live, set_back, closed,
        )  # fmt: skip

    def _load(self, only: str | None = None) -> tuple[list[Vote], list[str]]:
        votes, dead = [], []
        for stored in [one for one in self.state.fields.values() if only is None or one.id == only]:
            vote = self._decode(stored)
            if self._now < vote.closed_until:
                if vote.set_back and self._may_write():
                    self.state.fields[vote.id] = vote
                votes.append(vote)
            else:
                dead.append(vote.id)
        return votes, dead

    def _may_write(self) -> bool:
        try:
            self._touch(True)
        except Refused:
            return False
        return True

    def _waiter(self, id: str) -> Vote | None:
        stored = self.waiters.fields.get(id)
        return None if stored is None else self._decode(stored)

    def _put(self, vote: Vote) -> None:
        self._touch(True)
        self.state.fields[vote.id] = vote

    def _bury(self, dead: list[str]) -> None:
        if dead:
            self._touch(False)
            for id in dead:
                self.state.remove(id)

    def _keep_state(self, votes: list[Vote]) -> None:
        if len(votes) == 1:
            self._touch(False)
            self.state.keep(self._now, votes[0].closed_until - self._now + 2)
            return
        latest = max((vote.closed_until for vote in votes), default=0)
        if latest > 0:
            self._keep_until(latest)

    def _keep_until(self, moment: int) -> None:
        if self.state.left(self._now) < moment - self._now:
            self._touch(False)
            self.state.keep(self._now, moment - self._now + 2)

    def _stand(self, waiter: Vote) -> None:
        self._touch(True)
        self._touch(True)
        self.waiters.fields[waiter.id] = waiter
        left = waiter.deadline - self._now
        if self.waiters.left(self._now) < left:
            self._touch(False)
            self.waiters.keep(self._now, (-(-left // 1000) + 1) * 1000)

    def _withdraw(self, id: str) -> bool:
        self._touch(False)
        return self.waiters.remove(id)

    def _head(self) -> str | None:
        stored = min(self.waiters.fields.values(), key=lambda vote: vote.order, default=None)
        return None if stored is None else stored.id

    def _find_oldest(self) -> Vote | None:
        while True:
            id = self._head()
            if id is None:
                self._touch(False)
                return None
            waiter = self._waiter(id)
            assert waiter is not None
            if waiter.live:
                if waiter.set_back and self._may_write():
                    self.waiters.fields[id] = waiter
                return None if waiter.stage == "w" else waiter
            self._withdraw(id)

    def _vote_for_oldest(
        self, votes: list[Vote], silent_for: str | None, wanted: int = 0
    ) -> Vote | None:
        given = False
        for vote in votes:  # whose owner holds no more here
            if vote.stage == "a" and vote.live and _confirmed_hold(vote.owner, votes)[0] is None:
                vote.token, vote.stage = self._next_token(), "v"
                vote.close()
                self._put(vote)
        while True:
            oldest = self._find_oldest()
            token, exclusive = _confirmed_hold(oldest.owner, votes) if oldest else (None, False)
            again = oldest is not None and token is not None and (oldest.mode != "x" or exclusive)
            if oldest is None or not (again or _compatible(oldest.mode, votes)):
                if given:
                    self._keep_state(votes)
                return oldest
            proposed = 0 if again else self._take_wanted(wanted)
            oldest.token = token or 0 if again else proposed or self._next_token()
            oldest.stage = "a" if again else "p" if proposed else "v"
            oldest.close()
            self._put(oldest)
            votes.append(oldest)
            given = True
            self._withdraw(oldest.id)
            if oldest.id != silent_for:
                self._tell("granted", oldest, oldest.token)

    def _inquire(self, votes: list[Vote], oldest: Vote) -> None:
        for vote in votes:
            if _in_the_way(vote, oldest):
                self._tell("look", vote, vote.token)

    def _hint(self, oldest: Vote, votes: list[Vote]) -> None:
        look = min((vote.closed_until for vote in votes), default=None)
        if look is not None and look < oldest.deadline - oldest.length * 2 / 3:
            self._tell("look", oldest, 0)

    def _tell(self, word: str, vote: Vote, token: int) -> None:
        self._say(vote.client, f"{word} {self.key} {vote.id} {token}")

    def _answer(
        self, id: str, votes: list[Vote], oldest: Vote | None, waiter: Vote | None
    ) -> list[object]:
        vote = _find(votes, id)
        if vote is not None:
            back = int(_in_the_way(vote, oldest))
            stage = "v" if vote.is_open else vote.stage
            return ["vote", vote.token, vote.deadline - self._now, stage, back, self._now_us]
        look = -1
        if oldest is not None and oldest.id == id:
            ends = min((one.closed_until for one in votes), default=self._now)
            look = max(0, ends - self._now)
        assert waiter is not None
        floor = self._now_us - 1 if self.token is None else self.token
        return ["waiting", waiter.deadline - self._now, look, floor, self._now_us]

    # -- tokens ------------------------------------------------------------------------------------

    def _next_token(self) -> int:
        self._touch(True)
        token, keep, left = self._now_us, self._retention, -1
        if self.token is not None:
            left = self.token_until - self._now
            if self.token >= token:
                token = self.token + 1
                keep += -(-token // 1000) - self._now
        self.token = token
        if left < keep:  # a second longer than it has to be, so that few tokens touch it
            self.token_until = self._now + keep + 1000
        return token

    def _take_wanted(self, wanted: int) -> int:
        if not wanted or self.token is None or self.token >= wanted:
            return 0
        self._keep_token(wanted, self.token_until - self._now)
        return wanted

    def _remember(self, token: int) -> None:
        if self.token is None or self.token < token:
            left = 0 if self.token is None else self.token_until - self._now
            self._keep_token(token, left)

    def _keep_token(self, token: int, left: int) -> None:
        self._touch(True)
        ahead = max(0, -(-token // 1000) - self._now)
        self.token, self.token_until = token, self._now + max(left, self._retention + ahead)


def _find(votes: list[Vote], id: str) -> Vote | None:
    return next((vote for vote in votes if vote.id == id), None)


def _confirmed_hold(owner: str, votes: list[Vote]) -> tuple[int | None, bool]:
    token, exclusive = None, False
    for vote in votes:
        if vote.owner == owner and vote.live and vote.stage == "c":
            token = vote.token if token is None else token
            exclusive = exclusive or vote.mode == "x"
    return token, exclusive


def _compatible(mode: str, votes: list[Vote]) -> bool:
    return not votes if mode == "x" else all(vote.mode != "x" for vote in votes)


def _in_the_way(vote: Vote, oldest: Vote | None) -> bool:
    return oldest is not None and vote.is_open and vote.live and oldest.order < vote.order


class Node:
    """The names of one node, and its scripts as a server calls them."""

    def __init__(self) -> None:
        self.names: dict[bytes, Name] = {}

    def run(
        self,
        script: str,
        keys: Sequence[bytes],
        arguments: Sequence[bytes],
        now_us: int,
        touch: Touch,
        publish: Callable[[bytes, bytes], None],
    ) -> list[object]:
        """Run a script with the KEYS and ARGV that it has on a server; return what it returns."""
        key = keys[0]
        name = self.names.get(key)
        if name is None:
            name = self.names[key] = Name(key.decode())
        a = [argument.decode() for argument in arguments]
        channel, retention = _OPTIONS[script]
        prefix = a[channel] if channel >= 0 else ""

        def say(client: str, text: str) -> None:
            publish((prefix + client).encode(), text.encode())

        name.begin(now_us, int(a[retention]) if retention >= 0 else 0, touch, say)
        if script == "vote":
            length, delay, ticket, fence = int(a[3]), int(a[4]), int(a[6]), int(a[8])
            asked = (length, delay, a[5], ticket, a[7], fence, a[12], int(a[13]))
            result = name.vote(a[0], a[1], a[2], *asked)
        elif script == "unvote":
            result = name.unvote(a[0], a[1], int(a[2]), int(a[3]))
        elif script == "break_votes":
            result = name.break_votes(int(a[3]), a[4])
        else:
            result = name.inspect_votes()
        return [_bytes(part) for part in result]

    def knows(self, state_key: bytes, id: str) -> bool:
        name = self.names.get(state_key)
        return name is not None and (id in name.state.fields or id in name.waiters.fields)

    def left(self, now: int) -> list[str]:
        """Return the keys of names that somebody holds or waits for."""
        left = []
        for name in self.names.values():
            for part, kept in (("state", name.state), ("waiters", name.waiters)):
                kept.expire(now)
                if kept.fields:
                    left.append(name.key.removesuffix("state") + part)
        return left


#: Which argument is the prefix of channels, and which the retention of tokens.
_OPTIONS = {"vote": (9, 10), "unvote": (4, 5), "break_votes": (0, 1), "inspect_votes": (-1, -1)}


def _bytes(value: object) -> object:
    if isinstance(value, list):
        return [_bytes(part) for part in value]
    return str(value).encode()
