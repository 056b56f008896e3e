"""The user's token: one authentication at a time, which all calls of a client wait for.

To check a password takes a member a tenth of a second of its processor (bcrypt). Where many clients begin
together, or all tokens end with a member, the last one is answered after many seconds. So an authentication
has a patience of its own, much longer than that of other calls, and is not asked for again meanwhile:
what is given up is worked on all the same. Whether the member is alive is asked with another call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from ..._backoff import pause_after
from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import Patience
from . import messages as m
from .refusals import Denied, NoUsers

#: How long the answer to a password may take (seconds): at least, and at most.
_LEAST, _LONGEST = 15.0, 60.0
#: If there is none after so long, it is seen whether the member answers other calls.
_LOOK_AFTER = 2.0
#: Pauses after refusals (seconds), and in times that the refusal took: passwords cost the cluster.
_FIRST_PAUSE, _LONGEST_PAUSE, _TIMES = 0.1, 1.0, 3.0

_Authenticate = Callable[[m.AuthenticateRequest, float], Awaitable[str]]


class Login:
    """One user's.

    Mutable state: ``token`` (None: there is none; "": the cluster asks for none), ``gave_up`` (the member
    had no answer, to the last attempt), ``_asking`` (while it is asked for), ``_refusals`` (in a row),
    ``_not_before`` (of the next attempt), ``_refused`` (the last one).
    """

    def __init__(self, user: str | None, password: str, described: str) -> None:
        self.user: str | None = user
        self.token: str | None = None
        self.gave_up: bool = False
        self._password = password
        self._described = described
        self._patience = Patience(_LEAST, _LONGEST)
        self._asking: asyncio.Future[str] | None = None
        self._refusals = 0
        self._not_before = 0.0
        self._refused: BackendError | None = None

    def __repr__(self) -> str:
        return f"<Login of {self.user}>"

    def drop(self, token: str | None) -> None:
        """This token counts no more."""
        if self.token == token:  # else another call has asked for a new one already
            self.token = None

    def forget(self) -> None:
        """The client is left."""
        self.token = None

    async def get(
        self,
        authenticate: _Authenticate,
        look: Callable[[], Awaitable[None]],
        within: float | None,
        *,
        start: Callable[[Coroutine[object, object, None]], object],
        may_go_without: bool,
    ) -> str:
        """Return a token; ask for one if nobody does.

        :param start: makes a task of the client's.
        :param look: sees whether the member answers anything.
        :param within: how long this caller waits (seconds); the authentication goes on then.
        :param may_go_without: the cluster may ask for no users any more.
        """
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_future()
            start(self._ask(self._asking, authenticate, look, may_go_without))
        asking_now = self._asking
        await asyncio.wait({asking_now}, timeout=within)
        if not asking_now.done():
            why = f": {self._refused}" if self._refused else ""
            raise BackendUnavailable(f"{self._described}: no token for the user yet{why}")
        if (failed := asking_now.exception()) is not None:
            raise failed
        return asking_now.result()

    async def _ask(
        self,
        asking: asyncio.Future[str],
        authenticate: _Authenticate,
        look: Callable[[], Awaitable[None]],
        may_go_without: bool,
    ) -> None:
        """Have the future be done, whatever happens."""
        began = now()
        try:
            await asyncio.sleep(self._not_before - began)
            began = now()
            self.token = await self._once(authenticate, look)
        except NoUsers as none:
            if may_go_without:
                self.token = ""
            else:
                _fail(asking, none)
        except BackendError as failed:
            self._on_failed(failed, now() - began)
            _fail(asking, failed)
        else:
            self._patience.answered(now() - began)
        finally:
            self._asking = None
            if self.token is not None:
                self._refusals, self._refused, self.gave_up = 0, None, False
                asking.set_result(self.token)
            elif not asking.done():
                _fail(asking, BackendUnavailable(f"{self._described}: the client is being left"))

    def _on_failed(self, failed: BackendError, took: float) -> None:
        refused = isinstance(failed, Denied) or not isinstance(failed, BackendUnavailable)
        self._refused, self.gave_up = failed, not refused
        if refused:
            self._refusals += 1
            longest = max(_LONGEST_PAUSE, _TIMES * took)
            pause = pause_after(self._refusals, first=max(_FIRST_PAUSE, took), longest=longest)
            self._not_before = now() + pause
        elif took >= self._patience.learned:
            self._patience.ran_out()

    async def _once(self, authenticate: _Authenticate, look: Callable[[], Awaitable[None]]) -> str:
        assert self.user is not None
        request = m.AuthenticateRequest(self.user, self._password)
        answer = asyncio.ensure_future(authenticate(request, self._patience.learned))
        try:
            while True:
                done, _ = await asyncio.wait({answer}, timeout=_LOOK_AFTER)
                if done:
                    return answer.result()
                await look()
        finally:
            answer.cancel()


def _fail(asking: asyncio.Future[str], error: BackendError) -> None:
    asking.set_exception(error)
    asking.exception()  # it may be that nobody waits any more
