"""A client's own places in the queues: what it knows of them without asking the servers.

The answer to the deletion of a holder's node tells the client more than that. An exclusive holder had
nobody in front of it, so its successor holds now. If that is a request of the same client, it needs
neither a watch nor a look at the queue. In the same way a new node whose number follows that of one's own
exclusive node has that one in front of it, whoever else is in the queue.

Both nodes must belong to one session for that. The servers delete an empty queue, and the numbers begin
anew in the next one. What is told on one connection comes in order: a node that had gone before the new one
was made is known to have gone. The answers of another session may be late.

This holds only for a seat with one node (``queue.py``): an owner's seat goes on when one of its nodes goes.
Requests of other clients can join the seat of a user's owner. So that one counts as shared from the
beginning, a task's from its second request on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Session

#: Called once, when the stand in front has ended. Above 0: it held alone until this transaction, so
#: whoever was next then holds now.
Behind = Callable[[int], object]


class Stand:
    """One node of ours in a queue, and what waits behind it.

    Mutable state: ``behind``; ``alone`` (its seat has no other node).
    """

    __slots__ = ("alone", "behind", "directory", "exclusive", "node", "number", "session")

    def __init__(self, path: str, *, session: Session, exclusive: bool, alone: bool) -> None:
        self.session: Session = session
        directory, _, node = path.rpartition("/")
        self.directory: str = directory
        self.node: str = node
        self.number: int = int(self.node.rpartition(":")[2])
        self.exclusive: bool = exclusive
        self.alone: bool = alone
        self.behind: list[Behind] = []


class Stands:
    """Those of one client. Mutable state: ``_lines`` (by directory, then by node, oldest first)."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, Stand]] = {}

    def begin(self, stand: Stand) -> None:
        """The node is in the queue."""
        self._lines.setdefault(stand.directory, {})[stand.node] = stand

    def end(self, stand: Stand, *, held_until: int) -> None:
        """The node has gone, or nobody here hears of its end any more: those behind are told.

        :param held_until: the transaction that deleted the holder's node; else 0.
        """
        line = self._lines.get(stand.directory)
        if line is None or line.get(stand.node) is not stand:
            return
        del line[stand.node]
        if not line:
            del self._lines[stand.directory]
        behind, stand.behind = stand.behind, []
        for changed in behind:
            changed(held_until if stand.alone and stand.exclusive else 0)

    def share(self, directory: str, number: int) -> None:
        """One more node comes into this seat."""
        for stand in self._lines.get(directory, {}).values():
            if stand.number == number:
                stand.alone = False

    def ends_with_exclusive(self, directory: str, session: Session) -> bool:
        """Tell whether the newest one of a queue is exclusive, and of this session: the next node may
        stand right behind it."""
        line = self._lines.get(directory)
        if line is None:
            return False
        newest = line[next(reversed(line))]
        return newest.exclusive and newest.session is session

    def in_front_of(self, stand: Stand) -> Stand | None:
        """Return the exclusive one with the number before, if that is ours, and of the same session."""
        for other in reversed(self._lines.get(stand.directory, {}).values()):
            if other.session is stand.session and other.number < stand.number:
                return other if other.exclusive and other.number == stand.number - 1 else None
        return None

    def find(self, directory: str, node: str) -> Stand | None:
        """Return the one at this node, if it is ours."""
        return self._lines.get(directory, {}).get(node)
