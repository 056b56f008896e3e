"""The schema that a database needs: making it, and finding out which one is there."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

import asyncpg

from ..._errors import BackendError, BackendUnavailable
from .connection import Connection, transaction

Durability = Literal["logged", "unlogged"]

#: The version of what `schema.sql` makes. A client works with this version and no other.
VERSION = 9
#: The advisory lock of those that install.
_INSTALLING = 1095323470
#: How long one who installs waits for each lock (ms).
_LOCKED_MOST = 1500
#: Why nothing can be written by this session: what the server is, and what to do. Empty where it can.
READ_ONLY = """
select case
  when pg_is_in_recovery() then
    'is a standby, which is read-only: name the primary, or several hosts and '
    'target_session_attrs=read-write'
  when current_setting('transaction_read_only')::boolean then
    'has read-only sessions for this role: switch default_transaction_read_only off, for the server, the '
    'database or the role (ALTER ROLE the_role SET default_transaction_read_only = off)'
  else '' end
"""
#: What the tables need to become those of the next version, by the version that they have.
_UPGRADES = {
    2: """
        alter type aiodlock.holder add attribute lingers smallint;
        alter table aiodlock.waiter add column lingers boolean not null default false;
    """,
    3: "",  # only the functions have changed
    4: "",  # the same
    5: "",  # the same
    6: "",  # the same
    7: "",  # the same
    8: "",  # the same
}
_FUNCTIONS = "-- FUNCTIONS:"
#: What functions that clients call begin with. With enable_sort, the rows of a name would be collected and
#: sorted: beside a transaction that stays open these are all that ever were. With jit, servers before 18
#: compile a plan that has to do what is off, for 0.1 s: they count it as very expensive.
_CALLED = (
    "language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off "
    "set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_sort = off"
)
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
#: Those who may use the functions, besides the owner.
_GRANTEES = """
select distinct case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
from pg_proc p cross join aclexplode(p.proacl) a
where p.pronamespace = 'aiodlock'::regnamespace and a.privilege_type = 'EXECUTE' and a.grantee <> p.proowner
"""


def create_statements(durability: Durability = "logged") -> str:
    """Return the SQL that makes the schema; to be run in one transaction."""
    body = files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")
    unlogged = durability == "unlogged"
    return (
        body.replace("@unlogged@ table", "unlogged table" if unlogged else "table")
        .replace("@is_unlogged@", "true" if unlogged else "false")
        .replace("@version@", str(VERSION))
        .replace("@called@", _CALLED)
    )


async def installed(connection: Connection) -> tuple[int, Durability] | None:
    """Return version and durability of the schema that is there; None if there is none."""
    if await connection.fetchval("select to_regclass('aiodlock.meta')") is None:
        return None
    row = await connection.fetchrow("select version, durability from aiodlock.meta")
    assert row is not None
    return row["version"], row["durability"]


async def install(
    connection: Connection, durability: Durability | None = None, *, upgrade: bool = False
) -> Literal["created", "upgraded", "there"]:
    """Make the schema if it is not there; return what was done.

    :param upgrade: make the present version of an older one. Nothing that is stored is lost, and every
        role keeps its rights. No client may run meanwhile.
    :raises BackendError: the schema that is there has another version or durability than asked for.
    :raises BackendUnavailable: another process is at it, and does not end.
    """
    try:
        async with transaction(connection):
            await connection.execute(f"set local lock_timeout = {_LOCKED_MOST}")
            # When two processes install at the same time, the second one waits, and finds the schema.
            await connection.execute("select pg_advisory_xact_lock($1)", _INSTALLING)
            found = await installed(connection)
            if found is None:
                await connection.execute(create_statements(durability or "logged"))
                return "created"
            version, present = found
            if upgrade and min(_UPGRADES) <= version < VERSION and durability in (None, present):
                await _upgrade(connection, version, present)
                return "upgraded"
    except asyncpg.LockNotAvailableError as locked:
        raise BackendUnavailable(
            "another process installs the schema aiodlock, or has used its tables, and its transaction "
            "does not end: look for it in pg_stat_activity"
        ) from locked
    if version != VERSION:
        raise BackendError(wrong_version(version))
    if durability not in (None, present):
        raise BackendError(
            f"the schema aiodlock is there already, and is {present}: to change that, stop every client, "
            "run 'drop schema aiodlock cascade', and run 'aiodlock init' again. Every lock and every last "
            "token is forgotten then"
        )
    return "there"


async def _upgrade(connection: Connection, version: int, durability: Durability) -> None:
    # Clients of before wait here, and are refused then. In the order of their calls: else one of them and
    # this one could wait for each other.
    await connection.execute(
        "lock table aiodlock.name, aiodlock.waiter, aiodlock.meta in access exclusive mode"
    )
    grantees = [row[0] for row in await connection.fetch(_GRANTEES)]
    await connection.execute(_DROP_FUNCTIONS)
    for step in range(version, VERSION):
        if _UPGRADES[step]:
            await connection.execute(_UPGRADES[step])
    await connection.execute(
        create_statements(durability).partition(_FUNCTIONS)[2].partition("\n")[2]
    )
    for grantee in grantees:
        await connection.execute(f"grant execute on all functions in schema aiodlock to {grantee}")
    await connection.execute(f"update aiodlock.meta set version = {VERSION}")


def wrong_version(found: int) -> str:
    """Return what to tell about a schema of another version."""
    told = f"the schema aiodlock has version {found}, and this release of aiodlock needs version {VERSION}"
    if found > VERSION:
        return f"{told}: upgrade aiodlock here"
    if found in _UPGRADES:
        return f"{told}: stop every client, and run 'aiodlock init' of this release"
    return (
        f"{told}: stop every client, run 'drop schema aiodlock cascade', and run 'aiodlock init' of this "
        "release. Every lock and every last token is forgotten then"
    )


def missing(where: str) -> str:
    """Return what to tell about a database without the schema."""
    return (
        f"{where} has no schema aiodlock: create it once with 'aiodlock init --url postgresql://…', "
        "or with Client(…, create=True)"
    )
