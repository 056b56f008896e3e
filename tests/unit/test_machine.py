"""Rules of the machine that take a clock of the test's own, or a history that is rarely met."""

from __future__ import annotations

import pytest

from aiodlock.backends.memory.machine import Asked, Message, Mode, Name

SECOND = 1_000_000
MINUTE = 60 * SECOND
KEPT = 60_000


def asked(
    id: str,
    mode: Mode = "exclusive",
    *,
    ttl: int = 10_000,
    waiter_ttl: int = 10_000,
    delay: int = 0,
) -> Asked:
    return Asked(id, mode, 0, f"t{id}", f"client of {id}", ttl, waiter_ttl, delay)


def acquire(name: Name, now_us: int, request: Asked) -> tuple[object, ...]:
    return name.acquire(now_us, request, wait=True, retention=KEPT)[0]


def leave(name: Name, now_us: int, id: str, *, marker: int = 0) -> tuple[object, ...]:
    return name.leave(now_us, id, marker=marker, retention=KEPT)[0]


def extend(
    name: Name, now_us: int, id: str, length: int = 10_000, *, begins: bool = False
) -> tuple[object, ...]:
    return name.extend(now_us, id, length, begins=begins, retention=KEPT)[0]


def test_token_follows_the_clock_and_grows_while_the_clock_stands() -> None:
    name = Name()
    for number in range(3):
        assert acquire(name, 5 * MINUTE, asked("a"))[1] == 5 * MINUTE + number
        leave(name, 5 * MINUTE, "a")


def test_token_grows_across_a_clock_set_back_by_less_than_its_retention() -> None:
    name = Name()
    acquire(name, 5 * MINUTE, asked("a"))
    leave(name, 5 * MINUTE, "a")
    back = 5 * MINUTE - 59 * SECOND
    assert acquire(name, back, asked("b"))[1] == 5 * MINUTE + 1
    leave(name, back, "b")
    # It is ahead of the clock: it is remembered for so much longer.
    later = back + MINUTE + 50 * SECOND
    assert name.inspect(later).token == 5 * MINUTE + 1


def test_token_is_forgotten_after_its_retention() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a"))
    leave(name, MINUTE, "a")
    assert name.inspect(2 * MINUTE - 1000).token == MINUTE
    assert name.inspect(2 * MINUTE).token == 0
    assert name.kept_until() == 120_000
    assert acquire(name, 3 * MINUTE, asked("b"))[1] == 3 * MINUTE


def test_marker_refuses_a_late_duplicate_until_it_ends() -> None:
    name = Name()
    leave(name, MINUTE, "late", marker=1000)
    assert acquire(name, MINUTE + SECOND - 1000, asked("late")) == ("gone", "gone")
    assert acquire(name, MINUTE + SECOND, asked("late"))[0] == "held"


def test_markers_that_ended_take_no_memory() -> None:
    name = Name()
    for number in range(100):
        leave(name, MINUTE + number * SECOND, f"left {number}", marker=1500)
    assert len(name.markers) <= 2


def test_break_is_remembered_for_as_long_as_the_lease_would_have_lasted() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a", ttl=10_000))
    broken, messages = name.break_(MINUTE, remember=1000, retention=KEPT)
    assert broken == ["a"]
    assert messages == [Message("broken", "client of a", "a", MINUTE)]
    assert leave(name, MINUTE + 9 * SECOND, "a") == ("gone", "broken")
    assert leave(name, MINUTE + 10 * SECOND, "a") == ("gone", "gone")


def test_head_that_extends_too_late_hands_the_hint_to_the_next() -> None:
    name = Name()
    acquire(name, MINUTE, asked("holder", ttl=4_000))
    acquire(name, MINUTE, asked("head", waiter_ttl=1_000))
    acquire(name, MINUTE, asked("next", waiter_ttl=60_000))
    reply, messages = name.extend(MINUTE + 2 * SECOND, "head", 1_000, retention=KEPT)
    assert reply == ("gone", "taken_over")
    assert messages == [Message("look", "client of next", "next")]


def test_head_that_asks_itself_is_told_by_the_reply_alone() -> None:
    name = Name()
    acquire(name, MINUTE, asked("holder", ttl=4_000))
    acquire(name, MINUTE, asked("ghost", waiter_ttl=1_000))
    acquire(name, MINUTE, asked("next", waiter_ttl=60_000))
    reply, messages = name.extend(MINUTE + 2 * SECOND, "next", 60_000, retention=KEPT)
    assert reply[:3] == ("waiting", 60_000, 2_000)
    assert messages == []


