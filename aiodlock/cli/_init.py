"""``aiodlock init``: what a store needs before its first lock, once."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from .. import BackendError, BackendUnavailable
from ..backends.sources import check_scheme

Durability = Annotated[
    Literal["logged", "unlogged"] | None,
    typer.Option(
        help="logged (the default): a grant is on the disk before it counts. unlogged: faster where the "
        "disk is slow; a crash of the server empties the tables, and nothing is granted until every lease "
        "of before has ended."
    ),
]
DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="AIODLOCK_URL",
        metavar="URL",
        help="The database: postgresql://user@host:port/database. Other stores need no init.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the SQL, and connect to nothing.")]

_SCHEMES = ("postgresql", "postgres")
_DONE = {
    "created": "created the schema aiodlock",
    "upgraded": "upgraded the schema aiodlock",
    "there": "nothing to do: the schema aiodlock is there",
}
#: Seconds in which the server has to answer.
_WITHIN = 10.0


async def create(url: str, durability: Literal["logged", "unlogged"] | None) -> str:
    """Create or upgrade the schema of a database; return what was done, as text.

    :raises ValueError: for a store that needs nothing.
    :raises BackendUnavailable: the database is unreachable.
    :raises BackendError: it has a schema of another version or durability, or refuses.
    """
    _check(url)
    from ..backends.postgres import sources as sources  # it says what to install
    from ..backends.postgres.connection import FAILURES, ask, connect, sqlstate_of, will_pass
    from ..backends.postgres.installing import install
    from ..backends.postgres.schema import VERSION
    from ..backends.postgres.sources import check_url

    where = check_url("--url", url)
    try:
        # Behind a pooler, prepared statements would meet those of others.
        connection = await connect(url, _WITHIN, statement_cache_size=0)
        try:
            installing = install(connection, durability, upgrade=True)
            done, kind = await ask(connection, installing, _WITHIN)
        finally:
            connection.terminate()
    except BackendUnavailable as busy:  # an OSError too
        raise BackendUnavailable(f"{where}: {busy}") from busy
    except FAILURES as failed:
        if not will_pass(failed):
            rights = sqlstate_of(failed) == "42501"
            hint = (
                ": init needs a role that may create a schema, or owns this one" if rights else ""
            )
            raise BackendError(f"{where} refused: {failed}{hint}") from failed
        away = isinstance(failed, OSError)
        hint = " (is the server running, and the URL right?)" if away else ""
        raise BackendUnavailable(
            f"{where}: {str(failed) or type(failed).__name__}{hint}"
        ) from failed
    return f"{where}: {_DONE[done]} (version {VERSION}, {kind})"


def statements(url: str, durability: Literal["logged", "unlogged"] | None) -> str:
    """Return the SQL that ``create`` runs where nothing is there yet."""
    _check(url)
    from ..backends.postgres.schema import create_statements

    return f"begin;\n{create_statements(durability or 'logged')}commit;\n"


def _check(url: str) -> None:
    scheme = check_scheme(url)
    if scheme not in _SCHEMES:
        raise ValueError(
            f"init is for postgresql://: a store of the kind {scheme}:// needs no preparation"
        )
