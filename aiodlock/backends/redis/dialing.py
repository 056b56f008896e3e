"""When a lost connection is dialled again, how many are dialled at once, and how long one may take.

When a server comes back, or cuts all connections, every client dials. If all of them dial at the same
moment, each dial takes as long as all of them together. A fixed deadline then ends every dial shortly
before it is done, and the next round begins with the same load: nobody ever gets in. Three rules prevent
this:

- A process dials one server only a few times at once (``Turns``). The others wait, without a deadline.
- How long a step of a dial may take is learned (``logging_in``), and doubles after each that took longer. A
  jittered pause comes before every attempt (``Attempts``).
- A deadline counts the time in which this process could listen (``within``). A stall of the process ends
  no dial, and an answer begins the count anew.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from ..._backoff import pause_after
from ..._clock import now
from ..._patience import Further, Patience
from .wire import Wire, open_wire

#: So many dials of one process to one server are under way at once.
AT_ONCE = 32
#: A dial that takes longer than this, and than twice the last one that succeeded, hears nothing: the next
#: may begin (seconds).
_WORKING = 0.5
_LONGEST_WORKING = 4.0

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
#: A step of a dial (the transport, each answer to the login) may take so long at least, and at most
#: (seconds): a server may hash a password, and all its clients may dial at once.
_LEAST_STEP, _LONGEST_STEP = 2.0, 30.0
#: A deadline is counted in so many steps. A step that ends late counts once.
_STEPS = 8


def logging_in() -> Patience:
    """Return how long a step of a dial may take. Before anything is known, that is twice the least time."""
    patience = Patience(_LEAST_STEP, _LONGEST_STEP)
    patience.ran_out()
    return patience


class Handshake:
    """Counts and times the answers on a connection that is being made: each of them may take long.

    Mutable state: ``steps`` (the answers to the login), ``slowest`` of them (seconds: of two that come
    together, the second one takes no time).

    :param found: when looking for the server has last come further.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        further: Further,
        found: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.steps: int = 0
        self.slowest: float = 0.0
        self._connection = connection
        self._found = found
        self._loop = asyncio.get_running_loop()
        read = connection.read_response

        async def read_response(*args: Any, **kwargs: Any) -> Any:
            began = self._loop.time()
            reply = await read(*args, **kwargs)
            self.slowest = max(self.slowest, self._loop.time() - began)
            self.steps += 1
            further.reach(self.steps)
            return reply

        connection.read_response = read_response  # type: ignore[method-assign]

    def progress(self) -> object:
        """Return how far the connection has come."""
        return self.steps, self._connection.is_connected, self._found()

    async def run(self, patience: Patience) -> None:
        """Connect, or raise a RedisError or an OSError; each step may take what ``patience`` says."""
        try:
            async with within(patience.learned, self.progress):
                await connect(self._connection)
        except TimeoutError:
            patience.ran_out()
            raise
        finally:
            # Whoever reads next on it is not logging in.
            del self._connection.read_response
        patience.answered(self.slowest)


async def connect(connection: AbstractConnection) -> None:
    """Connect, or raise a RedisError or an OSError.

    A credential provider is users' code, and redis-py lets out what it raises: an outage of a service of
    tokens, say, is one of this server, too.
    """
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
    except (RedisError, OSError):
        raise
    except Exception as failed:
        raise RedisConnectionError(f"connecting raised {failed!r}") from failed


class Dialling:
    """How one server is dialled, and what was learned of how long that takes.

    Mutable state: ``_login`` (how long a step of a dial takes), ``_steps`` (of the last one).

    :param patience: how long replies take.
    :param further: is told when a connection has come further than ever.
    """

    def __init__(self, patience: Patience, further: Further | None = None) -> None:
        self.patience: Patience = patience
        self.further: Further = further or Further()
        self._login = logging_in()
        self._steps = 0

    def within(
        self, progress: Callable[[], object] = lambda: None
    ) -> AbstractAsyncContextManager[None]:
        """Raise TimeoutError when a step takes longer than those before."""
        return within(self._login.learned, progress)

    async def open(
        self,
        connection: AbstractConnection,
        look_up: Callable[[], Awaitable[object]],
        *,
        found: Callable[[], float] = lambda: 0.0,
        on_message: Callable[[Any], None] | None = None,
        longest: float = float("inf"),
    ) -> Wire:
        """Connect, or raise a RedisError or an OSError.

        :param look_up: waits until the server's address is known.
        :param found: when looking for the server has last come further.
        :param on_message, longest: see ``Wire``.
        """
        handshake = Handshake(connection, self.further, found)
        try:
            async with self.within():
                await look_up()
            await handshake.run(self._login)
            if not self.patience.knows and handshake.steps:
                self.patience.answered(handshake.slowest)
            self._steps = handshake.steps
            return open_wire(connection, self.patience, on_message, longest=longest)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    def came_further(self, wire: Wire) -> None:
        """Answers have come on the wire that was opened last, behind those to its login."""
        self.further.reach(self._steps + wire.answers)


