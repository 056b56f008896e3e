"""Put the token where it works: at the resource. Small helpers for Redis and for SQL.

A lock alone cannot stop a writer that was paused after it looked at its lease. The resource can: it
remembers the largest token it has seen and refuses a smaller one. The same token may write again.

In Redis, ``RedisGuard`` writes a value with its token in one script::

    guard = RedisGuard(redis)
    async with lock as lease:
        if not await guard.set("report", data, token=lease.token):
            ...                      # somebody with a newer token was here: stop writing

In SQL the token is a column of the row, and a clause of the UPDATE::

    fence = SQLFence()               # or SQLFence(column="lock_token", placeholder="%s")
    changed = execute(
        f"UPDATE account SET balance = ?, {fence.assignment} WHERE id = ? AND {fence.condition}",
        (balance, lease.token, id, lease.token),
    ).rowcount
    if not changed:
        ...                          # no such row, or a stale token: roll back, stop writing

A value that is made from the old one: raise the fence before the read, by an UPDATE that sets it
alone. Else a stale writer may write between the read and the write, and is written over.

A DELETE takes the condition alone. The row's token is gone with it, and a stale writer may insert it again:
where that matters, mark the row as deleted instead.

Tokens are below 2**53: a BIGINT column and a double both hold them exactly. They are comparable for one
name only, so guard each resource with the token of one lock, always the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from . import _options

_LARGEST_TOKEN = 2**53
_COLUMN = re.compile(
    r'(?:[A-Za-z_][A-Za-z0-9_]*|"[A-Za-z0-9_ ]+")'
    r'(?:\.(?:[A-Za-z_][A-Za-z0-9_]*|"[A-Za-z0-9_ ]+"))*'
)
_PLACEHOLDER = re.compile(r"\?|%s|[:$@?][A-Za-z0-9_]+|%\([A-Za-z0-9_]+\)s")

# One hash per resource: its value and the token it was written with.
#
# KEYS  1 the resource
# ARGV  1 token  2 value  3 ttl (ms), 0 for none
# Result  1 when written, 0 when the token is older than the resource's
_SET = """
local last = redis.call('HGET', KEYS[1], 'token')
if last and tonumber(ARGV[1]) < tonumber(last) then
  return 0
end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'value', ARGV[2])
if ARGV[3] == '0' then
  redis.call('PERSIST', KEYS[1])
else
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 1
"""


class RedisGuard:
    """Values in Redis that a stale writer cannot overwrite.

    Each is a hash with the fields ``value`` and ``token``, under ``prefix`` + key. Everybody who writes
    it has to do so by a guard, and writes it whole: between ``get`` and ``set`` a stale writer may get in.

    ```python
    from aiodlock.fencing import RedisGuard

    guard = RedisGuard(redis, prefix="guarded:")
    async with client.lock("report") as lease:
        written = await guard.set("report", "the text", token=lease.token)
    ```

    :param redis: a ``redis.asyncio.Redis`` or ``RedisCluster``; it stays yours.
    :param prefix: what the keys begin with.
    """

    def __init__(self, redis: Any, *, prefix: str = "") -> None:
        if not hasattr(redis, "__aenter__"):
            raise TypeError(f"redis must be a redis.asyncio.Redis or RedisCluster, not {redis!r}")
        self._redis = redis
        self._prefix = prefix

    async def set(
        self, key: str, value: bytes | str, *, token: int, ttl: float | None = None
    ) -> bool:
        """Write unless the key was written with a newer token; return whether it was written.

        ```python
        from aiodlock.fencing import RedisGuard

        async with client.lock("report") as lease:
            if not await RedisGuard(redis).set("report", "the text", token=lease.token):
                raise RuntimeError("a newer holder has written")
        ```

        :param token: the lease's. The same one may write again.
        :param ttl: seconds after which the key is gone, and its token forgotten: longer than any writer
            can be late. None keeps it.
        """
        token = _check_token(token)
        milliseconds = (
            0 if ttl is None else round(_options.check_seconds("ttl", ttl, least=0.001) * 1000)
        )
        written = await self._redis.eval(
            _SET, 1, self._prefix + key, str(token), value, str(milliseconds)
        )
        return bool(written)

    async def get(self, key: str) -> tuple[Any, int] | None:
        """Return the value and the token it was written with; None when there is none.

        The value is bytes, or str where the driver decodes.

        ```python
        from aiodlock.fencing import RedisGuard

        found = await RedisGuard(redis).get("report")
        if found is not None:
            value, token = found
        ```
        """
        value, token = await self._redis.hmget(self._prefix + key, "value", "token")
        return None if token is None else (value, int(token))


@dataclass(frozen=True, slots=True)
class SQLFence:
    """The pieces of SQL that refuse a stale writer. Both take the token as their parameter.

    ```python
    from aiodlock.fencing import SQLFence

    fence = SQLFence()
    statement = f"UPDATE account SET balance = ?, {fence.assignment} WHERE id = ? AND {fence.condition}"
    # execute(statement, (balance, lease.token, id, lease.token))
    ```

    :param column: the token's column: ``BIGINT NOT NULL DEFAULT 0``.
    :param placeholder: as the driver wants it: ``?`` (SQLite), ``%s`` (psycopg), ``$1`` or ``:token``.
    """

    column: str = "fence"
    placeholder: str = "?"

    def __post_init__(self) -> None:
        # Both become part of a statement.
        if not _COLUMN.fullmatch(self.column):
            raise ValueError(f"column must be the name of a column, not {self.column!r}")
        if not _PLACEHOLDER.fullmatch(self.placeholder):
            raise ValueError(
                f"placeholder must be one, such as '?' or '%s', not {self.placeholder!r}"
            )

    @property
    def definition(self) -> str:
        """For CREATE TABLE, or ALTER TABLE ... ADD COLUMN."""
        return f"{self.column} BIGINT NOT NULL DEFAULT 0"

    @property
    def assignment(self) -> str:
        """For SET: remember the token."""
        return f"{self.column} = {self.placeholder}"

    @property
    def condition(self) -> str:
        """For WHERE: true unless the row was written with a newer token."""
        return f"{self.column} <= {self.placeholder}"


def _check_token(token: int) -> int:
    """Return a fencing token, or raise TypeError or ValueError."""
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"token must be an int, not {token!r}: use lease.token")
    if not 0 < token < _LARGEST_TOKEN:
        raise ValueError(f"token must be from 1 to 2**53 - 1, and is {token}")
    return token
