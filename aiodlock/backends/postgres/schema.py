"""The schema that a database needs: making it, and finding out which one is there."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Literal

from ..._errors import BackendError

if TYPE_CHECKING:
    import asyncpg

Durability = Literal["logged", "unlogged"]

#: What `schema.sql` makes. A client works with this version and no other.
VERSION = 1


def quoted(schema: str) -> str:
    """Return the schema's name as SQL has it."""
    return '"' + schema.replace('"', '""') + '"'


def create_statements(schema: str = "aiodlock", durability: Durability = "logged") -> str:
    """Return the SQL that makes everything, in one transaction."""
    name = quoted(schema)
    body = files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")
    unlogged = "unlogged" if durability == "unlogged" else ""
    body = (
        body.replace("@schema@", name)
        .replace("@unlogged@", unlogged)
        .replace("@is_unlogged@", "true" if unlogged else "false")
        .replace("@version@", str(VERSION))
    )
    return f"begin;\ncreate schema if not exists {name};\n{body}commit;\n"


async def installed_version(connection: asyncpg.Connection, schema: str) -> int | None:
    """Return the version of the schema that is there; None if there is none."""
    found = await connection.fetchval("select to_regclass($1)", f"{quoted(schema)}.meta")
    if found is None:
        return None
    version: int = await connection.fetchval(f"select version from {quoted(schema)}.meta")
    return version


async def install(
    connection: asyncpg.Connection, schema: str = "aiodlock", durability: Durability = "logged"
) -> bool:
    """Make the schema if it is not there; return whether it was made.

    :raises BackendError: when one of another version is there.
    """
    # Two that are installed at the same time: the second finds the first one's.
    await connection.execute("select pg_advisory_lock(1095323470)")
    try:
        version = await installed_version(connection, schema)
        if version is None:
            await connection.execute(create_statements(schema, durability))
            return True
    finally:
        await connection.execute("select pg_advisory_unlock(1095323470)")
    if version != VERSION:
        raise BackendError(
            f"schema {schema!r} has version {version}, and this aiodlock needs {VERSION}"
        )
    return False
