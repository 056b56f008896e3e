"""Build and run a model with Spin: one configuration, what it must show, and what was explored."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

_SAFETY = ("-DSAFETY", "-DNOREDUCE")
_LIVENESS = ("-DNOREDUCE", "-DNFAIR=6")
_OUTCOMES = (
    "answer: ",
    "the answer is lost",
    "the request is lost",
    "it is late",
    "its answer is late",
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is in the world, and what must be true of it.

    ``switches`` are those of the model. With LIVENESS, every course of events in which each process goes on
    has to serve everybody. ``caught``: an old rule is switched on, and Spin must find a counterexample.
    ``model``: the name of its file.
    ``bits``: not exhaustive but supertrace (bitstate hashing), with a table of 2**bits bits, and for a
    bounded time: it may show a violation, and proves nothing.
    """

    name: str
    switches: tuple[str, ...]
    caught: bool = False
    small: bool = False
    bits: int = 0
    model: str = "quorum"

    @property
    def liveness(self) -> bool:
        return "LIVENESS" in self.switches


@dataclass(frozen=True, slots=True)
class Result:
    """What Spin said: ``states`` are those stored, ``depth`` is the longest course of events."""

    configuration: Configuration
    states: int
    depth: int
    errors: int
    complete: bool
    seconds: float
    megabytes: float
    counterexample: str

    @property
    def as_expected(self) -> bool:
        if self.configuration.caught:
            return self.errors > 0
        return self.errors == 0 and (self.complete or self.configuration.bits > 0)


def missing() -> str | None:
    """Return the name of a program that the model needs and that is not installed, if there is one."""
    return next((name for name in ("spin", "gcc") if shutil.which(name) is None), None)


def check(configuration: Configuration, directory: Path, megabytes: int, within: float) -> Result:
    """Run one configuration in a directory of its own, with bounded memory and time."""
    switches = [f"-D{switch}" for switch in configuration.switches]
    model = str(Path(__file__).with_name(f"{configuration.model}.pml"))
    _call(["spin", *switches, "-a", model], directory, 60.0)
    store = ["-DBITSTATE"] if configuration.bits else ["-DCOLLAPSE"]
    kind = _LIVENESS if configuration.liveness else _SAFETY
    # Spin's output has functions of 10,000 lines: optimization takes longer than it saves a small search.
    how = ["-O0" if configuration.small else "-O1", "-w", f"-DMEMLIM={megabytes}"]
    compiler = ["gcc", *how, *kind, *store, "-o", "pan", "pan.c"]
    _call(compiler, directory, 600.0)
    options = ["-E", "-m100000"]  # a waiting server is no deadlock
    if configuration.bits:
        options.append(f"-w{configuration.bits}")
    if configuration.liveness:
        options += ["-a", "-f"]
    began = perf_counter()
    report, ended = _run(["./pan", *options], directory, within)
    seconds = perf_counter() - began
    counterexample = ""
    trail = f"{configuration.model}.pml.trail"
    if (directory / trail).exists():
        replay = ["spin", *switches, "-k", trail, "-t", model]
        counterexample = _only_events(_call(replay, directory, 60.0))
    return Result(
        configuration,
        states=int(float(_found(r"([\d.e+]+) states, stored", report))),
        depth=int(_found(r"depth reached (\d+)", report)),
        errors=int(_found(r"errors: (\d+)", report)),
        complete=ended and "out of memory" not in report and "Search not completed" not in report,
        seconds=seconds,
        megabytes=float(_found(r"([\d.]+)\s+total actual memory usage", report)),
        counterexample=counterexample,
    )


def _call(command: Sequence[str], directory: Path, within: float) -> str:
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=within, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode != 0 and "-t" not in command:
        raise RuntimeError(f"{command[0]} failed: {said:.2000}")
    return said


def _run(command: Sequence[str], directory: Path, within: float) -> tuple[str, bool]:
    """Return what the search prints, and whether it came to an end in time."""
    with subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as search:
        try:
            return search.communicate(timeout=within)[0], True
        except subprocess.TimeoutExpired:
            search.send_signal(signal.SIGINT)  # it prints what it has explored so far
            return search.communicate(timeout=60.0)[0], False


def _found(pattern: str, report: str) -> str:
    found = re.search(pattern, report)
    return found[1] if found else "0"


def _only_events(replay: str) -> str:
    """Return the events of a replayed counterexample, without calls that repeat the one before."""
    events: list[str] = []
    for line in replay.splitlines():
        event = line.strip()
        if event.startswith("spin: trail ends"):
            break
        if "START OF CYCLE" in event:
            events.append("from here on for ever:")
        elif event.startswith(_OUTCOMES) and events:
            events[-1] += f", {event}"
            if len(events) > 1 and events[-1] == events[-2]:
                events.pop()
        elif event.startswith(("request", "node", "the ")):
            events.append(event)
    return "\n".join(f"    {event}" for event in events)
