"""What the nodes of a quorum know of a name, and what that comes to: who holds, who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ...._model import HolderInfo, LockInfo, Tokens, WaiterInfo, seconds_since
from ..replies import for_people, mode_of, owner_of, wrong_shape


@dataclass(frozen=True, slots=True)
class VoteView:
    """One vote at one node."""

    owner: bytes
    mode: bytes
    token: int
    left: float
    client: bytes
    stage: bytes
    ticket: int
    words: bytes
    length: float


@dataclass(frozen=True, slots=True)
class WaiterView:
    """One waiter at one node."""

    owner: bytes
    mode: bytes
    client: bytes
    ticket: int
    words: bytes


@dataclass(frozen=True, slots=True)
class NodeView:
    """What one node knows of a name. ``votes`` and ``waiters`` by request id."""

    token: int
    closed: float
    votes: dict[bytes, VoteView]
    waiters: dict[bytes, WaiterView]
    clock: float

    @classmethod
    def of(cls, reply: Any) -> NodeView:
        """Read what the script ``inspect_votes`` answers."""
        try:
            token, closed, voted, waiting, clock = reply
            votes = {
                id: VoteView(
                    *(owner, mode, int(token), int(left) / 1000, client, stage, int(ticket), words),
                    int(length) / 1000,
                )
                for id, owner, mode, token, left, client, stage, ticket, words, length in zip(
                    *[iter(voted)] * 10, strict=True
                )
            }
            waiters = {
                id: WaiterView(owner, mode, client, int(ticket), words)
                for id, owner, mode, client, ticket, words in zip(*[iter(waiting)] * 6, strict=True)
            }
            return cls(int(token), int(closed) / 1000, votes, waiters, int(clock) / 1e6)
        except (ValueError, TypeError, OverflowError) as wrong:
            raise wrong_shape("inspect_votes", reply) from wrong


def _most_common(tokens: Iterable[int]) -> int:
    counted = Counter(tokens)
    return max(counted, key=counted.__getitem__, default=0)


def _confirmed(cast: Sequence[VoteView]) -> tuple[int, list[VoteView]]:
    """Return the token that most of a request's votes have that may not be asked back, and those votes."""
    standing = [vote for vote in cast if vote.stage != b"v"]
    token = _most_common(vote.token for vote in standing)
    return token, [vote for vote in standing if vote.token == token]


def _by_request(views: Sequence[NodeView]) -> dict[bytes, list[VoteView]]:
    votes: dict[bytes, list[VoteView]] = {}
    for view in views:
        for id, vote in view.votes.items():
            votes.setdefault(id, []).append(vote)
    return votes


def _holding(views: Sequence[NodeView], nodes: int) -> dict[bytes, tuple[int, list[VoteView]]]:
    """Return the requests that hold by a majority of all nodes: their tokens, and the votes that say so.

    Of nodes that did not answer, some may have confirmed a request, too, which the others vote for alone.
    """
    majority, silent = nodes // 2 + 1, nodes - len(views)
    found: dict[bytes, tuple[int, list[VoteView]]] = {}
    for id, cast in _by_request(views).items():
        token, confirmed = _confirmed(cast)
        if len(confirmed) >= majority:
            found[id] = token, confirmed
        elif confirmed and len(cast) >= majority and len(confirmed) + silent >= majority:
            found[id] = token, cast
    return found


def ids_of(views: Sequence[NodeView], nodes: int, tokens: Tokens) -> list[bytes]:
    """Return the ids of the requests that hold with one of these tokens."""
    return [id for id, (token, _) in _holding(views, nodes).items() if token in tokens]


def lock_info(name: str, views: Sequence[NodeView], nodes: int) -> LockInfo:
    """Return the holders by a majority of all nodes; all other requests wait, in order of the tickets."""
    majority = nodes // 2 + 1
    clock = max(view.clock for view in views)  # as tickets are made
    holding = _holding(views, nodes)
    holders: dict[tuple[bytes, bytes], HolderInfo] = {}
    for token, confirmed in holding.values():
        who = confirmed[0].owner, confirmed[0].mode
        holders[who] = _holder(token, confirmed, majority, int(clock * 1e6), holders.get(who))
    # A token that was given is known to a majority; a larger one, to fewer, was only proposed.
    token = sorted((view.token for view in views), reverse=True)[majority - 1]
    closed = sorted(view.closed for view in views)[majority - 1]
    given = [holder.token for holder in holders.values()]
    waiters = _waiters(views, holding.keys(), clock)
    return LockInfo(name, tuple(holders.values()), waiters, max(given, default=token), closed)


def _holder(
    token: int, votes: Sequence[VoteView], majority: int, now_us: int, before: HolderInfo | None
) -> HolderInfo:
    """Return the owner of a request that holds by these votes; ``before``: of another of its requests."""
    vote = votes[0]
    left = sorted((vote.left for vote in votes), reverse=True)[majority - 1]
    return HolderInfo(
        owner=owner_of(vote.owner),
        mode=mode_of(vote.mode),
        token=token,
        count=before.count + 1 if before else 1,
        remaining=max(left, (before and before.remaining) or 0.0),
        client=vote.client.decode(),
        holding=seconds_since(token, now_us),
        ttl=max(vote.length, (before and before.ttl) or 0.0),
        **for_people(vote.words),
    )


def _waiters(
    views: Sequence[NodeView], holding: Set[bytes], clock: float
) -> tuple[WaiterInfo, ...]:
    waiting: dict[bytes, VoteView | WaiterView] = {}
    for view in views:
        here: dict[bytes, VoteView | WaiterView] = {**view.votes, **view.waiters}
        for id in here.keys() - holding:
            waiting.setdefault(id, here[id])
    ordered = sorted(waiting.items(), key=lambda item: (item[1].ticket, item[0]))
    return tuple(
        WaiterInfo(
            owner_of(waiter.owner),
            mode_of(waiter.mode),
            position,
            max(0.0, clock - waiter.ticket / 1e6),
            waiter.client.decode(),
            **for_people(waiter.words),
        )
        for position, (_, waiter) in enumerate(ordered)
    )
