"""The options of a client that each of its servers needs."""

from __future__ import annotations

from dataclasses import dataclass

from .keys import channel_prefix

#: A marker refuses late duplicates for at least so long (seconds).
_SHORTEST_MARKER = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of ``Client`` that every server of it needs; the docstring there says what each means."""

    prefix: str
    token_retention: float
    unavailable_after: float
    configure_notifications: bool = False
    min_replicas: int = 0
    description: str = ""

    @property
    def channels(self) -> str:
        """What the channel of each client begins with."""
        return channel_prefix(self.prefix)

    @property
    def retention_ms(self) -> int:
        return round(self.token_retention * 1000)

    @property
    def marker_ms(self) -> int:
        """For how long late duplicates of a request are refused, and a break is remembered."""
        return round(max(self.unavailable_after, _SHORTEST_MARKER) * 1000)
