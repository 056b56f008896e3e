"""What a request's node says about it, for people and for requests that join it. Pure.

Others can write what they like into a node. This is the one place where that is read, and it never raises:
what is not readable says nothing.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from .jute import Stat

_LARGEST = 2**63 - 1


class About(NamedTuple):
    """One node's. ``token``: of a request that joined another one; else 0."""

    owner: str = ""
    client: str = ""
    token: int = 0
    note: str = ""
    description: str = ""
    lingers: bool = False


def write_about(about: About) -> bytes:
    """Return what stands in a node."""
    fields = [*about[:5], 1] if about.lingers else about[:5]
    return json.dumps(fields, separators=(",", ":")).encode()


def read_about(data: bytes) -> About:
    """Return what a node says."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return About()
    if not isinstance(found, list) or len(found) < 5:
        return About()
    owner, client, token, note, description = found[:5]
    known = type(token) is int and 0 <= token <= _LARGEST
    return About(
        _text(owner),
        _text(client),
        token if known else 0,
        _text(note),
        _text(description),
        len(found) > 5,
    )


def _text(value: object) -> str:
    """Return a text that can be shown and encoded: halves of characters are replaced."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def is_recallable(data: bytes, stat: Stat) -> bool:
    """Tell whether what holds by this node lingers, and nobody has written it to recall it."""
    return stat.version == 0 and read_about(data).lingers
