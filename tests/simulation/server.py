"""One server: fakeredis with a virtual clock, the real scripts, and the ways in which a server fails.

The execution of a script is fakeredis's own but for three shortcuts, since a run executes some hundred:
a script is compiled once, the Lua heap is not collected after each call, and ``redis.call`` skips the
conversions that only other protocols and server types need.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import fakeredis
import redis
from fakeredis._commands import SUPPORTED_COMMANDS, Key
from fakeredis._core._database import CommandItem, Database
from fakeredis._helpers import NoResponse, SimpleError, SimpleString
from fakeredis._socket._fakesocket import FakeSocket
from fakeredis.commands_mixins.scripting_mixin import LUA_MODULE

from aiodlock.backends.redis.scripts import ALL, VOTING

from .votes import Node, Refused
from .world import World, Wrong

#: 2023-11-14, in seconds.
_EPOCH = 1_700_000_000.0

#: Commands that an out-of-memory server refuses, as long as their script has written nothing yet.
_GROWS = frozenset((b"HSET", b"SET", b"XADD", b"ZADD"))
_WRITES = _GROWS | {b"HDEL", b"XDEL", b"ZREM", b"DEL", b"PEXPIRE"}

_lua: Any = None
_compiled: dict[bytes, Any] = {}
_set_keys_argv: Any = None
_caller: list[SimSocket] = []
_ages = count()


def _runtime() -> Any:
    """Return the one Lua state of all simulated servers, as fakeredis sets it up."""
    global _lua, _set_keys_argv
    if _lua is None:
        _lua = LUA_MODULE.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        _lua.eval("function(c, p) redis = {call = c, pcall = p}; KEYS = {}; ARGV = {} end")(
            lambda op, *args: _caller[-1].script_call(op, args),
            lambda op, *args: _caller[-1].script_pcall(op, args),
        )
        _set_keys_argv = _lua.eval("function(keys, argv) KEYS = keys; ARGV = argv end")
    return _lua


class SimDatabase(Database):
    """Tells when a key expires, as a server does that sends keyspace events."""

    def __init__(self, lock: Any, expired: Callable[[bytes], None]) -> None:
        super().__init__(lock)
        self._tell = expired

    def __getitem__(self, key: bytes) -> Any:
        item = self._dict[key]
        if self.expired(item):
            del self._dict[key]
            self._tell(key)
            raise KeyError(key)
        return item

    def notify_watch(self, key: bytes) -> None:
        pass  # nobody blocks or watches

    def sweep(self) -> None:
        for key in [k for k, item in self._dict.items() if self.expired(item)]:
            del self._dict[key]
            self._tell(key)


class SimSocket(FakeSocket):
    """The server's side of one connection."""

    def __init__(self, server: SimServer, tell: Callable[[bytes], None]) -> None:
        self.sim = server
        self._age = next(_ages)
        self._tell_client = tell
        super().__init__(server.fake, 0, client_class=redis.Redis)

    def __hash__(self) -> int:
        return (
            self._age
        )  # not the address: sets of sockets are walked in the same order in every run

    def __eq__(self, other: object) -> bool:
        return self is other

    # -- in and out --------------------------------------------------------------------------------

    def put_response(self, msg: Any) -> None:
        self._tell_client(encode(msg))

    def execute(self, fields: list[bytes]) -> Any:
        """Run one command and return its reply, which is not sent."""
        name = fields[0].decode().lower()
        arguments = fields[1:]
        if name in ("config", "script", "client"):
            name, arguments = f"{name} {fields[1].decode().lower()}", fields[2:]
        try:
            if name == "info":
                return self.sim.info()
            if name == "evalsha":
                return self.evalsha(fields[1], int(fields[2]), *fields[3:])
            function, signature = self._name_to_func(name)
            assert function is not None
            return self._run_command(function, signature, arguments, False)
        except SimpleError as refused:
            return refused

    def time(self) -> list[bytes]:
        microseconds = self.sim.clock_us()
        return [b"%d" % (microseconds // 1_000_000), b"%d" % (microseconds % 1_000_000)]

    # -- scripts -----------------------------------------------------------------------------------

    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        votes = self.sim.votes
        # What is told of waits, and of the leases in use, concerns no vote.
        of_votes = _SCRIPTS.get(script, "tell") not in ("tell", "lengths")
        if votes is not None and of_votes:
            return self._run_plain(votes, script, keys_and_args[:numkeys], keys_and_args[numkeys:])
        runtime = _runtime()
        script = self.sim.patched(script)
        function = _compiled.get(script)
        if function is None:
            function = _compiled[script] = runtime.compile(script)
        _set_keys_argv(
            runtime.table_from(keys_and_args[:numkeys]), runtime.table_from(keys_and_args[numkeys:])
        )
        self._dirty = False
        _caller.append(self)
        try:
            result = function()
        except SimpleError as refused:
            raise SimpleError(f"{refused.value} script: simulated, on @user_script:1.") from None
        except LUA_MODULE.LuaError as broken:
            raise SimpleError(f"ERR Error running script: {broken}") from None
        finally:
            _caller.pop()
        return self._convert_lua_result(result, nested=False)

    def _run_plain(
        self, votes: Node, script: bytes, keys: tuple[bytes, ...], arguments: tuple[bytes, ...]
    ) -> Any:
        sim = self.sim
        dirty = False

        def touch(grows: bool) -> None:
            nonlocal dirty
            if sim.read_only or sim.out_of_memory:
                try:
                    sim.count_write(b"SET" if grows else b"DEL", dirty)
                except SimpleError as refused:
                    raise Refused(refused.value) from None
            dirty = True

        def publish(channel: bytes, text: bytes) -> None:
            sim.published.append((text.split(b" ")[0].decode(), text.split(b" ")[2].decode()))
            for socket in list(sim.fake.subscribers.get(channel, ())):
                socket.put_response([b"message", channel, text])

        try:
            return votes.run(_SCRIPTS[script], keys, arguments, sim.clock_us(), touch, publish)
        except Refused as refused:
            raise SimpleError(f"{refused} script: simulated, on @user_script:1.") from None

    def evalsha(self, sha1: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        script = self._server.script_cache.get(sha1)
        if script is None:
            raise SimpleError("NOSCRIPT No matching script. Please use EVAL.")
        return self.eval(script, numkeys, *keys_and_args)

    def script_call(self, op: bytes, args: tuple[Any, ...]) -> Any:
        sim = self.sim
        op = op.upper()
        if op == b"TIME":
            return _lua.table_from(self.time())
        if op in _WRITES:
            sim.count_write(op, self._dirty)
            self._dirty = True
        if op == b"PUBLISH" and not args[0].endswith(b":own"):
            word, _, id, _ = args[1].decode().split(" ")
            sim.published.append((word, id))
        function, signature = _known(self, op)
        converted = [arg if type(arg) is bytes else f"{arg:.17g}".encode() for arg in args]
        items: list[CommandItem] = []
        missing = _apply(signature, converted, items, self._db)
        if missing is not _NOT_MISSING:
            result = missing
        else:
            result = function(*converted)
            for item in items:
                item.writeback(remove_empty_val="v" not in signature.flags)
                if item.is_modified and sim.notifies:
                    self._tell_of(item.key, op)
        return self._to_lua(result)

    def script_pcall(self, op: bytes, args: tuple[Any, ...]) -> Any:
        try:
            return self.script_call(op, args)
        except SimpleError as refused:
            return _lua.table_from({b"err": refused.value.encode()})

    def _to_lua(self, result: Any) -> Any:
        if isinstance(result, bytes | int):
            return result
        if result is None:
            return False
        if isinstance(result, str):
            return result.encode()
        if isinstance(result, dict):
            result = [part for pair in result.items() for part in pair]
        if isinstance(result, list | tuple):
            return _lua.table_from([self._to_lua(part) for part in result])
        if isinstance(result, SimpleString):
            return _lua.table_from({b"ok": result.value})
        raise TypeError(f"a reply of type {type(result).__name__} in a script")

    def _tell_of(self, key: bytes, op: bytes) -> None:
        self.sim.keyspace_event(key, op.lower())
        if op != b"DEL" and key not in self._db:
            self.sim.keyspace_event(key, b"del")  # its last field or entry is gone

    def _keyspace_notifications(self, command_items: Any, event: bytes) -> None:
        if self.sim.notifies and event != b"evalsha":
            for item in command_items:
                if item.is_modified:
                    self.sim.keyspace_event(item.key, event)


_NOT_MISSING = object()
_plans: dict[tuple[str, int], list[tuple[int, Any, bool]]] = {}


def _apply(signature: Any, values: list[Any], items: list[CommandItem], db: Database) -> Any:
    """Do what ``Signature.apply`` does: decode arguments in place, look keys up. For valid calls only."""
    plan = _plans.get((signature.name, len(values)))
    if plan is None:
        signature.check_arity(values, (7,))
        types = list(signature.fixed)
        while len(types) < len(values):
            types += signature.repeat
        plan = [(i, t, isinstance(t, Key)) for i, t in enumerate(types) if t is not bytes]
        _plans[signature.name, len(values)] = plan
    for index, kind, is_key in plan:
        if not is_key:
            values[index] = kind.decode(values[index])
            continue
        key = values[index]
        item = db.get(key)
        default = None
        if item is None:
            if kind.missing_return is not Key.UNSPECIFIED:
                return kind.missing_return
            if kind.type_ is not None and kind.type_ is not bytes:
                default = kind.type_()
        values[index] = CommandItem(key, db, item, default=default)
        items.append(values[index])
    return _NOT_MISSING


_functions: dict[bytes, tuple[str, Any]] = {}


def _known(socket: SimSocket, op: bytes) -> tuple[Any, Any]:
    found = _functions.get(op)
    if found is None:
        signature = SUPPORTED_COMMANDS[op.decode().lower()]
        found = _functions[op] = signature.func_name, signature
    return getattr(socket, found[0]), found[1]


def encode(value: Any) -> bytes:
    """Return a reply in RESP 2."""
    kind = type(value)  # most are lists of these
    if kind is bytes:
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if kind is int:
        return b":%d\r\n" % value
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, SimpleError):
        return b"-" + value.value.replace("\n", " ").encode() + b"\r\n"
    if isinstance(value, SimpleString):
        return b"+" + value.value + b"\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, list | tuple):
        return b"*%d\r\n" % len(value) + b"".join(map(encode, value))
    raise TypeError(f"a reply of type {type(value).__name__}")


class Command:
    """One command of a client as the server sees it, for the log and the checkers."""

    __slots__ = ("arguments", "fields", "keys", "name", "script")

    def __init__(self, fields: list[bytes]) -> None:
        self.fields = fields
        self.name = fields[0].upper()
        self.script: str | None = None
        self.keys: list[bytes] = []
        self.arguments: list[bytes] = []
        if self.name in (b"EVALSHA", b"EVAL"):
            number = int(fields[2])
            self.script = _SCRIPTS.get(fields[1]) if number else None
            self.keys = fields[3 : 3 + number]
            self.arguments = fields[3 + number :]

    @property
    def base(self) -> str:
        """Of a script on one name: its keys up to the last part."""
        return self.keys[0].decode().removesuffix(":state")

    @property
    def id(self) -> str:
        """The request that it is about; empty for others."""
        about = self.script in _ABOUT_ONE and self.arguments
        return self.arguments[0].decode() if about else ""

    @property
    def length(self) -> int:
        """Of a vote or an extension: how long the lease is to be (ms)."""
        return int(self.arguments[3 if self.script == "vote" else 1])

    @property
    def lost(self) -> bool:
        """A leave of a request whose lease ran out for its client."""
        return self.script == "leave" and self.arguments[-1] == b"lost"

    @property
    def unused(self) -> bool:
        """A leave of a request whose body has not begun."""
        return self.script == "leave" and self.arguments[-1] == b"unused"

    @property
    def begins(self) -> bool:
        """It tells that a body begins, if the request holds."""
        if self.script == "acquire":
            return b"begins" in self.arguments[12]
        return self.script == "extend" and self.arguments[6:7] == [b"begins"]

    @property
    def record(self) -> tuple[bytes, int] | None:
        """Of a leave: the result that it puts on record, and for how long (ms)."""
        if self.script != "leave" or self.arguments[5] != b"recorded":
            return None
        return self.arguments[6], int(self.arguments[7])

    @property
    def forgets(self) -> str:
        """Whose success is taken back: the name's keys up to the last part; else empty."""
        of_record = self.name == b"DEL" and self.fields[1].endswith(b":record")
        return self.fields[1].decode().removesuffix(":record") if of_record else ""

    @property
    def yields(self) -> bool:
        """A vote is given back, for an older request."""
        return self.script == "unvote" and self.arguments[1] in (b"yield", b"rest")

    def __str__(self) -> str:
        if self.script is None or not self.keys:
            return b" ".join(field[:60] for field in self.fields[:3]).decode(errors="replace")
        what = f"{self.script} {_lock_name(self.keys[0])} {self.id}"
        if self.script == "acquire":
            a = [argument.decode() for argument in self.arguments]
            what += f" {a[1]} owner={a[2]} ttl={a[3]} waiter_ttl={a[4]} delay={a[5]} {a[10]}"
        elif self.script == "extend":
            what += f" by {self.arguments[1].decode()}"
        elif self.script == "leave" and self.arguments[4] != b"0":
            what += " with a marker"
        elif self.script == "vote":
            a = [argument.decode() for argument in self.arguments]
            what += f" {a[1]} owner={a[2]} length={a[3]} delay={a[4]} ticket={a[6]} {a[7]} {a[8]}"
        elif self.script == "unvote":
            a = [argument.decode() for argument in self.arguments]
            what += f" {a[1]} marker={a[2]} {a[3]}"
        return what


def words_in(command: Command, reply: Any) -> Any:
    """Return the words of a line, which some scripts answer; the last of `done` is any bytes."""
    if command.script not in ("acquire", "extend", "leave") or not isinstance(reply, bytes):
        return reply
    return reply.split(b" ", 1 if reply.startswith(b"done ") else -1)


class Said(NamedTuple):
    """A line of the schedule: most are never read."""

    server: str
    command: object
    reply: Any

    def __str__(self) -> str:
        return f"{self.server}: {self.command} -> {_show(self.reply)}"


_SCRIPTS = {script.sha: script.name for script in (*ALL, *VOTING)} | {
    script.source: script.name for script in (*ALL, *VOTING)
}
_ABOUT_ONE = ("acquire", "extend", "leave", "vote", "unvote")


def _lock_name(state_key: bytes) -> str:
    return state_key.decode().partition("{")[2].partition("}")[0]


class SimServer:
    """Commands in, replies out, one at a time. Its clock is ``true time + offset``.

    Mutable state: ``fake`` (the data, the scripts, the subscribers), ``offset``, ``refuses`` (what every
    command is answered with), ``read_only``, ``out_of_memory``, ``up``, ``busy_until``.
    """

    def __init__(self, world: World, name: str = "server") -> None:
        self.world = world
        self.name = name
        self.offset = _EPOCH
        self.life = 1
        self.fake = self._new_fake()
        self.notifies = False
        #: Some scripts meet no record but their own.
        self.meets_all = False
        self.refuses: str | None = None
        self.read_only = False
        self.out_of_memory = False
        #: Votes that are given back are refused, and how many were.
        self.refuses_yields = False
        self.refused_yields = 0
        self.up = True
        #: What it runs now it has run before: the network has carried it twice.
        self.repeats = False
        self.sides: list[Any] = []
        #: What broken variants put in place of a script's text.
        self.patches: dict[bytes, bytes] = {}
        #: Called after each command that a client sent.
        self.executed: list[Callable[[Command, Any], None]] = []
        #: Notices and hints of the command that is carried out: word and request.
        self.published: list[tuple[str, str]] = []
        #: Called with what happened to the data besides commands.
        self.lost_data: list[Callable[[], None]] = []
        self.snapshot: Any = None
        #: A quorum's votes, where they are decided in plain Python instead of Lua.
        self.votes: Node | None = None

    def _new_fake(self) -> fakeredis.FakeServer:
        fake = fakeredis.FakeServer(version=(7,))
        fake.dbs[0] = SimDatabase(fake.lock, self._expired)
        return fake

    # -- clock -------------------------------------------------------------------------------------

    def clock_us(self) -> int:
        return round((self.world.time + self.offset) * 1_000_000)

    def now_ms(self) -> int:
        return self.clock_us() // 1000

    def true_time_of(self, deadline_ms: float) -> float:
        """Return from what true time on the server's clock has reached that."""
        return deadline_ms / 1000 - self.offset

    # -- commands ----------------------------------------------------------------------------------

    def info(self) -> bytes:
        """Tell which life this is."""
        return b"# Server\r\nrun_id:%b%d\r\n" % (self.name.encode(), self.life)

    @property
    def db(self) -> SimDatabase:
        found = self.fake.dbs[0]
        assert isinstance(found, SimDatabase)
        found.time = self.now_ms() / 1000
        return found

    def run(self, socket: SimSocket, command: Command) -> Any:
        """Carry a command out, or refuse it; return what is to be sent."""
        fields = command.fields
        refuses = self.refuses or ""
        if refuses.startswith("LOADING") and command.name.endswith(b"SUBSCRIBE"):
            refuses = ""  # allowed while loading
        if self.refuses_yields and command.yields:
            refuses = "BUSY Redis is busy running a script. You can only call SCRIPT KILL."
            self.refused_yields += 1
        if refuses:
            reply: Any = SimpleError(refuses)
        else:
            self.db  # noqa: B018  (its clock is set)
            self.published = []
            reply = socket.execute(fields)
        words = words_in(command, reply)
        if fields[0] != b"SCRIPT":
            self.world.log(Said(self.name, command, words))
        for tell in self.executed:
            tell(command, words)
        return None if isinstance(reply, NoResponse) else encode(reply)

    def count_write(self, op: bytes, dirty: bool) -> None:
        if self.read_only:
            raise SimpleError("READONLY You can't write against a read only replica.")
        if self.out_of_memory and not dirty and op in _GROWS:
            raise SimpleError("OOM command not allowed when used memory > 'maxmemory'.")

    def patched(self, script: bytes) -> bytes:
        return self.patches.get(script, script)

    def read_record(self, base: str) -> tuple[str, bytes, int] | None:
        """Return the success on record: whose, its result, and until when it is kept."""
        item = self.db.get(f"{base}:record".encode())
        if item is None:
            return None
        kept = item.value._values
        return kept[b"id"].decode(), kept[b"result"], round(item.expireat * 1000)

    # -- what else goes on in it -------------------------------------------------------------------

    def _expired(self, key: bytes) -> None:
        if self.notifies:
            self.keyspace_event(key, b"expired")

    def keyspace_event(self, key: bytes, event: bytes) -> None:
        channel = b"__keyspace@0__:" + key
        for socket in list(self.fake.subscribers.get(channel, ())):
            socket.put_response([b"message", channel, event])

    def sweep(self) -> None:
        """The server's own cycle: expire what is due."""
        if self.up:
            self.db.sweep()

    def save(self) -> None:
        self.world.log(f"{self.name}: a snapshot is taken")
        self.snapshot = copy.deepcopy(self.db._dict)

    def restart(self, data: str) -> None:
        """Come back with ``kept``, ``older`` or no (``empty``) data; scripts and connections are gone."""
        old = self.db._dict
        self.fake = self._new_fake()
        if data != "kept" and self.votes is not None:
            self.votes = Node()
        if data == "older" and self.snapshot is not None:
            old = copy.deepcopy(self.snapshot)
        elif data != "kept":
            old = {}
        database = self.db
        for key, item in old.items():
            database[key] = item
        self.up = True
        self.life += 1
        if data != "kept":
            for tell in self.lost_data:
                tell()

    def flush_data(self) -> None:
        self.db.clear()
        if self.votes is not None:
            self.votes = Node()
        for tell in self.lost_data:
            tell()

    def knows(self, base: str, id: str) -> bool:
        """Whether a request is a holder's or a waiter's here."""
        if self.votes is not None:
            return self.votes.knows(f"{base}:state".encode(), id)
        records = [self.db.get(f"{base}:{part}".encode()) for part in ("state", "waiters")]
        return any(one is not None and id.encode() in one.value._values for one in records)

    def names_left(self) -> list[str]:
        """Return the keys of names that somebody holds or waits for."""
        keys = [key.decode() for key in self.db._dict]
        left = [key for key in keys if key.endswith((":state", ":queue", ":waiters"))]
        return left if self.votes is None else left + self.votes.left(self.now_ms())

    def flush_scripts(self) -> None:
        self.fake.script_cache.clear()


def _show(reply: Any) -> str:
    if isinstance(reply, SimpleError):
        return reply.value[:80]
    if isinstance(reply, list):
        return "[" + " ".join(_show(part) for part in reply) + "]"
    if isinstance(reply, NoResponse):
        return "-"
    return reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)


__all__ = ["Command", "SimServer", "SimSocket", "Wrong", "encode"]
