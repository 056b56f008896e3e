"""One request's node in a queue: its creation, its move to the owner's seat, its deletion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from ..._errors import BackendError, BackendUnavailable
from ..._model import IMPATIENT, Terms
from ..base import Unanswered
from . import jute
from .about import About, read_about, write_about
from .connection import Answer
from .lifetime import Lifetime
from .queue import Asked, Barred, Blocked, Entry, Holds, Joins, Queue, owner_tag
from .queues import Queues
from .session import Session

_Made: TypeAlias = Answer[list[object]]


#: What a break writes into the receipts of the holders.
BROKEN = b"broken"


class QueueNode:
    """What a request has in the store: a node in its queue, and a receipt. Every step may be repeated.

    Mutable state: ``_session`` (in which it is made; from the first attempt on) and its ``lifetime`` (from
    when it may be there), ``path`` (once known), ``created`` (by which transaction; of its owner's first
    node if that is earlier), ``making`` (the transaction that makes it, on its way), ``ambiguous`` (one
    went unanswered: a late duplicate may come), ``astray`` (its move to a seat did, or nobody waited for
    the answer: it is at one of two places), ``_joined`` (it is in its owner's seat).
    """

    def __init__(self, queues: Queues, terms: Terms, request_id: str, owner: str) -> None:
        self.directory: str = queues.directory(terms.kind, terms.name)
        self.lifetime: Lifetime | None = None
        self.path: str | None = None
        self.created: int = 0
        self.making: asyncio.Future[_Made] | None = None
        self.ambiguous: bool = False
        self.astray: bool = False
        self._session: Session | None = None
        self._queues = queues
        self._terms = terms
        self._owner = owner
        self.id: str = _short(request_id)
        self.asked: Asked
        if terms.limit:
            self.asked = Asked(self.id, str(terms.limit), "", terms.limit)
        else:
            tag = owner_tag(_short_owner(owner), self.id)
            self.asked = Asked(self.id, "x" if terms.mode == "exclusive" else "s", tag, 0)
        self._receipt = f"{queues.root}/ids/{self.id}"
        self._joined = False

    def begin(self, session: Session) -> None:
        """It is to be made in this session."""
        self._session = session

    @property
    def session(self) -> Session:
        """The session that it is made in; none before ``begin``."""
        assert self._session is not None
        return self._session

    @property
    def is_silent(self) -> bool:
        """Whether the servers owe answers."""
        return self._session is None or self._session.is_silent

    def is_over(self) -> bool:
        """Whether the session in which it was made has ended, and it with that."""
        return self.lifetime is None or self.lifetime.over

    def __repr__(self) -> str:
        return f"<QueueNode {self.id} {self.path}>"

    def refused(self, refused: jute.ZooKeeperError) -> BackendError:
        """Put into words that the servers have refused something about it: for now, if they have let this
        client make nodes before."""
        for_now = refused.code in jute.FOR_NOW or (
            refused.code in jute.OF_USERS and self._queues.was_let_in
        )
        kind = BackendUnavailable if for_now else BackendError
        return kind(
            f"{self._queues.described} refused what was asked about {self.directory}: {refused}",
            name=self._terms.name,
        )

    @property
    def may_join(self) -> bool:
        """Whether its owner may come to hold by another request."""
        return self.asked.owner != "" and not self._joined and self._owner.startswith("u")

    @property
    def is_alone(self) -> bool:
        """Whether no other client can add a node to its seat."""
        return not self._joined and not self._owner.startswith("u")

    def where(self, entries: Queue) -> Holds | Blocked | Joins | Barred | None:
        """Tell where it stands; None if it is not there."""
        return self.asked.where(entries, joined=self._joined)

    async def enter(self, *, reads: bool) -> Queue | None:
        """Make the node, unless that is done; return the queue as it is after that.

        Without ``reads`` it returns None when the node was made, and the queue was not read.
        """
        with_queue = rooted = False
        while self.path is None and not self.is_over():
            making = self.making = self._make(with_queue=with_queue)
            making.add_done_callback(self._on_made)
            # Both are on their way at once: the queue is read behind the node's creation.
            reading = self._read_queue() if reads else None
            try:
                await asyncio.shield(making)
            except jute.Aborted as aborted:
                if aborted.code == jute.NODE_EXISTS and aborted.index == 0:
                    # An attempt that had no answer was carried out.
                    return await self._read_and_adopt(reading)
                if aborted.code == jute.NODE_EXISTS and with_queue:
                    with_queue = False  # others have made it meanwhile
                elif aborted.code != jute.NO_NODE:
                    raise
                elif aborted.index > 0 and not with_queue:
                    self._queues.note(self.directory, exists=False)
                    with_queue = True
                elif rooted:
                    raise
                else:
                    # What all receipts stand in, or all queues: somebody has deleted it.
                    rooted = True
                    await self.session.make_root()
            else:
                return None if reading is None else await self._read_behind(reading)
        return await self.read()

    def _make(self, *, with_queue: bool) -> asyncio.Future[_Made]:
        """Send what makes the node."""
        if self._queues.is_known(self.directory) and not with_queue:
            # Two nodes of one queue must not have the same transaction: it is their token.
            return self.session.transact(self.creation(), once=self.directory)
        # This one may fail, and would take others with it.
        return self.session.submit(jute.multi(self.creation(queue=with_queue)))

    async def _read_behind(self, reading: asyncio.Future[Queue]) -> Queue:
        """Return the queue as it is with the node in it."""
        entries = await self.read(reading)
        if entries.zxid >= self.created:
            return entries
        # It could not be made together with others, and was made after the reading; perhaps the queue was,
        # too, by others.
        return await self.read()

    async def _read_and_adopt(self, reading: asyncio.Future[Queue] | None) -> Queue:
        entries = await self.read(reading)
        try:
            await self.adopt(entries)
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise
            return Queue()  # others have deleted it since
        return entries

    async def read(self, reading: asyncio.Future[Queue] | None = None) -> Queue:
        """Read the queue that the node was made in. Others may have deleted it, the servers it.

        :param reading: one that is on its way.
        """
        try:
            return await asyncio.shield(reading or self._read_queue())
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise
            return Queue()

    def _read_queue(self) -> asyncio.Future[Queue]:
        return self._queues.read_queue(self.session, self.directory)

    def creation(self, *, queue: bool = False) -> tuple[jute.Call[Any], ...]:
        """Return the calls of the transaction that makes a receipt and the node, and the queue with them.

        All or none are made. The receipt has the request's id for its name, so repeating it makes nothing.
        The servers delete a queue that has become empty, and never one that nothing was ever in.
        """
        acl = self._queues.acl
        path = f"{self.directory}/{self.asked.node_name}"
        flags = jute.EPHEMERAL | jute.SEQUENTIAL
        receipt = jute.create(self._receipt, b"", jute.EPHEMERAL, acl)
        node = jute.create(path, self.about(), flags, acl)
        if not queue:
            return receipt, node
        return receipt, jute.create2(self.directory, b"", jute.CONTAINER, acl), node

    def about(self, token: int = 0) -> bytes:
        """Return what the node tells people, and a joined one's token."""
        queues, terms = self._queues, self._terms
        about = About(
            self._owner, queues.label, token, terms.note, queues.description, terms.linger > 0
        )
        return write_about(about)

    def _on_made(self, making: asyncio.Future[_Made]) -> None:
        """Note the node, whether anybody still waits for the answer or not."""
        error = making.exception()
        if error is None:
            answer = making.result()
            self.path, self.created = cast("str", answer.value[-1]), answer.zxid
            self._queues.note(self.directory, exists=True)
            self._queues.was_let_in = True
        elif isinstance(error, Unanswered):
            self.ambiguous = True
        self.making = None

    async def adopt(self, entries: Queue) -> None:
        """Take the node that an unanswered attempt has made: of this request, and of this session."""
        for entry in entries:
            if entry.request == self.id:
                path = f"{self.directory}/{entry.node}"
                data, stat = (await self.session.ask(jute.get_data(path))).value
                if stat.ephemeral_owner != self.session.id:
                    raise BackendError(f"{path} belongs to another session", name=self._terms.name)
                self.path = path
                token = read_about(data).token
                self.created = token or stat.created
                self._joined = self._joined or token != 0

    async def join(self, seat: Entry) -> None:
        """Change over to the seat of the owner, who holds by another request, unless that has just gone."""
        assert self.path is not None
        path = f"{self.directory}/{seat.node}"
        try:
            data, stat = (await self.session.ask(jute.get_data(path))).value
            token = read_about(data).token or stat.created
            name = f"{self.asked.node_name}{seat.node.rpartition(':')[2]}"
            node = f"{self.directory}/{name}"
            await self.session.ask(
                jute.multi(
                    (
                        jute.check(path),
                        jute.create(node, self.about(token), jute.EPHEMERAL, self._queues.acl),
                        jute.delete(self.path),
                    )
                )
            )
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise
            return
        except BaseException:
            # It is one of the two. The next attempt adopts it, or a leave finds it. A late duplicate of the
            # move fails without the node that it deletes.
            self.path, self.astray = None, True
            raise
        self.path, self._joined, self.created = node, True, token

    # -- deleting ------------------------------------------------------------------------------------

    def deletion(self, node: str) -> tuple[jute.Call[Any], ...]:
        """Return the calls of the transaction that deletes the node.

        After a lost answer the receipt stays as long as the session: it refuses what may still come.
        """
        if self.ambiguous:
            return (jute.delete(node),)
        return jute.delete(node), jute.delete(self._receipt)

    async def find(self) -> None:
        """Find what an unanswered attempt has made. Behind the receipt no late duplicate makes anything."""
        try:
            await self.session.ask(
                jute.create(self._receipt, b"", jute.EPHEMERAL, self._queues.acl)
            )
        except jute.ZooKeeperError as refused:
            if refused.code not in (jute.NODE_EXISTS, jute.NO_NODE):
                raise
        mine = self.asked.find(await self.read())
        if mine is not None:
            self.path = f"{self.directory}/{mine.node}"

    def forget_receipt(self) -> None:
        """Its node has gone by itself: delete the receipt alone. One attempt: it ends with the session."""
        if not self.ambiguous and self.session.is_up:
            self.session.submit(jute.delete(self._receipt))

    async def is_broken(self) -> bool:
        """Tell whether an operator has deleted it: the receipt says so."""
        try:
            return (await self.session.ask(jute.get_data(self._receipt))).value[0] == BROKEN
        except jute.ZooKeeperError:
            return False

    async def delete(self, node: str, then: Callable[[asyncio.Future[_Made]], object]) -> None:
        """Delete it and its receipt. ``then`` gets the answer, also if nobody awaits it any more."""
        deleting = self.session.transact(self.deletion(node))
        deleting.add_done_callback(then)
        try:
            await asyncio.shield(deleting)
        except jute.Aborted as aborted:
            if aborted.index == 0 or aborted.code != jute.NO_NODE:
                raise
            await self.session.ask(jute.delete(node))  # its receipt was deleted by somebody


def _short(request_id: str) -> str:
    """Return what is unique in a request's id without the host and the process that it begins with."""
    return "-".join(request_id.split("-")[-2:])


def _short_owner(owner: str) -> str:
    """Return an owner as the names of nodes know it: a task is called by its first request.

    Whether that one gives up by itself is no part of it: else its node would look like a later one's.
    """
    return f"t{_short(owner[1:].removesuffix(IMPATIENT))}" if owner.startswith("t") else owner
