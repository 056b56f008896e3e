"""Rules of the machine that take a clock of the test's own, or a history that is rarely met."""

from __future__ import annotations

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


def test_inspecting_writes_nothing() -> None:
    name = Name()
    acquire(name, MINUTE, asked("a", delay=5_000))
    acquire(name, MINUTE, asked("b"))
    before = repr((name.holders, name.waiters, name.token, name.now))
    assert name.inspect(MINUTE - 30 * SECOND).holders[0][2] == 10_000, "the clamped time is told"
    assert name.inspect(MINUTE + 12 * SECOND).closed == 3_000
    assert repr((name.holders, name.waiters, name.token, name.now)) == before


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
