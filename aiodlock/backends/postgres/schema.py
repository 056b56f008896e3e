"""The schema that a database needs: its statements, and what is told about another one. Needs no driver."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

Durability = Literal["logged", "unlogged"]

#: The version of what `schema.sql` makes. A client works with this version and no other.
VERSION = 19
#: Why nothing can be written by this session: what the server is, and what to do. Empty where it can.
READ_ONLY = """
select case
  when pg_catalog.pg_is_in_recovery() then
    'is a standby, which is read-only: name the primary, or several hosts and '
    'target_session_attrs=read-write'
  when pg_catalog.current_setting('transaction_read_only')::boolean then
    'has read-only sessions for this role: switch default_transaction_read_only off, for the server, the '
    'database or the role (ALTER ROLE the_role SET default_transaction_read_only = off)'
  else '' end
"""
#: After these versions only the functions have changed.
_FUNCTIONS_ALONE = (*range(3, 9), *range(13, 19))
#: What the tables need to become those of the next version, by the version that they have.
UPGRADES = dict.fromkeys(_FUNCTIONS_ALONE, "") | {
    2: """
        alter type aiodlock.holder add attribute lingers smallint;
        alter table aiodlock.waiter add column lingers boolean not null default false;
    """,
    9: "alter table aiodlock.meta replica identity full",
    10: "alter table aiodlock.record add column if not exists recorded_at bigint not null default 0",
    11: """
        create table if not exists aiodlock.history (
          timeline integer primary key, id text not null, born_us bigint not null
        )
    """,
    12: """
        create unlogged table if not exists aiodlock.wait (
          client text collate "C" primary key, serial bigint not null, record bytea not null,
          keep_until bigint not null
        )
    """,
}
_MAKE_ANEW = (
    "stop every client, run 'drop schema aiodlock cascade', and run 'aiodlock init' of this release. Every "
    "lock and every last token is forgotten then"
)
#: What functions that clients call begin with. With enable_sort, the rows of a name would be collected and
#: sorted: beside a transaction that stays open these are all that ever were. With jit, servers before 18
#: compile a plan that has to do what is off, for 0.1 s: they count it as very expensive.
_CALLED = (
    "language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off "
    "set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_sort = off"
)


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


def wrong_version(found: int | None) -> str:
    """Return what to tell about a schema of another version, or of none: its tables were emptied."""
    if found is None:
        return f"the tables of the schema aiodlock were emptied (TRUNCATE): {_MAKE_ANEW}"
    told = f"the schema aiodlock has version {found}, and this release of aiodlock needs version {VERSION}"
    if found > VERSION:
        return f"{told}: upgrade aiodlock here"
    if found in UPGRADES:
        return f"{told}: stop every client, and run 'aiodlock init' of this release"
    return f"{told}: {_MAKE_ANEW}"


def missing(where: str) -> str:
    """Return what to tell about a database without the schema."""
    return (
        f"{where} has no schema aiodlock: create it once with 'aiodlock init --url postgresql://…', "
        "or with Client(…, create=True)"
    )
