"""The points at which metrics and traces hang. Free when nobody listens."""

from __future__ import annotations

from typing import Protocol

from ._errors import LossReason
from ._model import Request


class Hooks(Protocol):
    """What a listener implements. Called in the event loop; must return at once and not raise."""

    def acquired(self, request: Request, waited: float) -> None:
        """A request was granted after ``waited`` seconds."""

    def released(self, request: Request, held: float) -> None:
        """A lease was released after ``held`` seconds."""

    def lost(self, request: Request, reason: LossReason) -> None:
        """A lease was lost."""

    def extension_failed(self, request: Request, error: Exception) -> None:
        """An extension had no answer, or the server refused it."""

    def release_failed(self, request: Request, error: Exception) -> None:
        """A release that nobody awaits had no effect: the server frees the name when the lease ends."""
