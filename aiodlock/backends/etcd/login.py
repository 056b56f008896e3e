"""The user's token. All clients of a program that are the same user of the same cluster share it, and one
of them asks for it while the others wait.

To check a password takes a member a tenth of a second of its processor (bcrypt). Where many clients begin
together, or all tokens end with a member, the last one is answered after many seconds. So an authentication
has a patience of its own, and is not asked for again meanwhile: what is given up is worked on all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..._backoff import pause_after
from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import Patience
from .refusals import Denied, NoUsers

_logger = logging.getLogger("aiodlock")

#: How long the answer to a password may take (seconds): longer than etcd itself waits for a majority, which
#: is 7 s; and at most. Each that does not come doubles it: what is given up is worked on all the same.
#: A member that has died shows sooner: its connection gives no sign of life.
_ANSWERED_WITHIN, _LONGEST = 8.0, 60.0
#: Pauses after refusals (seconds), and in times that the refusal took: passwords cost the cluster.
_FIRST_PAUSE, _LONGEST_PAUSE, _TIMES = 0.1, 1.0, 3.0

#: The token, or why there is none.
_Asked: TypeAlias = str | BackendError

#: Those of each event loop, by what makes two the same.
_logins: WeakKeyDictionary[
    asyncio.AbstractEventLoop, WeakValueDictionary[tuple[object, ...], Login]
] = WeakKeyDictionary()


class Login:
    """One user's of one cluster.

    Mutable state: ``token`` (None: there is none; "": the cluster asks for none), ``_asking`` (the task
    that asks for one), ``_refusals`` (in a row), ``_not_before`` (of the next one), ``_refused`` (the last
    one), ``_told`` (that the cluster asks for none), ``patience`` (with an answer).
    """

    def __init__(self) -> None:
        self.token: str | None = None
        self.patience: Patience = Patience(_ANSWERED_WITHIN, _LONGEST)
        self._asking: asyncio.Task[_Asked] | None = None
        self._refusals = 0
        self._not_before = 0.0
        self._refused: BackendError | None = None
        self._told = False

    @classmethod
    def of(cls, *key: object) -> Login:
        """Return the one that clients of the running loop share who are the same user."""
        known = _logins.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
        login = known.get(key)
        if login is None:
            login = known[key] = cls()
        return login

    def drop(self, token: str | None) -> None:
        """This token counts no more."""
        if self.token == token:  # else another call has asked for a new one already
            self.token = None

    async def get(
        self,
        authenticate: Callable[[], Awaitable[str]],
        within: float | None,
        *,
        start: Callable[[Coroutine[object, object, _Asked]], asyncio.Task[_Asked]],
    ) -> str:
        """Return a token, "" where the cluster asks for no users; ask for one if nobody does.

        :param start: makes a task of the client's.
        :param within: how long this caller waits (seconds); the authentication goes on then.
        """
        asking = self._asking
        if asking is None:
            asking = self._asking = start(self._ask(authenticate))
            # A task that is cancelled before it began runs nothing, not even a finally.
            asking.add_done_callback(self._on_asked)
        await asyncio.wait({asking}, timeout=within)
        if not asking.done():
            why = f": {self._refused}" if self._refused else ""
            raise BackendUnavailable(f"no token for the user yet{why}")
        if asking.cancelled() or asking.exception() is not None:
            raise BackendUnavailable("the client that asked for a token was left")
        told = asking.result()
        if isinstance(told, BackendError):
            raise told
        return told

    def _on_asked(self, _: asyncio.Task[_Asked]) -> None:
        self._asking = None

    async def _ask(self, authenticate: Callable[[], Awaitable[str]]) -> _Asked:
        """Return the token, or why there is none: others wait for it, too."""
        began = now()
        try:
            await asyncio.sleep(self._not_before - began)
            began = now()
            self.token = await authenticate()
            self.patience.answered(now() - began)
        except NoUsers:
            # Clients are given their URL before users are switched on. A call that is refused for it later
            # asks anew.
            self.token = ""
            if not self._told:
                self._told = True
                _logger.warning(
                    "the URL names a user, but etcd asks for none: everybody who reaches it can break "
                    "every lock, until `etcdctl auth enable`",
                    extra={"event": "no_users"},
                )
        except BackendError as failed:
            if now() - began >= self.patience.learned:
                self.patience.ran_out()
            if isinstance(failed, Denied) or not isinstance(failed, BackendUnavailable):
                self._on_refused(failed, now() - began)
            return failed
        self._refusals, self._refused = 0, None
        return self.token

    def _on_refused(self, refused: BackendError, took: float) -> None:
        self._refused = refused
        self._refusals += 1
        longest = max(_LONGEST_PAUSE, _TIMES * took)
        pause = pause_after(self._refusals, first=max(_FIRST_PAUSE, took), longest=longest)
        self._not_before = now() + pause
