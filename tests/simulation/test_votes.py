"""The votes in plain Python, held against the scripts: the same history, step by step."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from aiodlock.backends.redis.scripts import (
    BREAK_VOTES,
    INSPECT_VOTES,
    UNVOTE,
    VOTE,
    Script,
)

from .server import SimServer, SimSocket
from .votes import Name, Node
from .world import World

_BASE = "aiodlock:2:lock:{n}"
_CHANNEL = "aiodlock:2:client:"
_CLIENTS = ("a", "b", "c")
_PARTS = ("state", "queue", "waiters", "token", "marker", "broken")


class Pair:
    """One node of each kind, on one clock."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(seed)
        self.nodes = [SimServer(self.world, f"{kind}") for kind in ("lua", "plain")]
        self.nodes[1].votes = Node()
        self.heard: list[list[bytes]] = [[], []]
        self.sockets = []
        for node, heard in zip(self.nodes, self.heard, strict=True):
            node.db  # noqa: B018  (its clock is set)
            listening = SimSocket(node, heard.append)
            for client in _CLIENTS:
                listening.execute([b"SUBSCRIBE", f"{_CHANNEL}{client}".encode()])
            self.sockets.append(SimSocket(node, lambda _: None))
        self.requests: list[tuple[Any, ...]] = []
        self.tokens = [0]
        self.met: Counter[tuple[str, bytes]] = Counter()

    def call(self, script: Script, id: str, *arguments: object) -> Any:
        """Run it on both; return the reply."""
        parts = _PARTS[: int(script.number_of_keys)]
        if script is BREAK_VOTES:
            parts = ("state", "queue", "waiters", "token", "broken")
        keys = [f"{_BASE}:{part}{id if part == 'marker' else ''}" for part in parts]
        words = [b"EVAL", script.source, b"%d" % len(keys)]
        words += [str(word).encode() for word in (*keys, *arguments)]
        replies = []
        for node, socket in zip(self.nodes, self.sockets, strict=True):
            node.sweep()  # a key that is over may come back when the clock is set back
            replies.append(socket.execute(words))
        lua, plain = (str(getattr(reply, "value", reply)) for reply in replies)
        assert lua == plain, (script.name, arguments)
        assert self.heard[0] == self.heard[1], (script.name, arguments)
        lua_dump, plain_dump = self._dump_lua(), self._dump_plain()
        assert lua_dump == plain_dump, (script.name, arguments)
        reply: Any = replies[0]
        if isinstance(reply, list):
            self.met[script.name, reply[0] if reply and script in (VOTE, UNVOTE) else b""] += 1
        else:
            self.met["refused", lua.split(" ")[0].encode()] += 1
        return reply

    def _dump_lua(self) -> dict[str, Any]:
        db = self.nodes[0].db
        found: dict[str, Any] = {}
        for part in ("state", "waiters", "broken"):
            item = db.get(f"{_BASE}:{part}".encode())
            if item is not None:
                values = item.value._values
                texts = [(key.decode(), value.decode()) for key, value in values.items()]
                until = item.expireat
                found[part] = texts, None if until is None else round(until * 1000)
        token = db.get(f"{_BASE}:token".encode())
        if token is not None:
            found["token"] = token.value.decode(), round(token.expireat * 1000)
        queue = db.get(f"{_BASE}:queue".encode())
        found["queue"] = [] if queue is None else _line(queue.value)
        return found

    def _dump_plain(self) -> dict[str, Any]:
        votes = self.nodes[1].votes
        assert votes is not None
        name = votes.names.get(f"{_BASE}:state".encode()) or Name("")
        found: dict[str, Any] = {}
        for part, kept in (("state", name.state), ("waiters", name.waiters)):
            kept.expire(self.nodes[1].now_ms())
            if kept.fields:
                found[part] = [(id, str(vote)) for id, vote in kept.fields.items()], kept.until
        if name.broken:
            found["broken"] = (
                [(id, str(token)) for id, token in name.broken.items()],
                name.broken_until,
            )
        if name.token is not None:
            found["token"] = str(name.token), name.token_until
        line = sorted(name.waiters.fields.values(), key=lambda vote: vote.order)
        found["queue"] = [vote.id for vote in line]
        return found

    # -- steps -------------------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.random
        kind = rng.random()
        if kind < 0.25 or not self.requests:
            self._ask_anew()
        elif kind < 0.60:
            self._vote(rng.choice(self.requests))
        elif kind < 0.80:
            self._unvote(rng.choice(self.requests))
        elif kind < 0.83:
            some = " ".join(request[0] for request in rng.sample(self.requests, 1))
            self.call(
                BREAK_VOTES,
                "",
                _CHANNEL,
                5000,
                "PUBLISH",
                rng.choice((300, 400)),
                rng.choice(("all", some)),
            )
        elif kind < 0.86:
            self.call(INSPECT_VOTES, "")
        elif kind < 0.98:
            self.world.time += rng.choice((0.0, 0.001, 0.0317, 0.2, 0.7, 3.0)) * rng.random()
        else:
            by = rng.choice((-0.4, -5.0, 0.4, 5.0))
            for node in self.nodes:
                node.offset += by
        refuses = rng.random()
        for node in self.nodes:
            node.out_of_memory = refuses < 0.05
            node.read_only = 0.05 < refuses < 0.08

    def _ask_anew(self) -> None:
        rng = self.random
        id = f"r{len(self.requests)}"
        client = rng.choice(_CLIENTS)
        owner = rng.choice((f"t{id}", f"t{id}", "o1", "o2"))
        ticket = self.nodes[0].clock_us() + rng.choice(
            (0, -300_000, 200_000, 2_000_000, 60_000_000)
        )
        delay, words = rng.choice((0, 0, 200)), rng.choice(("", " n=x"))
        mode = rng.choice(("x", "x", "s"))
        self.requests.append((id, mode, owner, delay, client, ticket, words))
        self._vote(self.requests[-1], rng.choice(("ask", "ask", "ask", "try")))

    def _vote(self, request: tuple[Any, ...], what: str = "") -> None:
        rng = self.random
        id, mode, owner, delay, client, ticket, words = request
        what = what or rng.choice(("ask", "fence", "fence", "held"))
        token = rng.choice(self.tokens[-4:]) + rng.choice((0, 0, 1))
        if what == "try" or (what == "ask" and rng.random() < 0.5):
            token = 0
        known = rng.choice((*self.tokens[-3:], token, 0)) if what == "held" else 0
        length = rng.choice((100, 300, 300, 1000))
        later = rng.choice((0, 0, 0, 500_000))
        options = (_CHANNEL, 5000, "PUBLISH", words, known)
        reply = self.call(
            VOTE, id, id, mode, owner, length, delay, client, ticket + later, what, token, *options
        )
        if isinstance(reply, list) and reply[0] == b"vote":
            self.tokens.append(int(reply[1]))

    def _unvote(self, request: tuple[Any, ...]) -> None:
        rng = self.random
        what = rng.choice(("ended", "ended", "lost", "yield"))
        marker = rng.choice((0, 0, 400))
        token = rng.choice(self.tokens[-4:]) + (0 if what == "yield" else rng.choice((0, 1)))
        if rng.random() < 0.3:
            token = 0
        self.call(UNVOTE, request[0], request[0], what, marker, token, _CHANNEL, 5000, "PUBLISH")


def _line(queue: Any) -> list[str]:
    scores = [(score, id) for id, score in queue.items()]
    return [id.decode() for _, id in sorted(scores)]


_ANSWERS = {
    *(("vote", word) for word in (b"vote", b"waiting", b"busy", b"deadlock", b"gone")),
    *(("unvote", word) for word in (b"vote", b"waiting", b"released", b"withdrawn", b"gone")),
    *((name, b"") for name in ("break_votes", "inspect_votes")),
    *(("refused", code) for code in (b"OOM", b"READONLY")),
}


def test_plain_votes_are_what_the_scripts_decide() -> None:
    met: Counter[tuple[str, bytes]] = Counter()
    for seed in range(60):
        pair = Pair(seed)
        for _ in range(60):
            pair.step()
        met += pair.met
    assert set(met) == _ANSWERS
