"""One message to several nodes, and the answers that have come so far. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ...._errors import BackendError, BackendUnavailable
from ...base import Unanswered

#: When a majority has answered and that does not decide, the other nodes have so long (seconds).
_GRACE = 0.02

_A = TypeVar("_A")


class Broadcast(Generic[_A]):
    """One message to several nodes.

    ``settled`` is done when the answers are ``enough``, when all have come, or a moment after a majority of
    all nodes has answered: a silent node must not keep the others waiting.

    :param asked: the number of nodes that were asked.
    :param enough: tells, after each answer, whether no other is needed.
    :param on_settled: called at that moment, before those who await ``settled`` run.
    """

    def __init__(
        self,
        asked: int,
        majority: int,
        enough: Callable[[Broadcast[_A]], bool],
        on_settled: Callable[[], object] | None = None,
        *,
        grace: float = _GRACE,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._outstanding = asked
        self._majority = majority
        self._grace = grace
        self._enough = enough
        self._on_settled = on_settled
        self._timer: asyncio.TimerHandle | None = None
        self.answers: dict[int, _A] = {}
        self.failures: list[Exception] = []
        self.settled: asyncio.Future[None] = self._loop.create_future()

    def take(self, node: int, answer: _A | Exception) -> None:
        """Take the answer of one node, or why there is none."""
        self._outstanding -= 1
        if isinstance(answer, Exception):
            self.failures.append(answer)
        else:
            self.answers[node] = answer
        if self.settled.done():
            return
        if self._outstanding == 0 or (node in self.answers and self._enough(self)):
            self._settle()
        elif len(self.answers) >= self._majority and self._timer is None:
            self._timer = self._loop.call_later(self._grace, self._settle)

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.settled.done():
            self.settled.set_result(None)
            on_settled, self._on_settled = self._on_settled, None
            if on_settled is not None:
                on_settled()

    def failure(self, described: str, nodes: int) -> BackendError:
        """Return the error to raise when the answers do not suffice; see ``failure_of``."""
        return failure_of(described, nodes, len(self.answers), self.failures)


def failure_of(
    described: str, nodes: int, answers: int, failures: Sequence[Exception]
) -> BackendError:
    """Return the error to raise when too few nodes have answered.

    It is a refusal if so many refuse that the others are no majority. A node that refuses while the others
    are silent counts as unreachable: they may answer soon.
    """
    refusals = [
        failure
        for failure in failures
        if isinstance(failure, BackendError) and not isinstance(failure, BackendUnavailable)
    ]
    if nodes - len(refusals) < nodes // 2 + 1:
        return refusals[0]
    return too_few(described, answers, failures)


def too_few(described: str, answers: int, failures: Sequence[Exception]) -> Unanswered:
    """Return the error that says how many nodes have answered."""
    # Without failures: the nodes that have answered are too few, and the silent ones were not waited for.
    why = failures[0] if failures else "the others did not answer in time"
    error = Unanswered(f"{described}: {answers} nodes answered, which does not suffice: {why}")
    error.__cause__ = failures[0] if failures else None
    return error
