"""What a lock asks for: a name, a mode and options, at one client. It holds nothing."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from ._acquire import Acquiring, OwnRequests
from ._acquisition import Acquisition
from ._capabilities import refuse_unsupported
from ._clock import now
from ._core import Core
from ._model import Kind, Mode, Terms
from ._options import LockOptions
from ._patience import left_of
from ._tasks import task_of


class Description:
    """The inside of a lock, a semaphore, and of what is made of locks. Any number of tasks may use it.

    :param kept_as: what an acquisition of it is.
    """

    __slots__ = ("_kept_as", "core", "options", "terms")

    def __init__(
        self,
        core: Core,
        name: str,
        mode: Mode,
        options: LockOptions,
        *,
        kind: Kind = "lock",
        limit: int = 0,
        resize: bool = False,
        begins: bool = True,
        kept_as: type[Acquisition] = Acquisition,
    ) -> None:
        self.core: Core = core
        self.options: LockOptions = options
        self._kept_as = kept_as
        ttl = options.ttl if options.max_hold is None else min(options.ttl, options.max_hold)
        self.terms: Terms = Terms(
            kind=kind,
            name=name,
            mode=mode,
            limit=limit,
            ttl=ttl,
            # A granted waiter's lease is what is left of this: no longer than a holder's.
            waiter_ttl=min(core.waiter_ttl, ttl),
            lock_delay=options.lock_delay,
            margin=options.margin,
            max_hold=options.max_hold,
            auto_extend=options.auto_extend,
            hold_at_least=options.hold_at_least,
            begins=begins,
            resize=resize,
            note=options.note,
            linger=options.linger,
        )
        refuse_unsupported(core.store.capabilities, self.terms, options.ttl, core.described)

    def __repr__(self) -> str:
        if self.terms.kind == "semaphore":
            return f"<Semaphore {self.name!r} limit={self.terms.limit} on {self.core!r}>"
        return f"<Lock {self.name!r} {self.terms.mode} on {self.core!r}>"

    @property
    def name(self) -> str:
        """The name, as given."""
        return self.terms.name

    def in_mode(self, mode: Mode) -> Description:
        """Return the lock of this name in that mode."""
        return Description(self.core, self.name, mode, self.options)

    def with_later_body(self) -> Description:
        """Return this lock, or one like it whose ``hold_at_least`` counts when a body is said to begin."""
        if not self.options.hold_at_least:
            return self
        return Description(self.core, self.name, self.terms.mode, self.options, begins=False)

    def of_owner(self, owner: str) -> Description:
        """Return the same lock for this owner."""
        options = replace(self.options, owner=owner)
        return Description(self.core, self.name, self.terms.mode, options)

    def acquire(
        self, timeout: float | None, own: OwnRequests | None = None
    ) -> Coroutine[Any, Any, Acquisition]:
        """Wait for the turn. With ``own`` the hold belongs to its ``Lease``, not to the current task."""
        session = self.core.session
        if session is not None and session.death is not None:
            return self._acquire_later(timeout, own)
        session = self.core.use(self.terms.name)
        task = task_of(session.loop) if own is None else None
        if task is None and own is None:
            raise RuntimeError(f"{self!r} can be acquired inside an asyncio task only")
        return Acquiring(session, self.terms, self.options, self._kept_as, timeout).acquire(
            task, own
        )

    async def _acquire_later(self, timeout: float | None, own: OwnRequests | None) -> Acquisition:
        """The session has died: wait for the next one."""
        began = now()
        await self.core.ready(self.name, timeout)
        return await self.acquire(left_of(timeout, began), own)
