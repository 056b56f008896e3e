"""What one seed does on a store whose servers are dialled: the same users as everywhere, other servers.

A store's scene makes its servers (``make_servers``), says where clients find them (``url``), and has faults
of its own besides those of processes and of the network.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import aiodlock
from aiodlock import Unsupported
from aiodlock.backends import _label

from ..network import Path
from ..scenario import _PROCESS, Faults, Simulation
from ..world import Process
from .promises import Promises, Truth
from .wire import Wire

_NETWORK = ("slow", "cut", "partition", "one_way", "mute", "deaf", "distant")


class Scene(Simulation):
    """One seed. ``faults_of_servers`` are methods of ``fault_class``, by name without the underscore."""

    keeps_records = False
    heeds_hints = False
    long_share = 4
    expected = (*Simulation.expected, Unsupported)
    faults_of_servers: tuple[str, ...] = ()
    #: Some seeds have these alone.
    rare_faults: tuple[str, ...] = ()
    fault_class: type[StoreFaults]
    #: What options this store refuses, or cannot do: ``lock_delay`` and others.
    lock_delays: tuple[float, ...] = (0.0,)
    ttls: tuple[float, ...] = (0.2, 0.3, 0.5, 1.0)
    #: How long a first waiter may take to hold while all is well (seconds).
    idle_patience = 0.5
    #: Faults of servers during which that is so, too.
    harmless: tuple[str, ...] = ()

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        self._numbers = count(1)
        super().__init__(seed, prepare)
        self.patch(_label, "secrets", SimpleNamespace(token_hex=self._token))
        self.patch(_label, "process_label", lambda: "host-1-")

    def _token(self, size: int) -> str:
        return f"{next(self._numbers):0{2 * size}x}"

    # -- what a store says ---------------------------------------------------------------------------

    def make_servers(self) -> Truth:
        """Make the servers; return how their records are read."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Return what clients are given."""
        raise NotImplementedError

    def calm_servers(self) -> None:
        """The faults stop: all servers are up, and reach each other."""

    def check_servers(self) -> None:
        """At the end: what is left in the store?"""

    # -- the simulation ------------------------------------------------------------------------------

    def make_world(self) -> None:
        self._restyle()
        self.wire = Wire(self.world)
        #: How far it usually is on the paths that are longer now.
        self.distances: dict[Path, float] = {}
        self.truth = self.make_servers()
        self.checkers: Any = Promises(self.world, self.truth)
        self.wire.on_send = self.checkers.on_send
        # Of one Redis server; scenarios ask these of it.
        self.server: Any = SimpleNamespace(offset=0.0, sweep=lambda: None)
        self.network: Any = SimpleNamespace(connections_of=self.wire.streams_of)

    def _restyle(self) -> None:
        rng = random.Random(f"{self.seed} store")
        faults: list[str] = []
        for group in (_NETWORK, _PROCESS, self.faults_of_servers):
            if group and rng.random() < 0.6:
                faults += rng.sample(group, min(len(group), rng.randint(1, 3)))
        if self.rare_faults and rng.random() < 0.2:
            faults = [rng.choice(self.rare_faults)]  # it needs to be undisturbed
        ttl = rng.choice(self.ttls)
        self.style = replace(
            self.style,
            forgetful=False,
            faults=tuple(faults),
            delays=self.lock_delays if rng.random() < 0.4 else (0.0,),
            ttls=(ttl,) if rng.random() < 0.5 else (ttl, *rng.sample(self.ttls, 2)),
            notifies=False,
        )

    def make_client(self, process: Process, **options: Any) -> aiodlock.Client:
        options.pop("token_retention", None)
        return aiodlock.Client(self.url, **options)

    def _start(self, name: str) -> None:
        super()._start(name)
        self.world.processes[-1].loop.wire = self.wire

    def strike(self, name: str) -> None:
        self.fault_class(self).strike(name)

    def _sweep(self) -> None:
        pass

    def _watch_for_idle(self) -> None:
        """Long enough after the last fault, who is first holds at once."""
        patience = self.idle_patience + 3 * self.reads_every
        well = set(self.style.faults) <= {*_PROCESS, *self.harmless}

        def watch() -> None:
            again = self.checkers.check_idle(patience)
            self.checkers.on_waiter = None if again else begin
            if again:
                self.world.after(0.05, watch)

        def begin() -> None:
            self.checkers.on_waiter = None
            self.world.after(0.05, watch)

        self.world.at(0.0 if well else self.chaos_ends + 18.0, watch)

    def calm_down(self) -> None:
        self.world.log("-- the faults stop --")
        self.calm_servers()
        for path in self.wire.paths.values():
            path.calm()
            path.usual = self.distances.get(path, path.usual)
        self.wire.released()
        for process in self.world.processes:
            process.resume()

    def _check_end(self) -> None:
        for process in self.mains:
            if process.dead:
                continue
            if any(stream.is_open for stream in self.wire.streams_of(process)):
                self.checkers.wrong("leak", f"{process} still has a connection")
        self.check_servers()

    def _log_errors_are_failures(self) -> None:
        super()._log_errors_are_failures()
        look, simulation = self._logger.filters[0], self

        def look_twice(record: logging.LogRecord) -> bool:
            current = simulation.world.current
            if current is not None and not current.dead and record.levelno >= logging.WARNING:
                simulation.checkers.on_log(current, record)
            return bool(look(record))  # type: ignore[operator]

        self._logger.filters[:] = [look_twice]


