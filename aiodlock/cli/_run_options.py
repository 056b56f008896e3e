"""The options of ``aiodlock run``: what its help says of them, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .._model import Kind

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

#: The guardian kills that much before the server's deadline, or at a quarter of a shorter margin (seconds).
_SPARE = 0.25
SHORTEST_MARGIN = 0.1


@dataclass
class Run:
    """What the user asked for.

    :param once: seconds for which the command's success stays on record; None: nothing is recorded.
    """

    url: str
    name: str
    command: list[str]
    shared: bool
    ttl: float
    margin: float
    timeout: float | None
    quiet: bool
    conflict_exit_code: int
    as_json: bool
    client_options: dict[str, Any]
    hold_at_least: float
    note: str
    once: float | None

    def __post_init__(self) -> None:
        if self.once is not None and self.shared:
            raise ValueError("--once and --shared contradict each other")
        if self.once is not None and 0 < self.once < self.hold_at_least:
            least = f"--hold-at-least ({self.hold_at_least:g} s)"
            raise ValueError(f"{least} must not be longer than --once ({self.once:g} s)")

    @property
    def kind(self) -> Kind:
        """What is held: a lock, or what is to be done once."""
        return "lock" if self.once is None else "once"

    @property
    def spare(self) -> float:
        """How long before the server's deadline nothing of the command may run any more (seconds)."""
        return min(_SPARE, self.margin / 4)


def margin_for(ttl: float, margin: float | None = None) -> float:
    """Return the margin that is wanted, or a usual one.

    :raises ValueError: when it leaves the command no time to end.
    """
    if margin is None:
        margin = min(5.0, ttl / 4)
        if margin < SHORTEST_MARGIN:
            raise ValueError(f"ttl ({ttl:g} s) must be at least {4 * SHORTEST_MARGIN} s")
    if margin < SHORTEST_MARGIN or margin >= ttl:
        raise ValueError(
            f"margin ({margin:g} s) must be at least {SHORTEST_MARGIN} s and shorter than the "
            f"ttl ({ttl:g} s), because the command needs time to end"
        )
    return margin
