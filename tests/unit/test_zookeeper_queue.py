"""Who holds a ZooKeeper queue, told by the names of its nodes: held against the readable machine."""

from __future__ import annotations

import random

import pytest

from aiodlock.backends.zookeeper import queue
from aiodlock.backends.zookeeper.queue import (
    Asked,
    Barred,
    Blocked,
    Entry,
    Holds,
    Joins,
    Queue,
    holders,
    owner_tag,
    read_queue,
    standing,
)


def _queue(*nodes: str) -> Queue:
    return read_queue(nodes)


def _mine(entries: list[Entry], request: str) -> Entry:
    return next(entry for entry in entries if entry.request == request)


def _where(nodes: tuple[str, ...], request: str) -> object:
    entries = _queue(*nodes)
    return standing(entries, _mine(entries, request))


def test_first_holds_and_the_next_watches_it() -> None:
    nodes = ("x:b::0000000002", "x:a::0000000001", "x:c::0000000003")
    assert _where(nodes, "a") == Holds(followed=True)
    assert _where(nodes, "b") == Blocked(("x:a::0000000001",))
    assert _where(nodes, "c") == Blocked(("x:b::0000000002",))


def test_readers_hold_together_up_to_the_first_writer() -> None:
    nodes = ("s:a::0000000001", "s:b::0000000002", "x:w::0000000003", "s:c::0000000004")
    assert [entry.request for entry in holders(_queue(*nodes))] == ["a", "b"]
    assert _where(nodes, "b") == Holds(followed=True)
    assert _where(nodes, "w") == Blocked(("s:b::0000000002",))
    assert _where(nodes, "c") == Blocked(("x:w::0000000003",))


def test_reader_passes_no_writer_that_waits() -> None:
    nodes = ("s:a::0000000001", "x:w::0000000002", "s:c::0000000003")
    assert isinstance(_where(nodes, "c"), Blocked)


def test_semaphore_lets_its_limit_in_and_the_next_watches_them_all() -> None:
    nodes = tuple(f"2:{name}::{number:010d}" for number, name in enumerate("abcd"))
    assert _where(nodes, "b") == Holds(followed=True)
    assert _where(nodes, "c") == Blocked((nodes[0], nodes[1]))
    assert _where(nodes, "d") == Blocked((nodes[2],), hears=True)


def test_semaphore_with_another_limit_is_refused() -> None:
    nodes = ("2:a::0000000001", "3:b::0000000002")
    assert _where(nodes, "b") == Barred(2)


