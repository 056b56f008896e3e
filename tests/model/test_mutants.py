"""What the model test is worth: each rule taken out of the scripts, it must notice within its budget.

A mutant is one exact piece of the scripts and what stands there without the rule. The runs are the same
each time (derandomized), so that a mutant is noticed always or never. Rules that take a rare history to be
missed are not here: tests/protocol/test_guards.py has a history for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import redis
from hypothesis import Phase, Verbosity
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from aiodlock.backends.redis import scripts

from ..servers import Store
from .test_scripts import Locks, Semaphores, hold_against_the_reference

BUDGET = 10_000


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
        "    changed = true\n  end\nend",
        "    do return find_head(keys.queue, keys.waiters), true end\n  end\nend",
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
        "id = head.id, mode = head.mode, deadline = head.deadline,",
        "id = head.id, mode = head.mode, deadline = now + head.length,",
    ),
    Mutant(
        "a deadline is clamped when the clock was set back",
        "return math.min(tonumber(deadline), now + tonumber(length))",
        "return tonumber(deadline)",
    ),
    Mutant(
        "a holder's clamped deadline is written",
        "if record.set_back and not read_only then",
        "if false then",
    ),
    Mutant(
        "those of all waiters are written together",
        "local fields = redis.call('HGETALL', waiters)\n  for i = 1, #fields, 2 do",
        "local fields = redis.call('HGETALL', waiters)\n  for i = 1, 2, 2 do",
    ),
    # The common cases have a way of their own, where each of these would be the general way's to decide.
    Mutant("a short queueing is behind a live holder", "and held > 0 and", "and"),
    Mutant("and somebody else's", "and holder ~= owner and", "and"),
    Mutant("behind a live head", "and waits > 0 and", "and"),
    Mutant("and by one that does not wait yet", "and redis.call('HEXISTS', waiters, id) == 0", ""),
    Mutant("a short hand-off is the holder's", "or holding[1] ~= id then", "then"),
    Mutant("the only holder's", "if #holding ~= 2 or", "if"),
    Mutant("that is exclusive, also there", " or mode ~= 'x' then", " then"),
    Mutant(
        "who is of the same client hears by the reply",
        "local own = client == own_client",
        "local own = false",
    ),
    # Tokens and markers.
    Mutant(
        "a token is larger than the last one",
        "token = math.max(tonumber(last) + 1, now_us)",
        "token = math.max(tonumber(last), now_us)",
    ),
    Mutant(
        "also when the clock was set back",
        "token = math.max(tonumber(last) + 1, now_us)",
        "token = now_us",
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
        "if head.client == options.reader then",
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
        "if head and (changed or was_head) then\n  hint(keys, options, head, others)",
        "if head and changed then\n  hint(keys, options, head, others)",
    ),
]


@pytest.fixture
def _constants_of_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Hypothesis from trying constants that it finds in the modules of ours which happen to be
    loaded: other tests of the same process would change the histories."""
    monkeypatch.setattr(providers, "_get_local_constants", Constants)
    providers.CONSTANTS_CACHE.cache.clear()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_constants_of_no_module")
@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_model_test_notices_a_rule_taken_out(mutant: Mutant, store: Store) -> None:
    sources = mutant.sources()
    with pytest.raises((AssertionError, redis.ResponseError)):
        hold_against_the_reference(
            mutant.machine,
            store,
            BUDGET,
            sources,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
        )
