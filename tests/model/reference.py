"""One name, as design says it behaves, in plain Python: what the scripts are held against.

It knows no keys, records or sweeps: what is overdue is not there. Times are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

Answer = tuple[object, ...]


@dataclass
class Entry:
    """A request, waiting or holding."""

    id: str
    mode: str
    owner: str
    delay: int
    client: str
    deadline: int = 0
    #: The longest that it was promised from any moment on.
    length: int = 0
    token: int = 0

    def promise(self, length: int, now: int) -> None:
        """Push the deadline into the future, never nearer."""
        self.deadline = max(self.deadline, now + length)
        self.length = max(length, self.deadline - now)


@dataclass
class Reference:
    """Holders, and waiters in order of arrival."""

    now: int
    holding: list[Entry] = field(default_factory=list)
    waiting: list[Entry] = field(default_factory=list)
    token: int = 0
    broken: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    #: Client, word and request: what has been said to those who did not ask. Without hints.
    notices: list[tuple[str, str, str]] = field(default_factory=list)

    # -- what is there at this moment --------------------------------------------------------------

    def holders(self) -> list[Entry]:
        return [entry for entry in self.holding if self.now < entry.deadline]

    def waiters(self) -> list[Entry]:
        return [entry for entry in self.waiting if self.now < entry.deadline]

    def blockers(self) -> list[Entry]:
        """Return the holders and those who were lost a lock-delay ago or less."""
        return [entry for entry in self.holding if self.now < entry.deadline + entry.delay]

    def find(self, id: str) -> Entry | None:
        return next((e for e in self.holders() + self.waiters() if e.id == id), None)

    def head(self) -> Entry | None:
        return next(iter(self.waiters()), None)

    def earliest_end(self) -> int:
        """Return when the first of the blockers ends, if nobody is heard of."""
        return min(entry.deadline + entry.delay for entry in self.blockers())

    # -- the rules ---------------------------------------------------------------------------------

    def clock_is_set_back(self, by: int) -> None:
        """Nobody has more left than its length, from that moment on."""
        self.now -= by
        for entry in self.holding + self.waiting:
            entry.deadline = min(entry.deadline, self.now + entry.length)

    def acquire(self, new: Entry, ttl: int, waiter_ttl: int, wait: bool) -> Answer:
        id, mode, owner = new.id, new.mode, new.owner
        if id in self.refused:
            return ("gone",)
        self._grant()
        known = self.find(id)
        if known is not None:
            return self._holds(known) if known in self.holding else self._waits(known)
        if any(entry.id == id for entry in self.blockers()):
            return ("gone",)
        if mode == "x" and self._token_of(owner) and not self._holds_exclusively(owner):
            return ("deadlock",)
        entry = replace(new, deadline=0, length=0)
        if self._token_of(owner) or (not self.waiters() and self._fits(mode)):
            entry.promise(ttl, self.now)
            self._admit(entry)
            return self._holds(entry)
        if not wait:
            return ("busy",)
        entry.promise(waiter_ttl, self.now)
        self.waiting.append(entry)
        return self._waits(entry)

    def extend(self, id: str, length: int) -> Answer:
        entry = self.find(id)
        if entry is not None:
            entry.promise(length, self.now)
            if entry in self.holding:
                return ("held", entry.token, entry.deadline - self.now)
        self._grant()
        named = entry is not None and entry in self.waiting and entry.owner.startswith("u")
        if entry is not None and named and self._gets_in_again(entry):
            # Its owner came to hold by another request: that one is not waited for.
            self.waiting.remove(entry)
            self._admit(entry)
            self._grant()
        if entry is None:
            return ("gone", "broken" if id in self.broken else "not broken")
        if entry in self.holding:
            return ("held", entry.token, entry.deadline - self.now)
        return self._waits(entry)

    def leave(self, id: str, *, ambiguous: bool) -> Answer:
        if ambiguous:
            self.refused.add(id)
        entry = self.find(id)
        answer: Answer
        if entry is None:
            answer = ("gone", "broken" if id in self.broken else "not broken")
        elif entry in self.holding:
            self.holding.remove(entry)
            answer = ("released",)
        else:
            self.waiting.remove(entry)
            answer = ("withdrawn",)
        self._grant()
        if answer == ("released",):
            assert entry is not None
            answer = (*answer, *self._told_by_reply(entry.client))
        return answer

    def _told_by_reply(self, client: str) -> list[tuple[str, int]]:
        """Return the grants just made to requests of the client that is answered, which needs no notice."""
        own = [n for n in self.notices if n[:2] == (client, "granted")]
        self.notices = [n for n in self.notices if n not in own]
        tokens = {entry.id: entry.token for entry in self.holding}
        return [(id, tokens[id]) for _, _, id in own]

    def break_lock(self) -> int:
        live = self.holders()
        self.broken.update(entry.id for entry in live)
        self.notices += [(entry.client, "broken", entry.id) for entry in live]
        self.holding.clear()
        self._grant()
        return len(live)

    # -- parts -------------------------------------------------------------------------------------

    def _grant(self) -> None:
        """From the head on, as far as the holders allow. Nobody passes the one that stays."""
        self.holding = self.blockers()
        self.waiting = self.waiters()
        while self.waiting:
            head = self.waiting[0]
            if not self._gets_in_again(head) and not self._fits(head.mode):
                return
            self._admit(self.waiting.pop(0))
            self.notices.append((head.client, "granted", head.id))

    def _admit(self, entry: Entry) -> None:
        entry.token = self._token_of(entry.owner)
        if not entry.token:
            entry.token = self.token = max(self.token + 1, self.now * 1000)
        self.holding = [*self.blockers(), entry]

    def _fits(self, mode: str) -> bool:
        blockers = self.blockers()
        if mode == "x":
            return not blockers
        limit = int(mode[1:] or 1_000_000)
        return len(blockers) < limit and all(entry.mode != "x" for entry in blockers)

    def _gets_in_again(self, entry: Entry) -> bool:
        return bool(self._token_of(entry.owner)) and (
            entry.mode != "x" or self._holds_exclusively(entry.owner)
        )

    def _token_of(self, owner: str) -> int:
        return next((entry.token for entry in self.holders() if entry.owner == owner), 0)

    def _holds_exclusively(self, owner: str) -> bool:
        return any(entry.owner == owner and entry.mode == "x" for entry in self.holders())

    def _holds(self, entry: Entry) -> Answer:
        return ("granted", entry.token, entry.deadline - self.now)

    def _waits(self, entry: Entry) -> Answer:
        look = -1
        if self.head() is entry:
            look = max(0, self.earliest_end() - self.now)
        floor = max(self.token, self.now * 1000)
        return ("waiting", entry.deadline - self.now, look, floor)
