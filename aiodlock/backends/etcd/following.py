"""What a client watches of a name that it knows: all of it, or while its turn is far its own keys and one
request in front of them (``room.py`` says why)."""

from __future__ import annotations

from collections.abc import Callable

from . import messages as m
from .recipe import Keys, after
from .watching import Watch, Watches

_Heard = Callable[[list[m.Event], int], None]


class Following:
    """The watches of one name; ``heard`` and ``missed`` are as of ``Watches.watch``.

    Mutable state: ``_near`` (the watch of the whole name) or ``_far`` (those instead of it), or none.
    """

    def __init__(self, keys: Keys, label: str, watches: Watches) -> None:
        self._keys = keys
        self._label = label
        self._watches = watches
        self._near: Watch | None = None
        self._far: list[Watch] = []

    @property
    def is_near(self) -> bool:
        """Whether the whole name is watched."""
        return self._near is not None

    @property
    def is_far(self) -> bool:
        """Whether a few keys of it are."""
        return bool(self._far)

    def near(self, start: int, heard: _Heard, missed: Callable[[], None]) -> None:
        """Watch the whole name from this revision on, unless it is watched already."""
        if self._near is None:
            self.end()
            self._near = self._watches.watch(self._keys.base, self._keys.end, start, heard, missed)

    def far(self, start: int, ahead: str, heard: _Heard, missed: Callable[[], None]) -> None:
        """Watch this request and the own ones from this revision on, unless such are watched already."""
        if self._far:
            return
        self.end()
        # The own ones, too: if the first waiter gives up, another one's turn may be near.
        first, own = self._keys.request(ahead), self._keys.request(self._label)
        self._far = [
            self._watches.watch(key, end, start, heard, missed)
            for key, end in ((first, b""), (own, after(own)))
        ]

    def end(self) -> None:
        """Watch nothing."""
        watches, self._far = self._far, []
        if self._near is not None:
            watches.append(self._near)
            self._near = None
        for watch in watches:
            self._watches.end(watch)
