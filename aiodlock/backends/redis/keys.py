"""Key names. All keys of a name share its percent-encoded form as hash tag."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

#: Version of the protocol. Clients of another version use other keys and never meet.
VERSION = "2"
#: Names that are their own encoding, as nearly all are.
_PLAIN = re.compile(r"[A-Za-z0-9_.~-]*")
#: What ``quote`` and ``unquote`` make of ASCII, in half of their time: there may be thousands of names.
_ESCAPES = {code: quote(chr(code), safe="") for code in range(128)}
_MEANINGS = {escape: chr(code) for code, escape in _ESCAPES.items()}
_ASCII_ESCAPE = re.compile(r"%[0-7][0-9A-F]")
_OTHER_ESCAPE = re.compile(r"%(?![0-7][0-9A-F])")
#: A piece of a glob, read as ``fnmatch`` does: a set of one character, an open one, or text.
_GLOB = re.compile(r"\[(?P<one>[^!])\]|[*?]|\[!?\]?[^]]*\]|(?P<text>[^*?[]+|\[)", re.DOTALL)
_MOST_PARTS = 6


class Keys(NamedTuple):
    """The keys of one name of one kind."""

    state: str
    queue: str
    waiters: str
    token: str
    broken: str
    record: str  # of names of kind `once` alone
    marker: str  # followed by a request id
    changes: str  # a channel, not a key

    @property
    def base(self) -> str:
        """What all of them begin with."""
        return self.state.removesuffix(":state")


@lru_cache(maxsize=8192)
def keys_of(prefix: str, kind: str, name: str) -> Keys:
    """Return the keys of ``name``; two names never share one."""
    base = base_of(prefix, kind, name)
    return Keys(
        f"{base}:state",
        f"{base}:queue",
        f"{base}:waiters",
        f"{base}:token",
        f"{base}:broken",
        f"{base}:record",
        f"{base}:marker:",
        f"{base}:changes",
    )


def base_of(prefix: str, kind: str, name: str) -> str:
    """Return what all keys of ``name`` begin with."""
    return f"{prefix}:{VERSION}:{kind}:{{{encoded(name)}}}"


def encoded(name: str) -> str:
    """Return the name as keys carry it, percent-encoded."""
    if _PLAIN.fullmatch(name):
        return name
    return name.translate(_ESCAPES) if name.isascii() else quote(name, safe="")


def decoded(text: str) -> str:
    """Return the name that a key carries."""
    if "%" not in text:
        return text
    if _OTHER_ESCAPE.search(text):
        return unquote(text)
    return _ASCII_ESCAPE.sub(lambda found: _MEANINGS[found[0]], text)


def state_pattern(prefix: str, kind: str, match: str) -> str:
    """Return a SCAN pattern for the names that are held or waited for and match the glob, and maybe others.

    Keys carry names percent-encoded, so a character that is left open may be several there.
    """
    encoded = f"{prefix}:{VERSION}:{kind}:{{"
    for number, part in enumerate(parts_of(match)):
        if number == _MOST_PARTS:
            encoded += "*"  # the rest is matched by the client: many stars make a server slow
            break
        encoded += "*" if part is None else quote(part, safe="")
    if kind == "once":  # or on record: ":record"
        return f"{encoded}}}:[sqr][tue][aec][tuo][er]*"
    # Held or waited for: ":state" or ":queue".
    return f"{encoded}}}:[sq][tu][ae][tu]e"


def parts_of(match: str) -> list[str | None]:
    """Take a glob apart: texts that a name has to contain, and None for whatever is in between."""
    parts: list[str | None] = []
    for found in _GLOB.finditer(match):
        text = found["text"] or found["one"]
        if text is None:
            if not parts or parts[-1] is not None:
                parts.append(None)
        elif parts and parts[-1] is not None:
            parts[-1] += text
        else:
            parts.append(text)
    return parts


def name_of(key: str) -> tuple[str, str]:
    """Return kind and name that a key belongs to."""
    head, _, rest = key.partition(":{")
    return head.rpartition(":")[2], decoded(rest.rpartition("}:")[0])


def channel_prefix(prefix: str) -> str:
    """Return what every client's notice channel begins with; the client's label follows."""
    return f"{prefix}:{VERSION}:client:"


def waits_key(prefix: str, client: str) -> str:
    """Return the key under which a client tells what its tasks wait for."""
    return f"{prefix}:{VERSION}:waits:{{{encoded(client)}}}"


def versions_key(prefix: str) -> str:
    """Return the key of the mark that says which versions work under the prefix; it has no version."""
    return f"{prefix}:versions"


def probe_key(prefix: str, client: str) -> str:
    """Return the key that lives for a millisecond to see whether keyspace events arrive."""
    return f"{prefix}:{VERSION}:probe:{{{client}}}"