def test_thousands_of_readers_come_in_together_at_once() -> None:
    """The work grows with their number, not with its square."""
    name = Name()
    acquire(name, MINUTE, asked("writer"))
    for number in range(5_000):
        acquire(name, MINUTE, asked(f"r{number}", "shared"))
    _, messages = name.leave(MINUTE, "writer", retention=KEPT)
    assert [message.id for message in messages] == [f"r{number}" for number in range(5_000)]


def test_inspecting_writes_nothing_but_what_it_clamps() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a", delay=5_000))
    acquire(name, MINUTE, asked("b"))
    before = repr((name.holders, name.waiters, name.token))
    assert name.inspect(MINUTE + 12 * SECOND).closed == 3_000
    assert repr((name.holders, name.waiters, name.token)) == before
    assert name.inspect(MINUTE - 30 * SECOND).holders[0][2] == 10_000, "the clamped time is told"
    assert name.inspect(MINUTE - 20 * SECOND).closed == 5_000, "and counts from then on"


@pytest.mark.parametrize("by", [SECOND, 9 * SECOND, 10 * SECOND, 1_000 * MINUTE])
def test_clock_that_is_set_back_keeps_the_dead_for_one_more_length_at_most(by: int) -> None:
    """What died just before its deadline lasts for twice the length then, and never longer."""
    for died in (0, 10 * SECOND - 1_000):
        name = Name()
        now = 2_000 * MINUTE
        acquire(name, now, asked("holder"))
        acquire(name, now, asked("head"))
        acquire(name, now, asked("live", waiter_ttl=60_000))
        now += died - by
        left = min(10 * SECOND, 10 * SECOND - died + by)
        assert extend(name, now, "live", 60_000)[0] == "waiting"
        assert extend(name, now + left - 1_000, "live", 60_000)[0] == "waiting"
        assert extend(name, now + left, "live", 60_000)[0] == "held"


@pytest.mark.parametrize(("dead", "live"), [(30, 3), (3, 30)])
def test_dead_waiter_costs_its_own_length_whatever_that_of_the_next_one(
    dead: int, live: int
) -> None:
    """Clients may have different values of ``waiter_ttl``: what counts is the dead one's."""
    name = Name()
    acquire(name, MINUTE, asked("holder"))
    acquire(name, MINUTE, asked("dead", ttl=60_000, waiter_ttl=dead * 1_000))
    acquire(name, MINUTE, asked("live", ttl=60_000, waiter_ttl=live * 1_000))
    leave(name, MINUTE, "holder")  # the dead one is granted
    for second in range(1, dead):
        assert extend(name, MINUTE + second * SECOND, "live", live * 1_000)[0] == "waiting"
    assert extend(name, MINUTE + dead * SECOND, "live", live * 1_000)[0] == "held"


def test_one_that_lingers_and_lives_again_as_the_clock_was_set_back_is_recalled() -> None:
    """It had run out within its lock-delay when somebody queued."""
    name = Name()
    lingers = asked("a", delay=30_000)._replace(lingers=True)
    acquire(name, MINUTE, lingers)
    acquire(name, MINUTE + 10 * SECOND, asked("b"))
    assert acquire(name, MINUTE + 5 * SECOND, lingers)[0] == "recalled"


def test_success_that_had_expired_stays_away_when_the_clock_is_set_back() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a"))
    name.record_success(MINUTE, "a", b"fine", keep=1000, retention=KEPT)
    assert acquire(name, MINUTE + SECOND, asked("b"))[0] == "held"
    assert name.extend(MINUTE, "b", 10_000, retention=KEPT)[0][0] == "held"
    leave(name, MINUTE, "b")
    assert acquire(name, MINUTE, asked("c"))[0] == "held"


def test_success_that_expired_while_a_body_runs_stays_away_too() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a"))
    name.record_success(MINUTE, "a", b"fine", keep=1000, retention=KEPT)
    acquire(name, MINUTE + SECOND, asked("b"))
    assert acquire(name, MINUTE, asked("c"))[0] == "waiting"


