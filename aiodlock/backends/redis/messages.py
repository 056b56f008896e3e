"""What a server is sent: calls of scripts. A message about a request is a template with holes.

The messages about all requests of one lock differ in the request's id and its owner alone. So a call is
packed once, with holes where these are, and filled for each request: a quarter of the time of packing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol
from urllib.parse import quote

import hiredis

from ..._model import StoreRequest
from .keys import Keys, base_of, keys_of
from .scripts import ACQUIRE, EXTEND, LEAVE, Script, Words

#: So many templates are remembered (some 500 bytes each).
_MOST_TEMPLATES = 8192
#: Stands in a word of a template for what is filled in: no name, owner or prefix has it.
_HOLE: Final = "\0"


class Channels(Protocol):
    """The channels that waiters are notified on."""

    def words(self, base: str) -> tuple[str, int, str]:
        """Return what scripts need to notify waiters of a name: channel, token retention, command."""

    def on_waiting(self, request: StoreRequest) -> None:
        """The request is queued, or lingers: be sure that its notice arrives, or that it is recalled."""

    def on_leaving(self, request: StoreRequest) -> None:
        """The request does not wait any more."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a script in RESP, for all servers that it is sent to."""

    script: Script
    packed: bytes

    @classmethod
    def of(
        cls, script: Script, keys: Sequence[str], arguments: Sequence[str | int | bytes]
    ) -> Call:
        words = ("EVALSHA", script.sha, len(keys), *keys, *arguments)
        return cls(script, hiredis.pack_command(words))  # type: ignore[arg-type]

    @property
    def with_source(self) -> bytes:
        """The same for a server that has forgotten the script."""
        source = self.script.source
        named = b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % self.script.sha
        whole = b"$4\r\nEVAL\r\n$%d\r\n%b\r\n" % (len(source), source)
        return self.packed.replace(named, whole, 1)


class _Template:
    """A call in RESP, in the pieces around its holes. A hole is two: the size of a word, and what is new.

    ``marker`` is the size of the first word that has a hole, without what is filled in.
    """

    __slots__ = ("marker", "pieces")

    def __init__(self, script: Script, keys: Sequence[str], arguments: Words) -> None:
        words = ("EVALSHA", script.sha.decode(), str(len(keys)), *keys, *map(str, arguments))
        text = f"*{len(words)}\r\n"
        for word in words:
            text += f"${_HOLE if _HOLE in word else len(word)}\r\n{word}\r\n"
        self.pieces: list[str] = text.split(_HOLE)
        self.marker: int = next(len(word) - 1 for word in words if _HOLE in word)


