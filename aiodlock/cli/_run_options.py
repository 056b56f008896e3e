"""The options of ``aiodlock run``, and what its help says of them."""

from __future__ import annotations

from typing import Annotated

import typer

Command = Annotated[
    list[str],
    typer.Argument(
        help="The command and its words. Options of `run` stand before it.", metavar="COMMAND"
    ),
]
Shared = Annotated[
    bool, typer.Option("--shared", help="Take the lock in shared mode, beside other readers.")
]
Ttl = Annotated[
    float,
    typer.Option(
        help="Seconds until the lock is free again if this machine crashes.", metavar="SECONDS"
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(help="Seconds to wait for the lock. Default: no limit.", metavar="SECONDS"),
]
Nonblock = Annotated[bool, typer.Option("--nonblock", "-n", help="Do not wait for the lock.")]
ConflictExitCode = Annotated[
    int,
    typer.Option(
        "--conflict-exit-code",
        "-E",
        help="The exit code if the lock was not acquired.",
        metavar="CODE",
        min=0,
        max=255,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print nothing while waiting, and nothing if the lock was not acquired or the success is "
        "on record. Failures are still printed: a lost lock, an unreachable store.",
    ),
]
Margin = Annotated[
    float | None,
    typer.Option(
        help="If the lease cannot be extended, the command gets SIGTERM this many seconds before the "
        "lease ends, and SIGKILL at its end. Default: a quarter of the ttl, at most 5.",
        metavar="SECONDS",
    ),
]
HoldAtLeast = Annotated[
    float,
    typer.Option(
        help="The lock stays closed for this many seconds after its grant, also when the command ends "
        "sooner. So several hosts whose clocks differ run a job once per period.",
        metavar="SECONDS",
        min=0.0,
    ),
]
Once = Annotated[
    float | None,
    typer.Option(
        help="Keep the command's success on record for this many seconds. If it is on record, the "
        "command does not run, and the exit code is 0. A command that fails records nothing. Put the "
        "period into the name, or keep it for half of the period.",
        metavar="SECONDS",
    ),
]
Note = Annotated[str, typer.Option(help="Shown to people who look at the lock.", metavar="TEXT")]
MinReplicas = Annotated[
    int,
    typer.Option(
        help="The number of replicas that must have a grant or an extension before it counts.",
        metavar="N",
        min=0,
    ),
]
RestartDelay = Annotated[
    float | None,
    typer.Option(
        help="With a quorum: seconds for which a server that was restarted does not count.",
        metavar="SECONDS",
        min=0.0,
    ),
]
ListenSource = Annotated[
    str | None,
    typer.Option(
        help="With PostgreSQL behind a pooler: the URL of the connection that listens.",
        metavar="URL",
    ),
]
Messages = Annotated[
    bool, typer.Option("--json", help="Print messages as JSON objects, one a line.")
]
