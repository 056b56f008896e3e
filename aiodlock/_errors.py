"""Everything that aiodlock raises.

LockError
├── AcquireTimeout      (TimeoutError)
├── WouldBlock
├── LockLost            .reason
├── NotHeld             (RuntimeError)
├── DeadlockError       (RuntimeError)
├── ClientClosed        (RuntimeError)
├── Unsupported         (ValueError)   this backend cannot do that
└── BackendError        the driver's error is its cause
    └── BackendUnavailable  (ConnectionError)
"""

from __future__ import annotations

from typing import Any, Literal

LossReason = Literal["expired", "broken", "taken_over", "gone", "max_hold", "closed"]


class LockError(Exception):
    """The base of every error of this library.

    ``name`` is the lock's name where one is concerned, and the first one of a multilock.
    """

    name: str | None

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        # Also for ``copy.copy``: one object raised in several tasks would mix their tracebacks and notes.
        state = self.__dict__.copy()
        if "__notes__" in state:
            state["__notes__"] = list(state["__notes__"])
        return _rebuild, (type(self), self.args, state)


def _rebuild(kind: type[LockError], args: tuple[Any, ...], state: dict[str, Any]) -> LockError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class AcquireTimeout(LockError, TimeoutError):
    """The lock was not granted in time. The request has left the queue, or is leaving it.

    With ``timeout=0``, too. What does not wait at all, ``acquire_nowait``, raises ``WouldBlock``.
    """


class WouldBlock(LockError):
    """``acquire_nowait`` found the lock held or waited for. No ``TimeoutError``: nothing was waited for."""


class LockLost(LockError):
    """The lease is over although nobody released it: stop writing.

    ``reason`` is one of ``expired`` (the local deadline passed, or the server had dropped it as
    overdue), ``broken`` (by an operator), ``taken_over`` (another holds), ``gone`` (the server knows
    nothing of it), ``max_hold`` and ``closed`` (the client was left).
    """

    reason: LossReason

    def __init__(
        self, message: str, *, name: str | None = None, reason: LossReason = "expired"
    ) -> None:
        super().__init__(message, name=name)
        self.reason = reason


class NotHeld(LockError, RuntimeError):
    """There is nothing to release: never acquired by this task, or released before."""


class DeadlockError(LockError, RuntimeError):
    """The wait would never end.

    Either the owner holds the name in shared mode and asks for it exclusively. Then ``cycle`` is empty. Or
    the requests in ``cycle`` wait for each other. Each is a tuple of name, owner, client and note.
    Each waits for the next. The first one got this error.
    """

    cycle: tuple[tuple[str, str, str, str], ...]

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        cycle: tuple[tuple[str, str, str, str], ...] = (),
    ) -> None:
        super().__init__(message, name=name)
        self.cycle = cycle


class ClientClosed(LockError, RuntimeError):
    """The client was left, or was not entered yet."""


class Unsupported(LockError, ValueError):
    """This backend cannot do what was asked for."""


class BackendError(LockError):
    """The store answered with an error, or not as this library expects. The cause is the driver's error."""


class BackendUnavailable(BackendError, ConnectionError):
    """The store does not answer."""


def concerning(error: BackendError, name: str) -> BackendError:
    """Return the error as one about that lock; its cause stays the driver's."""
    kind = BackendUnavailable if isinstance(error, BackendUnavailable) else BackendError
    about = kind(f"{name!r}: {error}", name=name)
    about.__cause__ = error.__cause__
    return about
