"""Each guard of the protocol, taken out: a test of its behaviour must notice.

A mutation is one exact piece of a script and what stands there without the guard. The tests named
beside it are run against the mutated scripts, and one of them has to fail. They pass on the
scripts as they are: that is what the other modules of this folder show.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from aiodlock.backends.redis import scripts

from ..servers import Store
from . import (
    test_acquire,
    test_extend,
    test_hold,
    test_keys,
    test_leave,
    test_once,
    test_versions,
    test_votes,
)
from .direct import CLIENTS, Direct, Heard

Check = Callable[..., Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands in the scripts that are named (if none are: in a server's), becomes `new`."""

    guard: str
    old: str
    new: str
    noticed_by: Check
    only: tuple[str, ...] = ()
    #: Whether the common case, which has a way of its own, takes the general one.
    in_general: bool = False
    #: Whether random histories hardly ever notice.
    rare: bool = False

    def sources(self) -> dict[str, str]:
        mutated = {}
        names = self.only or [script.name for script in scripts.ALL]
        for script in (*scripts.ALL, *scripts.VOTING):
            source = script.source.decode()
            if self.old in source and script.name in names:
                mutated[script.name] = source.replace(self.old, self.new)
                if self.in_general and script is scripts.LEAVE:
                    mutated[script.name] = _without_shortcut(mutated[script.name])
        assert mutated, f"this is not in the scripts any more: {self.old}"
        return mutated


def _without_shortcut(source: str) -> str:
    """Let a hand-off to one request go the way of all others."""
    shortcut = "if not quiet and ARGV[5] == '0' and why == 'ended' then"
    assert source.count(shortcut) == 1
    return source.replace(shortcut, "if false then")


