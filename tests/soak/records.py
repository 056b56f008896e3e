"""What an ensemble of ZooKeeper has on record: about a lease, and about itself.

A lease that ends as ``gone`` says only that its node is not there. The servers' transaction logs say
why: its deletion, the end of its session, or nothing, if a server has lost what it acknowledged.

Servers do lose it. With each transaction the leader sends a digest of its tree, and a server whose tree
has another one says so, once. From then on a client is told one thing by one server and something else by
the next, and no promise of a lock on them can be judged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple
from urllib.parse import quote

from aiodlock._clock import now

_LINE = re.compile(
    r"^(?P<at>.*) session (?P<session>0x\w+) cxid \w+ zxid (?P<zxid>0x\w+) (?P<what>.*)$"
)
#: How many lines of a server's log are told.
_LINES = 12


class _Transaction(NamedTuple):
    zxid: int
    at: str
    session: str
    what: str


def first_mismatch(log: str) -> tuple[float, str] | None:
    """Return when (on our clock) a server found that its tree differs from the leader's, and its words."""
    for line in log.splitlines():
        at, _, what = line.partition(" ")
        if "digest mismatch" in what:
            return now() - time.time() + datetime.fromisoformat(at).timestamp(), line
    return None


def of_lease(
    name: str, token: int, transactions: Mapping[int, Sequence[str]], logs: Mapping[int, str]
) -> list[str]:
    """Return what became of a lease, in lines.

    :param transactions: by server, what its transaction logs have.
    :param logs: by server, what it wrote about itself.
    """
    found: dict[_Transaction, set[int]] = {}
    for server, lines in transactions.items():
        for one in filter(None, map(_read, lines)):
            found.setdefault(one, set()).add(server)
    made = next((one for one in sorted(found) if one.zxid == token), None)
    if made is None:
        return [f"no server has transaction {token:#x} on record"]
    told = [f"made by {made.zxid:#x} of session {made.session} at {made.at}, on {_on(found[made])}"]
    node = re.search(
        rf"/(?:lock|semaphore)s/{re.escape(quote(name, safe=''))}/[^/]*?:-?\d{{10}}", made.what
    )
    own = None if node is None else re.compile(rf"delete:.*{re.escape(node.group())}(?!\d)")
    for one in sorted(found):
        deleted = own is not None and own.search(one.what) is not None
        closed = one.session == made.session and one.what.startswith("closeSession")
        if one.zxid > made.zxid and (deleted or closed):
            how = "deleted" if deleted else "its session was closed"
            told.append(
                f"{how} by {one.zxid:#x} of session {one.session} at {one.at}, on {_on(found[one])}"
            )
    if len(told) == 1:
        told.append("no server has its end on record")
    for server, log in logs.items():
        about = [line for line in log.splitlines() if made.session in line]
        told += [f"server {server}: {line}" for line in about[-_LINES:]]
    return told


def _read(line: str) -> _Transaction | None:
    parts = _LINE.match(line)
    if parts is None:
        return None
    return _Transaction(int(parts["zxid"], 16), parts["at"], parts["session"], parts["what"])


def _on(servers: set[int]) -> str:
    return "servers " + ", ".join(map(str, sorted(servers)))