def test_lease_lost_just_before_its_deadline_keeps_what_is_left_of_its_hold() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a", ttl=10_000)._replace(hold=9_950, begins=True))
    acquire(name, MINUTE, asked("b", ttl=20_000, waiter_ttl=20_000))
    lost_at = MINUTE + 9 * SECOND + 900_000
    assert name.leave(lost_at, "a", end="lost", retention=KEPT)[0] == ("gone", "expired")
    assert name.extend(lost_at + 49_000, "b", 10_000, retention=KEPT)[0][0] == "waiting"
    assert name.extend(lost_at + 100_000, "b", 10_000, retention=KEPT)[0][0] == "held"


def test_lease_lost_before_its_body_began_opens_its_name() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a", ttl=10_000)._replace(hold=9_950))
    acquire(name, MINUTE, asked("b", waiter_ttl=20_000))
    assert name.leave(MINUTE + 9 * SECOND, "a", end="lost", retention=KEPT)[0] == ("released",)


def test_lease_lost_after_its_hold_opens_its_name() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a")._replace(hold=5_000, begins=True))
    lost_at = MINUTE + 6 * SECOND
    assert name.leave(lost_at, "a", end="lost", retention=KEPT)[0] == ("released",)
    assert acquire(name, lost_at, asked("b"))[0] == "held"


def test_unused_grant_that_ran_out_closes_nothing() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a")._replace(hold=30_000, begins=True))
    late = MINUTE + 11 * SECOND
    assert acquire(name, late, asked("b"))[0] == "waiting"
    assert name.leave(late, "a", end="unused", retention=KEPT)[0] == ("gone", "expired")
    assert extend(name, late, "b")[0] == "held"


def test_repeated_request_does_not_take_back_that_its_body_began() -> None:
    name = Name()
    request = asked("a")._replace(hold=30_000)
    acquire(name, MINUTE, request)
    extend(name, MINUTE, "a", begins=True)
    assert acquire(name, MINUTE, request)[0] == "held"
    assert acquire(name, MINUTE + 11 * SECOND, asked("b"))[0] == "waiting"


def test_body_does_not_begin_while_its_request_waits() -> None:
    name = Name()
    acquire(name, MINUTE, asked("holder"))
    acquire(name, MINUTE, asked("a")._replace(hold=30_000))
    assert extend(name, MINUTE, "a", begins=True)[0] == "waiting"
    leave(name, MINUTE, "holder")
    assert acquire(name, MINUTE + 11 * SECOND, asked("b"))[0] == "held"


def test_request_repeated_after_its_lease_ran_out_does_not_hold_within_its_lock_delay() -> None:
    name = Name()
    request = asked("a", delay=5_000)
    acquire(name, MINUTE, request)
    assert acquire(name, MINUTE + 12 * SECOND, request) == ("gone", "expired")


def test_extension_that_comes_too_late_is_told_that_the_lease_expired() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a"))
    assert extend(name, MINUTE + 11 * SECOND, "a") == ("gone", "expired")


def test_overdue_reader_is_told_that_its_lease_expired_also_when_another_one_has_left() -> None:
    """Where nobody waits, a leave looks at no other holder."""
    name = Name()
    acquire(name, MINUTE, asked("a", "shared"))
    acquire(name, MINUTE, asked("b", "shared", ttl=60_000))
    assert leave(name, MINUTE + 11 * SECOND, "b") == ("released",)
    assert extend(name, MINUTE + 11 * SECOND, "a") == ("gone", "expired")


def test_waiter_that_asks_again_too_late_stands_at_the_end() -> None:
    name = Name()
    late = asked("late", waiter_ttl=1_000)
    for request in (asked("holder"), asked("head"), late, asked("last")):
        acquire(name, MINUTE, request)
    assert acquire(name, MINUTE + 2 * SECOND, late)[:3] == ("waiting", 1_000, None)
    waiters = name.inspect(MINUTE + 2 * SECOND).waiters
    assert [waiter.id for waiter, _ in waiters] == ["head", "last", "late"]


def test_waiter_that_meets_a_dead_head_has_the_next_head_told() -> None:
    name = Name()
    acquire(name, MINUTE, asked("holder", ttl=4_000))
    acquire(name, MINUTE, asked("ghost", waiter_ttl=1_000))
    acquire(name, MINUTE, asked("next", waiter_ttl=60_000))
    acquire(name, MINUTE, asked("last", waiter_ttl=60_000))
    reply, messages = name.extend(MINUTE + 2 * SECOND, "last", 60_000, retention=KEPT)
    assert reply[:3] == ("waiting", 60_000, None)
    assert messages == [Message("look", "client of next", "next")]