MUTATIONS = [
    Mutation(
        "an extension never brings the deadline nearer",
        "record.deadline = math.max(record.deadline, now + length)",
        "record.deadline = now + length",
        test_extend.test_extension_never_brings_a_holder_nearer,
    ),
    Mutation(
        "nor that of a waiter",
        "record.deadline = math.max(record.deadline, now + length)",
        "record.deadline = now + length",
        test_extend.test_extension_never_brings_a_waiter_nearer,
    ),
    Mutation(
        "a shorter ttl does not let the clamp cut what was promised",
        "record.length = math.max(length, record.deadline - now)",
        "record.length = length",
        test_extend.test_promise_survives_a_shorter_ttl_whoever_looks_later,
    ),
    Mutation(
        "an overdue holder is not revived",
        "if record.live then\n    push(record)",
        "if true then\n    push(record)",
        test_extend.test_overdue_holder_is_never_revived_within_its_lock_delay,
    ),
    Mutation(
        "an overdue waiter is not revived",
        "if own and now < waiter.deadline then\n    push(waiter)",
        "if own then\n    push(waiter)",
        test_extend.test_overdue_waiter_is_never_revived,
    ),
    Mutation(
        "a waiter needs its own entry in the stream",
        "local own = entry and entry[2][2] == id\n  if own and",
        "local own = true\n  if own and",
        test_extend.test_waiter_whose_stream_was_evicted_is_gone,
    ),
    Mutation(
        "somebody else's entry is not its own",
        "local own = entry and entry[2][2] == id",
        "local own = entry",
        test_extend.test_waiter_of_an_evicted_stream_is_not_the_newcomer_in_its_successor,
    ),
    Mutation(
        "an entry whose waiter stands elsewhere by now is a ghost",
        "local own = waiter and waiter.stream_id == entry[1]",
        "local own = waiter",
        test_extend.test_waiter_that_lost_its_record_and_asks_again_stands_at_the_end,
    ),
    Mutation(
        "a stream that is gone takes its waiters with it",
        "redis.call('DEL', queue, waiters)",
        "redis.call('DEL', queue)",
        test_leave.test_stream_evicted_but_not_the_waiters_grants_nobody_twice,
    ),
    Mutation(
        "the name is not wedged by waiters whose stream is gone",
        "if own and now < waiter.deadline then\n    push(waiter)",
        "if now < waiter.deadline then\n    push(waiter)",
        test_leave.test_stream_evicted_but_not_the_waiters_does_not_wedge_the_name,
    ),
    Mutation(
        "a marker refuses a late duplicate after a release",
        "if redis.call('EXISTS', marker) == 1 then",
        "if false then",
        test_leave.test_late_duplicate_after_an_ordinary_release_is_refused,
    ),
    Mutation(
        "a marker refuses a late duplicate after a withdrawal",
        "if redis.call('EXISTS', marker) == 1 then",
        "if false then",
        test_leave.test_late_duplicate_after_a_withdrawal_is_refused,
    ),
    Mutation(
        "the marker is written also when nothing was found",
        "redis.call('SET', marker, '1', 'PX', ARGV[5])",
        "local _ = nil",
        test_leave.test_request_that_arrives_after_its_own_leave_is_refused,
    ),
    Mutation(
        "leaving late does not open a name early",
        "if why ~= 'unused' or not keeps then\n      return 'gone expired', false",
        "if why ~= 'unused' or not keeps then\n      return 'gone expired', true",
        test_leave.test_leaving_late_does_not_open_a_name_before_its_lock_delay_is_over,
    ),
    Mutation(
        "an overdue record blocks during its lock-delay",
        "if now < record.closed_until then",
        "if now < record.deadline then",
        test_acquire.test_overdue_holder_is_gone_for_itself_and_blocks_during_its_lock_delay,
    ),
    Mutation(
        "an overdue record gives its owner nothing",
        "if record.live then\n      local own",
        "if true then\n      local own",
        test_acquire.test_lock_delay_keeps_out_its_own_owner_too,
    ),
    Mutation(
        "a known overdue id is gone",
        "if not record.live then\n      return finish('gone')",
        "if false then\n      return finish('gone')",
        test_acquire.test_overdue_holder_is_gone_for_itself_and_blocks_during_its_lock_delay,
    ),
    Mutation(
        "a repeated message is told the time that is left",
        "return finish(holds(record))",
        "return finish('granted ' .. record.token .. ' ' .. int(ttl))",
        test_acquire.test_known_holder_gets_its_present_state,
    ),
    Mutation(
        "a known waiter is not queued again",
        "local known = not quiet and redis.call('HGET', waiters, id)",
        "local known = false",
        test_acquire.test_known_waiter_keeps_its_one_place,
    ),
    Mutation(
        "nobody gets in past a waiter",
        "if not head and compatible(mode, holders) then",
        "if compatible(mode, holders) then",
        test_acquire.test_reader_does_not_pass_a_waiting_writer,
    ),
    Mutation(
        "ghosts are skipped",
        "if own and now < waiter.deadline then\n      waiter.id = id",
        "if own then\n      waiter.id = id",
        test_leave.test_ghosts_at_the_head_are_skipped,
    ),
    Mutation(
        "ghosts are skipped in the middle",
        "if own and now < waiter.deadline then\n      waiter.id = id",
        "if own then\n      waiter.id = id",
        test_leave.test_ghosts_in_the_middle_are_skipped,
    ),
    Mutation(
        "a granted waiter keeps the deadline it had",
        "id = waiter.id, mode = waiter.mode, deadline = waiter.deadline,",
        "id = waiter.id, mode = waiter.mode, deadline = now + waiter.length,",
        test_extend.test_granted_waiter_keeps_its_deadline_until_it_extends,
        in_general=True,
    ),
    Mutation(
        "the old record is removed after the new one is written",
        "local granted = {}\nlocal head, changed = grant_waiting(keys, options, others, granted)",
        "bury(state, dead)\nlocal granted = {}\n"
        "local head, changed = grant_waiting(keys, options, others, granted)",
        test_leave.test_state_key_never_vanishes_in_a_hand_off,
        in_general=True,
    ),
    Mutation(
        "the next head is told when the head withdraws",
        "if head and (changed or was_head or nearer) then\n  hint(keys, options, head, others)",
        "if head and (changed or nearer) then\n  hint(keys, options, head, others)",
        test_leave.test_head_that_withdraws_gives_the_next_one_hint,
    ),
    Mutation(
        "the next head is told when the head is found dead",
        "changed = changed or dropped > 0",
        "local _ = dropped",
        test_leave.test_head_that_dies_gives_the_next_one_hint_from_whoever_looks,
    ),
    Mutation(
        "the next head is told when an overdue head finds itself out",
        "if head and (changed or was_head) and head.id ~= id then",
        "if head and changed and head.id ~= id then",
        test_leave.test_overdue_head_that_extends_gives_the_next_one_hint,
    ),
    Mutation(
        "no hint for a head that asks soon enough",
        "if look and look < next_extension then",
        "if look then",
        test_leave.test_no_hint_when_the_new_head_will_ask_soon_enough,
    ),
    Mutation(
        "a nearer time to look is hinted",
        "elseif head and holders[#holders].closed_until < earliest then",
        "elseif false then",
        test_leave.test_nearer_time_to_look_is_hinted,
    ),
    Mutation(
        "a deadline is clamped to the record's length",
        "return math.min(tonumber(deadline), now + tonumber(length))",
        "return tonumber(deadline)",
        test_extend.test_clock_set_back_does_not_stretch_a_dead_holder,
    ),
    Mutation(
        "also that of a waiter",
        "return math.min(tonumber(deadline), now + tonumber(length))",
        "return tonumber(deadline)",
        test_extend.test_clock_set_back_does_not_stretch_a_dead_waiter,
    ),
    Mutation(
        "a token follows the last one",
        "if last and tonumber(last) >= now_us then",
        "if false then",
        test_keys.test_token_grows_when_the_clock_was_set_back,
    ),
    Mutation(
        "a token follows the clock",
        "local token, keep = stamp, retention",
        "local token, keep = '1', retention",
        test_keys.test_token_grows_across_the_expiry_of_its_key,
    ),
    Mutation(
        "a token is remembered for its own time",
        "keep = retention + math.ceil(token / 1000) - now",
        "keep = retention",
        test_keys.test_token_is_remembered_until_its_own_time_is_over,
    ),
    Mutation(
        "a token is never forgotten earlier than promised",
        "if redis.call('PTTL', key) < keep then",
        "if true then",
        test_keys.test_token_is_never_forgotten_earlier_than_promised_before,
    ),
    Mutation(
        "a token is printed in full",
        "return string.format(number < 2147483648 and '%d' or '%.0f', number)",
        "return tostring(number)",
        test_keys.test_token_grows_when_the_clock_was_set_back,
    ),
    Mutation(
        "the state outlives its records",
        "keep_until(state, record.closed_until)",
        "local _ = nil",
        test_keys.test_every_key_has_a_ttl_that_covers_its_records,
    ),
    Mutation(
        "the queue outlives its waiters",
        "keep_queue_until(queue, waiters, waiter.deadline)",
        "local _ = nil",
        test_keys.test_every_key_has_a_ttl_that_covers_its_records,
    ),
    Mutation(
        "the first write is one that an out-of-memory server refuses",
        "  record.token = token or next_token(token_key, options.retention)\n"
        "  write_record(state, record)",
        "  bury(state, dead)\n"
        "  record.token = token or next_token(token_key, options.retention)\n"
        "  write_record(state, record)",
        test_keys.test_acquire_refused_for_want_of_memory_has_done_nothing,
    ),
    Mutation(
        "a grant that comes with a reply is that client's own",
        "if record.client == options.reader then",
        "if options.reader then",
        test_leave.test_what_a_release_grants_to_its_own_client_comes_with_its_reply,
    ),
    Mutation(
        "a leave that finds waiters needs no memory",
        "need_no_memory(state)\nlocal result",
        "local result",
        test_keys.test_server_out_of_memory_still_extends_hands_off_withdraws_and_breaks,
        in_general=True,
    ),
    Mutation(
        "an extension needs no memory",
        "need_no_memory(state)\nlocal why",
        "local why",
        test_keys.test_server_out_of_memory_still_extends_hands_off_withdraws_and_breaks,
    ),
    Mutation(
        "a lease that ran out early keeps its lock-delay",
        "elseif why == 'lost' and (record.delay > 0 or",
        "elseif why == 'lost' and (",
        test_leave.test_leaving_a_lease_lost_early_keeps_its_lock_delay,
    ),
    Mutation(
        "a lease that ran out early keeps what is left of its hold",
        "or keeps and string.find(record.words, ' b=1', 1, true)) then",
        ") then",
        test_hold.test_lease_lost_just_before_its_deadline_keeps_what_is_left_of_its_hold,
    ),
    Mutation(
        "thousands of dead holders are removed in pieces",
        "for first = 1, #dead, 1000 do",
        "for first = 1, #dead, 1000000 do",
        test_extend.test_dead_holders_are_swept_in_any_number,
    ),
    Mutation(
        "an owner that shares is refused exclusively",
        "if mode == 'x' and not held_exclusive then",
        "if false then",
        test_acquire.test_sharing_owner_that_asks_exclusively_is_refused,
    ),
]


