"""Histories by hand, for rules that random ones seldom meet: a few calls each, answered as by the machine.

The store that is tested and the machine are called side by side, as in ``test_scripts``. After each step
both have to know the same holders and waiters.
"""

from __future__ import annotations

from collections.abc import Callable

from aiodlock.backends.memory.machine import Asked, End, Mode

from .test_scripts import MINUTE, Calls, Locks, Onces, Semaphores


class History:
    """One name, whose requests are called by numbers of their own."""

    def __init__(self, machine: Locks) -> None:
        self._machine = machine

    def request(
        self,
        mode: Mode = "exclusive",
        *,
        owner: str = "",
        ttl: int = 2 * MINUTE,
        waiter_ttl: int = 2 * MINUTE,
        delay: int = 0,
        client: str = "one",
        wait: bool = True,
        hold: int = 0,
        begins: bool = False,
        lingers: bool = False,
        resize: bool = False,
        limit: int = 0,
    ) -> Asked:
        """Ask anew; return what was asked for. ``limit``: of a semaphore, another one than usual."""
        machine = self._machine
        id = next(machine.ids)
        mode = mode if len(machine.modes) > 1 else machine.modes[0]
        places = limit or machine.limit
        asked = Asked(
            id, mode, places, owner or f"t{id}", client, ttl, waiter_ttl, delay, hold, begins
        )._replace(lingers=lingers, resize=resize)
        self.repeat(asked, wait=wait)
        return asked

    def repeat(self, asked: Asked, *, wait: bool = True) -> None:
        """Send the acquire again, as after a lost reply."""
        self._machine._acquire(asked, wait=wait)
        self._machine.same_holders_and_waiters()

    def extend(self, *requests: Asked, length: int = 2 * MINUTE, begins: bool = False) -> None:
        for asked in requests:
            self._machine._extend(asked, length, begins)
            self._machine.same_holders_and_waiters()

    def leave(self, asked: Asked, end: End = "ended", *, ambiguous: bool = False) -> None:
        self._machine._leave(asked, ambiguous, end)
        self._machine.same_holders_and_waiters()

    def record(self, asked: Asked, *, ambiguous: bool = False) -> None:
        """Leave with a success."""
        machine = self._machine
        assert isinstance(machine, Onces)
        machine.leave_and_record(machine.known.index(asked), ambiguous)
        machine.same_holders_and_waiters()

    def forget(self) -> None:
        """Take the success back."""
        machine = self._machine
        assert isinstance(machine, Onces)
        machine.forget()

    def inspect(self) -> None:
        self._machine.inspect()

    def break_lock(self) -> None:
        self._machine.break_lock()
        self._machine.same_holders_and_waiters()

    def time_passes(self, by: int) -> None:
        self._machine.time_passes(by)
        self._machine.same_holders_and_waiters()

    def clock_is_set_back(self, by: int = 1_000 * MINUTE) -> None:
        """Usually by much; the next call finds it out."""
        self._machine.clock_is_set_back(by)
        self._machine.same_holders_and_waiters()


Tale = Callable[[History], None]


def a_free_name(history: History) -> None:
    """Let a lease end a moment ago, so that the name may be taken by a short way."""
    history.leave(history.request())
    history.time_passes(1)


def waiting_writer_and_a_new_reader(history: History) -> None:
    history.request("shared")
    history.request("exclusive")
    history.request("shared")


def reader_while_a_writer_holds(history: History) -> None:
    history.request("exclusive")
    history.request("shared")


def held_name_that_is_tried(history: History) -> None:
    a_free_name(history)
    history.request()
    history.time_passes(1)
    history.request(wait=False)


def more_requests_than_places(history: History) -> None:
    for _ in range(3):
        history.request()


def reader_that_wants_to_write(history: History) -> None:
    history.request("shared", owner="uA")
    history.request("exclusive", owner="uA")


def owner_that_comes_back_within_its_lock_delay(history: History) -> None:
    history.request(owner="uA", delay=MINUTE)
    history.time_passes(2 * MINUTE)
    history.request(owner="uA")


def name_that_is_tried_within_a_lock_delay(history: History) -> None:
    a_free_name(history)
    history.request(delay=MINUTE)
    history.time_passes(2 * MINUTE)
    history.request(wait=False)
    history.time_passes(MINUTE)
    history.request(wait=False)


def name_that_waits_for_a_lock_delay(history: History) -> None:
    history.request(delay=MINUTE)
    history.request(waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE + 1)
    history.request(wait=False)


def two_grants_of_one_moment(history: History) -> None:
    for _ in range(3):
        history.leave(history.request())
    history.time_passes(1)
    for _ in range(3):
        history.leave(history.request())


def one_after_the_other(history: History) -> None:
    for mode in ("exclusive", "shared", "exclusive"):
        holder = history.request(mode)
        history.time_passes(MINUTE)
        history.extend(holder)
        history.inspect()
        history.time_passes(MINUTE)
        history.request(wait=False)
        history.extend(holder, length=5 * MINUTE)
        history.extend(holder)
        history.leave(holder)
        history.time_passes(1)


def lone_holder_that_is_joined(history: History) -> None:
    history.leave(history.request())
    history.time_passes(1)
    first = history.request("shared", owner="uA")
    second = history.request("shared")
    history.request("shared", owner="uA")
    history.request(waiter_ttl=10 * MINUTE)
    history.extend(first, second)
    history.leave(first)
    history.leave(second)


