"""What is to be done once: at most one success on record, for as long as it is kept."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ._acquisition import Acquisition
from ._body import Blocks, current_task
from ._core import Core
from ._description import Description
from ._errors import LockLost
from ._lease import Lease
from ._model import End
from ._options import LockOptions
from ._request import AlreadyDone, Request
from ._session import Session

_logger = logging.getLogger("aiodlock")

#: The longest result, in bytes of UTF-8 where it is a str.
LONGEST_RESULT = 64 * 1024


class Outcome:
    """What the body that is first says of itself, or what is on record of it.

    Mutable state: ``result``, ``fingerprint``; ``_unfit``, the error of a result of a wrong type.
    """

    __slots__ = ("_unfit", "fingerprint", "result")

    def __init__(self, result: str | bytes | None = None, fingerprint: str | None = None) -> None:
        self.result: str | bytes | None = result
        self.fingerprint: str | None = fingerprint
        self._unfit: TypeError | None = None

    def assign(self, value: object) -> None:
        """Take a result, or raise TypeError, and know that again."""
        try:
            self.result = check_result(value)
        except TypeError as unfit:
            self._unfit = unfit
            raise

    def record_at(
        self, name: str, exc_type: type[BaseException] | None, exc: BaseException | None
    ) -> bytes | None:
        """Return what leaving the body with this exception puts on record; None: nothing."""
        unfit, self._unfit = self._unfit, None
        if exc_type is not None and (unfit is None or exc is not unfit):
            return None
        try:
            return encode_record(self.result, self.fingerprint)
        except ValueError as too_long:
            _logger.warning(
                "the success of %r is on record without its result: %s",
                name,
                too_long,
                extra={"event": "result_not_kept", "lock": name},
            )
            return encode_record(None, self.fingerprint)


class OnceRun:
    """One entry of a ``Once``: whether it is the first, and the result.

    ``lease`` is None unless ``first``. The first sets ``result`` in its body; all others find the result
    that is on record.

    ```python
    async with client.once("invoice:7", keep=86400) as once:
        if once.first:
            once.result = "sent"
    print(once.result)
    ```

    ``lease.token`` of the first is the fencing token for what its body writes:
    ``database.write(fence=once.lease.token)``.
    """

    __slots__ = ("_outcome", "lease")

    lease: Lease | None

    def __init__(self, lease: Lease | None, outcome: Outcome) -> None:
        self.lease = lease
        self._outcome = outcome

    def __repr__(self) -> str:
        return f"<OnceRun first={self.first}>"

    @property
    def first(self) -> bool:
        """Whether this body has to do it."""
        return self.lease is not None

    @property
    def result(self) -> str | bytes | None:
        """The result, of the type that was assigned; None if none was.

        When it is assigned, it has been done: what cannot be kept is no reason to do it again. So more than
        64 KiB (of UTF-8), or a str with lone surrogates, is recorded without value, with a warning in the
        log. A result of a wrong type raises, and if that ends the body, the success is on record, too.

        :raises RuntimeError: on assignment, when a success is on record already.
        :raises TypeError: on assignment of anything but a str, bytes or None.
        """
        return self._outcome.result

    @result.setter
    def result(self, value: str | bytes | None) -> None:
        self._check_first()
        self._outcome.assign(value)

    @property
    def fingerprint(self) -> str | None:
        """What the first has said of its request, in a short text, for others to compare; None if nothing.

        It is kept beside the result, and decides nothing.

        :raises RuntimeError: on assignment, when a success is on record already.
        :raises TypeError: on assignment of anything but a str.
        :raises ValueError: on assignment of more than 255 bytes of UTF-8.
        """
        return self._outcome.fingerprint

    @fingerprint.setter
    def fingerprint(self, value: str) -> None:
        self._check_first()
        if not isinstance(value, str):
            raise TypeError(f"fingerprint must be a str, not {value!r:.100}")
        if len(value.encode()) > 255:
            raise ValueError(f"fingerprint must be at most 255 bytes of UTF-8, not {value!r:.100}")
        self._outcome.fingerprint = value

    def _check_first(self) -> None:
        if self.lease is None:
            raise RuntimeError(
                "a success is on record already: only the body that is first has a result"
            )


class OnceAcquisition(Acquisition):
    """That of the body that is first. Mutable state: ``record``, what leaving puts on record."""

    __slots__ = ("record",)

    def __init__(self, session: Session, request: Request) -> None:
        super().__init__(session, request)
        self.record: tuple[bytes, float] | None = None

    async def leave(self, *, wait: bool) -> Any:
        """End it; with a record, that is written. Raises NotHeld after a release by hand."""
        if self.record is None:
            return await super().leave(wait=wait)
        request, session = self.request, self.session
        session.register.lose_if_overdue(request)
        if self.is_over and request.loss is None:
            raise self.not_held()
        if request.loss is not None:
            return await super().leave(wait=wait)
        request.end_handle(self.serial)
        try:
            left = await session.departure.until_deadline(
                request, self.serial, End(record=self.record)
            )
        except LockLost as lost:
            raise LockLost(
                f"outcome unknown: {lost}; whether the success is on record shows when it is entered again",
                name=request.name,
                reason=lost.reason,
            ) from lost
        if left.what != "recorded":
            return session.register.lost_on_leaving(request, left.reason, self.serial)
        session.telling.released(request)
        return None


@dataclass(slots=True)
class _Run:
    """An open block. ``acquired``: None if a success was on record."""

    session: Session
    acquired: Acquisition | None
    outcome: Outcome


class Once:
    """Something to be done once; made by ``Client.once``. May be used by many tasks at once.

    ```python
    async with client.once("order:42", keep=86400) as once:
        if once.first:
            once.result = "charged"
        print(once.result)
    ```
    """

    def __init__(self, core: Core, name: str, options: LockOptions, keep: float) -> None:
        self._described = Description(
            core, name, "exclusive", options, kind="once", kept_as=OnceAcquisition
        )
        self._keep = keep
        #: The open blocks of all tasks, also those that are not the first.
        self._entered: Blocks[_Run] = Blocks()

    def __repr__(self) -> str:
        return f"<Once {self.name!r} keep={self._keep:g} on {self._described.core!r}>"

    @property
    def name(self) -> str:
        """The name, as given. A lock of the same name is another thing."""
        return self._described.name

    async def __aenter__(self) -> OnceRun:
        run = await self._start()
        acquired = run.acquired
        task = current_task() if acquired is None else acquired.arm()
        assert task is not None
        self._entered.enter(task, run)
        return OnceRun(None if acquired is None else Lease(acquired), run.outcome)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        meant = self._entered.take(self, exc)
        if meant is not None and (acquired := meant[1].acquired) is not None:
            task, run = meant
            assert isinstance(acquired, OnceAcquisition)
            record = run.outcome.record_at(self.name, exc_type, exc)
            if record is not None:  # without an exception, that is a success
                acquired.record = record, self._keep
            await acquired.end_block(task, exc_type, exc)

    async def _start(self) -> _Run:
        described = self._described
        try:
            acquired = await described.acquire(described.options.timeout)
            return _Run(acquired.session, acquired, Outcome())
        except AlreadyDone as done:
            session = described.core.use(self.name)
            return _Run(session, None, Outcome(*decode_record(done.result)))


def encode_record(result: str | bytes | None, fingerprint: str | None = None) -> bytes:
    """Return what is kept: a letter that tells the result's type, and its bytes.

    With a fingerprint the letter is a capital, and a byte with its length and the fingerprint follow.

    :raises ValueError: for more than can be kept, and for a str without UTF-8 form.
    """
    kind, kept = b"n", b""
    if isinstance(result, str):
        kind, kept = b"s", result.encode()
    elif isinstance(result, bytes):
        kind, kept = b"b", result
    if len(kept) > LONGEST_RESULT:
        raise ValueError(
            f"result has {len(kept)} bytes, and at most {LONGEST_RESULT} are kept: keep it elsewhere, "
            "and its key here"
        )
    if fingerprint is None:
        return kind + kept
    mark = fingerprint.encode()
    return kind.upper() + bytes([len(mark)]) + mark + kept


def decode_record(kept: bytes) -> tuple[str | bytes | None, str | None]:
    """Return the result as it was assigned, and the fingerprint."""
    kind, rest = kept[:1], kept[1:]
    fingerprint = None
    if kind.isupper():
        fingerprint, rest = rest[1 : 1 + rest[0]].decode(), rest[1 + rest[0] :]
    match kind.lower():
        case b"s":
            return rest.decode(), fingerprint
        case b"b":
            return rest, fingerprint
    return None, fingerprint


def check_result(value: object) -> str | bytes | None:
    """Return a result of a type that is kept."""
    if value is None or isinstance(value, str | bytes):
        return value
    raise TypeError(f"result must be a str, bytes or None, not {value!r:.100}")


def recordable(result: object) -> str | bytes | None:
    """Return what of a function's result goes on record: None if it is of no type that is kept."""
    return result if isinstance(result, str | bytes) else None


def check_hold(hold_at_least: float, keep: float) -> None:
    """Raise ValueError if the name would have to stay closed for longer than the success is kept.

    A success opens the name for everybody who asks for the result, so nothing would keep that hold.
    """
    if hold_at_least > keep:
        raise ValueError(
            f"hold_at_least ({hold_at_least:g} s) must not be longer than keep ({keep:g} s): a success on "
            "record ends the hold, and keeps everybody from doing it again for as long as it is kept"
        )
