"""How a request's node is deleted, and what that finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from ..._errors import BackendError
from ..._model import Left
from . import jute
from .connection import Answer
from .node import QueueNode


class Leaving:
    """The end of one request's node. ``deleted`` is called when a leave has deleted it: with the
    transaction, if the request was granted before, else with 0.

    Mutable state: ``sent`` (a leave was sent), ``_discards`` (the lease ran out, and the node must go),
    ``_broken`` (an operator has deleted the node).
    """

    def __init__(self, node: QueueNode, deleted: Callable[[int], object]) -> None:
        self.sent: bool = False
        self._node = node
        self._deleted = deleted
        self._discards = False
        self._broken = False

    def __repr__(self) -> str:
        return f"<Leaving sent={self.sent} discards={self._discards} broken={self._broken}>"

    async def delete(self, *, granted: bool) -> Left:
        """Delete the node."""
        node = self._node
        if node.path is None and (node.ambiguous or node.astray):
            await node.find()
        repeated, self.sent = self.sent, True
        try:
            if node.path is not None:
                await node.delete(node.path, partial(self._on_deleted, granted))
            elif node.astray:
                node.forget_receipt()
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise
            return await self._why(repeated)
        return Left("released" if granted else "withdrawn")

    def _on_deleted(self, granted: bool, answer: asyncio.Future[Answer[list[object]]]) -> None:
        if answer.exception() is None:
            self._deleted(answer.result().zxid if granted else 0)

    # -- what has gone by itself ---------------------------------------------------------------------

    async def _why(self, repeated: bool) -> Left:
        """Return what a leave finds whose node has gone."""
        self._broken = self._broken or await self._node.is_broken()
        self._node.forget_receipt()
        if self._discards:
            return Left("gone", "expired")
        if repeated and not self._broken:
            return Left("released")
        return Left("gone", "broken" if self._broken else "gone")

    async def was_broken(self) -> bool:
        """Find out whether an operator has deleted the node."""
        try:
            self._broken = await self._node.is_broken()
        except (jute.ZooKeeperError, BackendError):
            pass
        return self._broken

    def discard(self) -> None:
        """The lease is over: delete the node, and again after a lost connection, unless a leave does."""
        if self.sent or self._node.is_over() or self._node.path is None:
            return
        self._discards = True
        if self._node.session.is_up:
            self._node.session.transact(self._node.deletion(self._node.path))

    def on_up(self) -> None:
        """There is a connection again."""
        if self._discards:
            self.discard()
