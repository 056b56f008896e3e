"""The points at which metrics and traces hang. Free when nobody listens."""

from __future__ import annotations

from ._errors import LossReason
from ._model import RequestInfo


class Hooks:
    """What a listener may hear of one client: subclass, override what you need, ``client.add_hooks(it)``.

    ``acquiring`` is followed by exactly one of ``acquired``, ``not_acquired`` and ``done``, ``acquired`` by
    exactly one of ``released`` and ``lost``, with an equal ``request.id``. Entering a lock again that is
    held is no new request.

    Called in the event loop: return at once. The first four are called in the acquiring task, so context
    variables are its own. An exception is logged, and does no harm to the lock.

    ```python
    class Slow(aiodlock.Hooks):
        def acquired(self, request: aiodlock.RequestInfo, waited: float) -> None:
            if waited > 1:
                print(f"waited {waited:.1f} s for {request.name}")
    ```
    """

    def acquiring(self, request: RequestInfo) -> None:
        """A request begins. Those without an end so far are this process's part of the queue."""

    def acquired(self, request: RequestInfo, waited: float) -> None:
        """It was granted, after ``waited`` seconds. ``request.token`` is known from now on."""

    def not_acquired(self, request: RequestInfo, waited: float, error: BaseException) -> None:
        """It was given up after ``waited`` seconds: timed out, cancelled, refused, or the store is away."""

    def done(self, request: RequestInfo, waited: float) -> None:
        """A ``once`` was answered from its record, after ``waited`` seconds: nothing was left to do.

        That is no error, and no lease follows.
        """

    def released(self, request: RequestInfo, held: float) -> None:
        """The lease was released, after ``held`` seconds."""

    def lost(self, request: RequestInfo, held: float, reason: LossReason) -> None:
        """The lease was lost, after ``held`` seconds."""

    def extension_failed(self, request: RequestInfo, error: Exception) -> None:
        """Extending a holder or a waiter had no answer, or was refused; it is tried again."""

    def release_failed(self, request: RequestInfo, error: Exception) -> None:
        """A release that nobody awaits had no effect: the server frees the name when the lease ends."""