def test_request_with_a_limit_that_meets_a_dead_head_has_the_next_head_told() -> None:
    name = Name()
    for request in (
        asked("holder", "shared", ttl=4_000),
        asked("ghost", "shared", waiter_ttl=1_000),
        asked("next", "shared", waiter_ttl=60_000),
    ):
        acquire(name, MINUTE, request._replace(limit=1))
    resizing = asked("last", "shared")._replace(limit=1, resize=True)
    reply, messages = name.acquire(MINUTE + 2 * SECOND, resizing, wait=True, retention=KEPT)
    assert reply[0] == "waiting"
    assert messages == [Message("look", "client of next", "next")]


def test_new_head_is_told_once_also_when_its_blockers_owner_enters_for_a_shorter_time() -> None:
    name = Name()
    owner = "uowner"
    acquire(name, MINUTE, asked("holder", ttl=30_000)._replace(owner=owner))
    acquire(name, MINUTE, asked("ghost", waiter_ttl=1_000))
    acquire(name, MINUTE, asked("next", waiter_ttl=60_000))
    again = asked("again", ttl=4_000)._replace(owner=owner)
    reply, messages = name.acquire(MINUTE + 2 * SECOND, again, wait=True, retention=KEPT)
    assert reply[0] == "held"
    assert messages == [Message("look", "client of next", "next")]


def test_waiter_gets_in_past_the_head_when_its_owner_came_to_hold() -> None:
    """The head knew when the owner's first lease ends, and the second one ends earlier."""
    name = Name()
    owner = "uowner"
    acquire(name, MINUTE, asked("holder"))
    acquire(name, MINUTE, asked("first", "shared", waiter_ttl=60_000)._replace(owner=owner))
    acquire(name, MINUTE, asked("head", waiter_ttl=60_000))
    acquire(name, MINUTE, asked("second", "shared")._replace(owner=owner))
    leave(name, MINUTE, "holder")
    reply, messages = name.extend(MINUTE, "second", 10_000, retention=KEPT)
    assert reply == ("held", MINUTE + 1, 10_000)
    assert messages == [Message("look", "client of head", "head")]


def test_request_of_a_task_gets_in_past_nobody_by_one_that_the_task_gave_up() -> None:
    name = Name()
    task = "ttask"
    acquire(name, MINUTE, asked("holder"))
    acquire(name, MINUTE, asked("given up", "shared")._replace(owner=task))
    acquire(name, MINUTE, asked("head"))
    acquire(name, MINUTE, asked("second", "shared")._replace(owner=task))
    leave(name, MINUTE, "holder")
    assert extend(name, MINUTE, "second")[:3] == ("waiting", 10_000, None)


def test_owner_stays_exclusive_by_its_second_lease_when_the_first_one_has_ended() -> None:
    name = Name()
    modes: dict[str, Mode] = {"first": "exclusive", "reader": "shared", "second": "exclusive"}
    for id, mode in modes.items():
        acquire(name, MINUTE, asked(id, mode)._replace(owner="uowner"))
    leave(name, MINUTE, "first")
    assert acquire(name, MINUTE, asked("third")._replace(owner="uowner"))[0] == "held"


def test_success_of_a_lease_that_ran_out_is_not_recorded() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a"))
    late = MINUTE + 11 * SECOND
    reply, _ = name.record_success(late, "a", b"late", keep=60_000, retention=KEPT)
    assert reply == ("gone", "expired")
    assert acquire(name, late, asked("b"))[0] == "held"


def test_late_duplicate_is_refused_though_the_success_is_forgotten() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a"))
    name.record_success(MINUTE, "a", b"fine", keep=60_000, marker=60_000, retention=KEPT)
    assert name.forget(MINUTE)[0]
    assert acquire(name, MINUTE, asked("a")) == ("gone", "gone")


def test_success_is_kept_when_the_token_is_forgotten() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a"))
    name.record_success(MINUTE, "a", b"fine", keep=10 * KEPT, retention=KEPT)
    assert name.kept_until() == 60_000 + 10 * KEPT