def owner_that_comes_back_with_a_hold(history: History) -> None:
    history.request(owner="uA", ttl=3 * MINUTE)
    history.request(waiter_ttl=10 * MINUTE, client="three")
    history.request(owner="uA", hold=3 * MINUTE, begins=True)
    history.request(owner="uA")


def dead_waiter_at_the_head(history: History) -> None:
    holder = history.request(ttl=5 * MINUTE)
    history.request()
    history.request(waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.leave(holder)


def dead_writer_between_readers(history: History) -> None:
    history.request("shared", ttl=5 * MINUTE)
    history.request("exclusive")
    reader = history.request("shared", waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.extend(reader)


def dead_writer_between_readers_whose_clock_was_set_back(history: History) -> None:
    holder = history.request("shared", ttl=5 * MINUTE)
    history.request("exclusive")
    reader = history.request("shared", waiter_ttl=10 * MINUTE)
    history.clock_is_set_back()
    history.time_passes(MINUTE)
    history.extend(holder, reader, length=5 * MINUTE)
    history.time_passes(MINUTE)
    history.extend(reader)


def shorter_extension(history: History) -> None:
    history.leave(history.request(ttl=5 * MINUTE))
    history.time_passes(1)
    holder = history.request(ttl=5 * MINUTE)
    history.extend(holder)
    history.time_passes(MINUTE)
    history.extend(holder)


def dead_holder_whose_clock_was_set_back(history: History) -> None:
    a_free_name(history)
    history.request()
    history.clock_is_set_back()
    history.request(wait=False)
    history.time_passes(2 * MINUTE)
    history.request(wait=False)


def holder_that_extends_after_the_clock_was_set_back(history: History) -> None:
    holder = history.request()
    history.clock_is_set_back()
    history.extend(holder)
    history.request(wait=False)
    history.time_passes(2 * MINUTE)
    history.request(wait=False)


def dead_waiters_whose_clock_was_set_back(history: History) -> None:
    history.request()
    history.request()
    history.request()
    live = history.request(waiter_ttl=10 * MINUTE)
    history.clock_is_set_back()
    for _ in range(2):
        history.extend(live, length=10 * MINUTE)
        history.time_passes(MINUTE)
    history.extend(live, length=10 * MINUTE)


def newcomer_after_the_clock_was_set_back(history: History) -> None:
    history.request(ttl=5 * MINUTE)
    history.request(waiter_ttl=10 * MINUTE)
    history.clock_is_set_back()
    history.request(waiter_ttl=10 * MINUTE)


def duplicate_that_comes_after_the_leave(history: History) -> None:
    a_free_name(history)
    holder = history.request()
    history.leave(holder, ambiguous=True)
    history.time_passes(1)
    history.repeat(holder)


def repeated_request_that_holds(history: History) -> None:
    holder = history.request(ttl=5 * MINUTE)
    history.time_passes(MINUTE)
    history.repeat(holder)
    history.leave(holder)
    history.leave(holder)


def broken_lease(history: History) -> None:
    holder = history.request(client="two")
    history.request(client="three")
    history.break_lock()
    history.extend(holder)
    history.leave(holder)


def broken_request_that_a_duplicate_brings_back(history: History) -> None:
    """It holds again, and was not broken since."""
    holder = history.request()
    history.break_lock()
    history.repeat(holder)
    history.leave(holder, "lost")


def broken_request_that_a_duplicate_brings_back_and_others_wait_for(history: History) -> None:
    holder = history.request()
    history.break_lock()
    history.repeat(holder)
    history.request(client="two")
    history.leave(holder, "lost")


def readers_that_end_at_different_times(history: History) -> None:
    history.request("shared", ttl=5 * MINUTE)
    history.request("shared", ttl=2 * MINUTE)
    history.request("exclusive", waiter_ttl=10 * MINUTE)


def lease_that_is_lost_and_has_a_lock_delay(history: History) -> None:
    holder = history.request(delay=MINUTE)
    history.leave(holder, "lost")
    history.request(wait=False)


def lease_that_is_lost_and_has_none(history: History) -> None:
    holder = history.request()
    history.leave(holder, "lost")
    history.request(wait=False)


def lease_that_is_lost_and_has_a_hold(history: History) -> None:
    holder = history.request(hold=11 * MINUTE, begins=True)
    history.leave(holder, "lost")
    history.time_passes(2 * MINUTE)
    history.request(wait=False)


def head_that_withdraws_from_a_long_lease(history: History) -> None:
    history.request(ttl=5 * MINUTE)
    head = history.request(client="two")
    history.request(client="three")
    history.leave(head)


def first_of_two_readers_leaves(history: History) -> None:
    first = history.request("shared")
    second = history.request("shared")
    history.leave(first)
    history.request(wait=False)
    history.leave(second)


def second_of_two_readers_leaves(history: History) -> None:
    first = history.request("shared")
    second = history.request("shared")
    history.leave(second)
    history.leave(first)


def stranger_that_leaves(history: History) -> None:
    a_free_name(history)
    history.request()
    stranger = history.request(wait=False)
    history.leave(stranger)


def release_with_a_waiter(history: History) -> None:
    a_free_name(history)
    for client in ("one", "two"):
        holder = history.request(client="one")
        history.request(client=client)
        history.leave(holder)
        history.break_lock()


def release_that_comes_too_late(history: History) -> None:
    a_free_name(history)
    holder = history.request()
    history.time_passes(2 * MINUTE)
    history.leave(holder)


def extension_that_comes_too_late(history: History) -> None:
    a_free_name(history)
    holder = history.request()
    history.time_passes(2 * MINUTE)
    history.extend(holder)
    history.request(wait=False)


def extension_of_somebody_else(history: History) -> None:
    history.request()
    waiter = history.request()
    history.extend(waiter)


def short_body_with_a_hold(history: History) -> None:
    holder = history.request(hold=3 * MINUTE, begins=True)
    history.leave(holder)
    history.request(wait=False)
    history.time_passes(3 * MINUTE)
    history.request(wait=False)


def extension_that_begins_a_body(history: History) -> None:
    holder = history.request(hold=11 * MINUTE)
    history.extend(holder, begins=True)
    history.time_passes(2 * MINUTE)
    history.request(wait=False)


def success_and_a_newcomer(history: History) -> None:
    holder = history.request()
    history.request(client="two")
    history.record(holder)
    history.request()


def success_that_is_alone(history: History) -> None:
    a_free_name(history)
    holder = history.request()
    history.record(holder)
    history.record(holder)
    history.time_passes(1)
    history.request()


def late_repetition_of_an_owner_that_came_to_hold(history: History) -> None:
    """Its overdue place in the queue ends with it, and does not come back with the clock."""
    first = history.request()
    history.request("shared", owner="uB", waiter_ttl=10 * MINUTE)
    history.request(waiter_ttl=10 * MINUTE)
    again = history.request("shared", owner="uB")
    history.leave(first)
    history.time_passes(2 * MINUTE)
    history.repeat(again)
    history.clock_is_set_back()


def newcomers_behind_one_that_lingers(history: History) -> None:
    """The second one need not recall it again, and each of its extensions tells it."""
    a_free_name(history)
    holder = history.request(lingers=True)
    history.time_passes(1)
    history.extend(holder)
    first = history.request(client="two")
    history.request(client="three")
    history.extend(holder)
    history.repeat(holder)
    history.leave(first)
    history.leave(holder)


def one_that_lingers_and_is_tried(history: History) -> None:
    a_free_name(history)
    holder = history.request(lingers=True)
    history.time_passes(1)
    history.request(client="two", wait=False)
    history.request(client="two", wait=False)
    history.extend(holder)
    history.leave(holder)
    history.time_passes(1)
    history.request(client="two", wait=False)


def reader_that_lingers_beside_another(history: History) -> None:
    history.request("shared", lingers=True, client="two")
    history.request("shared")
    history.request(wait=False)


def waiters_that_linger(history: History) -> None:
    """Of three that are granted one after the other, the last one is not recalled."""
    first = history.request(lingers=True)
    second = history.request(lingers=True, client="two")
    third = history.request("shared", lingers=True, client="three")
    fourth = history.request("shared", lingers=True)
    history.leave(first)
    history.extend(second)
    history.leave(second)
    history.extend(third, fourth)


def waiter_that_lingers_and_finds_a_dead_holder(history: History) -> None:
    """Its own extension grants it, and tells that others wait."""
    history.request()
    second = history.request(lingers=True, waiter_ttl=10 * MINUTE)
    history.request(client="two", waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.extend(second)


def owner_that_lingers_and_gets_in_past_a_waiter(history: History) -> None:
    holder = history.request(owner="uA")
    history.request(client="two")
    again = history.request(owner="uA", lingers=True)
    history.extend(holder, again)


def waiter_that_lingers_and_whose_owner_came_to_hold(history: History) -> None:
    holder = history.request()
    history.request("shared", owner="uB", waiter_ttl=10 * MINUTE)
    history.request(waiter_ttl=10 * MINUTE, client="two")
    again = history.request("shared", owner="uB", waiter_ttl=10 * MINUTE, lingers=True)
    history.leave(holder)
    history.extend(again)


def newcomer_behind_an_overdue_one_that_lingers(history: History) -> None:
    history.request(lingers=True, delay=MINUTE)
    history.time_passes(2 * MINUTE)
    history.request(client="two")


def one_that_lingers_and_lives_again_as_the_clock_was_set_back(history: History) -> None:
    """It had run out within its lock-delay when somebody queued, whose message is repeated."""
    holder = history.request(delay=5 * MINUTE, lingers=True)
    history.time_passes(2 * MINUTE)
    waiter = history.request(waiter_ttl=10 * MINUTE)
    history.clock_is_set_back(MINUTE)
    history.repeat(waiter)
    history.repeat(holder)


def lease_that_is_lost_after_its_hold(history: History) -> None:
    holder = history.request(hold=MINUTE, begins=True)
    history.time_passes(MINUTE + 1)
    history.leave(holder, "lost")
    history.request(wait=False)


def unused_grant_that_ran_out(history: History) -> None:
    holder = history.request(hold=11 * MINUTE, begins=True)
    history.time_passes(2 * MINUTE)
    waiter = history.request(waiter_ttl=10 * MINUTE)
    history.leave(holder, "unused")
    history.extend(waiter)


def repeated_request_whose_body_began(history: History) -> None:
    holder = history.request(hold=11 * MINUTE)
    history.extend(holder, begins=True)
    history.repeat(holder)
    history.time_passes(2 * MINUTE)
    history.request(wait=False)


def waiter_that_says_that_its_body_begins(history: History) -> None:
    """It has not been granted: nothing begins."""
    holder = history.request()
    waiter = history.request(hold=11 * MINUTE)
    history.extend(waiter, begins=True)
    history.leave(holder)
    history.time_passes(2 * MINUTE)
    history.request(wait=False)


def request_repeated_within_its_lock_delay(history: History) -> None:
    holder = history.request(delay=MINUTE)
    history.time_passes(2 * MINUTE)
    history.repeat(holder)


def waiter_that_asks_again_too_late(history: History) -> None:
    history.request(ttl=5 * MINUTE)
    history.request(waiter_ttl=10 * MINUTE)
    late = history.request()
    history.request(waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.repeat(late)


def waiter_that_asks_again_and_finds_that_it_is_the_head(history: History) -> None:
    """The answer says when to look: no message has to."""
    history.request(ttl=3 * MINUTE)
    history.request()
    second = history.request(waiter_ttl=10 * MINUTE, client="two")
    history.time_passes(2 * MINUTE)
    history.repeat(second)


def waiter_that_asks_again_when_it_has_come_to_hold(history: History) -> None:
    """The notice was lost. With the answer to its repetition the body begins."""
    holder = history.request()
    waiter = history.request(hold=11 * MINUTE, begins=True)
    history.leave(holder)
    history.repeat(waiter)
    history.time_passes(2 * MINUTE)
    history.request(wait=False)


def waiter_that_finds_a_dead_holder_and_begins(history: History) -> None:
    history.request()
    waiter = history.request(hold=11 * MINUTE, waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.extend(waiter, begins=True)
    history.time_passes(8 * MINUTE)
    history.request(wait=False)


def waiter_that_finds_a_dead_holder_and_does_not_begin(history: History) -> None:
    history.request()
    waiter = history.request(hold=11 * MINUTE, waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.extend(waiter)
    history.time_passes(8 * MINUTE)
    history.request(wait=False)


def waiter_behind_another_that_asks_again(history: History) -> None:
    """Only the head is told when to look."""
    history.request()
    history.request(client="two")
    history.repeat(history.request())


def dead_head_that_extends_too_late(history: History) -> None:
    history.request(ttl=3 * MINUTE)
    head = history.request()
    history.request(waiter_ttl=10 * MINUTE, client="two")
    history.time_passes(2 * MINUTE)
    history.extend(head)


def break_that_leaves_a_waiter(history: History) -> None:
    history.request()
    history.request(client="two")
    history.request(waiter_ttl=10 * MINUTE, client="three")
    history.break_lock()


def reader_beside_an_owner_that_writes_and_reads(history: History) -> None:
    history.request(owner="uA")
    history.request("shared", owner="uA")
    history.request("shared")


def reader_with_an_owner_behind_a_writer(history: History) -> None:
    """Its owner holds nothing: it does not get in."""
    history.request()
    history.request(client="two", waiter_ttl=10 * MINUTE)
    history.extend(history.request("shared", owner="uA"))


def short_body_with_a_hold_whose_leave_is_repeated(history: History) -> None:
    holder = history.request(hold=3 * MINUTE, begins=True)
    history.leave(holder)
    history.leave(holder)
    history.time_passes(3 * MINUTE)
    history.leave(holder)


def lease_that_is_lost_before_its_body_began(history: History) -> None:
    holder = history.request(hold=11 * MINUTE)
    history.leave(holder, "lost")
    history.request(wait=False)


def leave_that_comes_too_late_and_lets_its_client_in(history: History) -> None:
    """The answer tells that the lease was lost, not what was granted."""
    reader = history.request("shared", delay=5 * MINUTE)
    history.request("exclusive")
    history.request("shared", waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.leave(reader)


def readers_that_are_handed_the_name_before_a_writer(history: History) -> None:
    """The writer is the head now, and does not know when they end."""
    holder = history.request()
    for _ in range(2):
        history.request("shared", client="two")
    history.request(waiter_ttl=10 * MINUTE, client="three")
    history.leave(holder)


def repeated_request_whose_body_has_not_begun(history: History) -> None:
    holder = history.request(hold=11 * MINUTE)
    history.repeat(holder)
    history.time_passes(2 * MINUTE)
    history.request(wait=False)


def head_that_withdraws_from_a_short_lease(history: History) -> None:
    history.request(ttl=3 * MINUTE)
    head = history.request(client="two")
    history.request(waiter_ttl=10 * MINUTE, client="three")
    history.leave(head)


def short_body_with_a_hold_and_a_waiter(history: History) -> None:
    """The name opens sooner than the waiter knew."""
    holder = history.request(ttl=10 * MINUTE, hold=3 * MINUTE, begins=True)
    history.request(waiter_ttl=10 * MINUTE, client="two")
    history.leave(holder)


def waiter_that_extends_and_finds_that_it_is_the_head(history: History) -> None:
    """The answer says when to look: no message has to."""
    history.request(ttl=3 * MINUTE)
    history.request()
    second = history.request(waiter_ttl=10 * MINUTE, client="two")
    history.time_passes(2 * MINUTE)
    history.extend(second, length=10 * MINUTE)


def waiter_with_an_owner_that_finds_a_dead_holder(history: History) -> None:
    history.request()
    waiter = history.request(owner="uA", waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.extend(waiter)
    history.leave(waiter)
    history.extend(waiter)


def two_waiters_of_one_owner(history: History) -> None:
    holder = history.request()
    history.request(owner="uA", client="two")
    history.request(owner="uA", client="two")
    history.request()
    history.leave(holder)


def two_readers_of_one_owner(history: History) -> None:
    """Both have the same token."""
    holder = history.request()
    for client in ("one", "two"):
        history.request("shared", owner="uA", client=client)
    history.leave(holder)


def writer_behind_a_reader_of_its_owner(history: History) -> None:
    """It waits on: another reader holds, too."""
    holder = history.request()
    history.request("shared")
    history.request("shared", owner="uA")
    history.request(owner="uA")
    history.leave(holder)


def writer_whose_owner_came_to_read(history: History) -> None:
    """It waits on: others may read beside its owner."""
    holder = history.request()
    history.request("shared", owner="uA")
    history.request(waiter_ttl=10 * MINUTE)
    writer = history.request(owner="uA")
    history.leave(holder)
    history.extend(writer)


def writer_whose_owner_came_to_write(history: History) -> None:
    holder = history.request()
    history.request(owner="uA")
    history.request(waiter_ttl=10 * MINUTE, client="two")
    writer = history.request(owner="uA")
    history.leave(holder)
    history.extend(writer)


def dead_head_that_the_last_of_three_waiters_meets(history: History) -> None:
    history.request(ttl=3 * MINUTE)
    history.request()
    history.request(waiter_ttl=10 * MINUTE, client="two")
    last = history.request(waiter_ttl=10 * MINUTE, client="three")
    history.time_passes(2 * MINUTE)
    history.extend(last, length=10 * MINUTE)


def dead_head_that_a_request_with_a_limit_meets(history: History) -> None:
    history.request(ttl=3 * MINUTE)
    history.request(ttl=3 * MINUTE)
    history.request()
    history.request(waiter_ttl=10 * MINUTE, client="two")
    history.time_passes(2 * MINUTE)
    history.request(client="three", resize=True)


def dead_head_that_its_blockers_owner_meets(history: History) -> None:
    """The new head is told once, though its blocker's end is nearer too."""
    history.request(owner="uA", ttl=10 * MINUTE)
    history.request()
    history.request(waiter_ttl=10 * MINUTE, client="two")
    history.time_passes(2 * MINUTE)
    history.request(owner="uA", ttl=MINUTE)


def waiter_whose_owner_came_to_hold_for_longer(history: History) -> None:
    """The head knew when the owner's first lease ends."""
    holder = history.request()
    history.request("shared", owner="uA", waiter_ttl=10 * MINUTE)
    history.request(waiter_ttl=10 * MINUTE, client="two")
    second = history.request("shared", owner="uA")
    history.leave(holder)
    history.extend(second)


def dead_head_that_a_waiter_meets_whose_owner_came_to_hold(history: History) -> None:
    """Its own lease ends later than the first one, and the new head is told all the same."""
    holder = history.request()
    history.request("shared", owner="uA", waiter_ttl=3 * MINUTE)
    history.request()
    history.request(waiter_ttl=10 * MINUTE, client="two")
    second = history.request("shared", owner="uA", waiter_ttl=10 * MINUTE, client="three")
    history.leave(holder)
    history.time_passes(2 * MINUTE)
    history.extend(second, length=10 * MINUTE)


def extension_that_begins_a_body_without_a_hold(history: History) -> None:
    history.extend(history.request(), begins=True)


def semaphore_of_two_limits(history: History) -> None:
    """The first one counts."""
    history.request()
    history.request(limit=3)
    history.request(limit=1, wait=False)
    history.request()
    history.request(limit=3)


def semaphore_with_a_hold(history: History) -> None:
    history.leave(history.request(hold=3 * MINUTE, begins=True))
    history.request()
    history.request(wait=False)


def semaphore_that_is_resized_when_it_is_free(history: History) -> None:
    """Others follow."""
    history.request(limit=3, resize=True)
    for limit in (2, 1, 2):
        history.request(limit=limit)


def semaphore_that_grows(history: History) -> None:
    """A place is free now for the first waiter; the second one is the head, and learns when to look."""
    for _ in range(3):
        history.request()
    history.request(waiter_ttl=10 * MINUTE, client="two")
    history.request(limit=3, resize=True)
    history.request(wait=False)


def semaphore_that_grows_when_nobody_waits(history: History) -> None:
    history.request()
    history.request(limit=3, resize=True)
    for _ in range(2):
        history.request()


def semaphore_that_shrinks(history: History) -> None:
    """Those that waited before have the new limit, too."""
    first, second = history.request(), history.request()
    history.request()
    history.request()
    history.leave(history.request(limit=1, resize=True))
    history.leave(first)
    history.leave(second)


def leave_that_comes_too_late_within_its_hold(history: History) -> None:
    """The name stays closed."""
    holder = history.request(hold=11 * MINUTE, begins=True)
    history.time_passes(2 * MINUTE)
    history.leave(holder)
    history.request(wait=False)


def waiter_with_a_hold_that_is_handed_the_name(history: History) -> None:
    """Its hold counts from then on, and ends."""
    holder = history.request()
    waiter = history.request(hold=3 * MINUTE)
    history.leave(holder)
    history.extend(waiter, begins=True)
    history.time_passes(3 * MINUTE)
    history.request(wait=False)


def duplicate_that_comes_after_a_hand_off(history: History) -> None:
    holder = history.request()
    history.request()
    history.leave(holder, ambiguous=True)
    history.repeat(holder)


def waiters_that_are_looked_at(history: History) -> None:
    history.request()
    history.request(client="two")
    history.request("shared", waiter_ttl=10 * MINUTE)
    history.inspect()
    history.time_passes(2 * MINUTE - 1)
    history.inspect()
    history.time_passes(1)
    history.inspect()


def task_whose_request_that_it_gave_up_came_to_hold(history: History) -> None:
    """Its next one gets in past nobody."""
    holder = history.request()
    history.request("shared", owner="tA", waiter_ttl=10 * MINUTE)
    history.request(waiter_ttl=10 * MINUTE)
    second = history.request("shared", owner="tA")
    history.leave(holder)
    history.extend(second)


def owner_whose_first_lease_ends_before_its_others(history: History) -> None:
    first = history.request(owner="uA")
    history.request("shared", owner="uA")
    history.request(owner="uA")
    history.leave(first)
    history.request(owner="uA")


def short_body_with_a_hold_and_a_longer_lock_delay(history: History) -> None:
    """It was released: the lock-delay does not count."""
    history.leave(history.request(hold=MINUTE, delay=5 * MINUTE, begins=True))
    history.time_passes(MINUTE)
    history.request(wait=False)


def dead_reader_beside_one_that_leaves(history: History) -> None:
    history.request("shared")
    reader = history.request("shared", ttl=5 * MINUTE)
    history.request(waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.leave(reader)


def hold_that_began_just_before_the_clock_was_set_back(history: History) -> None:
    """The lease had begun before, when its request began to wait: its deadline does not tell."""
    holder = history.request()
    waiter = history.request(hold=3 * MINUTE, begins=True)
    history.time_passes(MINUTE)
    history.leave(holder)
    history.repeat(waiter)
    history.clock_is_set_back(MINUTE // 2)
    history.request(wait=False)
    history.time_passes(3 * MINUTE)
    history.request(wait=False)


def extension_of_a_body_that_has_begun(history: History) -> None:
    holder = history.request(hold=11 * MINUTE, begins=True)
    history.time_passes(MINUTE)
    history.extend(holder)
    history.time_passes(2 * MINUTE)
    history.request(wait=False)


def newcomer_after_a_leave_that_refuses_duplicates(history: History) -> None:
    history.leave(history.request(), ambiguous=True)
    history.request()


def dead_waiter_that_meets_a_dead_holder(history: History) -> None:
    history.request()
    history.request(waiter_ttl=10 * MINUTE)
    waiter = history.request()
    history.time_passes(2 * MINUTE)
    history.extend(waiter)


def unused_grant(history: History) -> None:
    history.leave(history.request(), "unused")
    history.request(wait=False)


def unused_grant_that_ran_out_beside_a_reader(history: History) -> None:
    reader = history.request("shared")
    history.request("shared", ttl=5 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.leave(reader, "unused")


def unused_grant_that_ran_out_before_its_hold_began(history: History) -> None:
    """The end of its lock-delay stays the same, so nobody is notified."""
    holder = history.request(hold=11 * MINUTE, delay=5 * MINUTE)
    history.request(waiter_ttl=30 * MINUTE, client="two")
    history.time_passes(2 * MINUTE)
    history.leave(holder, "unused")


def unused_grant_that_ran_out_and_has_a_long_lock_delay(history: History) -> None:
    holder = history.request(hold=3 * MINUTE, delay=5 * MINUTE, begins=True)
    history.request(waiter_ttl=30 * MINUTE, client="two")
    history.time_passes(2 * MINUTE)
    history.leave(holder, "unused")


def two_readers_of_one_owner_behind_another(history: History) -> None:
    """They are granted together, and have one token."""
    holder = history.request()
    history.request("shared")
    history.request("shared", owner="uA")
    history.request("shared", owner="uA")
    history.leave(holder)


def waiter_that_lingers_and_asks_again_behind_a_dead_holder(history: History) -> None:
    history.request()
    waiter = history.request(lingers=True, waiter_ttl=10 * MINUTE)
    history.request(waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.repeat(waiter)


def leave_of_one_whose_success_is_on_record(history: History) -> None:
    holder = history.request()
    history.record(holder)
    history.leave(holder)


def waiter_that_records_when_a_success_is_on_record(history: History) -> None:
    holder = history.request()
    waiter = history.request(client="two")
    history.record(holder)
    history.record(waiter)


def waiter_of_a_semaphore_that_asks_again_too_late(history: History) -> None:
    for _ in range(2):
        history.request(ttl=5 * MINUTE)
    history.request(waiter_ttl=10 * MINUTE)
    waiter = history.request()
    history.time_passes(2 * MINUTE)
    history.repeat(waiter)


def waiter_that_asks_again_after_another_has_set_the_limit(history: History) -> None:
    """The limit stays the later one."""
    for _ in range(3):
        history.request(limit=3)
    waiter = history.request(limit=1, resize=True)
    history.request(resize=True)
    history.repeat(waiter)
    history.request(wait=False)


def holder_that_asks_again_after_another_has_set_the_limit(history: History) -> None:
    holder = history.request(limit=1, resize=True)
    history.request(limit=3, resize=True)
    history.repeat(holder)
    history.request(wait=False)


def dead_holder_that_asks_again_and_sets_the_limit(history: History) -> None:
    """Its request is as a new one."""
    holder = history.request(limit=1, resize=True)
    history.request(limit=3, resize=True, ttl=5 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.repeat(holder)
    history.request(wait=False)


def waiter_of_a_semaphore_whose_owner_came_to_hold(history: History) -> None:
    first = history.request()
    history.request()
    history.request(owner="uA")
    history.request()
    waiter = history.request(owner="uA")
    history.leave(first)
    history.repeat(waiter)
    history.extend(waiter)


def waiter_that_lingers_and_finds_a_dead_holder_alone(history: History) -> None:
    """Nobody else waits, so it is not recalled."""
    history.request()
    waiter = history.request(lingers=True, waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.extend(waiter)


def body_that_begins_within_its_lock_delay(history: History) -> None:
    """Too late: its hold does not count."""
    holder = history.request(hold=11 * MINUTE, delay=5 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.extend(holder, begins=True)
    history.repeat(holder._replace(begins=True))
    history.time_passes(5 * MINUTE)
    history.request(wait=False)


def reader_whose_owner_reads_beside_another(history: History) -> None:
    """It has the token of its owner's first hold."""
    history.request("shared")
    history.request("shared", owner="uA")
    history.request("shared", owner="uA")


def waiter_that_tries_again(history: History) -> None:
    history.request()
    history.repeat(history.request(), wait=False)


def dead_holder_that_asks_again(history: History) -> None:
    holder = history.request()
    history.time_passes(2 * MINUTE)
    history.repeat(holder)


def dead_head_that_a_longer_lease_of_its_blockers_owner_meets(history: History) -> None:
    history.request("shared", owner="uA", ttl=5 * MINUTE)
    history.request()
    history.request(waiter_ttl=30 * MINUTE, client="two")
    history.time_passes(2 * MINUTE)
    history.request("shared", owner="uA", ttl=5 * MINUTE)


def free_name_with_a_hold(history: History) -> None:
    a_free_name(history)
    history.leave(history.request(hold=3 * MINUTE, begins=True))
    history.request(wait=False)


def semaphore_that_was_resized_is_looked_at(history: History) -> None:
    history.request(limit=3, resize=True)
    history.inspect()


def free_semaphore_with_another_limit(history: History) -> None:
    a_free_name(history)
    history.request(limit=3)
    history.request(limit=3)
    history.inspect()


def dead_head_that_had_extended_when_the_clock_was_set_back(history: History) -> None:
    """By less than the length of its lease, which is what is left of it from then on."""
    history.request(ttl=10 * MINUTE)
    head = history.request()
    live = history.request(waiter_ttl=10 * MINUTE)
    history.time_passes(MINUTE)
    history.extend(head)
    history.clock_is_set_back(MINUTE // 2)
    history.time_passes(2 * MINUTE)
    history.extend(live)


def waiter_whose_deadline_is_near_when_the_clock_was_set_back(history: History) -> None:
    """That of the head is clamped. Its own stays as it is."""
    history.request(ttl=10 * MINUTE)
    head = history.request()
    history.request(waiter_ttl=10 * MINUTE)
    history.time_passes(MINUTE)
    history.extend(head)
    history.time_passes(MINUTE)
    history.request(wait=False)
    history.clock_is_set_back(MINUTE + MINUTE // 2)
    history.inspect()


def broken_request_that_a_duplicate_brings_back_and_that_runs_out(history: History) -> None:
    holder = history.request(delay=5 * MINUTE)
    history.break_lock()
    history.repeat(holder)
    history.time_passes(2 * MINUTE)
    history.repeat(holder)


def name_that_is_looked_at_within_a_lock_delay(history: History) -> None:
    history.request(delay=5 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.inspect()


def lease_that_runs_out_after_another_was_broken(history: History) -> None:
    history.request()
    history.break_lock()
    holder = history.request()
    history.time_passes(2 * MINUTE)
    history.extend(holder)


def success_that_comes_too_late(history: History) -> None:
    holder = history.request()
    history.time_passes(2 * MINUTE)
    history.record(holder)
    history.request()


def success_and_a_waiter_that_extends(history: History) -> None:
    """The message to it was lost."""
    holder = history.request()
    waiter = history.request(client="two")
    history.record(holder)
    history.extend(waiter)


def success_of_one_that_left(history: History) -> None:
    holder = history.request()
    history.leave(holder)
    history.record(holder)
    history.request()


def duplicate_that_comes_after_a_success_was_taken_back(history: History) -> None:
    holder = history.request()
    history.record(holder, ambiguous=True)
    history.forget()
    history.repeat(holder)


LOCKS: list[Tale] = [
    waiting_writer_and_a_new_reader,
    reader_while_a_writer_holds,
    held_name_that_is_tried,
    reader_that_wants_to_write,
    owner_that_comes_back_within_its_lock_delay,
    name_that_is_tried_within_a_lock_delay,
    name_that_waits_for_a_lock_delay,
    two_grants_of_one_moment,
    one_after_the_other,
    lone_holder_that_is_joined,
    owner_that_comes_back_with_a_hold,
    dead_waiter_at_the_head,
    dead_writer_between_readers,
    dead_writer_between_readers_whose_clock_was_set_back,
    shorter_extension,
    dead_holder_whose_clock_was_set_back,
    holder_that_extends_after_the_clock_was_set_back,
    dead_waiters_whose_clock_was_set_back,
    newcomer_after_the_clock_was_set_back,
    duplicate_that_comes_after_the_leave,
    repeated_request_that_holds,
    broken_lease,
    broken_request_that_a_duplicate_brings_back,
    broken_request_that_a_duplicate_brings_back_and_others_wait_for,
    readers_that_end_at_different_times,
    lease_that_is_lost_and_has_a_lock_delay,
    lease_that_is_lost_and_has_none,
    lease_that_is_lost_and_has_a_hold,
    head_that_withdraws_from_a_long_lease,
    first_of_two_readers_leaves,
    second_of_two_readers_leaves,
    stranger_that_leaves,
    release_with_a_waiter,
    release_that_comes_too_late,
    extension_that_comes_too_late,
    extension_of_somebody_else,
    short_body_with_a_hold,
    extension_that_begins_a_body,
    extension_that_begins_a_body_without_a_hold,
    leave_that_comes_too_late_within_its_hold,
    waiter_with_a_hold_that_is_handed_the_name,
    duplicate_that_comes_after_a_hand_off,
    waiters_that_are_looked_at,
    late_repetition_of_an_owner_that_came_to_hold,
    newcomers_behind_one_that_lingers,
    one_that_lingers_and_is_tried,
    reader_that_lingers_beside_another,
    waiters_that_linger,
    waiter_that_lingers_and_finds_a_dead_holder,
    owner_that_lingers_and_gets_in_past_a_waiter,
    waiter_that_lingers_and_whose_owner_came_to_hold,
    newcomer_behind_an_overdue_one_that_lingers,
    one_that_lingers_and_lives_again_as_the_clock_was_set_back,
    lease_that_is_lost_after_its_hold,
    unused_grant_that_ran_out,
    repeated_request_whose_body_began,
    waiter_that_says_that_its_body_begins,
    request_repeated_within_its_lock_delay,
    waiter_that_asks_again_too_late,
    waiter_that_asks_again_and_finds_that_it_is_the_head,
    waiter_that_asks_again_when_it_has_come_to_hold,
    waiter_that_finds_a_dead_holder_and_begins,
    waiter_that_finds_a_dead_holder_and_does_not_begin,
    waiter_behind_another_that_asks_again,
    dead_head_that_extends_too_late,
    break_that_leaves_a_waiter,
    reader_beside_an_owner_that_writes_and_reads,
    reader_with_an_owner_behind_a_writer,
    short_body_with_a_hold_whose_leave_is_repeated,
    lease_that_is_lost_before_its_body_began,
    leave_that_comes_too_late_and_lets_its_client_in,
    readers_that_are_handed_the_name_before_a_writer,
    repeated_request_whose_body_has_not_begun,
    head_that_withdraws_from_a_short_lease,
    short_body_with_a_hold_and_a_waiter,
    waiter_that_extends_and_finds_that_it_is_the_head,
    waiter_with_an_owner_that_finds_a_dead_holder,
    two_waiters_of_one_owner,
    two_readers_of_one_owner,
    writer_behind_a_reader_of_its_owner,
    writer_whose_owner_came_to_read,
    writer_whose_owner_came_to_write,
    dead_head_that_the_last_of_three_waiters_meets,
    dead_head_that_its_blockers_owner_meets,
    waiter_whose_owner_came_to_hold_for_longer,
    dead_head_that_a_waiter_meets_whose_owner_came_to_hold,
    task_whose_request_that_it_gave_up_came_to_hold,
    owner_whose_first_lease_ends_before_its_others,
    short_body_with_a_hold_and_a_longer_lock_delay,
    dead_reader_beside_one_that_leaves,
    hold_that_began_just_before_the_clock_was_set_back,
    extension_of_a_body_that_has_begun,
    newcomer_after_a_leave_that_refuses_duplicates,
    dead_waiter_that_meets_a_dead_holder,
    unused_grant,
    unused_grant_that_ran_out_beside_a_reader,
    unused_grant_that_ran_out_before_its_hold_began,
    unused_grant_that_ran_out_and_has_a_long_lock_delay,
    two_readers_of_one_owner_behind_another,
    waiter_that_lingers_and_asks_again_behind_a_dead_holder,
    waiter_that_lingers_and_finds_a_dead_holder_alone,
    body_that_begins_within_its_lock_delay,
    reader_whose_owner_reads_beside_another,
    waiter_that_tries_again,
    dead_holder_that_asks_again,
    dead_head_that_a_longer_lease_of_its_blockers_owner_meets,
    free_name_with_a_hold,
    dead_head_that_had_extended_when_the_clock_was_set_back,
    waiter_whose_deadline_is_near_when_the_clock_was_set_back,
    broken_request_that_a_duplicate_brings_back_and_that_runs_out,
    name_that_is_looked_at_within_a_lock_delay,
    lease_that_runs_out_after_another_was_broken,
]
SEMAPHORES: list[Tale] = [
    more_requests_than_places,
    dead_head_that_a_request_with_a_limit_meets,
    semaphore_of_two_limits,
    semaphore_with_a_hold,
    semaphore_that_is_resized_when_it_is_free,
    semaphore_that_grows,
    semaphore_that_grows_when_nobody_waits,
    semaphore_that_shrinks,
    waiter_of_a_semaphore_that_asks_again_too_late,
    waiter_that_asks_again_after_another_has_set_the_limit,
    holder_that_asks_again_after_another_has_set_the_limit,
    dead_holder_that_asks_again_and_sets_the_limit,
    waiter_of_a_semaphore_whose_owner_came_to_hold,
    free_semaphore_with_another_limit,
    semaphore_that_was_resized_is_looked_at,
]
ONCES: list[Tale] = [
    success_and_a_newcomer,
    success_that_is_alone,
    success_that_comes_too_late,
    success_and_a_waiter_that_extends,
    success_of_one_that_left,
    leave_of_one_whose_success_is_on_record,
    waiter_that_records_when_a_success_is_on_record,
    duplicate_that_comes_after_a_success_was_taken_back,
]

#: Every history, with the machine that it is one of.
ALL: list[tuple[type[Locks], Tale]] = [
    *((Locks, tale) for tale in LOCKS),
    *((Semaphores, tale) for tale in SEMAPHORES),
    *((Onces, tale) for tale in ONCES),
]


def tell(make: Callable[[type[Locks]], Calls], machine: type[Locks], tale: Tale) -> None:
    """Run a history; raise AssertionError at the first answer that differs."""
    told = machine(make(machine))
    try:
        tale(History(told))
    finally:
        told.teardown()
