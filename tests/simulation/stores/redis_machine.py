"""The keys of one Redis server in plain Python: what the scripts decide is decided by the machine of
``memory://``, and here are their words, their messages, and the keys that exist.

``test_redis_cluster_fake.py`` holds this against the scripts on a real server.

Left out: keyspace events, keys that are overdue and not swept yet, requests that are repeated with other
options, and commands that clients do not send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from aiodlock.backends.memory.machine import Asked, Message, Name
from aiodlock.backends.redis.scripts import ALL

_NAMES = {script.sha: script.name for script in ALL} | {
    script.source: script.name for script in ALL
}
_SOURCES = {script.source: script.sha for script in ALL}
#: The keys that scripts pass, by their last part; a marker's is followed by a request's id.
_PARTS = ("state", "queue", "waiters", "token", "broken", "record", "marker")


class Refusal(Exception):
    """An error reply."""


class Said(NamedTuple):
    """What a script publishes: by which command, on which channel."""

    command: str
    channel: str
    text: str


class Kept(NamedTuple):
    """A string and until when it is kept (ms)."""

    value: bytes
    until: int


def script_of(sha_or_source: bytes) -> str:
    """Return what a script is called; empty for one that is not ours."""
    return _NAMES.get(sha_or_source, "")


def sha_of(source: bytes) -> bytes:
    return _SOURCES.get(source, b"")


def split(key: str) -> tuple[str, str]:
    """Return what all keys of a name begin with, and the rest of this one; no name: ("", key)."""
    base, tag, rest = key.rpartition("}:")
    return (f"{base}}}", rest) if tag and ":waits:" not in key else ("", key)


class Keys:
    """All keys of a server. Mutable state: ``names`` by what their keys begin with, ``strings``."""

    def __init__(self) -> None:
        self.names: dict[str, Name] = {}
        self.strings: dict[str, Kept] = {}

    def name(self, base: str) -> Name:
        found = self.names.get(base)
        if found is None:
            found = self.names[base] = Name()
        return found

    def exists(self, key: str, now: int) -> bool:
        """Whether the server has this key."""
        base, part = split(key)
        if not base:
            kept = self.strings.get(key)
            return kept is not None and now < kept.until
        name = self.names.get(base)
        return name is not None and has_part(name, part, now)

    # -- scripts -------------------------------------------------------------------------------------

    def run(
        self, script: str, keys: Sequence[str], arguments: Sequence[bytes], now_us: int
    ) -> tuple[Any, list[Said]]:
        """Run a script; return its answer and what it publishes."""
        words = [argument.decode() for argument in arguments]
        if script == "inspect":
            each = int(words[0])
            bases = [split(key)[0] for key in keys[::each]]
            seen = [self._inspect(base, words[1] == "queues", now_us) for base in bases]
            return [*seen, b"%d" % now_us], []
        if script == "tell":
            return [self._tell(keys[0], words[0], int(words[1]), arguments[2], now_us)], []
        state = keys[0]
        name = self.name(split(state)[0])
        reader = ""
        if script == "acquire":
            prefix, publish = words[7], words[9]
            reply, messages = _acquire(name, now_us, words)
            if reply[0] == "held":
                reply = ("granted", *reply[1:])
        elif script == "extend":
            prefix, publish = words[3], words[5]
            options: dict[str, Any] = {
                "begins": words[6:] == ["begins"],
                "retention": int(words[4]),
            }
            reply, messages = name.extend(now_us, words[0], int(words[1]), **options)
        elif script == "leave":
            prefix, publish = words[1], words[3]
            holder = name.holders.get(words[0])
            reader = holder.asked.client if holder is not None else ""
            reply, messages = _leave(name, now_us, words, arguments)
            if reply[0] != "released":
                reader = ""
        else:
            prefix, publish = words[0], words[2]
            tokens = None if words[4] == "all" else frozenset(map(int, words[4].split()))
            broken, messages = name.break_(
                now_us, tokens, remember=int(words[3]), retention=int(words[1])
            )
            if broken:
                _keep_together(name)
            reply = len(broken)
        said, handed = _said(state, messages, prefix, publish, reader)
        if script == "break":
            return reply, said
        answer = [_word(part) for part in reply]
        if script == "acquire" and answer[0] == b"gone":
            answer = [b"gone"]
        elif answer[0] == b"limit":
            answer = [b"limit", b"s%d" % reply[1]]
        if handed:
            answer += [state.encode(), *handed]
        return answer, said

    def _inspect(self, base: str, queues: bool, now_us: int) -> list[Any]:
        name = self.names.get(base) or Name()
        seen = name.inspect(now_us, queues=queues)
        holding: list[Any] = []
        for asked, token, left, length in seen.holders:
            holding += [
                _word(one) for one in (asked.owner, _mode(asked), token, left, asked.client)
            ]
            holding += [_further(asked), _word(length)]
        waiting: list[Any] = []
        for asked, waited in seen.waiters:
            waiting += [_word(one) for one in (asked.owner, _mode(asked), waited, asked.client)]
            waiting.append(_further(asked))
        recorded = [_word(seen.recorded[0]), seen.recorded[1]] if seen.recorded else []
        last = _word(seen.token)
        return [last, _word(seen.closed), holding, waiting, seen.closed_places, recorded]

    def _tell(self, key: str, serial: str, keep: int, text: bytes, now_us: int) -> bytes:
        now = now_us // 1000
        kept = self.strings.get(key)
        there = kept.value[:20].decode() if kept is not None and now < kept.until else ""
        if there > serial:
            return b"older"
        if there == serial:
            assert kept is not None
            self.strings[key] = Kept(kept.value, now + keep)
        elif text == b"again":
            return b"missing"
        else:
            self.strings[key] = Kept(serial.encode() + text, now + keep)
        return b"told"

    # -- single keys -----------------------------------------------------------------------------------

    def get(self, key: str, now: int) -> bytes | None:
        kept = self.strings.get(key)
        return kept.value if kept is not None and now < kept.until else None

    def delete(self, key: str, now_us: int) -> int:
        """Delete a record, or a string; return whether it was there."""
        base, part = split(key)
        if base and part == "record":
            return int(self.name(base).forget(now_us)[0])
        kept = self.strings.pop(key, None)
        return int(kept is not None and now_us // 1000 < kept.until)

    def scan(self, now: int) -> Iterable[str]:
        """Return the keys of names that are held, waited for, or on record."""
        for base, name in self.names.items():
            for part in ("state", "queue", "record"):
                if has_part(name, part, now):
                    yield f"{base}:{part}"


def has_part(name: Name, part: str, now: int) -> bool:
    """Whether a key of a name exists."""
    if part == "state":
        return any(now < entry.closed_until for entry in name.holders.values())
    if part in ("queue", "waiters"):
        return any(now < entry.deadline for entry in name.waiters.values())
    if part == "token":
        return bool(name.token) and now < name.token_until
    if part == "broken":
        return any(now < until for until in name.broken.values())
    if part == "record":
        return name.record is not None and now < name.record_until
    return now < name.markers.get(part.partition(":")[2], 0)


def parts_of(name: Name, now: int) -> list[str]:
    """Return the last parts of all keys of a name."""
    markers = [f"marker:{id}" for id in name.markers]
    return [part for part in (*_PARTS[:-1], *markers) if has_part(name, part, now)]


def _acquire(name: Name, now_us: int, words: Sequence[str]) -> tuple[Any, list[Message]]:
    id, mode, owner, ttl, waiter_ttl, delay, client, _, retention, _, wait, further, how = words
    about = dict(word.partition("=")[::2] for word in further.split(" ") if word)
    asked = Asked(
        id,
        "exclusive" if mode == "x" else "shared",
        int(mode[1:] or 0),
        owner,
        client,
        int(ttl),
        int(waiter_ttl),
        int(delay),
        int(about.get("h", 0)),
        "begins" in how,
        "resize" in how,
        "g" in about,
        unquote(about.get("n", "")),
        unquote(about.get("d", "")),
    )
    return name.acquire(now_us, asked, wait=wait == "wait", retention=int(retention))


def _leave(
    name: Name, now_us: int, words: Sequence[str], arguments: Sequence[bytes]
) -> tuple[Any, list[Message]]:
    options: dict[str, Any] = {"marker": int(words[4]), "retention": int(words[2])}
    if words[5] == "recorded":
        keep = int(words[7])
        return name.record_success(now_us, words[0], arguments[6], keep=keep, **options)
    end: Any = words[5]
    return name.leave(now_us, words[0], end=end, **options)


def _keep_together(name: Name) -> None:
    """Breaks are fields of one key: who was broken first is remembered as long as the last."""
    until = max(name.broken.values())
    name.broken = {id: until for id, end in name.broken.items() if name.now < end}


def _said(
    state: str, messages: Sequence[Message], prefix: str, publish: str, reader: str
) -> tuple[list[Said], list[bytes]]:
    """Return what is published, and what the answer tells instead to the one who reads it."""
    said, handed = [], []
    for message in messages:
        number = f"{message.token}{'r' * message.recalled}"
        channel = prefix + message.client
        if message.word == "granted" and message.client == reader:
            channel += ":own"
            handed += [message.id.encode(), number.encode()]
        said.append(Said(publish, channel, f"{message.word} {state} {message.id} {number}"))
    return said, handed


def _word(part: object) -> bytes:
    if part is None:
        return b"-1"
    return part if isinstance(part, bytes) else str(part).encode()


def _mode(asked: Asked) -> str:
    return f"s{asked.limit}" if asked.limit else "x" if asked.mode == "exclusive" else "s"


def _further(asked: Asked) -> bytes:
    text = f" n={quote(asked.note, safe='')}" if asked.note else ""
    return (text + f" d={quote(asked.description, safe='')}" * bool(asked.description)).encode()


def encode(value: Any) -> bytes:
    """Return a reply in RESP 2."""
    if type(value) is bytes:
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, int):
        return b":%d\r\n" % value
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, list | tuple):
        return b"*%d\r\n" % len(value) + b"".join(map(encode, value))
    if isinstance(value, Refusal):
        return b"-%b\r\n" % str(value).encode()
    assert isinstance(value, str), value
    return b"+%b\r\n" % value.encode()


Tell = Callable[[bytes], None]
