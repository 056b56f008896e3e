"""Key names. All keys of a name share its percent-encoded form as hash tag."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

#: Version of the protocol. Clients of another version use other keys and never meet.
VERSION = "1"
#: Names that are their own encoding, as nearly all are.
_PLAIN = re.compile(r"[A-Za-z0-9_.~-]*")


class Keys(NamedTuple):
    """The keys of one name of one kind."""

    state: str
    queue: str
    waiters: str
    token: str
    broken: str
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
        f"{base}:marker:",
        f"{base}:changes",
    )


def base_of(prefix: str, kind: str, name: str) -> str:
    """Return what all keys of ``name`` begin with."""
    encoded = name if _PLAIN.fullmatch(name) else quote(name, safe="")
    return f"{prefix}:{VERSION}:{kind}:{{{encoded}}}"


def state_patterns(prefix: str, kind: str) -> tuple[str, str]:
    """Return SCAN patterns for the names that are held and those that are waited for."""
    return f"{prefix}:{VERSION}:{kind}:{{*}}:state", f"{prefix}:{VERSION}:{kind}:{{*}}:queue"


def name_of(key: str) -> tuple[str, str]:
    """Return kind and name that a key belongs to."""
    head, _, rest = key.partition(":{")
    return head.rpartition(":")[2], unquote(rest.rpartition("}:")[0])


def channel_prefix(prefix: str) -> str:
    """Return what every client's notice channel begins with; the client's label follows."""
    return f"{prefix}:{VERSION}:client:"


def probe_key(prefix: str, client: str) -> str:
    """Return the key that lives for a millisecond to see whether keyspace events arrive."""
    return f"{prefix}:{VERSION}:probe:{{{client}}}"