class Messages:
    """What one server is sent about requests.

    Mutable state: the templates so far, ``_acquires`` and ``_leaves``.
    """

    def __init__(
        self, prefix: str, label: str, description: str, marker_ms: int, channels: Channels
    ) -> None:
        self._prefix = prefix
        self._label = label
        self._description = description
        self._marker_ms = marker_ms
        self._channels = channels
        self._acquires: dict[tuple[object, ...], _Template] = {}
        self._leaves: dict[tuple[object, ...], _Template] = {}

    def forget(self) -> None:
        """Pack everything anew: what scripts need to notify waiters may have changed."""
        self._acquires.clear()
        self._leaves.clear()

    def acquire(self, request: StoreRequest, wait: bool) -> bytes:
        """Return the call of ``acquire``."""
        terms = request.terms
        lock = (
            terms.kind,
            terms.name,
            terms.mode,
            terms.limit,
            terms.ttl,
            terms.waiter_ttl,
            terms.lock_delay,
            terms.hold_at_least,
            request.begins,
            terms.resize,
            terms.note,
            request.lingers,
            wait,
        )
        template = self._acquires.get(lock)
        if template is None:
            keys = self._keys(request)
            names = (*keys[:4], keys.marker + _HOLE, *_record_of(request, keys))
            arguments = (
                _HOLE,
                wire_mode(request),
                _HOLE,
                _ms(terms.ttl),
                _ms(terms.waiter_ttl),
                _ms(terms.lock_delay),
                self._label,
                *self._channels.words(keys.base),
                "wait" if wait else "nowait",
                words_of(request, self._description),
                _how_of(request),
            )
            template = _kept(self._acquires, lock, _Template(ACQUIRE, names, arguments))
        a, b, c, d, e, f, g = template.pieces
        id, owner, size = request.id, request.owner, len(request.id)
        return (
            f"{a}{template.marker + size}{b}{id}{c}{size}{d}{id}{e}{len(owner)}{f}{owner}{g}"
        ).encode("ascii")

    def leave(self, request: StoreRequest, late: bool) -> bytes:
        """Return the call of ``leave``; ``late`` if an acquire may arrive after it."""
        terms = request.terms
        how = (terms.kind, terms.name, late, request.end.word)
        template = self._leaves.get(how)
        if template is None:
            keys = self._keys(request)
            names = (*_leave_keys(keys, _HOLE), *_record_of(request, keys))
            arguments = self._leaving(_HOLE, keys, late, request.end.word)
            template = _kept(self._leaves, how, _Template(LEAVE, names, arguments))
        a, b, c, d, e = template.pieces
        id, size = request.id, len(request.id)
        return f"{a}{template.marker + size}{b}{id}{c}{size}{d}{id}{e}".encode("ascii")

    def leave_unknown(self, request_id: str, keys: Keys, late: bool) -> Call:
        """Return the call that gives a grant back which this client knows nothing of."""
        arguments = self._leaving(request_id, keys, late, "unused")
        return Call.of(LEAVE, _leave_keys(keys, request_id), arguments)

    def record(self, request: StoreRequest, result: bytes, keep: float) -> Call:
        """Return the call that puts a success on record, and leaves."""
        keys, id = self._keys(request), request.id
        arguments = self._leaving(id, keys, request.ambiguous, "recorded")
        return Call.of(
            LEAVE, (*_leave_keys(keys, id), keys.record), (*arguments, result, _ms(keep))
        )

    def extend(self, request: StoreRequest, length: float) -> bytes:
        """Return the call of ``extend``.

        Nothing is kept per name: a client extends its names one after the other, and with more of them than
        are remembered it would find none there.
        """
        if request.terms.hold_at_least or request.kind == "once":
            return self._extend_by_word(request, length).packed
        base = base_of(self._prefix, request.kind, request.name)
        channel, retention, publish = self._channels.words(base)
        a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t = _extension(retention, publish)
        size, id, owner, ms = len(base), request.id, request.owner, str(_ms(length))
        return (
            f"{a}{size + 6}{b}{base}{c}{size + 6}{d}{base}{e}{size + 8}{f}{base}{g}{size + 6}{h}{base}"
            f"{i}{size + 7}{j}{base}{k}{len(id)}{m}{id}{n}{len(ms)}{o}{ms}{p}{len(owner)}{q}{owner}"
            f"{r}{len(channel)}{s}{channel}{t}"
        ).encode("ascii")

    def _extend_by_word(self, request: StoreRequest, length: float) -> Call:
        keys = self._keys(request)
        begins = ("begins",) if request.terms.hold_at_least and request.begins else ()
        words = self._channels.words(keys.base)
        return Call.of(
            EXTEND,
            (*keys[:5], *_record_of(request, keys)),
            (request.id, _ms(length), request.owner, *words, *begins),
        )

    def _leaving(self, id: str, keys: Keys, late: bool, word: str) -> Words:
        return (id, *self._channels.words(keys.base), self._marker_ms if late else 0, word)

    def _keys(self, request: StoreRequest) -> Keys:
        return keys_of(self._prefix, request.kind, request.name)


@lru_cache(maxsize=16)
def _extension(retention: int, publish: str) -> list[str]:
    """Return the pieces of all extensions: what the keys begin with, and the channel, are holes, too."""
    keys = [f"{_HOLE}:{key}" for key in ("state", "queue", "waiters", "token", "broken")]
    return _Template(EXTEND, keys, (*[_HOLE] * 4, retention, publish)).pieces


def words_of(request: StoreRequest, description: str) -> str:
    """Return the further words of a request's records; ``records.lua`` says what they are."""
    terms = request.terms
    words = f" h={round(terms.hold_at_least * 1000)}" if terms.hold_at_least else ""
    if request.lingers:
        words += " g=1"
    if terms.note:
        words += f" n={quote(terms.note, safe='')}"
    return f"{words} d={quote(description, safe='')}" if description else words


def _how_of(request: StoreRequest) -> str:
    """Return what an acquire tells the script besides."""
    how = ["resize"] if request.terms.resize else []
    if request.terms.hold_at_least:
        how.append("begins" if request.begins else "later")
    return " ".join(how)


def wire_mode(request: StoreRequest) -> str:
    """Return the mode as scripts read it: ``x`` exclusive, ``s`` shared, ``s5`` a semaphore for five."""
    if request.terms.limit:
        return f"s{request.terms.limit}"
    return "x" if request.terms.mode == "exclusive" else "s"


def _record_of(request: StoreRequest, keys: Keys) -> tuple[str, ...]:
    return (keys.record,) if request.kind == "once" else ()


def _leave_keys(keys: Keys, request_id: str) -> tuple[str, ...]:
    marker = keys.marker + request_id
    return keys.state, keys.queue, keys.waiters, keys.token, marker, keys.broken


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _kept(known: dict[tuple[object, ...], Any], key: tuple[object, ...], new: Any) -> Any:
    if len(known) >= _MOST_TEMPLATES:
        known.clear()
    known[key] = new
    return new
