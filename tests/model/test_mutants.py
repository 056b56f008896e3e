"""What the model test is worth: each rule taken out of the scripts or of the machine, it must notice within
its budget.

A mutant is one exact piece of the text and what stands there without the rule. The runs are the same
each time (derandomized), so that a mutant is noticed always or never. Rules that take a rare history to be
missed are not here: tests/protocol/test_guards.py has a history for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from hypothesis import Phase, Verbosity

from aiodlock.backends.memory.machine import Name
from aiodlock.backends.redis import scripts

from ..servers import Store
from .mutant import mutated
from .test_scripts import Locks, Onces, Semaphores, hold_against_the_machine

BUDGET = 20_000


@dataclass(frozen=True)
class Mutant:
    """`old`, wherever it stands in the scripts, becomes `new`."""

    rule: str
    old: str
    new: str
    machine: type[Locks] = Locks

    def sources(self) -> dict[str, str]:
        sources = {script.name: script.source.decode() for script in scripts.ALL}
        mutated = {
            name: source.replace(self.old, self.new)
            for name, source in sources.items()
            if self.old in source
        }
        assert mutated, f"this is not in the scripts any more: {self.old}"
        return mutated


MUTANTS = [
    # Who gets in, and in which order.
    Mutant(
        "nobody gets in past a waiter",
        "if not head and compatible(mode, holders) then",
        "if compatible(mode, holders) then",
    ),
    Mutant("a writer is alone", "return #holders == 0", "return #holders <= 1"),
    Mutant(
        "no reader beside a writer",
        "return not summary(holders).exclusive",
        "return true",
    ),
    Mutant("a semaphore has its limit", "if #holders >= limit then", "if false then", Semaphores),
    Mutant(
        "readers come in together",
        "    changed = true\n  end\n  for _",
        "    changed, head = true, find_head(keys.queue, keys.waiters)\n    break\n  end\n  for _",
    ),
    Mutant(
        "a release hands off",
        "local head, changed = grant_waiting(keys, options, others, granted)",
        "local head, changed = find_head(queue, waiters), false",
    ),
    Mutant(
        "a known waiter is not queued again",
        "local known = not quiet and redis.call('HGET', waiters, id)",
        "local known = false",
    ),
    # Owners.
    Mutant(
        "who shares does not come to exclude",
        "own.exclusive = own.exclusive or record.mode == 'x'",
        "own.exclusive = true",
    ),
    Mutant(
        "who enters again has the same token",
        "record.token = token or next_token(token_key, options.retention)",
        "record.token = next_token(token_key, options.retention)",
    ),
    Mutant(
        "an owner that holds by another request does not wait",
        "if waiter and not granted[id] and string.sub(owner, 1, 1) == 'u' then",
        "if false then",
    ),
    Mutant(
        "an overdue record gives its owner nothing",
        "if record.live then\n      local own",
        "if true then\n      local own",
    ),
    # The overdue.
    Mutant(
        "ghosts are skipped",
        "if own and now < waiter.deadline then\n      waiter.id = id",
        "if own then\n      waiter.id = id",
    ),
    Mutant(
        "an overdue holder is not revived",
        "if record.live then\n    push(record)",
        "if true then\n    push(record)",
    ),
    Mutant(
        "an overdue waiter is not revived",
        "if own and now < waiter.deadline then\n    push(waiter)",
        "if own then\n    push(waiter)",
    ),
    Mutant(
        "a lost name stays closed for its lock-delay",
        "if now < record.closed_until then",
        "if now < record.deadline then",
    ),
    # Leases.
    Mutant(
        "an extension never brings the deadline nearer",
        "record.deadline = math.max(record.deadline, now + length)",
        "record.deadline = now + length",
    ),
    Mutant(
        "a granted waiter keeps the deadline it had",
        "id = waiter.id, mode = waiter.mode, deadline = waiter.deadline,",
        "id = waiter.id, mode = waiter.mode, deadline = now + waiter.length,",
    ),
    Mutant(
        "a deadline is clamped when the clock was set back",
        "return math.min(tonumber(deadline), now + tonumber(length))",
        "return tonumber(deadline)",
    ),
    Mutant(
        "a holder's clamped deadline is written",
        "if record.set_back then",
        "if false then",
    ),
    Mutant(
        "those of all waiters are written together",
        "local fields = redis.call('HGETALL', waiters)\n  for i = 1, #fields, 2 do",
        "local fields = redis.call('HGETALL', waiters)\n  for i = 1, 2, 2 do",
    ),
    # The common cases have a way of their own, where each of these would be the general way's to decide.
    # (tests/protocol/test_guards.py takes out that they look whether a request is alive: it is rare here.)
    Mutant("and somebody else's", "and holder ~= owner and", "and"),
    Mutant("and by one that does not wait yet", "and redis.call('HEXISTS', waiters, id) == 0", ""),
    Mutant("a short hand-off is the holder's", "or holding[1] ~= id then", "then"),
    Mutant("the only holder's", "if #holding ~= 2 or", "if"),
    Mutant(
        "who is of the same client hears by the reply",
        "local own = client == own_client",
        "local own = false",
    ),
    # Tokens and markers.
    Mutant(
        "a token is larger than the last one",
        "token = int(last + 1)",
        "token = last",
    ),
    Mutant(
        "also when the clock was set back",
        "if last and tonumber(last) >= now_us then",
        "if false then",
    ),
    Mutant(
        "a marker refuses a late duplicate",
        "if redis.call('EXISTS', marker) == 1 then",
        "if false then",
    ),
    # Who is told what.
    Mutant(
        "a grant is told",
        "say(options.publish, channel, 'granted'",
        "say(options.publish, 'nobody', 'granted'",
    ),
    Mutant(
        "a grant is told by a reply only to its own client",
        "if record.client == options.reader then",
        "if options.reader then",
    ),
    Mutant(
        "a break is told",
        "say(options.publish, options.channel .. record.client, 'broken'",
        "say(options.publish, options.channel .. 'nobody', 'broken'",
    ),
    Mutant(
        "the head learns the earliest end of its blockers",
        "record.closed_until < earliest then",
        "record.closed_until > earliest then",
    ),
    Mutant(
        "the next head is told when the head withdraws",
        "if head and (changed or was_head or nearer) then\n  hint(keys, options, head, others)",
        "if head and (changed or nearer) then\n  hint(keys, options, head, others)",
    ),
    # Holds, limits in use, and what is done once.
    Mutant(
        "a body that never began closes nothing",
        "if string.find(words, ' b=1', 1, true) then",
        "if true then",
    ),
    Mutant(
        "a short body keeps the name closed",
        "elseif why == 'ended' and keeps then",
        "elseif false then",
    ),
    Mutant(
        "others follow the limit that was set",
        "elseif string.sub(used, -1) == 'r' then",
        "elseif false then",
        Semaphores,
    ),
    Mutant(
        "waiters have the limit in use",
        "waiter.mode = string.match(waiter.place_words, ' m=([^ ]+)') or waiter.mode",
        "local _ = nil",
        Semaphores,
    ),
    Mutant(
        "a success is recorded once",
        "if redis.call('HGET', record_key, 'id') == id then",
        "if false then",
        Onces,
    ),
    Mutant(
        "who waits is told of a success",
        "for _, client in ipairs(clients) do",
        "for _, client in ipairs({}) do",
        Onces,
    ),
    Mutant(
        "nobody is granted what is done",
        "if on_record then\n  return 'done ' .. on_record\nend\n\n-- Nobody holds",
        "-- Nobody holds",
        Onces,
    ),
]


@dataclass(frozen=True)
class MachineMutant:
    """`old`, which stands once in the machine of the memory store, becomes `new`."""

    rule: str
    old: str
    new: str
    machine: type[Locks] = Locks

    def name_class(self) -> type[Name]:
        return mutated(self.old, self.new)


MACHINE_MUTANTS = [
    # Who gets in, and in which order.
    MachineMutant(
        "nobody gets in past a waiter",
        "if not self.waiters and self._fits(asked):",
        "if self._fits(asked):",
    ),
    MachineMutant(
        "a writer is alone", "return not self.holders\n", "return len(self.holders) <= 1\n"
    ),
    MachineMutant("no reader beside a writer", "return not self._exclusive and (", "return ("),
    MachineMutant(
        "a semaphore has its limit",
        "len(self.holders) < self.limit)",
        "len(self.holders) <= self.limit)",
        Semaphores,
    ),
    MachineMutant(
        "readers come in together",
        "            changed = True\n        for entry",
        "            changed = True\n            break\n        for entry",
    ),
    MachineMutant(
        "a release hands off",
        "        changed = self._sweep_and_grant()\n        if changed or nearer",
        "        changed = False\n        if changed or nearer",
    ),
    MachineMutant(
        "a known waiter is not queued again",
        "if known is not None and self.now < known.deadline:\n            return self._waits(known)",
        "",
    ),
    # Owners.
    MachineMutant(
        "a reader does not come to exclude",
        "own.exclusive = own.exclusive or exclusive",
        "own.exclusive = True",
    ),
    MachineMutant(
        "an owner that enters again has the same token",
        "self._admit(entry, own.token)\n            entry.recalled",
        "self._admit(entry, self._next_token())\n            entry.recalled",
    ),
    MachineMutant(
        "an owner that holds by another request does not wait",
        "if id in self.waiters:\n            changed = self._join_owner",
        "if False:\n            changed = self._join_owner",
    ),
    MachineMutant(
        "an overdue record gives its owner nothing",
        "        if self.now < holder.deadline:\n            own =",
        "        if True:\n            own =",
    ),
    # The overdue.
    MachineMutant("ghosts are skipped", "if head.deadline <= now:", "if False:"),
    MachineMutant(
        "an overdue holder is not revived",
        "if holder is not None and now < holder.deadline:\n            holder.promise",
        "if holder is not None:\n            holder.promise",
    ),
    MachineMutant(
        "an overdue waiter is not revived",
        "if waiter is not None and now < waiter.deadline:\n            waiter.promise",
        "if waiter is not None:\n            waiter.promise",
    ),
    MachineMutant(
        "a lost name stays closed for its lock-delay",
        "if now < e.closed_until}",
        "if now < e.deadline}",
    ),
    MachineMutant(
        "also when its holder says that it lost it",
        'if end == "lost" and (holder.asked.delay or closes):',
        "if False:",
    ),
    # Leases.
    MachineMutant(
        "an extension never brings the deadline nearer",
        "self.deadline = max(self.deadline, now + length)",
        "self.deadline = now + length",
    ),
    MachineMutant(
        "nor the clamp",
        "self.length = max(length, self.deadline - now)",
        "self.length = length",
    ),
    MachineMutant(
        "a granted waiter keeps the deadline it had",
        "        self.holders[entry.asked.id] = entry\n",
        "        self.holders[entry.asked.id] = entry\n        entry.deadline = self.now + entry.length\n",
    ),
    MachineMutant(
        "a deadline is clamped when the clock was set back",
        "entry.deadline = min(entry.deadline, now + entry.length)",
        "pass",
    ),
    # Tokens and markers.
    MachineMutant(
        "a token is larger than the last one",
        "self.token = max(last + 1, self.now_us)",
        "self.token = max(last, self.now_us)",
    ),
    MachineMutant(
        "also when the clock was set back",
        "self.token = max(last + 1, self.now_us)",
        "self.token = self.now_us",
    ),
    MachineMutant(
        "a marker refuses a late duplicate",
        "if self._remembers(self.markers, asked.id):",
        "if False:",
    ),
    # Who is told what.
    MachineMutant(
        "a grant is told",
        '            self._messages.append(\n                Message("granted"',
        '            [].append(\n                Message("granted"',
    ),
    MachineMutant(
        "a break is told", 'self._messages.append(Message("broken"', '[].append(Message("broken"'
    ),
    MachineMutant(
        "the head learns the earliest end of its blockers",
        "return min((entry.closed_until for",
        "return max((entry.closed_until for",
    ),
    MachineMutant(
        "the next head is told when the head withdraws",
        'if changed or nearer or (was_head and reply != ("released",)):',
        "if changed or nearer:",
    ),
    MachineMutant(
        "the head is told when its blocker's owner will end sooner",
        "if sooner and not changed:",
        "if False:",
    ),
    MachineMutant(
        "a head that asks soon enough is told nothing",
        "if self._earliest_end() < next_extension:",
        "if True:",
    ),
]


def _some(mutants: Sequence[Mutant | MachineMutant]) -> list[Any]:
    """Mark all but each fourth as long: what the test of the machine notices, it notices of all or none."""
    return [
        pytest.param(mutant, id=mutant.rule, marks=pytest.mark.long if number % 4 else ())
        for number, mutant in enumerate(mutants)
    ]


@pytest.mark.usefixtures("_constants_of_no_module")
@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("mutant", _some(MUTANTS))
def test_model_test_notices_a_rule_taken_out(mutant: Mutant, store: Store) -> None:
    _is_noticed(mutant.machine, store, sources=mutant.sources())


@pytest.mark.usefixtures("_constants_of_no_module")
@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("mutant", _some(MACHINE_MUTANTS))
def test_model_test_notices_a_rule_taken_out_of_the_machine(
    mutant: MachineMutant, store: Store
) -> None:
    _is_noticed(mutant.machine, store, name=mutant.name_class())


def _is_noticed(machine: type[Locks], store: Store, **mutated: Any) -> None:
    with pytest.raises((AssertionError, redis.ResponseError)):
        hold_against_the_machine(
            machine,
            store,
            BUDGET,
            **mutated,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
        )