# -- the short ways of a server's scripts --------------------------------------------------------------

ACQUIRE, LEAVE = ("acquire",), ("leave",)

#: Also held against the general ways, like those below, in tests/model/test_short_ways.py.
SHORT_WAYS = [
    Mutation(
        "what is granted shortly is held by nobody",
        "if present == 0 and how == '' then",
        "if redis.call('EXISTS', queue, waiters, marker) == 0 and how == '' then",
        test_acquire.test_nowait_is_refused_and_leaves_nothing,
        ACQUIRE,
    ),
    Mutation(
        "and has no queue",
        "if present == 0 and how == '' then",
        "if redis.call('EXISTS', state, waiters, marker) == 0 and how == '' then",
        test_acquire.test_name_that_lost_two_keys_is_granted_and_leaves_nothing_of_the_third,
        ACQUIRE,
    ),
    Mutation(
        "nor waiters",
        "if present == 0 and how == '' then",
        "if redis.call('EXISTS', state, queue, marker) == 0 and how == '' then",
        test_acquire.test_name_that_lost_two_keys_is_granted_and_leaves_nothing_of_the_third,
        ACQUIRE,
    ),
    Mutation(
        "nor a marker of the request",
        "if present == 0 and how == '' then",
        "if redis.call('EXISTS', state, queue, waiters) == 0 and how == '' then",
        test_leave.test_late_duplicate_after_an_ordinary_release_is_refused,
        ACQUIRE,
    ),
    Mutation(
        "the state outlives who is granted shortly",
        "  redis.call('PEXPIRE', state, int(ttl + delay + 2))\n",
        "",
        test_keys.test_every_key_has_a_ttl_that_covers_its_records,
        ACQUIRE,
    ),
    Mutation(
        "and its lock-delay",
        "int(ttl + delay + 2)",
        "int(ttl + 2)",
        test_keys.test_every_key_has_a_ttl_that_covers_its_records,
        ACQUIRE,
    ),
    Mutation(
        "who is queued shortly is refused by no marker",
        "if present == 3 then",
        "if present >= 3 then",
        test_acquire.test_marker_refuses_a_late_duplicate_also_when_many_wait,
        ACQUIRE,
    ),
    Mutation(
        "and waits for one holder alone",
        "#holding == 2 and redis",
        "#holding >= 2 and redis",
        test_acquire.test_newcomer_clamps_every_holder_that_a_clock_set_back_has_stretched,
        ACQUIRE,
        rare=True,
    ),
    Mutation(
        "who is there",
        "#holding == 2 and redis",
        "#holding <= 2 and redis",
        test_acquire.test_marker_refuses_a_late_duplicate_also_when_a_key_was_lost,
        ACQUIRE,
    ),
    Mutation(
        "behind somebody in the queue",
        "local waiter = head and redis",
        "local waiter = head ~= false and redis",
        test_acquire.test_marker_refuses_a_late_duplicate_also_when_a_key_was_lost,
        ACQUIRE,
        rare=True,
    ),
    Mutation(
        "of whom there is a record",
        "  if waiter then\n    local held_mode",
        "  if head then\n    local held_mode",
        test_acquire.test_marker_refuses_a_late_duplicate_also_when_a_key_was_lost,
        ACQUIRE,
    ),
    Mutation(
        "the holder is exclusive: a semaphore's limit is compared, also when many wait",
        "if held_mode == 'x' and holder",
        "if holder",
        test_acquire.test_semaphore_of_another_limit_is_refused_also_when_many_wait,
        ACQUIRE,
    ),
    Mutation(
        "and another owner",
        " and holder ~= owner",
        "",
        test_acquire.test_owner_that_holds_gets_in_again_with_its_token_whoever_waits,
        ACQUIRE,
    ),
    Mutation(
        "and alive",
        " and held > 0",
        "",
        test_acquire.test_newcomer_stands_behind_the_waiters_of_a_name_just_freed,
        ACQUIRE,
    ),
    Mutation(
        "and not stretched by a clock set back",
        " and held <= tonumber(length)",
        "",
        test_acquire.test_newcomer_clamps_what_a_clock_set_back_has_stretched,
        ACQUIRE,
    ),
    Mutation(
        "the head stands in its own place",
        "and place == head[1] ",
        "",
        test_acquire.test_newcomer_drops_a_place_that_is_nobodys,
        ACQUIRE,
        rare=True,
    ),
    Mutation(
        "and is alive",
        " and waits > 0",
        "",
        test_acquire.test_newcomer_behind_a_dead_waiter_is_the_head,
        ACQUIRE,
    ),
    Mutation(
        "and not stretched by a clock set back either",
        " and waits <= tonumber(waits_for)",
        "",
        test_acquire.test_newcomer_clamps_what_a_clock_set_back_has_stretched,
        ACQUIRE,
    ),
    Mutation(
        "who waits already is not queued anew",
        "      and redis.call('HEXISTS', waiters, id) == 0\n",
        "",
        test_acquire.test_known_waiter_keeps_its_one_place,
        ACQUIRE,
    ),
    Mutation(
        "who does not wait is not queued, also when many wait",
        "return ARGV[11] == 'nowait' and 'busy' or queue_up('-1')",
        "return queue_up('-1')",
        test_acquire.test_nowait_is_refused_and_leaves_nothing,
        ACQUIRE,
    ),
    Mutation(
        "the queue outlives who is queued",
        "  keep_queue_until(queue, waiters, now + ARGV[5])\n",
        "",
        test_keys.test_every_key_has_a_ttl_that_covers_its_records,
        ACQUIRE,
    ),
    Mutation(
        "what is released shortly has no queue",
        "if quiet and ARGV[5] == '0'",
        "if redis.call('EXISTS', waiters) == 0 and ARGV[5] == '0'",
        test_leave.test_release_of_a_name_that_lost_half_its_queue_leaves_only_the_token,
        LEAVE,
    ),
    Mutation(
        "nor waiters",
        "if quiet and ARGV[5] == '0'",
        "if redis.call('EXISTS', queue) == 0 and ARGV[5] == '0'",
        test_leave.test_release_of_a_name_that_lost_half_its_queue_leaves_only_the_token,
        LEAVE,
    ),
    Mutation(
        "the marker is written also when nobody waits",
        "if quiet and ARGV[5] == '0' and ",
        "if quiet and ",
        test_leave.test_late_duplicate_after_an_ordinary_release_is_refused,
        LEAVE,
    ),
    Mutation(
        "a lease that was lost is not released shortly",
        "if quiet and ARGV[5] == '0' and why == 'ended' then",
        "if quiet and ARGV[5] == '0' then",
        test_leave.test_lease_lost_early_keeps_its_lock_delay_also_without_a_marker,
        LEAVE,
    ),
    Mutation(
        "nor one that is not there",
        "if text and not string.find(text, ' h=', 1, true) and now < ",
        "if not string.find(text, ' h=', 1, true) and now < ",
        test_extend.test_broken_holder_is_told_so,
        LEAVE,
    ),
    Mutation(
        "nor an overdue one",
        " and now < tonumber(string.match(text, '^[^ ]+ [^ ]+ ([^ ]+)')) then",
        " then",
        test_leave.test_leaving_late_does_not_open_a_name_before_its_lock_delay_is_over,
        LEAVE,
    ),
    Mutation(
        "the marker is written also when somebody waits",
        "if not quiet and ARGV[5] == '0' and ",
        "if not quiet and ",
        test_leave.test_late_duplicate_is_refused_also_after_a_hand_off,
        LEAVE,
    ),
    Mutation(
        "a lease that was lost is not handed off shortly",
        "if not quiet and ARGV[5] == '0' and why == 'ended' then",
        "if not quiet and ARGV[5] == '0' then",
        test_leave.test_lease_lost_early_keeps_its_lock_delay_also_without_a_marker,
        LEAVE,
    ),
    Mutation(
        "who hands off shortly is the only holder",
        "if #holding ~= 2 or holding[1] ~= id then",
        "if holding[1] ~= id then",
        test_acquire.test_writer_gets_in_after_the_last_reader,
        LEAVE,
    ),
    Mutation(
        "and the one who leaves",
        "if #holding ~= 2 or holding[1] ~= id then",
        "if #holding ~= 2 then",
        test_leave.test_head_that_withdraws_gives_the_next_one_hint,
        LEAVE,
    ),
    Mutation(
        "and not overdue",
        "if now >= tonumber(held_until) or not head or has",
        "if not head or has",
        test_leave.test_overdue_holder_leaves_too_late_also_when_somebody_waits,
        LEAVE,
    ),
    Mutation(
        "it goes to somebody",
        "if now >= tonumber(held_until) or not head or has",
        "if now >= tonumber(held_until) or has",
        test_leave.test_release_of_a_name_that_lost_half_its_queue_leaves_only_the_token,
        LEAVE,
    ),
    Mutation(
        "of whom there is a record",
        "read_place(text or '')",
        "read_place(text)",
        test_leave.test_release_of_a_name_that_lost_half_its_queue_leaves_only_the_token,
        LEAVE,
    ),
    Mutation(
        "who stands in its own place",
        "if place == stream_id then",
        "if place then",
        test_extend.test_waiter_that_lost_its_record_and_asks_again_stands_at_the_end,
        LEAVE,
        rare=True,
    ),
    Mutation(
        "and is alive",
        "return left > 0 and left",
        "return left",
        test_leave.test_ghosts_at_the_head_are_skipped,
        LEAVE,
    ),
    Mutation(
        "and not stretched by a clock set back",
        " and left <= tonumber(length) and left",
        " and left",
        test_leave.test_hand_off_clamps_what_a_clock_set_back_has_stretched,
        LEAVE,
    ),
    Mutation(
        "and is looked at",
        "if not left or mode ~= 'x' or has",
        "if mode ~= 'x' or has",
        test_leave.test_one_ghost_at_the_head_is_skipped,
        LEAVE,
    ),
    Mutation(
        "and exclusive",
        "if not left or mode ~= 'x' or has",
        "if not left or has",
        test_acquire.test_readers_at_the_head_are_granted_together_up_to_the_first_writer,
        LEAVE,
    ),
    Mutation(
        "the one behind it is alive, too",
        "if not second_left or ",
        "if ",
        test_leave.test_ghosts_in_the_middle_are_skipped,
        LEAVE,
    ),
    Mutation(
        "and another owner's",
        " or second_owner == owner",
        "",
        test_leave.test_owner_that_is_handed_a_name_has_it_for_its_next_request_too,
        LEAVE,
    ),
    Mutation(
        "who is handed a name keeps the deadline it had",
        "token .. ' ' .. deadline .. ' '",
        "token .. ' ' .. int(now + length) .. ' '",
        test_extend.test_granted_waiter_keeps_its_deadline_until_it_extends,
        LEAVE,
    ),
    Mutation(
        "the state lives as long",
        "  redis.call('PEXPIRE', state, int(closed_for + 2))\n",
        "",
        test_leave.test_state_outlives_who_is_handed_the_name_and_its_lock_delay,
        LEAVE,
    ),
    Mutation(
        "and its lock-delay longer",
        "int(closed_for + 2)",
        "int(left + 2)",
        test_leave.test_state_outlives_who_is_handed_the_name_and_its_lock_delay,
        LEAVE,
    ),
    Mutation(
        "a hand-off needs no memory",
        "redis.call('HDEL', state, '')\n  local token",
        "local token",
        test_keys.test_server_out_of_memory_still_extends_hands_off_withdraws_and_breaks,
        LEAVE,
    ),
    Mutation(
        "the old record is removed after the new one is written, also in a short hand-off",
        "redis.call('HDEL', state, '')\n  local token",
        "redis.call('HDEL', state, '', id)\n  local token",
        test_leave.test_state_key_never_vanishes_in_a_hand_off,
        LEAVE,
        rare=True,
    ),
    Mutation(
        "the queue goes with its last waiter",
        "  if second then\n    redis.call('XDEL'",
        "  if true then\n    redis.call('XDEL'",
        test_leave.test_queue_that_was_served_leaves_only_the_token,
        LEAVE,
    ),
    Mutation(
        "and stays with the others",
        "  if second then\n    redis.call('XDEL'",
        "  if false then\n    redis.call('XDEL'",
        test_acquire.test_grants_follow_the_order_of_arrival,
        LEAVE,
    ),
    Mutation(
        "who is of the same client hears by the reply, also of a short hand-off",
        "local own = client == own_client",
        "local own = false",
        test_leave.test_what_a_release_hands_to_its_own_client_comes_with_its_reply,
        LEAVE,
    ),
    Mutation(
        "and nobody else",
        "local own = client == own_client",
        "local own = true",
        test_leave.test_hand_off_says_so_to_the_one_who_waits_and_to_nobody_else,
        LEAVE,
    ),
    Mutation(
        "the next one behind is told to look",
        "if second and closed_for < asks_in then",
        "if false then",
        test_leave.test_hand_off_to_a_short_lease_hints_the_next_head_once,
        LEAVE,
    ),
    Mutation(
        "unless it asks soon enough",
        "if second and closed_for < asks_in then",
        "if second then",
        test_leave.test_hand_off_says_so_to_the_one_who_waits_and_to_nobody_else,
        LEAVE,
    ),
    Mutation(
        "which a lock-delay makes sooner",
        "if second and closed_for < asks_in then",
        "if second and left < asks_in then",
        test_leave.test_hand_off_hints_nobody_who_asks_within_the_lock_delay,
        LEAVE,
    ),
    Mutation(
        "if there is one",
        "if second and closed_for < asks_in then",
        "if closed_for < (asks_in or 1e9) then",
        test_leave.test_notice_carries_request_and_token,
        LEAVE,
    ),
]


