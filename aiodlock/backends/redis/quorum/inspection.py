"""What operators ask a quorum: a majority of nodes answers, and their answers are put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

import anyio

from ...._errors import BackendError, Unsupported
from ...._model import Kind, LockInfo, Tokens
from ...base import Unanswered
from ..waits import newest, records
from .broadcast import failure_of
from .nodes import Nodes
from .views import ids_of, lock_info
from .voter import Voter

_T = TypeVar("_T")

#: When a majority has answered, the other nodes have so long (seconds): three such questions in a row
#: have to be answered before a call of an operator is given up.
_GRACE = 0.3


class Inspection:
    """The calls of ``StoreBase`` that are for people, and those about waits, on all nodes."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    async def inspect(self, kind: str, name: str) -> LockInfo:
        views = await self.of_majority(lambda voter: voter.inspect(kind, name))
        return lock_info(name, views, len(self._nodes.voters))

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        return await asyncio.gather(*(self.inspect(kind, name) for name in names))

    async def names(self, match: str, kind: Kind) -> AsyncIterator[str]:
        found = await self.of_majority(lambda voter: _collected(voter.names(match)))
        for name in sorted(set().union(*found)):
            yield name

    async def break_lock(self, name: str, kind: Kind, tokens: Tokens | None) -> int:
        ids: Collection[bytes] | None = None
        if tokens is not None:
            # Votes have tokens of their own until a request holds: its id is the same on all nodes.
            views = await self.of_majority(lambda voter: voter.inspect("lock", name))
            ids = ids_of(views, len(self._nodes.voters), tokens)
            if not ids:
                return 0
        broken = await self.of_majority(lambda voter: voter.break_votes(name, ids))
        return len(set().union(*broken))

    async def forget(self, name: str) -> bool:
        raise Unsupported("what is done once is recorded on one server, and a quorum has several")

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        await self.of_majority(lambda voter: voter.waits.tell_waits(serial, record, keep=keep))

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        return records(newest(await self.of_majority(lambda voter: voter.waits.told(labels))))

    async def of_majority(self, call: Callable[[Voter], Coroutine[Any, Any, _T]]) -> list[_T]:
        """Call every node; return the answers, of a majority at least."""
        voters, majority = self._nodes.voters, self._nodes.majority
        answers: list[_T] = []
        failures: list[BackendError] = []

        async def one(voter: Voter) -> None:
            try:
                async with asyncio.timeout(voter.patience.learned):
                    answers.append(await call(voter))
            except BackendError as error:
                failures.append(error)
            except TimeoutError:
                failures.append(Unanswered(f"{voter!r} did not answer in time"))
            if len(answers) >= majority:
                enough.set()

        connected = [voter for voter in voters if voter.server.wire is not None]
        enough = asyncio.Event()
        asked = connected if len(connected) >= majority else voters

        async def give_up() -> None:
            await enough.wait()
            await asyncio.sleep(_GRACE)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            async with anyio.create_task_group() as asking:
                for voter in asked:
                    asking.start_soon(one, voter)
            tasks.cancel_scope.cancel()
        if len(answers) < majority:
            raise failure_of(self._nodes.described, len(voters), len(answers), failures)
        return answers


async def _collected(names: AsyncIterator[str]) -> set[str]:
    return {name async for name in names}
