"""Making the schema in a database, and finding out which one is there."""

from __future__ import annotations

from typing import Literal

import asyncpg

from ..._errors import BackendError, BackendUnavailable
from .connection import Connection, transaction
from .schema import UPGRADES, VERSION, Durability, create_statements, wrong_version

#: The advisory lock of those that install.
_INSTALLING = 1095323470
#: How long one who installs waits for each lock (ms).
_LOCKED_MOST = 1500
_FUNCTIONS = "-- FUNCTIONS:"
_DROP_FUNCTIONS = """
do $$
declare
  f regprocedure;
begin
  for f in select oid from pg_proc where pronamespace = 'aiodlock'::regnamespace loop
    execute 'drop function ' || f;
  end loop;
end $$
"""
#: Functions have the rights of their owner, whoever upgrades. What they use is the owner's, too.
_GIVE_TO_OWNER = """
do $$
declare
  its_owner regrole := (select relowner from pg_class where oid = 'aiodlock.meta'::regclass);
  given text;
begin
  for given in
    select 'function ' || oid::regprocedure from pg_proc where pronamespace = 'aiodlock'::regnamespace
    union all
    select 'table ' || oid::regclass from pg_class
      where relnamespace = 'aiodlock'::regnamespace and relkind = 'r' and relowner <> its_owner
    union all
    select 'type aiodlock.situation'
  loop
    execute format('alter %s owner to %s', given, its_owner);
  end loop;
end $$
"""
#: Who may use functions besides their owner, which ones, and whether these are all.
_RIGHTS = """
select case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end,
  array_agg(p.proname::text),
  count(*) = (select count(*) from pg_proc where pronamespace = 'aiodlock'::regnamespace)
from pg_proc p cross join aclexplode(p.proacl) a
where p.pronamespace = 'aiodlock'::regnamespace and a.privilege_type = 'EXECUTE' and a.grantee <> p.proowner
group by a.grantee
"""
_FUNCTIONS_THERE = """
select proname::text, oid::regprocedure::text from pg_proc where pronamespace = 'aiodlock'::regnamespace
"""


async def installed(connection: Connection) -> tuple[int, Durability] | None:
    """Return version and durability of the schema that is there; None if there is none."""
    # Without a name: a pooler lends the session to others.
    there = await connection.prepare("select to_regclass('aiodlock.meta')", name="")
    if await there.fetchval() is None:
        return None
    meta = await connection.prepare("select version, durability from aiodlock.meta", name="")
    row = await meta.fetchrow()
    if row is None:
        raise BackendError(wrong_version(None))
    return row["version"], row["durability"]


async def install(
    connection: Connection, durability: Durability | None = None, *, upgrade: bool = False
) -> tuple[Literal["created", "upgraded", "there"], Durability]:
    """Make the schema if it is not there; return what was done, and the durability that there is.

    :param upgrade: make the present version of an older one. Nothing that is stored is lost, and every
        role keeps its rights. No client may run meanwhile.
    :raises BackendError: the schema that is there has another version or durability than asked for.
    :raises BackendUnavailable: another process is at it, and does not end.
    """
    try:
        async with transaction(connection):
            await connection.execute(f"set local lock_timeout = {_LOCKED_MOST}")
            # When two processes install at the same time, the second one waits, and finds the schema.
            await connection.execute(f"select pg_advisory_xact_lock({_INSTALLING})")
            found = await installed(connection)
            if found is None:
                await connection.execute(create_statements(durability or "logged"))
                return "created", durability or "logged"
            version, present = found
            if upgrade and min(UPGRADES) <= version < VERSION and durability in (None, present):
                await _upgrade(connection, version, present)
                return "upgraded", present
    except asyncpg.LockNotAvailableError as locked:
        raise BackendUnavailable(
            "another process installs the schema aiodlock, or has used its tables, and its transaction "
            "does not end: look for it in pg_stat_activity"
        ) from locked
    if version != VERSION and not (upgrade and version in UPGRADES):
        raise BackendError(wrong_version(version))
    if durability not in (None, present):
        raise BackendError(
            f"the schema aiodlock is there already, and is {present}: to change that, stop every client, "
            "run 'drop schema aiodlock cascade', and run 'aiodlock init' again. Every lock and every last "
            "token is forgotten then"
        )
    return "there", present


async def _upgrade(connection: Connection, version: int, durability: Durability) -> None:
    # Clients of before wait here, and are refused then. In the order of their calls: else one of them and
    # this one could wait for each other.
    await connection.execute(
        "lock table aiodlock.name, aiodlock.waiter, aiodlock.meta in access exclusive mode"
    )
    rights = await connection.fetch(_RIGHTS)
    await connection.execute(_DROP_FUNCTIONS)
    for step in range(version, VERSION):
        if UPGRADES[step]:
            await connection.execute(UPGRADES[step])
    await connection.execute(
        create_statements(durability).partition(_FUNCTIONS)[2].partition("\n")[2]
    )
    functions = await connection.fetch(_FUNCTIONS_THERE)
    for role, names, has_all in rights:
        those = ", ".join(there for name, there in functions if has_all or name in names)
        if those:
            await connection.execute(f"grant execute on function {those} to {role}")
    await connection.execute(_GIVE_TO_OWNER)
    await connection.execute(f"update aiodlock.meta set version = {VERSION}")