# -- the short ways of a quorum's scripts --------------------------------------------------------------

VOTE, UNVOTE = ("vote",), ("unvote",)

SHORT_WAYS_OF_A_QUORUM = [
    Mutation(
        "who tries gets no place, also when many wait",
        "if what == 'ask' and redis",
        "if what ~= 'fence' and what ~= 'held' and redis",
        test_votes.test_try_leaves_no_place_also_when_many_wait,
        VOTE,
    ),
    Mutation(
        "nor does who writes a token",
        "if what == 'ask' and redis",
        "if what ~= 'try' and what ~= 'held' and redis",
        test_votes.test_fence_leaves_no_place_also_when_many_wait,
        VOTE,
    ),
    Mutation(
        "who holds is not refused a place for want of memory, also when many wait",
        "if what == 'ask' and redis",
        "if what ~= 'try' and what ~= 'fence' and redis",
        test_votes.test_node_out_of_memory_takes_back_who_holds_and_extends_who_waits,
        VOTE,
    ),
    Mutation(
        "who is queued shortly is refused by no marker",
        "keys.waiters, marker) == 3",
        "keys.waiters) == 3",
        test_votes.test_late_duplicate_is_refused_also_when_many_wait,
        VOTE,
    ),
    Mutation(
        "and waits for one vote alone",
        "#given == 2 and redis",
        "#given >= 2 and redis",
        test_votes.test_newcomer_clamps_what_a_clock_set_back_has_stretched,
        VOTE,
        rare=True,
    ),
    Mutation(
        "which is there",
        "#given == 2 and redis",
        "#given <= 2 and redis",
        test_votes.test_late_duplicate_is_refused_also_by_a_node_that_lost_a_key,
        VOTE,
        rare=True,
    ),
    Mutation(
        "behind somebody in the queue",
        "oldest and redis.call('HGET'",
        "oldest ~= false and redis.call('HGET'",
        test_votes.test_late_duplicate_is_refused_also_by_a_node_that_lost_a_key,
        VOTE,
    ),
    Mutation(
        "of whom there is a record",
        "if waiter then\n    local given_mode",
        "if oldest then\n    local given_mode",
        test_votes.test_late_duplicate_is_refused_also_by_a_node_that_lost_a_key,
        VOTE,
        rare=True,
    ),
    Mutation(
        "the vote that it waits for is exclusive",
        "given_mode == 'x' and ",
        "",
        test_votes.test_newcomer_lets_in_a_reader_whose_writer_died,
        VOTE,
        rare=True,
    ),
    Mutation(
        "and not its owner's",
        " and given_to ~= owner",
        "",
        test_votes.test_named_owner_enters_again_with_its_token_past_all_who_wait,
        VOTE,
    ),
    Mutation(
        "and alive",
        " and given_left > 0",
        "",
        test_votes.test_newcomer_hands_an_overdue_vote_on,
        VOTE,
    ),
    Mutation(
        "and not stretched by a clock set back",
        " and given_left <= tonumber(given_for)",
        "",
        test_votes.test_newcomer_clamps_what_a_clock_set_back_has_stretched,
        VOTE,
    ),
    Mutation(
        "and not of the oldest waiter's owner",
        "and given_to ~= waits_too ",
        "",
        test_votes.test_newcomer_lets_in_an_owner_that_holds_when_who_was_before_it_died,
        VOTE,
        rare=True,
    ),
    Mutation(
        "the oldest waiter is alive",
        " and waits_left > 0",
        "",
        test_votes.test_newcomer_behind_a_dead_waiter_is_the_oldest,
        VOTE,
    ),
    Mutation(
        "and not stretched by a clock set back either",
        " and waits_left <= tonumber(waits_for)",
        "",
        test_votes.test_newcomer_clamps_what_a_clock_set_back_has_stretched,
        VOTE,
    ),
    Mutation(
        "and older",
        "and tonumber(ticket) < tonumber(ARGV[7]) ",
        "",
        test_votes.test_newcomer_with_an_older_ticket_is_told_when_to_look,
        VOTE,
    ),
    Mutation(
        "not as old, for then the ids decide",
        "tonumber(ticket) < tonumber(ARGV[7])",
        "tonumber(ticket) <= tonumber(ARGV[7])",
        test_votes.test_newcomer_with_an_older_ticket_is_told_when_to_look,
        VOTE,
    ),
    Mutation(
        "who waits already is not queued anew",
        " and redis.call('HEXISTS', keys.waiters, id) == 0",
        "",
        test_votes.test_waiter_that_asks_for_less_keeps_its_deadline,
        VOTE,
    ),
    Mutation(
        "nor refused for want of memory",
        " and redis.call('HEXISTS', keys.waiters, id) == 0",
        "",
        test_votes.test_node_out_of_memory_takes_back_who_holds_and_extends_who_waits,
        VOTE,
    ),
    Mutation(
        "the queue outlives who is queued shortly",
        "      keep_queue_until(keys.queue, keys.waiters, now + length)\n",
        "",
        test_votes.test_place_of_a_newcomer_lives_as_long_as_it,
        VOTE,
    ),
    Mutation(
        "a lease that was lost is not handed on shortly",
        "if is_queue and what == 'ended' and ARGV[3] == '0' then",
        "if is_queue and what ~= 'yield' and ARGV[3] == '0' then",
        test_votes.test_lease_lost_early_keeps_its_lock_delay_also_when_somebody_waits,
        UNVOTE,
    ),
    Mutation(
        "nor what is given back",
        "if is_queue and what == 'ended' and ARGV[3] == '0' then",
        "if is_queue and what ~= 'lost' and ARGV[3] == '0' then",
        test_votes.test_yield_goes_to_the_older_request_and_the_younger_waits_on,
        UNVOTE,
    ),
    Mutation(
        "the marker is written also when somebody waits",
        "if is_queue and what == 'ended' and ARGV[3] == '0' then",
        "if is_queue and what == 'ended' then",
        test_votes.test_late_duplicate_is_refused_also_when_many_wait,
        UNVOTE,
    ),
    Mutation(
        "what is handed on shortly is the only vote",
        "#given ~= 2 or ",
        "",
        test_votes.test_named_owner_enters_again_with_its_token_past_all_who_wait,
        UNVOTE,
    ),
    Mutation(
        "and that of the one who leaves",
        "given[1] ~= id or ",
        "",
        test_votes.test_waiter_that_withdraws_hands_nothing_on,
        UNVOTE,
    ),
    Mutation(
        "and not overdue",
        " or now >= tonumber((select(3, read_vote(given[2]))))",
        "",
        test_votes.test_overdue_holder_leaves_too_late_also_when_somebody_waits,
        UNVOTE,
        rare=True,
    ),
    Mutation(
        "of whom there is a record, too",
        "local left = mode and deadline - now",
        "local left = deadline - now",
        test_votes.test_holder_whose_followers_lost_their_place_leaves_none,
        UNVOTE,
    ),
    Mutation(
        "who is alive",
        "if left and left > 0 and left <=",
        "if left and left <=",
        test_votes.test_dead_waiter_is_passed,
        UNVOTE,
    ),
    Mutation(
        "and exclusive",
        "if mode ~= 'x' then",
        "if not mode then",
        test_votes.test_readers_enter_together_up_to_the_writer_that_waits,
        UNVOTE,
    ),
    Mutation(
        "and whose deadline no clock set back has stretched",
        "if left and left > 0 and left <= tonumber(length) and stage ~= 'h' and stage ~= 'w' then",
        "if left and left > 0 and stage ~= 'h' and stage ~= 'w' then",
        test_votes.test_hand_off_clamps_what_a_clock_set_back_has_stretched,
        UNVOTE,
    ),
    Mutation(
        "the one behind it is alive, too",
        "    if not second_left then\n      return\n    end\n",
        "    second_left, second_length = second_left or 0, second_length or 0\n",
        test_votes.test_dead_waiter_behind_the_next_one_is_dropped,
        UNVOTE,
    ),
    Mutation(
        "a vote is handed on with the deadline that its waiter had",
        "' ' .. deadline .. ' ' .. length",
        "' ' .. int(now + length) .. ' ' .. length",
        test_votes.test_given_vote_keeps_the_deadline_its_waiter_had,
        UNVOTE,
    ),
    Mutation(
        "the state lives as long",
        "  redis.call('PEXPIRE', keys.state, int(left + 2))\n",
        "",
        test_votes.test_given_vote_keeps_the_deadline_its_waiter_had,
        UNVOTE,
    ),
    Mutation(
        "a wanted token that is not taken is not what the vote says",
        "(proposed and ' p' or ' v')",
        "' p'",
        test_votes.test_wanted_token_that_is_not_larger_than_all_before_is_not_taken,
        UNVOTE,
    ),
    Mutation(
        "a vote that is handed on with a wanted token says so",
        "(proposed and ' p' or ' v')",
        "' v'",
        test_votes.test_next_vote_has_the_token_that_the_leaving_holder_wants_for_it,
        UNVOTE,
    ),
    Mutation(
        "a hand-off needs no memory",
        "redis.call('HDEL', keys.state, '')\n  local proposed",
        "local proposed",
        test_votes.test_node_out_of_memory_hands_its_vote_on,
        UNVOTE,
    ),
    Mutation(
        "the old vote is removed after the new one is written",
        "redis.call('HDEL', keys.state, '')\n  local proposed",
        "redis.call('HDEL', keys.state, id)\n  local proposed",
        test_votes.test_state_key_never_vanishes_in_a_hand_off,
        UNVOTE,
        rare=True,
    ),
    Mutation(
        "waiters that have no place go with the queue",
        "redis.call('DEL', keys.queue, keys.waiters)\n  end\n  redis.call('PEXPIRE'",
        "redis.call('DEL', keys.queue)\n  end\n  redis.call('PEXPIRE'",
        test_votes.test_last_waiter_to_be_followed_leaves_no_record_of_those_whose_place_was_lost,
        UNVOTE,
    ),
    Mutation(
        "the next one behind is told to look",
        "if second_id and left < asks_in then",
        "if false then",
        test_votes.test_hand_off_to_a_short_lease_hints_the_next_one_once,
        UNVOTE,
    ),
    Mutation(
        "unless it asks soon enough",
        "if second_id and left < asks_in then",
        "if second_id then",
        test_votes.test_hand_off_hints_nobody_who_asks_soon_enough,
        UNVOTE,
    ),
    Mutation(
        "if there is one",
        "if second_id and left < asks_in then",
        "if left < (asks_in or 1e9) then",
        test_votes.test_next_vote_has_the_token_that_the_leaving_holder_wants_for_it,
        UNVOTE,
    ),
]
MUTATIONS += [
    Mutation(
        "an unused grant closes nothing",
        "elseif why == 'ended' and keeps then",
        "elseif keeps then",
        test_hold.test_unused_grant_closes_nothing,
    ),
    Mutation(
        "nor one that came too late",
        "if why ~= 'unused' or not keeps then",
        "if true then",
        test_hold.test_grant_that_came_too_late_closes_nothing,
    ),
    Mutation(
        "the head is told that its name opens sooner",
        "nearer = record.closed_until < before",
        "nearer = false",
        test_hold.test_head_knows_when_the_name_opens,
    ),
    Mutation(
        "nothing is recorded without the lease",
        "if text and decode_record(id, text).live then",
        "if text then",
        test_once.test_only_who_holds_records,
    ),
    Mutation(
        "a repeated leave records nothing anew",
        "if redis.call('HGET', record_key, 'id') == id then",
        "if false then",
        test_once.test_repeated_leave_is_answered_from_the_record,
    ),
    Mutation(
        "a hold is not released shortly",
        "if text and not string.find(text, ' h=', 1, true) and now",
        "if text and now",
        test_hold.test_body_that_ends_early_leaves_the_name_closed_for_the_rest,
    ),
]
# What all scripts read and write with.
MUTATIONS += [
    Mutation(
        "a record is written anew only when the clock was set back",
        "if record.set_back then",
        "if true then",
        test_keys.test_refusal_writes_nothing_whoever_holds,
    ),
    Mutation(
        "and also by who only looks",
        "if record.set_back then",
        "if false then",
        test_keys.test_inspect_writes_what_it_clamps_when_the_clock_was_set_back,
    ),
    Mutation(
        "further words of a place need not tell a mode",
        "' m=([^ ]+)') or waiter.mode",
        "' m=([^ ]+)') or false",
        test_versions.test_word_of_a_later_version_survives_a_hand_off_and_extensions_by_this_one,
    ),
    Mutation(
        "the queue does not end before its waiters, and has an end",
        "if redis.call('PTTL', waiters) < left then",
        "if false then",
        test_keys.test_every_key_has_a_ttl_that_covers_its_records,
    ),
    Mutation(
        "a last token that was forgotten is not compared",
        "last and tonumber(last) > now_us and last or stamp",
        "tonumber(last) > now_us and last or stamp",
        test_acquire.test_token_floor_follows_the_clock_when_the_last_token_was_forgotten,
    ),
    Mutation(
        "the floor is the clock then",
        "last and tonumber(last) > now_us and last or stamp",
        "last and tonumber(last) > now_us and last or '0'",
        test_acquire.test_token_floor_follows_the_clock_when_the_last_token_was_forgotten,
    ),
    Mutation(
        "the floor is not below the last token",
        "last and tonumber(last) > now_us and last or stamp",
        "stamp",
        test_acquire.test_token_floor_holds_when_the_clock_was_set_back,
    ),
]
MUTATIONS += SHORT_WAYS + SHORT_WAYS_OF_A_QUORUM


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guard)
async def test_guard_taken_out_is_noticed(mutation: Mutation, store: Store, heard: Heard) -> None:
    raw = await store.raw()
    noticed = False
    for arguments in _arguments(mutation.noticed_by, raw, mutation.sources(), store, heard):
        try:
            await mutation.noticed_by(**arguments)
        except (AssertionError, redis.ResponseError):
            noticed = True
        await raw.config_set("maxmemory", "0")
        await raw.flushall()
    assert noticed, f"{mutation.noticed_by.__name__} is content without it"


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize(
    # Each once, and in the same order in every process that collects them.
    "check",
    list(dict.fromkeys(mutation.noticed_by for mutation in MUTATIONS)),
    ids=lambda check: check.__name__,
)
async def test_whoever_notices_is_content_with_the_scripts_as_they_are(
    check: Check, store: Store
) -> None:
    """Called in this way, and not only by pytest."""
    raw = await store.raw()
    for arguments in _arguments(check, raw, {}, store, None):
        if "heard" in arguments:
            arguments["heard"] = await Heard.on(await store.raw(), CLIENTS)
        await check(**arguments)
        if "heard" in arguments:
            await arguments["heard"].aclose()
        await raw.config_set("maxmemory", "0")
        await raw.flushall()


def _arguments(
    check: Check, raw: Any, sources: dict[str, str], store: Store, heard: Heard | None
) -> list[dict[str, Any]]:
    """Return what to call a test with: once, or once per value that it is parametrised with."""
    fixtures = {
        "direct": Direct(raw, sources=sources),
        "once": Direct(raw, kind="once", sources=sources),
        "node": test_votes.Node(raw, sources=sources),
        "store": store,
        "real_store": store,
        "heard": heard,
    }
    names = inspect.signature(check).parameters
    given = {name: value for name, value in fixtures.items() if name in names}
    for mark in getattr(check, "pytestmark", []):
        if mark.name == "parametrize":
            return [{**given, mark.args[0]: value} for value in mark.args[1]]
    return [given]
