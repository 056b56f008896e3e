"""Which sentinels belong together: those that name one another.

A sentinel of another deployment may know the same name of a service, and a larger epoch. So an answer
counts if it is from the deployment that most of the named sentinels belong to, and later on from the one
that the client knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ..._clock import now
from .sentinel import Address, Named

_logger = logging.getLogger("aiodlock")


class Deployment:
    """The sentinels that a client knows.

    Mutable state: ``_ids`` (theirs; empty before the first answer), ``_heard_at`` (when one of them was
    heard last, on our clock), ``_told`` (addresses of other sentinels of which the log has told).
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._ids: frozenset[str] = frozenset()
        self._heard_at = now()
        self._told: set[Address] = set()
        #: Seconds after which others are believed when no lease can be held any more.
        self.silence: float = float("inf")
        self.may_hold: Callable[[], bool] = lambda: True

    def settled(self, heard: Mapping[Address, Named], asked: int) -> bool:
        """Tell whether the answers of the others cannot change which deployment is meant."""
        return bool(self._ids) or any(2 * len(group) > asked for group in _groups(heard))

    def believed(self, heard: Mapping[Address, Named], *, learns: bool) -> list[Named]:
        """Return the answers that count; the log tells of the others, once for each address.

        :param learns: all sentinels were waited for, so which deployment is meant is decided by these
            answers if it is not known. Otherwise the quickest sentinel would decide it.
        """
        ours = self._ours(_groups(heard)) if self._ids or learns else {}
        if ours:
            self._ids = frozenset[str]().union(*(named.knows for named in ours.values()))
            self._heard_at = now()
        for address in heard.keys() - ours.keys():
            if heard[address].id and self._ids and address not in self._told:
                self._told.add(address)
                _logger.warning(
                    "the sentinel at %s:%d is not one of those that watch over this %r: it is not believed",
                    *address,
                    self._service,
                    extra={"event": "other_store"},
                )
        return [named for address, named in heard.items() if address in ours or not named.id]

    def _ours(self, groups: list[dict[Address, Named]]) -> dict[Address, Named]:
        if not groups:
            return {}
        if self._ids:
            known = [g for g in groups if any(named.id in self._ids for named in g.values())]
            if known:
                return {address: named for group in known for address, named in group.items()}
            if now() - self._heard_at < self.silence or self.may_hold():
                return {}
            _logger.warning(
                "the sentinels of %r that were known have been silent for %.0f s, and no lease is left: "
                "this client goes on with others",
                self._service,
                now() - self._heard_at,
                extra={"event": "store_replaced"},
            )
            self._told.clear()
        groups.sort(key=len, reverse=True)
        if len(groups) > 1 and len(groups[0]) == len(groups[1]):
            return {}  # nobody can say which is meant
        return groups[0]


def _groups(heard: Mapping[Address, Named]) -> list[dict[Address, Named]]:
    """Put together who names whom. A sentinel that does not tell its id is left out."""
    groups: list[dict[Address, Named]] = []
    for address, named in heard.items():
        if not named.id:
            continue
        joined = {address: named}
        apart = []
        for group in groups:
            if any(named.id in one.knows or one.id in named.knows for one in group.values()):
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return groups
