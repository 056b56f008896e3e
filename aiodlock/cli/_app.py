"""The commands and their options."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .. import BackendError, Client, LockInfo
from . import _doctor, _run, _show
from ._hand_overs import counting
from ._source import read_source

_T = TypeVar("_T")

#: What the commands have to say they say themselves.
logging.getLogger("aiodlock").addHandler(logging.NullHandler())

app = typer.Typer(
    help="Fair distributed locks on Redis and Valkey.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="AIODLOCK_URL",
        help="Where locks live: redis://host:port/db; several URLs with commas between them are a quorum.",
    ),
]
Prefix = Annotated[str, typer.Option(help="What every key begins with.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Argument(help="The lock's name.", metavar="NAME")]

_URL = "redis://localhost:6379/0"
_PREFIX = "aiodlock"


def _do(work: Coroutine[Any, Any, _T]) -> _T:
    """Run it; tell people about errors in one line, with the documented exit codes."""
    try:
        return asyncio.run(work)
    except BackendError as away:
        print(f"aiodlock: {away}", file=sys.stderr)
        raise typer.Exit(_run.UNAVAILABLE) from None
    except ImportError as missing:
        print(f"aiodlock: {missing}", file=sys.stderr)
        raise typer.Exit(_run.SOFTWARE) from None
    except (ValueError, TypeError) as wrong:
        print(f"aiodlock: {wrong}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(1) from None


@app.command(context_settings={"ignore_unknown_options": False})
def run(
    name: Name,
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    shared: Annotated[bool, typer.Option("--shared", help="Share the lock with readers.")] = False,
    ttl: Annotated[float, typer.Option(help="Seconds the lease lives without us.")] = 30.0,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait; without it, for ever.")
    ] = None,
    nonblock: Annotated[bool, typer.Option("--nonblock", "-n", help="Do not wait.")] = False,
    margin: Annotated[
        float | None,
        typer.Option(
            help="Seconds before the lease ends at which the command gets SIGTERM; it is killed at "
            "the end of them. Default: a quarter of the ttl, 5 at most."
        ),
    ] = None,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    as_json: Json = False,
) -> None:
    """Run a command while holding a lock.

    The command finds AIODLOCK_NAME, AIODLOCK_TOKEN and AIODLOCK_SEQUENCER in its environment. Ends with
    its exit code; 75 when the lock was not acquired, 76 when it was lost, 69 when the store is away.
    """
    if margin is None:
        margin = min(5.0, ttl / 4)
    if margin < _run.SHORTEST_MARGIN or margin >= ttl:
        raise typer.BadParameter(
            f"margin ({margin:g} s) must be at least {_run.SHORTEST_MARGIN} s and shorter than the "
            f"ttl ({ttl:g} s): the command needs time to end"
        )
    wanted = _run.Run(
        url=url,
        name=name,
        command=command,
        shared=shared,
        ttl=ttl,
        margin=margin,
        timeout=0.0 if nonblock else timeout,
        as_json=as_json,
        # When nothing answers the lease ends by itself: nobody has to wait for that.
        # A quorum waits for a client's ttl before it believes a server that was restarted.
        client_options={"prefix": prefix, "close_timeout": 1.0, "ttl": max(30.0, ttl)},
    )
    raise typer.Exit(_do(_run.run(wanted)))


@app.command("ls")
def list_locks(
    match: Annotated[str, typer.Argument(help="A glob on the names.")] = "*",
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    as_json: Json = False,
) -> None:
    """List every lock that is held or waited for."""
    infos = _do(_list(url, prefix, match))
    if as_json:
        _show.print_json([_show.as_dict(info) for info in infos])
    else:
        _show.print_list(infos)


async def _list(url: str, prefix: str, match: str) -> list[LockInfo]:
    async with Client(read_source(url), prefix=prefix) as client:
        return await _collect(client, match)


async def _collect(client: Client, match: str) -> list[LockInfo]:
    return sorted([info async for info in client.locks(match)], key=lambda info: info.name)


@app.command()
def show(name: Name, url: Url = _URL, prefix: Prefix = _PREFIX, as_json: Json = False) -> None:
    """Show who holds a lock and who waits for it."""

    async def work() -> LockInfo:
        async with Client(read_source(url), prefix=prefix) as client:
            return await client.inspect(name)

    info = _do(work())
    if as_json:
        _show.print_json(_show.as_dict(info))
    else:
        _show.print_one(info)


@app.command("break")
def break_lock(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    as_json: Json = False,
) -> None:
    """Release a lock by force. Its holders are told; the next waiter gets in at once.

    Ends with 1 when nobody held it.
    """
    if not yes:
        if not sys.stdin.isatty():
            print("aiodlock: break asks first: answer with --yes in a script", file=sys.stderr)
            raise typer.Exit(2)
        typer.confirm(f"Take {name!r} from its holders, who may be writing?", abort=True)

    async def work() -> int:
        async with Client(read_source(url), prefix=prefix) as client:
            return await client.break_lock(name)

    count = _do(work())
    if as_json:
        _show.print_json({"name": name, "broken": count})
    else:
        print(f"released {count} holder{'' if count == 1 else 's'} of {_show.printable(name)!r}")
    raise typer.Exit(0 if count else 1)


@app.command()
def top(
    match: Annotated[str, typer.Argument(help="A glob on the names.")] = "*",
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.05)] = 1.0,
    count: Annotated[int, typer.Option(help="Stop after that many looks; 0: never.", min=0)] = 0,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    as_json: Json = False,
) -> None:
    """Watch locks live: holders, queues, waits, and hand-overs to those who waited, per second."""
    _do(_top(url, prefix, match, interval, count, as_json))


async def _top(
    url: str, prefix: str, match: str, interval: float, count: int, as_json: bool
) -> None:
    looks = 0
    live = (
        Live(console=_show.console(), screen=True) if _show.for_people() and not as_json else None
    )
    if live is not None:
        live.start()
    try:
        async with (
            Client(read_source(url), prefix=prefix) as client,
            counting(url, prefix) as hand_overs,
        ):
            while True:
                infos = await _collect(client, match)
                waits = [waiter.waiting for info in infos for waiter in info.waiters]
                facts = {
                    "locks": len(infos),
                    "holders": sum(len(info.holders) for info in infos),
                    "waiters": len(waits),
                    "longest_wait": round(max(waits, default=0.0), 3),
                    "hand_overs_per_second": await hand_overs.per_second(),
                }
                if live is not None:
                    live.update(_top_table(infos, facts), refresh=True)
                elif as_json:
                    _show.print_json({**facts, "names": [_show.as_dict(info) for info in infos]})
                else:
                    print("\t".join(f"{key} {value}" for key, value in facts.items()))
                    for info in infos:
                        print("\t".join(_show.summary(info)), flush=True)
                looks += 1
                if looks == count:
                    return
                await asyncio.sleep(interval)
    finally:
        if live is not None:
            live.stop()


def _top_table(infos: list[LockInfo], facts: dict[str, Any]) -> Group:
    told = "  ".join(f"{key.replace('_', ' ')}: {value}" for key, value in facts.items())
    busiest = sorted(infos, key=lambda info: (-len(info.waiters), info.name))
    return Group(Text(f"{told}\n"), _show.table(busiest[:100]))


_LEVELS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


@app.command()
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Turn notifications on.")] = False,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    as_json: Json = False,
) -> None:
    """Examine a server: what is found, what it means for locks, how to mend it.

    Ends with 1 when there is an error among the findings.
    """
    findings = _do(_doctor.examine(read_source(url), prefix=prefix, fix=fix))
    if as_json:
        _show.print_json([dataclasses.asdict(finding) for finding in findings])
    elif _show.for_people():
        found = Table("", "", "found", "what it means, and how to mend it", show_lines=True)
        for finding in findings:
            level = Text(finding.level, style=_LEVELS[finding.level])
            advice = "\n".join(part for part in (finding.meaning, finding.mend) if part)
            found.add_row(finding.subject, level, Text(finding.found), Text(advice))
        _show.render(found)
    else:
        for finding in findings:
            print(f"{finding.level}\t{finding.subject}\t{finding.found}")
            for part in (finding.meaning, finding.mend):
                if part:
                    print(f"\t{part}")
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)


@app.command()
def demo(as_json: Json = False) -> None:
    """Show locks at work, on a private server that is started for it (needs aiodlock[demo]).

    Worker processes take turns on a ledger; holders and waiters are killed. Ends with 0 if all that was
    shown is true.
    """
    from .._embedded import EmbeddedServerError
    from . import _demo

    try:
        shown = _do(_demo.run(as_json=as_json))
    except EmbeddedServerError as missing:
        print(f"aiodlock: {missing}", file=sys.stderr)
        raise typer.Exit(_run.SOFTWARE) from None
    raise typer.Exit(0 if shown else 1)


@app.command()
def bench(
    seconds: Annotated[float, typer.Option(help="How long each case runs.", min=0.1)] = 2.0,
    url: Url = _URL,
    prefix: Prefix = _PREFIX,
    as_json: Json = False,
) -> None:
    """Measure locks on a server of yours, beside a bare round trip to it.

    Uses locks of its own; nobody else's are touched. A server that is busy with other work is slowed down.
    """
    from . import _bench

    results = _do(_bench.measure(url, prefix=prefix, seconds=seconds))
    if as_json:
        _show.print_json([dataclasses.asdict(result) for result in results])
    else:
        _bench.show(results)
