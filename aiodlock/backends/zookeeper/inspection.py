"""What operators ask: who holds and waits, which names there are; and break a lock by force."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from urllib.parse import unquote

from ..._errors import BackendError, Unsupported
from ..._model import HolderInfo, Kind, LockInfo, Mode, Tokens, WaiterInfo
from ..asked import by_owner, shown
from . import jute
from .about import read_about
from .node import BROKEN
from .queue import Entry, Queue, holders
from .queues import Queues
from .session import Session

_WAIT_UP = 1.0
#: How many nodes are asked about, or broken, at once.
_AT_ONCE = 200
#: So many names are compared with a glob in one turn of the event loop: some 5 ms.
_IN_ONE_TURN = 2000
#: How often a break is tried whose holders come and go meanwhile.
_TRIES = 20


class Inspection:
    """The calls of ``StoreBase`` that are for people."""

    def __init__(self, queues: Queues, session: Callable[[], Session]) -> None:
        """:param session: gives the one that is asked."""
        self._queues = queues
        self._session = session

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        """Return whether the grant that has this token holds still. Waiters are not asked for."""
        session, path = self._session(), self._queues.directory(kind, name)
        await session.wait_up(_WAIT_UP)
        await self._queues.leaves.until_arrived(path, but=session)
        holding = holders(await self._entries(session, path))
        grants = [
            (_mode_of(entry), read_about(data).token or stat.created)
            async for entry, data, stat in self._read(session, path, holding)
        ]
        return (mode, token) in grants

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool
    ) -> list[LockInfo]:
        session = self._session()
        await session.wait_up(_WAIT_UP)
        found: list[LockInfo] = []
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            calls = [self._inspect(session, kind, name, queues) for name in some]
            found += await asyncio.gather(*calls)
        return found

    async def _inspect(self, session: Session, kind: Kind, name: str, queues: bool) -> LockInfo:
        path = self._queues.directory(kind, name)
        await self._queues.leaves.until_arrived(path, but=session)
        entries = await self._entries(session, path)
        holding = {entry.node for entry in holders(entries)}
        held: list[HolderInfo] = []
        waiters: list[WaiterInfo] = []
        asked = entries if queues else holders(entries)
        async for entry, data, stat in self._read(session, path, asked):
            owner, client, token, note, description, _ = read_about(data)
            mode = _mode_of(entry)
            if entry.node not in holding:
                waiters.append(
                    WaiterInfo(shown(owner), mode, len(waiters), None, client, note, description)
                )
                continue
            held.append(
                HolderInfo(owner, mode, token or stat.created, 1, None, client, note, description)
            )
        last = max((holder.token for holder in held), default=0)
        return LockInfo(name, by_owner(held), tuple(waiters), last, kind=kind)

    async def _entries(self, session: Session, path: str) -> Queue:
        """Read a queue as it is now, not as this client's server saw it a moment ago."""
        session.submit(jute.sync(path))
        try:
            return await asyncio.shield(self._queues.read_queue(session, path))
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise self._refused(refused) from refused
            return Queue()

    async def _read(
        self, session: Session, path: str, entries: Sequence[Entry]
    ) -> AsyncIterator[tuple[Entry, bytes, jute.Stat]]:
        """Read the nodes of these entries; those that have gone meanwhile are left out."""
        for first in range(0, len(entries), _AT_ONCE):
            some = entries[first : first + _AT_ONCE]
            reading = [session.submit(jute.get_data(f"{path}/{entry.node}")) for entry in some]
            for entry, answer in zip(some, reading, strict=True):
                try:
                    data, stat = (await asyncio.shield(answer)).value
                except jute.ZooKeeperError as refused:
                    if refused.code != jute.NO_NODE:
                        raise self._refused(refused) from refused  # another user has made it
                    continue
                yield entry, data, stat

    def _refused(self, refused: jute.ZooKeeperError) -> BackendError:
        return BackendError(f"{self._queues.described}: {refused}")

    async def names(self, match: str, kind: Kind) -> AsyncIterator[str]:
        session = self._session()
        await session.wait_up(_WAIT_UP)
        path = f"{self._queues.root}/{kind}s"
        session.submit(jute.sync(path))
        try:
            nodes = (await session.ask(jute.get_children(path))).value[0]
        except jute.ZooKeeperError as refused:
            if refused.code == jute.NO_NODE:
                return
            raise self._refused(refused) from refused
        wanted: list[str] = []
        nodes.sort()
        for first in range(0, len(nodes), _IN_ONE_TURN):
            some = nodes[first : first + _IN_ONE_TURN]
            wanted += (node for node in some if fnmatch.fnmatchcase(unquote(node), match))
            await asyncio.sleep(0)
        for first in range(0, len(wanted), _AT_ONCE):
            some = wanted[first : first + _AT_ONCE]
            asked = [session.submit(jute.exists(f"{path}/{node}")) for node in some]
            for node, answer in zip(some, asked, strict=True):
                try:
                    used = (await asyncio.shield(answer)).value.children
                except jute.ZooKeeperError:
                    continue
                if used:
                    yield unquote(node)

    async def break_lock(self, name: str, kind: Kind, tokens: Tokens | None) -> int:
        session, path = self._session(), self._queues.directory(kind, name)
        await session.wait_up(_WAIT_UP)
        broken, missing = 0, set[str]()
        for _ in range(_TRIES):
            holding = holders(await self._entries(session, path))
            if tokens is not None:
                holding = [
                    entry
                    async for entry, data, stat in self._read(session, path, holding)
                    if (read_about(data).token or stat.created) in tokens
                ]
            try:
                # Servers refuse messages of a megabyte. Who is behind all of these waits for the last one.
                for first in range(0, len(holding), _AT_ONCE):
                    some = holding[first : first + _AT_ONCE]
                    await self._break(session, path, some, missing)
                    broken += len(some)
            except jute.ZooKeeperError as refused:
                if refused.code != jute.NO_NODE:
                    raise self._refused(refused) from refused
                continue
            return broken
        raise BackendError(f"the holders of {name!r} change too fast to be broken", name=name)

    async def _break(
        self, session: Session, path: str, holding: Sequence[Entry], missing: set[str]
    ) -> None:
        """Delete these nodes, all or none. ``missing``: receipts that are known not to be there."""
        calls: list[jute.Call[Any]] = [jute.delete(f"{path}/{entry.node}") for entry in holding]
        # Each holder's receipt tells it that this was no accident.
        receipts = [f"{self._queues.root}/ids/{entry.request}" for entry in holding]
        receipts = [receipt for receipt in receipts if receipt not in missing]
        calls += [jute.set_data(receipt, BROKEN) for receipt in receipts]
        try:
            await session.ask(jute.multi(calls))
        except jute.Aborted as refused:
            # One of them has left meanwhile, or somebody has deleted its receipt alone.
            if refused.code == jute.NO_NODE and refused.index >= len(holding):
                missing.add(receipts[refused.index - len(holding)])
            raise

    async def forget(self, name: str) -> bool:
        raise Unsupported("ZooKeeper keeps no record of what was done once", name=name)


def _mode_of(entry: Entry) -> Mode:
    return "exclusive" if entry.mode == "x" else "shared"