class StoreFaults(Faults):
    """Faults of the network and of processes; a store's own are a subclass's."""

    simulation: Any

    def _someones_path(self) -> tuple[Process, Any]:
        process = self._someone()
        paths = self.simulation.wire.paths_of(process)
        return process, self.random.choice(paths) if paths else None

    def _some_stream(self) -> Any:
        of = self.simulation.wire.streams_of(self._someone())
        return self.random.choice(of) if of else None

    def _slow(self) -> None:
        process, path = self._someones_path()
        if path is not None:
            length = self._length()
            path.slow_share, path.slow = 0.5, self.random.choice((0.02, 0.2, 0.6))
            self._log(f"half of {process}'s messages take up to {path.slow} s, for {length:.3f} s")
            self.world.after(length, setattr, path, "slow_share", 0.0)

    def _distant(self) -> None:
        """All messages of a process take longer from now on, and quicker again later."""
        process, path = self._someones_path()
        if path is not None:
            usual, length = (
                self.simulation.distances.setdefault(path, path.usual),
                3 * self._length(),
            )
            path.usual = self.random.choice((0.03, 0.1, 0.4))
            self._log(f"{process} is {path.usual} s away from a server, for {length:.3f} s")
            self.world.after(length, setattr, path, "usual", usual)

    def _cut(self) -> None:
        stream = self._some_stream()
        if stream is not None:
            self._log(f"a connection of {stream.process} is cut")
            stream.break_off()

    def _block(self, outwards: bool, inwards: bool) -> None:
        process, length = self._someone(), self._length()
        paths = self.simulation.wire.paths_of(process)
        if self.random.random() < 0.5 and paths:
            paths = [self.random.choice(paths)]
        self._log(f"{process} is blocked (out {outwards}, in {inwards}) for {length:.3f} s")
        for path in paths:
            path.out_blocked, path.in_blocked = outwards, inwards

        def heal() -> None:
            for path in paths:
                path.out_blocked = path.in_blocked = False
            self.world.log(f"network: {process} is reachable again")
            self.simulation.wire.released()

        self.world.after(length, heal)

    def _mute(self) -> None:
        stream = self._some_stream()
        if stream is not None:
            self._log(f"answers on a connection of {stream.process} are lost from now on")
            stream.mute = True

    def _deaf(self) -> None:
        stream = self._some_stream()
        if stream is not None:
            self._log(f"requests on a connection of {stream.process} are lost from now on")
            stream.deaf = True

    def _crash(self) -> None:
        process = self._someone()
        power = self.random.random() < 0.3
        self._log(f"{process} {'loses power' if power else 'is killed'}")
        process.crash()
        del self.simulation.mains[process]
        self.simulation.checkers.sessions.pop(process, None)
        bodies = self.simulation.checkers.bodies
        bodies[:] = [body for body in bodies if body.process is not process]
        for stream in self.simulation.wire.streams_of(process):
            stream.die(power=power)
        self.world.after(self.random.uniform(0.01, 1.0), self.simulation._start, f"{process.name}'")
