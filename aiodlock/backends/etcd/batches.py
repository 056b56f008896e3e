"""Transactions of one turn of the loop go out as one: a call costs the client half a millisecond, and the
cluster one write to the disk.

etcd looks at all comparisons before it carries out the first step, so two requests that enter one name
together would both find it free. So at most one of each name is in a batch, or any number of such that look
at nothing but their own request's keys, as leaves and moves do: one of each request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..._errors import BackendError, BackendUnavailable
from . import calls as api
from . import messages as m
from . import transactions
from .link import Link
from .refusals import Forbidden

#: So many calls are on their way at most: what comes meanwhile goes out together.
_FLYING = 16
#: A transaction takes 128 steps. Those inside it count, too.
_TOGETHER = 60
#: A batch is no larger (bytes), unless it is one request. A member refuses a message of more than its
#: ``--max-request-bytes`` and 512 KiB before it looks at it: so it never refuses a batch for that.
_LARGEST = 1 << 19
#: What has a moment's time is kept back for so long, to be sent together with others (seconds).
_GATHER = 0.001

#: The last: the request, if it looks at that one's keys alone.
_Call = tuple[m.TxnRequest, "asyncio.Future[m.TxnResponse]", str]


class Batches:
    """What is to be sent.

    Mutable state: ``_waiting`` (by name, in order), ``_flying`` (calls without an answer), ``_scheduled``
    (whether the end of this turn sends), ``_gathered`` (what a timer will send, by name).
    """

    def __init__(self, link: Link, start: Callable[..., bool]) -> None:
        self._link = link
        self._start = start
        self._waiting: dict[bytes, deque[_Call]] = {}
        self._flying = 0
        self._scheduled = False
        self._gathered: dict[bytes, deque[_Call]] = {}

    async def transact(
        self, name: bytes, request: m.TxnRequest, *, own: str = "", gather: bool = False
    ) -> m.TxnResponse:
        """Carry out a transaction about one name. Cancelled, it may be carried out all the same.

        :param own: the request, if it looks at nothing but that one's keys.
        :param gather: there is a moment's time for it.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[m.TxnResponse] = loop.create_future()
        if gather:
            if not self._gathered:
                loop.call_later(_GATHER, self._send_gathered)
            self._gathered.setdefault(name, deque()).append((request, answer, own))
            return await answer
        calls = self._waiting.setdefault(name, deque())
        if own and (gathered := self._gathered.pop(name, None)) is not None:
            calls.extend(gathered)
        calls.append((request, answer, own))
        if not self._scheduled and self._flying < _FLYING:
            self._scheduled = True
            loop.call_soon(self._send)
        return await answer

    def _send_gathered(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for name, calls in gathered.items():
            self._waiting.setdefault(name, deque()).extend(calls)
        self._send()

    def _send(self) -> None:
        self._scheduled = False
        while self._waiting and self._flying < _FLYING:
            batch = self._next_batch()
            self._flying += 1
            if not self._start(self._fly, batch):
                self._flying -= 1
                _fail(
                    batch, BackendUnavailable(f"{self._link.described}: the client is not running")
                )

    def _next_batch(self) -> list[_Call]:
        batch: list[_Call] = []
        size = 0
        for name in list(self._waiting):
            calls, owners = self._waiting[name], set[str]()
            while calls and _fits(calls[0][2], owners):
                size += transactions.size(calls[0][0])
                if batch and (len(batch) == _TOGETHER or size > _LARGEST):
                    return batch
                owners.add(calls[0][2])
                batch.append(calls.popleft())
            del self._waiting[name]
            if calls:
                self._waiting[name] = calls  # behind the others
        return batch

    async def _fly(self, batch: list[_Call]) -> None:
        try:
            await self._call([call for call in batch if not call[1].done()])
        finally:
            _fail(batch, BackendUnavailable(f"{self._link.described}: the client was left"))
            self._flying -= 1
            if self._waiting:
                self._send()

    async def _call(self, batch: list[_Call]) -> None:
        if len(batch) < 2:
            for request, answer, _ in batch:
                try:
                    result = await self._link.call(api.TXN, request)
                except BackendError as failed:
                    _fail(batch, failed)
                else:
                    if not answer.done():
                        answer.set_result(result)
            return
        steps = [m.RequestOp(request_txn=request) for request, _, _ in batch]
        try:
            together = await self._link.call(api.TXN, m.TxnRequest(success=steps))
        except BackendError as failed:
            if isinstance(failed, BackendUnavailable) and not isinstance(failed, Forbidden):
                _fail(batch, failed)
                return
            # Nothing was carried out, because of one of them: each by itself. Not what was given up
            # meanwhile: its leave may have been carried out.
            for call in batch:
                if not call[1].done():
                    await self._call([call])
        else:
            for (_, answer, _), step in zip(batch, together.responses, strict=True):
                assert step.response_txn is not None
                # Inside a transaction the answers have no header of their own.
                step.response_txn.header = together.header
                if not answer.done():
                    answer.set_result(step.response_txn)


def _fits(own: str, others: set[str]) -> bool:
    """Whether a call may go out with those of these requests, about the same name."""
    return not others or (own != "" and "" not in others and own not in others)


def _fail(batch: list[_Call], error: BackendError) -> None:
    for _, answer, _ in batch:
        if not answer.done():
            fresh = type(error)(str(error))
            fresh.__cause__ = error.__cause__ or error
            answer.set_exception(fresh)
