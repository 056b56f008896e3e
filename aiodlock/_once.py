"""What is to be done once: at most one success on record, for as long as it is kept."""

from __future__ import annotations

import asyncio
import logging
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._body import Blocks, current_task
from ._core import Core
from ._errors import LockLost
from ._lease import Lease
from ._lock import Acquirable
from ._model import End, Kind
from ._request import AlreadyDone, Request

if TYPE_CHECKING:
    from ._options import LockOptions
    from ._session import Session

_logger = logging.getLogger("aiodlock")

#: The longest result, in bytes of UTF-8 where it is a str.
LONGEST_RESULT = 64 * 1024


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

    Mutable state: ``_result``, ``_fingerprint``; ``_unfit``, the error of a result of a wrong type.
    """

    __slots__ = ("_fingerprint", "_result", "_session", "_unfit", "lease")

    lease: Lease | None
    _session: Session

    def __init__(
        self,
        lease: Lease | None,
        result: str | bytes | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.lease = lease
        self._result = result
        self._fingerprint = fingerprint
        self._unfit: TypeError | None = None

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
        return self._result

    @result.setter
    def result(self, value: str | bytes | None) -> None:
        self._check_first()
        try:
            self._result = check_result(value)
        except TypeError as unfit:
            self._unfit = unfit
            raise

    @property
    def fingerprint(self) -> str | None:
        """What the first has said of its request, in a short text, for others to compare; None if nothing.

        It is kept beside the result, and decides nothing.

        :raises RuntimeError: on assignment, when a success is on record already.
        :raises TypeError: on assignment of anything but a str.
        :raises ValueError: on assignment of more than 255 bytes of UTF-8.
        """
        return self._fingerprint

    @fingerprint.setter
    def fingerprint(self, value: str) -> None:
        self._check_first()
        if not isinstance(value, str):
            raise TypeError(f"fingerprint must be a str, not {value!r:.100}")
        if len(value.encode()) > 255:
            raise ValueError(f"fingerprint must be at most 255 bytes of UTF-8, not {value!r:.100}")
        self._fingerprint = value

    def _check_first(self) -> None:
        if self.lease is None:
            raise RuntimeError(
                "a success is on record already: only the body that is first has a result"
            )

    def _record_at(
        self, exc_type: type[BaseException] | None, exc: BaseException | None
    ) -> bytes | None:
        """Return what leaving the body with this exception puts on record; None: nothing."""
        unfit, self._unfit = self._unfit, None
        if exc_type is not None and (unfit is None or exc is not unfit):
            return None
        try:
            return encode_record(self._result, self._fingerprint)
        except ValueError as too_long:
            name = None if self.lease is None else self.lease.name
            _logger.warning(
                "the success of %r is on record without its result: %s",
                name,
                too_long,
                extra={"event": "result_not_kept", "lock": name},
            )
            return encode_record(None, self._fingerprint)


class OnceLease(Lease):
    """The lease of the body that is first. Mutable state: ``record``, what leaving puts on record."""

    __slots__ = ("record",)

    def __init__(self, session: Session, request: Request) -> None:
        super().__init__(session, request)
        self.record: tuple[bytes, float] | None = None

    async def _leave(self, *, wait: bool) -> Any:
        if self.record is None:
            return await super()._leave(wait=wait)
        request, session = self._request, self._session
        session.register.lose_if_overdue(request)
        if self._serial not in request.handles and request.reason is None:
            raise self._not_held()
        if request.reason is not None:
            return await super()._leave(wait=wait)
        request.end_handle(self._serial)
        try:
            left = await session.departure.until_deadline(
                request, self._serial, End(record=self.record)
            )
        except LockLost as lost:
            raise LockLost(
                f"outcome unknown: {lost}; whether the success is on record shows when it is entered again",
                name=self.name,
                reason=lost.reason,
            ) from lost
        if left.what != "recorded":
            return session.register.lost_on_leaving(request, left.reason, self._serial)
        session.telling.released(request, request.granted_at)
        return None


class OnceLock(Acquirable):
    """The exclusive lock that a ``Once`` is made of: kind ``once``, with keys of its own."""

    _kind: Kind = "once"
    _lease_type: type[Lease] = OnceLease


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
        self._lock = OnceLock(core, name, "exclusive", options)
        self._keep = keep
        #: The open blocks of all tasks, also those that are not the first.
        self._entered: Blocks[OnceRun] = Blocks()

    def __repr__(self) -> str:
        return f"<Once {self.name!r} keep={self._keep:g} on {self._lock._core!r}>"

    @property
    def name(self) -> str:
        """The name, as given. A lock of the same name is another thing."""
        return self._lock.name

    async def __aenter__(self) -> OnceRun:
        run = await self._start()
        task = current_task() if run.lease is None else run.lease._arm()
        assert task is not None
        self._entered.enter(task, run, sys._getframe(1))
        return run

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        meant = self._entered.take(self, exc, sys._getframe(1))
        if meant is not None and meant[1].lease is not None:
            task, run = meant
            await self._finish(run, task, exc_type, exc)

    async def _start(self) -> OnceRun:
        session = await self._lock._core.ready(self.name, self._lock._options.timeout)
        try:
            lease = await self._lock._acquire(self._lock._options.timeout)
        except AlreadyDone as done:
            run = OnceRun(None, *decode_record(done.result))
        else:
            run = OnceRun(lease)
        run._session = session
        return run

    async def _finish(
        self,
        run: OnceRun,
        task: asyncio.Task[Any],
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
    ) -> None:
        """Leave the body that was first; without an exception, that is a success."""
        lease = run.lease
        assert isinstance(lease, OnceLease)
        record = run._record_at(exc_type, exc)
        if record is not None:
            lease.record = (record, self._keep)
        await lease._end_block(task, exc_type, exc)


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