def test_thousand_waiters_of_a_semaphore_do_not_look_at_a_million_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of a client look at the same reading, once per timeout of their session."""
    entries = _queue(*(f"3:{i}::{i:010}" for i in range(1000)), f"4:odd::{1000:010}")
    looks, is_decimal = 0, queue._is_decimal

    def counted(text: str) -> bool:
        nonlocal looks
        looks += 1
        return is_decimal(text)

    monkeypatch.setattr(queue, "_is_decimal", counted)
    where = [standing(entries, entry) for entry in entries]
    assert where[:3] == [Holds(True)] * 3
    assert where[3] == Blocked(tuple(entry.node for entry in entries[:3]))
    assert where[4] == Blocked((entries[3].node,), hears=True)
    assert where[999] == Blocked((entries[998].node,), hears=True)
    assert where[1000] == Barred(3)
    assert looks < 20_000


def test_owner_that_holds_joins_its_seat_past_every_waiter() -> None:
    tag = owner_tag("ubob", "r")
    nodes = (f"x:a:{tag}:0000000001", "x:w::0000000002", f"x:b:{tag}:0000000003")
    entries = _queue(*nodes)
    assert _where(nodes, "b") == Joins(entries[0])
    joined = _queue(nodes[0], f"x:b:{tag}:0000000001", nodes[1])
    assert isinstance(standing(joined, _mine(joined, "b"), joined=True), Holds)
    # It holds on when the first one goes.
    left = _queue(f"x:b:{tag}:0000000001", nodes[1])
    assert [entry.request for entry in holders(left)] == ["b"]
    assert isinstance(standing(left, _mine(left, "w")), Blocked)


def test_exclusive_request_moves_only_while_an_exclusive_node_of_its_owner_is_there() -> None:
    tag = owner_tag("ubob", "r")
    nodes = (f"s:a:{tag}:0000000001", f"x:b:{tag}:0000000001", f"x:c:{tag}:0000000002")
    assert _where(nodes, "c") == Joins(_queue(*nodes)[1])
    assert _where((nodes[0], nodes[2]), "c") == Barred(0)


def test_task_that_holds_exclusively_joins_its_own_seat_in_shared_mode() -> None:
    first = "x:c-1::0000000001"
    tag = owner_tag("tc-1", "c-2")
    entries = _queue(first, "s:w::0000000002", f"s:c-2:{tag}:0000000003")
    assert owner_tag("tc-1", "c-1") == ""
    assert standing(entries, _mine(entries, "c-2")) == Joins(entries[0])


def test_downgrade_lets_other_readers_in() -> None:
    tag = owner_tag("ubob", "r")
    both = _queue(f"x:a:{tag}:0000000001", f"s:b:{tag}:0000000001", "s:w::0000000002")
    assert isinstance(standing(both, _mine(both, "w")), Blocked)
    downgraded = _queue(f"s:b:{tag}:0000000001", "s:w::0000000002")
    assert isinstance(standing(downgraded, _mine(downgraded, "w")), Holds)


def test_owner_that_holds_in_shared_mode_is_refused_the_exclusive_one() -> None:
    tag = owner_tag("ubob", "r")
    nodes = (f"s:a:{tag}:0000000001", f"x:b:{tag}:0000000002")
    assert _where(nodes, "b") == Barred(0)


def test_owners_differ_and_a_user_cannot_be_a_task() -> None:
    tags = {owner_tag(owner, "r") for owner in ("ubob", "ualice", "tbob", "ur", "tq")}
    assert len(tags) == 5
    assert owner_tag("tr", "r") == ""


def test_number_that_overflows_is_no_jump_in_the_queue() -> None:
    # String.format("%010d") of a 32-bit counter that begins again.
    nodes = ("x:b::-2147483648", "x:a::2147483647", "x:c::-2147483647")
    assert [entry.request for entry in _queue(*nodes)] == ["a", "b", "c"]


def test_what_others_put_into_the_queue_is_left_out() -> None:
    assert _queue("foreign", "a:b:c:d", "x:a::0000000001") == [
        Entry(1, "x", "a", "", "x:a::0000000001")
    ]


def test_name_of_a_node_is_read_back() -> None:
    (entry,) = _queue(f"{Asked('h-1', 'x', 'tag', 0).node_name}0000000012")
    assert entry[:4] == (12, "x", "h-1", "tag")


@pytest.mark.parametrize("seed", range(200))
def test_whoever_watches_is_told_in_time(seed: int) -> None:
    """Nodes go in any order, and each request looks only when a node that it watches goes (or, of a
    semaphore,
    is written by one that came to hold): whoever can hold, does, and holders stay holders."""
    chance = random.Random(seed)
    limit = chance.choice([0, 0, 1, 2, 3])
    modes = [str(limit) if limit else chance.choice("xs") for _ in range(8)]
    nodes = {f"r{number}": f"{mode}:r{number}::{number:010d}" for number, mode in enumerate(modes)}
    watching: dict[str, tuple[str, ...]] = {}
    holding: set[str] = set()

    def look(request: str) -> None:
        entries = _queue(*nodes.values())
        match standing(entries, _mine(entries, request)):
            case Blocked(by):
                assert request not in holding
                watching[request] = by
            case Holds(followed):
                watching.pop(request, None)
                if request not in holding:
                    holding.add(request)
                    if limit and followed:
                        tell(nodes[request])

    def tell(node: str) -> None:
        waiting = [request for request, by in watching.items() if node in by]
        for request in chance.sample(waiting, len(waiting)):
            look(request)

    for request in list(nodes):
        look(request)
    while nodes:
        request = chance.choice(list(nodes))
        node = nodes.pop(request)
        watching.pop(request, None)
        holding.discard(request)
        tell(node)
        held = {entry.request for entry in holders(_queue(*nodes.values()))}
        assert holding == held
