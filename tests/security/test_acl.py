"""A server user who may do exactly what the documentation lists, and users who may do less."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import redis.asyncio

import aiodlock
from aiodlock.backends.redis.backend import RedisBackend
from aiodlock.backends.redis.permissions import CHECKED, CHECKED_VOTING
from aiodlock.cli._doctor_redis import examine_server
from aiodlock.cli._hand_overs import counting

from ..scenes import bounded, soon, store_of, until
from ..servers import Store, embedded

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "production.md"
FILES = ROOT / "examples" / "operators"
USER, PASSWORD = "locks", "pass-of-locks"

SetUser = Callable[[list[str]], Awaitable[str]]


def documented(file: str = "locks.acl") -> list[str]:
    """Return the rules of a file that the page shows, of all its lines."""
    rules = []
    for line in (FILES / file).read_text().splitlines():
        command, setuser, _, *words = line.replace(">PASSWORD", f">{PASSWORD}").split()
        assert (command, setuser) == ("ACL", "SETUSER")
        rules += words
    return rules


def commands() -> list[str]:
    return [word for word in documented() if word.startswith("+")]


@pytest.fixture
async def set_user(real_store: Store) -> AsyncIterator[SetUser]:
    """Give a setter of the user; it returns the URL for it."""
    raw = await real_store.raw()

    async def set_user(rules: list[str]) -> str:
        await raw.execute_command("ACL", "SETUSER", USER, *rules)  # type: ignore[no-untyped-call]
        return real_store.url.replace("://", f"://{USER}:{PASSWORD}@", 1)

    yield set_user
    await raw.acl_deluser(USER)


async def use_everything(client: aiodlock.Client, raw: redis.asyncio.Redis) -> None:
    """Go through every script, and through every line in them that calls the server."""
    async with client.lock("name", ttl=5.0, timeout=5.0) as lease:
        waiting = asyncio.create_task(client.lock("name").acquire())
        while not (await client.inspect("name")).waiters:
            await asyncio.sleep(0.002)
        withdrawn = asyncio.create_task(client.lock("name").acquire())
        while len((await client.inspect("name")).waiters) < 2:
            await asyncio.sleep(0.002)
        withdrawn.cancel()
        await asyncio.wait({withdrawn})
        await lease.extend()
        assert [info.name async for info in client.locks()] == ["name"]
        await raw.script_flush()
    handed_over = await soon(waiting)  # which PUBLISH has told
    assert await client.break_lock("name") == 1
    assert (await handed_over.wait_lost()).reason == "broken"
    with pytest.raises(aiodlock.LockLost):
        await handed_over.release()
    async with client.semaphore("pool", 2, timeout=5.0), client.multilock("a", "b", timeout=5.0):
        pass
    readers = client.rwlock("name", timeout=5.0).read
    async with readers, bounded(5.0):
        await (await readers.acquire()).release()


async def test_everything_works_with_what_the_page_lists(
    real_store: Store, set_user: SetUser, notifications: bool
) -> None:
    url = await set_user(documented())
    async with aiodlock.Client(url) as client:
        await use_everything(client, await real_store.raw())
        store = store_of(client)
        assert isinstance(store, RedisBackend)
        assert store.server.notifications is notifications


async def test_user_of_the_page_sees_and_touches_nothing_else(
    real_store: Store, set_user: SetUser
) -> None:
    url = await set_user(documented())
    async with redis.asyncio.Redis.from_url(url) as user:
        for command in (
            ("GET", "somebody-elses"),
            ("SUBSCRIBE", "news"),
            ("KEYS", "*"),
            ("CONFIG", "GET", "*"),
            ("FLUSHALL",),
            ("EVAL", "return redis.call('GET', 'somebody-elses')", "0"),
        ):
            with pytest.raises(redis.exceptions.ResponseError):
                await user.execute_command(*command)  # type: ignore[no-untyped-call]


async def test_another_prefix_and_database_work_as_the_page_says(
    real_store: Store, set_user: SetUser
) -> None:
    rules = [
        rule.replace("aiodlock", "my.app").replace("@0__", "@3__") for rule in documented()
    ] + ["+select"]
    url = (await set_user(rules)).replace("?db=0", "?db=3").replace("/0", "/3")
    raw = redis.asyncio.Redis.from_url(real_store.url.replace("?db=0", "?db=3"))
    async with raw, aiodlock.Client(url, prefix="my.app") as client:
        await use_everything(client, raw)


@pytest.mark.parametrize("command", [word for word in commands() if word not in ("+scan",)])
async def test_missing_command_is_named_on_entering(
    real_store: Store, set_user: SetUser, command: str
) -> None:
    url = await set_user([rule for rule in documented() if rule != command])
    if command.startswith("+script|"):  # the page says that the client does without
        async with aiodlock.Client(url) as client:
            await use_everything(client, await real_store.raw())
        return
    with pytest.raises(aiodlock.BackendError, match=command[1:].upper()) as refused:
        async with aiodlock.Client(url):
            pass
    assert not isinstance(refused.value, aiodlock.BackendUnavailable)
    assert PASSWORD not in str(refused.value)
    raw = await real_store.raw()
    assert await raw.keys("*") == [] or command == "+del"


async def test_missing_scan_is_named_when_locks_are_listed(
    real_store: Store, set_user: SetUser
) -> None:
    url = await set_user([rule for rule in documented() if rule != "+scan"])
    async with aiodlock.Client(url) as client:
        async with client.lock("name"):
            with pytest.raises(aiodlock.BackendError, match="'scan'"):
                [info async for info in client.locks()]


@pytest.mark.parametrize(
    ("missing", "named"),
    [("~aiodlock:*", r"keys aiodlock:\*"), ("&aiodlock:*", "SUBSCRIBE aiodlock:.*channel")],
)
async def test_missing_keys_and_channels_are_named_on_entering(
    set_user: SetUser, missing: str, named: str
) -> None:
    url = await set_user([rule for rule in documented() if rule != missing])
    with pytest.raises(aiodlock.BackendError, match=named):
        async with aiodlock.Client(url):
            pass


async def test_without_the_keyspace_channel_all_works_as_without_notifications(
    real_store: Store, set_user: SetUser, notifications: bool
) -> None:
    url = await set_user([rule for rule in documented() if "__keyspace" not in rule])
    async with aiodlock.Client(url) as client:
        await use_everything(client, await real_store.raw())


async def test_several_missing_commands_are_all_named(set_user: SetUser) -> None:
    url = await set_user([rule for rule in documented() if rule not in ("+xadd", "+hset")])
    with pytest.raises(aiodlock.BackendError, match="HSET, the command XADD"):
        async with aiodlock.Client(url):
            pass


QUORUM = {"tickets", "vote", "unvote", "break_votes", "inspect_votes"}


def test_page_and_check_have_every_command_that_the_scripts_call() -> None:
    called: dict[bool, set[str]] = {True: set(), False: set()}
    for path in (ROOT / "aiodlock" / "backends" / "redis" / "lua").glob("*.lua"):
        words = re.findall(r"redis\.p?call\('([A-Z]+)'", path.read_text())
        called[path.stem in QUORUM].update(words)
    assert called[False] <= {*CHECKED, "TIME", "SET"}
    assert called[True] <= {*CHECKED, *CHECKED_VOTING, "TIME", "SET"}
    listed = {word[1:].upper() for word in commands()}
    assert called[False] <= listed
    besides = re.search(r"\*\*A \[quorum\].*: add `([^`]*)`", PAGE.read_text())
    assert besides is not None
    assert called[True] - listed <= {word[1:].upper() for word in besides[1].split()}


def _told(caplog: pytest.LogCaptureFixture, what: str) -> bool:
    return what in caplog.text


@pytest.mark.stores("valkey9", "redis70")
async def test_user_of_a_quorums_node_needs_what_the_page_says_besides(
    set_user: SetUser, real_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    besides = re.search(r"\*\*A \[quorum\].*: add `([^`]*)`", PAGE.read_text())
    assert besides is not None
    url = await set_user([*documented(), *besides[1].split()])
    with embedded("valkey9") as second, embedded("valkey9") as third:
        nodes = [url, second.url, third.url]
        async with aiodlock.Client(nodes) as client:
            third.stop()  # so that the first has to vote
            # What starts again does not count for as long as the longest lease in use.
            async with client.lock("name", ttl=1, timeout=10) as lease:
                assert lease.held
        third.start()
        # One node that refuses is one that is away.
        for less, told in (([], "ZADD"), (["+zadd"], "ZREM")):
            await set_user([*documented(), *less])
            nodes = [url, second.url, third.url]
            async with aiodlock.Client(nodes, restart_delay=0) as client:
                await until(partial(_told, caplog, told), "the warning")
                assert len(caplog.records) < 5
                async with client.lock("name", ttl=1, timeout=10) as lease:
                    assert lease.held
            caplog.clear()


@pytest.mark.stores("valkey9", "redis70", "redis62")
@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="this machine has no redis-cli")
@pytest.mark.parametrize("file", ["locks.acl", "doctor.acl"])
async def test_lines_of_the_page_can_be_typed_into_redis_cli(real_store: Store, file: str) -> None:
    """As a file, and so as lines that are pasted: it reads both from its standard input."""
    raw = await real_store.raw()
    user = file.partition(".")[0]
    place = await raw.config_get("unixsocket")
    typed = (FILES / file).read_text().replace("PASSWORD", PASSWORD)
    done = subprocess.run(
        ["redis-cli", "-s", str(place["unixsocket"])],
        input=typed,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    try:
        assert done.stdout.split() == ["OK"] * len(typed.splitlines())
        url = real_store.url.replace("://", f"://{user}:{PASSWORD}@", 1)
        async with aiodlock.Client(url) as client:
            await use_everything(client, raw)
    finally:
        await raw.acl_deluser(user)


@pytest.mark.stores("valkey9", "redis70", "redis62")
async def test_user_of_the_page_lets_doctor_see_everything(real_store: Store) -> None:
    raw = await real_store.raw()
    await raw.execute_command("ACL", "SETUSER", "doctor", *documented("doctor.acl"))  # type: ignore[no-untyped-call]
    try:
        url = real_store.url.replace("://", f"://doctor:{PASSWORD}@", 1)
        found = {one.subject: one for one in await examine_server(url, "aiodlock", fix=False)}
        assert "doctor" in found["acl"].found
        assert not [one for one in found.values() if "unknown" in one.found]
        async with counting(url, "aiodlock") as hand_overs:  # of `aiodlock top`
            assert await hand_overs.per_second() is not None
    finally:
        await raw.acl_deluser("doctor")