class Attempts:
    """The attempts of one link to get its connection back.

    Mutable state: ``failures`` (since it was last up for a while), ``_up_at`` (when it came up).
    """

    def __init__(self) -> None:
        self.failures: int = 0
        self._up_at = float("inf")

    def came_up(self) -> None:
        """There is a connection."""
        self._up_at = now()

    def failed(self) -> float:
        """Return the seconds to wait before the next attempt.

        A connection that was up shortly was no more than one more attempt: what ended it (a refusal, a
        proxy that accepts and cuts) may end the next one as soon.
        """
        if now() - self._up_at >= _LONGEST_PAUSE:
            self.failures = 0
        self._up_at = float("inf")
        self.failures += 1
        if self.failures == 1:
            # At once, but not all together: all clients may lose their connections in one moment.
            return random.uniform(0.0, _FIRST_PAUSE)
        return pause_after(self.failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)


class Turn:
    """The permission to dial; given back by its owner, or by a timer."""

    def __init__(self, turns: Turns) -> None:
        self._turns: Turns | None = turns
        self._all = turns
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._timer = loop.call_later(turns.patience, self.give_back)

    def succeeded(self) -> None:
        """The connection is ready: let the next one dial, and tell how long this took."""
        took = asyncio.get_running_loop().time() - self._began
        self._all.patience = max(_WORKING, min(2 * took, _LONGEST_WORKING))
        self.give_back()

    def give_back(self) -> None:
        """Let the next one dial. Harmless when that was done."""
        turns, self._turns = self._turns, None
        if turns is not None:
            self._timer.cancel()
            turns._pass_on()


class Turns:
    """A bound on the dials to one server, first come, first served.

    Mutable state: ``_under_way``, ``_waiting`` (futures; a done one is a cancelled task's), ``patience``
    (seconds after which a dial hears nothing; a slow server must not be given ever more to do).
    """

    def __init__(self) -> None:
        self.patience: float = _WORKING
        self._under_way = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> Turn:
        """Wait for a turn."""
        if self._under_way < AT_ONCE:
            self._under_way += 1
            return Turn(self)
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._pass_on()  # it was handed to this task in the moment of its cancellation
            raise
        return Turn(self)

    def _pass_on(self) -> None:
        while self._waiting:
            next_one = self._waiting.popleft()
            if not next_one.done():
                next_one.set_result(None)
                return
        self._under_way -= 1


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Turns]] = WeakKeyDictionary()


def turns_of(server: str) -> Turns:
    """Return what all clients of this event loop share for one server."""
    return _turns.setdefault(asyncio.get_running_loop(), {}).setdefault(server, Turns())


@asynccontextmanager
async def within(
    seconds: float, progress: Callable[[], object] = lambda: None
) -> AsyncIterator[None]:
    """Raise TimeoutError when the body takes so long while this process could listen.

    :param progress: whenever what it returns has changed, the body gets the full time again.
    """
    loop = asyncio.get_running_loop()
    seen, left = progress(), _STEPS
    timer: asyncio.TimerHandle

    def step() -> None:
        nonlocal seen, left, timer
        left -= 1
        if progress() != seen:
            seen, left = progress(), _STEPS
        if left > 0:
            timer = loop.call_later(seconds / _STEPS, step)
        else:
            scope.reschedule(loop.time())

    timer = loop.call_later(seconds / _STEPS, step)
    scope = asyncio.timeout(None)
    try:
        async with scope:
            yield
    except TimeoutError as late:
        if scope.expired():
            raise TimeoutError(f"no answer within {seconds:g} s") from late
        raise
    finally:
        timer.cancel()
