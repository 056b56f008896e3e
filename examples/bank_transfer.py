"""Money moves between accounts: two locks at a time, and a token that the database checks.

Run it: ``python -m examples.bank_transfer [URL]`` (default: a store in this process).
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress

from aiodlock import Client, LockLost, MultiLease
from aiodlock.fencing import SQLFence

ACCOUNTS = 20
OPENING_BALANCE = 100
FENCE = SQLFence()


class StaleWriter(Exception):
    """Somebody with a newer token has written since."""


def open_bank(path: str = ":memory:") -> sqlite3.Connection:
    """Create accounts of 100 each."""
    database = sqlite3.connect(path)
    database.execute(f"CREATE TABLE account (id INTEGER PRIMARY KEY, balance, {FENCE.definition})")
    database.executemany(
        "INSERT INTO account (id, balance) VALUES (?, ?)",
        [(number, OPENING_BALANCE) for number in range(ACCOUNTS)],
    )
    database.commit()
    return database


def balance(database: sqlite3.Connection, account: int) -> int:
    """Return what is in the account."""
    row = database.execute("SELECT balance FROM account WHERE id = ?", (account,)).fetchone()
    return int(row[0])


def read(database: sqlite3.Connection, account: int, token: int) -> int:
    """Return what is in the account, and raise its fence.

    Else a paused writer could wake up between this and our own write, and we would write its change away.
    """
    check(
        database.execute(
            f"UPDATE account SET {FENCE.assignment} WHERE id = ? AND {FENCE.condition}",
            (token, account, token),
        ),
        account,
        token,
    )
    return balance(database, account)


def write(database: sqlite3.Connection, account: int, amount: int, token: int) -> None:
    """Set a balance, unless a newer token has been here."""
    check(
        database.execute(
            f"UPDATE account SET balance = ?, {FENCE.assignment} WHERE id = ? AND {FENCE.condition}",
            (amount, token, account, token),
        ),
        account,
        token,
    )


def check(done: sqlite3.Cursor, account: int, token: int) -> None:
    """Refuse what has changed no row."""
    if not done.rowcount:
        raise StaleWriter(f"account {account} was used with a newer token than {token}")


def name_of(account: int) -> str:
    """Return the name of an account's lock."""
    return f"account:{account}"


async def transfer(
    client: Client,
    database: sqlite3.Connection,
    source: int,
    target: int,
    amount: int,
    think: Callable[[], object] = lambda: None,
) -> None:
    """Move money. The locks are taken in one order, whichever direction it moves in."""
    if source == target or amount <= 0:
        # From an account to itself, the second write would win, and the money come out of nothing.
        raise ValueError(f"cannot move {amount} from account {source} to {target}")
    async with client.multilock(name_of(source), name_of(target)) as leases:
        with database:
            have = read(database, source, leases[name_of(source)].token)
            had = read(database, target, leases[name_of(target)].token)
        think()  # whatever takes time: others run meanwhile
        await asyncio.sleep(0)
        if have >= amount:
            move(database, leases, source, target, have - amount, had + amount)


def move(
    database: sqlite3.Connection,
    leases: MultiLease,
    source: int,
    target: int,
    source_balance: int,
    target_balance: int,
) -> None:
    """Write both in one transaction, each with the token of its own lock."""
    with database:  # commits, or rolls back when a token is stale
        write(database, source, source_balance, leases[name_of(source)].token)
        write(database, target, target_balance, leases[name_of(target)].token)


async def prove_that_a_stale_writer_is_refused(
    client: Client, database: sqlite3.Connection
) -> None:
    """One client reads and is paused for so long that its lease ends; it wakes up at the worst moment."""
    rich = max(range(ACCOUNTS), key=lambda account: balance(database, account))
    poor, other = (rich + 1) % ACCOUNTS, (rich + 2) % ACCOUNTS
    paused = await client.multilock(name_of(rich), name_of(poor), on_lost="flag").acquire()
    read_before = balance(database, rich), balance(database, poor)
    for account in (rich, poor):
        await client.break_lock(name_of(account))  # as if the lease had run out

    def wake_up() -> None:
        # It goes on as if nothing had happened; a lock alone could not stop it.
        try:
            move(database, paused, rich, poor, read_before[0] - 50, read_before[1] + 50)
        except StaleWriter as refused:
            print(f"refused: {refused}")
        else:
            raise AssertionError("the stale writer was let in")

    # The next holder has read, and has not written yet.
    await asyncio.create_task(transfer(client, database, rich, other, 1, think=wake_up))
    wake_up()  # and when it has written
    with suppress(LockLost):
        await paused.release()


async def main(
    source: str | list[str] = "memory://", *, tasks: int = 50, transfers: int = 4
) -> int:
    """Return the sum of all accounts after the transfers: what it was before."""
    database = open_bank()
    async with Client(source) as client:

        async def clerk() -> None:
            for _ in range(transfers):
                source, target = random.sample(range(ACCOUNTS), 2)
                await transfer(client, database, source, target, random.randint(1, 50))

        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(clerk())
        await prove_that_a_stale_writer_is_refused(client, database)
    total = int(database.execute("SELECT sum(balance) FROM account").fetchone()[0])
    database.close()
    print(f"{tasks * transfers} transfers, {total} in all accounts together")
    return total


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
