"""Whoever wants to know when the holder of a name changes, on a cluster whose nodes come and go."""

from __future__ import annotations

from collections.abc import Callable

from .node import Node


class Observer:
    """One of them. It listens where changes are announced: at the node that owns the name.

    Mutable state: ``_node`` (None while nobody knows which one that is), ``_stop`` (ends to listen there).

    :param owner: tells which node owns a name now.
    """

    def __init__(
        self,
        owner: Callable[[str], Node | None],
        kind: str,
        name: str,
        changed: Callable[[], object],
    ) -> None:
        self._owner = owner
        self._kind = kind
        self._name = name
        self._changed = changed
        self._node: Node | None = None
        self._stop: Callable[[], object] | None = None
        self._listen(owner(name))

    def settle(self) -> None:
        """Listen at the node that owns the name now. What was announced meanwhile was missed."""
        owner = self._owner(self._name)
        if owner is not None and owner is not self._node:
            self.stop()
            self._listen(owner)
            self._changed()

    def _listen(self, node: Node | None) -> None:
        self._node = node
        if node is not None:
            self._stop = node.calls.observe(self._kind, self._name, self._changed)

    def stop(self) -> None:
        """Listen no more."""
        if self._stop is not None:
            self._stop()
            self._stop = None
