"""A column that refuses a writer whose lease was lost, with SQLAlchemy.

The lock keeps workers from doing the work at the same time. The fence column keeps a worker that was paused
for too long from overwriting what the next one has written.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from aiodlock import sync


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)
    fence: Mapped[int] = mapped_column(BigInteger, default=0)


class Stale(Exception):
    """A writer with a newer token was here."""


def read(session: Session, account_id: int, token: int) -> Account:
    """Return the account, and raise its fence: no older writer gets in between this and our own write."""
    check(session, account_id, token, fence=token)
    account: Account = session.get_one(Account, account_id)
    session.refresh(account)
    return account


def set_balance(session: Session, account_id: int, balance: int, token: int) -> None:
    """Write, unless somebody with a newer token was here."""
    check(session, account_id, token, fence=token, balance=balance)


def check(session: Session, account_id: int, token: int, **values: int) -> None:
    done = session.execute(
        update(Account).where(Account.id == account_id, Account.fence <= token).values(**values)
    )
    if done.rowcount == 0:
        raise Stale(f"account {account_id} was used with a newer token than {token}")


def deposit(locks: sync.Client, session: Session, account_id: int, amount: int) -> None:
    with locks.lock(f"account:{account_id}", timeout=10) as lease, session.begin():
        account = read(session, account_id, lease.token)
        set_balance(session, account_id, account.balance + amount, lease.token)
