"""A dependency by which a request is done once, however often it is sent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from fastapi import Response
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from .. import _once as core
from .._client import Client
from .._errors import LockError
from .._once import OnceRun, check_hold
from .._options import check_flag, check_seconds
from ._dependencies import Locked, parameter
from ._disconnect import Watch
from ._fingerprint import fingerprint_of
from ._handlers import check_handler, go_around, route_of
from ._problems import KeyReused, LockTimedOut, as_problems, told_to
from ._threads import handler_thread, in_thread

_T = TypeVar("_T")


@dataclass
class _Answers:
    """What the handler of a request has answered; the response that its dependencies share tells which."""

    response: Response
    #: Ends the dependencies of the request that end before the response is sent.
    stack: AsyncExitStack | None
    answers: list[object] = field(default_factory=list)
    #: What was raised while FastAPI made a response of the answer; False before that has ended.
    raised: BaseException | Literal[False] | None = False

    def add(self, answer: object) -> None:
        self.answers.append(answer)
        if self.stack is not None:
            self.stack.push(self._on_end)  # before any dependency ends, which may raise itself

    def _on_end(self, _: object, raised: BaseException | None, traceback: object) -> None:
        self.raised = raised

    def came_before(self, failure: BaseException) -> bool:
        """Return whether the handler had done its work: an error now would let it be done again."""
        if not self.answers or self.stack is None:
            return False
        return self.raised is failure or self.raised is False  # a thread's, of a cancelled request


#: Those of the request that is handled here.
_handled: ContextVar[_Answers | None] = ContextVar("aiodlock_answers", default=None)


class _Failed(Exception):
    """The handler has answered with an error: nothing is recorded."""


class Once(Locked):
    """``once: Annotated[OnceRun, Once("orders:{order_id}", keep=86400)]``: do a request once.

    The first request has ``once.first`` and assigns ``once.result``. Every other one waits for it, and gets
    the result that is on record. A handler that raises, or answers with 4xx or 5xx, records nothing: the
    next request is first. (An ``HTTPException`` with a lower status is an answer. And a handler whose
    answer cannot be sent has done its work, which is on record.) The template is one as of ``Locked``, and
    the same errors come out. An app in which nobody reads the run, as in
    ``dependencies=[Depends(Once(...))]``, does not start: its handler would do the work each time.

    ```python
    from typing import Annotated

    from fastapi import FastAPI

    from aiodlock.fastapi import Once

    app = FastAPI()


    @app.post("/orders/{order_id}/pay")
    async def pay(
        order_id: int, once: Annotated[aiodlock.OnceRun, Once("orders:{order_id}", keep=86400)]
    ) -> str:
        if once.first:
            once.result = "paid"
        return str(once.result)
    ```

    :param keep: seconds for which a success stays on record.
    :param timeout: seconds to wait for the first, then 423; 0 tries once; None waits for ever. Default:
        10 s.
    :param status: the status instead of 423.
    :param fingerprint: answer 422 to another request of the same name, as told by its method, path, query
        and body. Default: where the name has the header ``Idempotency-Key``.
    :param lock_options: as of ``Client.once``.
    """

    def __init__(
        self,
        name_template: str,
        *,
        keep: float,
        timeout: float | None = 10.0,
        status: int = LockTimedOut.status,
        fingerprint: bool | None = None,
        **lock_options: Any,
    ) -> None:
        for option in ("owner", "linger", "confirm_release", "shared"):
            if option in lock_options:
                raise ValueError(f"{option} has no meaning for what is done once")
        super().__init__(name_template, timeout=timeout, status=status, **lock_options)
        self.__dict__["_keep"] = check_seconds("keep", keep, least=0.001)
        if fingerprint is None:
            fingerprint = self.__dict__["_template"].has_header("idempotency-key")
        check_flag("fingerprint", fingerprint)
        self.__dict__["_fingerprint"] = fingerprint
        check_hold(lock_options.get("hold_at_least", 0.0), keep)

    def _parameters(self) -> Iterator[inspect.Parameter]:
        yield from super()._parameters()
        yield parameter("response", Response)

    def __repr__(self) -> str:
        return f"Once({self.__dict__['_template'].text!r})"

    async def __call__(  # type: ignore[override]
        self,
        connection: HTTPConnection,
        client: Client,
        response: Response,
        **fields: str,
    ) -> AsyncIterator[OnceRun]:
        inner = self.__dict__
        check_handler(connection)
        self._check_use(getattr(route_of(connection), "dependant", None), RuntimeError)
        name, timeout = await inner["_template"].name(connection), inner["_timeout"]
        fingerprint = await fingerprint_of(connection) if inner["_fingerprint"] else None
        once = client.once(name, keep=inner["_keep"], **{**inner["_options"], "timeout": timeout})
        problems = as_problems(connection, client, name, timeout, inner["_status"])
        with _answers_to(connection, response) as handled, problems:
            watch = Watch(connection)

            async def take_back(_: OnceRun) -> None:
                await once.__aexit__(_Failed, _Failed(), None)

            try:
                run = await watch.wait_for(name, once.__aenter__, take_back)
                try:
                    _compare(connection, name, run, fingerprint)
                    with handler_thread(connection) as thread:
                        try:
                            yield run
                        except asyncio.CancelledError:
                            await thread.leave(run.lease)
                            raise
                except BaseException as failure:
                    # With a lost lease nothing can be recorded, and the failure may be the loss itself.
                    lost = run.lease is not None and run.lease.lost is not None
                    if not lost and handled.came_before(failure):
                        with suppress(LockError):  # the failure comes first
                            await self._end(once, connection, handled)
                    else:
                        await once.__aexit__(type(failure), failure, failure.__traceback__)
                    raise
                await self._end(once, connection, handled)
            finally:
                watch.end()

    def _check(self, dependant: Any, endpoint: Any, in_path: Collection[str]) -> None:
        super()._check(dependant, endpoint, in_path)
        self._check_use(dependant, ValueError)

    def _check_behind(self, before: Sequence[Locked]) -> None:
        text = self.__dict__["_template"].text
        others = [one for one in before if isinstance(one, Once) and one is not self]
        if any(one.__dict__["_template"].text == text for one in others):
            raise ValueError("the request does it already (DeadlockError): use one Once object")

    def _check_use(self, dependant: Any, error: type[Exception]) -> None:
        """Raise if neither the handler nor a dependency can tell whether it is first."""
        if dependant is not None and not any(
            inner.call is self and inner.name is not None
            for user in _all_of(dependant)
            for inner in user.dependencies
        ):
            raise error(
                f"nobody reads the run of {self!r}, so the handler would do the work each time: give it "
                "'once: Annotated[OnceRun, Once(...)]', and let it do the work 'if once.first'"
            )

    @staticmethod
    async def _end(once: core.Once, connection: HTTPConnection, handled: _Answers) -> None:
        """Record a success, unless the handler has answered with an error."""
        statuses = _statuses(connection, handled.answers, handled.response)
        failed = _Failed() if max(statuses) >= 400 else None
        await once.__aexit__(None if failed is None else _Failed, failed, None)


def _compare(connection: HTTPConnection, name: str, run: OnceRun, fingerprint: str | None) -> None:
    """Tell what is on record which request it is for, or refuse another one."""
    if fingerprint is None:
        return
    if run.first:
        run.fingerprint = fingerprint
    elif run.fingerprint not in (None, fingerprint):
        problem = KeyReused("Under this key another request has been done.", name=name)
        raise told_to(connection, problem)


def _all_of(dependant: Any) -> Iterator[Any]:
    yield dependant
    for inner in dependant.dependencies:
        yield from _all_of(inner)


def _statuses(
    connection: HTTPConnection, answers: Sequence[object], response: Response
) -> list[int]:
    """Return the status of what the handler has answered with, and of the response that it may change."""
    kinds = (Response, HTTPException)
    answered = [answer.status_code for answer in answers if isinstance(answer, kinds)]
    if response.status_code:  # None until the handler changes it
        return [*answered, response.status_code]
    usual: int | None = getattr(connection.scope.get("route"), "status_code", None)
    return answered or [usual or 200]


@contextmanager
def _answers_to(connection: HTTPConnection, response: Response) -> Iterator[_Answers]:
    """Give what gets the answer of the handler of this request, the same to each of its ``Once``.

    A dependency is not told that, so the handler of its route is wrapped, once.
    """
    around = _handled.get()
    if around is not None and around.response is response:
        handled = around
    else:
        handled = _Answers(response, connection.scope.get("fastapi_function_astack"))
    _handled.set(handled)
    go_around(connection, "tells_aiodlock", _answer)
    try:
        yield handled
    finally:
        _handled.set(around)  # a handler may have made this request in its own task


def _answer(handler: Callable[[], Any]) -> Any:
    def answered() -> Any:
        with _redirects_told():
            answer = handler()
        return _answer_later(answer) if inspect.isawaitable(answer) else _tell(answer)

    return in_thread(answered)  # the handler may be left as soon as its thread has ended


async def _answer_later(answer: Awaitable[_T]) -> _T:
    with _redirects_told():
        answered = await answer
    return _tell(answered)


@contextmanager
def _redirects_told() -> Iterator[None]:
    """Take an error that the handler raises to answer with a redirect for an answer: it is no failure."""
    try:
        yield
    except HTTPException as redirect:
        if redirect.status_code < 400:
            _tell(redirect)
        raise


def _tell(answer: _T) -> _T:
    handled = _handled.get()
    if handled is not None:
        handled.add(answer)
    return answer
