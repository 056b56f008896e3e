"""A password is in no log line, error, repr or process argument."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import sys
import traceback
from pathlib import Path

import pytest

import aiodlock
from aiodlock._embedded import EmbeddedServer

from .. import forked
from ..scenes import side_by_side
from ..servers import Store, embedded

ROOT = Path(__file__).parents[2]
SECRET = "s3cr3t-Xyzzy"


def with_secret(server: EmbeddedServer, secret: str = SECRET) -> str:
    return server.url.replace("://", f"://:{secret}@", 1)


def all_about(error: BaseException) -> str:
    """Return everything that a person or a log may be shown of it."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    shown = "".join(traceback.format_exception(error))
    # The lines of this file are quoted in the traceback, and name no secret.
    return shown + "".join(f"{one!r} {one.__dict__}" for one in chain)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:{}@host:6379/0",
        "redis://user:{}@host/0",
        "redis://host?password={}",
        "rediss://user:{}@host:6379/0?ssl_ca_certs=x",
        "unix://user:{}@/path?db=0",
        "unix:///path?password={}",
    ],
)
def test_reprs_have_no_password(url: str) -> None:
    client = aiodlock.Client(url.format(SECRET))
    things = [client, client.lock("name"), client.rwlock("name"), client.semaphore("name", 2)]
    things += [client.multilock("a", "b"), client.election("name")]
    assert SECRET not in " ".join(map(repr, things))


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:{}/x@host:6379/0",  # the mistakes of those who do not percent-encode
        "redis://user:{}#x@host:6379/0",
        "redis://user:{}?x@host:6379/0",
        "redis://user:x/{}@host:6379/0",
        "unix://user:{}@/path?db=x",
        "redis://user:{}@host/0?socket_timeout={}",
        "http://user:{}@host",
        "user:{}@host:6379",
        "redis+sentinel://user:{}/x@host:26379/service",
        "redis+cluster://user:{}?x@host:6379",
        "redis+cluster://user:{}#x@host:6379",
        "postgresql://user:{}/x@host:5432/db",
        "postgresql://user:{}#x@host/db",
        "postgresql://user:{}?x@host/db",
        "postgresql://user:1/{}@host/db",
        "postgresql://user:1?{}@host/db",
        "etcd://user:{}/x@host:2379",
        "etcd://user:1?{}@host",
        "zookeeper://user:{}/x@host:2181",
        "zookeeper://user:1/{}@host",
        "zookeeper://user:1?{}@host",
    ],
)
def test_wrong_urls_are_refused_without_their_password(url: str) -> None:
    try:
        client = aiodlock.Client(url.replace("{}", SECRET))
    except (ValueError, aiodlock.LockError) as refused:
        shown = all_about(refused)
    else:
        shown = repr(client)
    assert SECRET not in shown


@pytest.mark.parametrize("scheme", ["redis", "postgresql", "etcd", "zookeeper"])
def test_password_that_is_not_percent_encoded_is_told_to_be(scheme: str) -> None:
    with pytest.raises(ValueError, match="percent-encode"):
        aiodlock.Client(f"{scheme}://user:{SECRET}/x@host/")


def test_url_to_listen_on_is_refused_without_its_password() -> None:
    with pytest.raises(ValueError, match="listen_source") as refused:
        aiodlock.Client(
            "postgresql://host/db", listen_source=f"postgresql://user:{SECRET}/x@host/db"
        )
    assert SECRET not in all_about(refused.value)


@pytest.mark.usefixtures("brief_entering")
async def test_logs_and_errors_of_a_whole_life_have_no_password(
    real_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    with embedded(real_store.name, requirepass=SECRET) as server:
        url = with_secret(server)
        client = aiodlock.Client(url, unavailable_after=0.3, close_timeout=0.3)
        async with client:
            lease = await client.lock("name", ttl=0.5).acquire()
            shown.append(repr(lease) + lease.sequencer + lease.owner)
            shown.append(repr(await client.inspect("name")))
            server.kill()
            with pytest.raises(aiodlock.BackendError) as away:
                await client.lock("other").acquire()
            shown.append(all_about(away.value) + str(pickle.dumps(away.value)))
            shown.append(repr(await lease.wait_lost()))
            with pytest.raises(aiodlock.LockLost) as lost:
                await lease.release()
            shown.append(all_about(lost.value))
            shown += [repr(client), repr(client._core.session), repr(client._core.session.backend)]  # type: ignore[union-attr]
            server.start()
    with pytest.raises(aiodlock.BackendError) as gone:
        async with aiodlock.Client(url):
            pass
    shown.append(all_about(gone.value))
    shown += [record.getMessage() + str(record.__dict__) for record in caplog.records]
    assert caplog.records
    assert SECRET not in " ".join(shown)


@pytest.mark.usefixtures("brief_entering")
async def test_refused_password_is_not_quoted(real_store: Store) -> None:
    with embedded(real_store.name, requirepass="another") as server:
        with pytest.raises(aiodlock.BackendError) as refused:
            async with aiodlock.Client(with_secret(server)):
                pass
        assert "password" in str(refused.value)
        assert SECRET not in all_about(refused.value)


COMMANDS = [
    ["ls"],
    ["show", "name"],
    ["break", "nobody's", "--yes"],
    ["doctor"],
    ["doctor", "--json"],
    ["run", "name", "--", "true"],
]


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("password", [SECRET, "another"], ids=["right", "wrong"])
async def test_commands_print_no_password(real_store: Store, password: str) -> None:
    """All at the same time: with a wrong password each tries for almost five seconds."""

    async def prints_none(arguments: list[str]) -> None:
        process = await forked.start(
            "aiodlock",
            *arguments,
            env={**os.environ, "AIODLOCK_URL": with_secret(server)},
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        assert SECRET not in printed.decode()
        # A lock that is not held is no error of `break`, nor is what `doctor` finds.
        assert (process.returncode == 69) is (password != SECRET), printed.decode()

    with embedded(real_store.name, requirepass=password) as server:
        commands = COMMANDS if password == SECRET else [["ls"], ["doctor"], COMMANDS[-1]]
        await side_by_side(prints_none, {" ".join(command): command for command in commands})


@pytest.mark.stores("valkey9")
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
async def test_no_process_of_run_has_the_password_among_its_arguments(real_store: Store) -> None:
    look = (
        "import json, os, pathlib; ours = []\n"
        "for process in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    try: arguments = (process / 'cmdline').read_text()\n"
        "    except OSError: continue\n"
        "    ours.append(arguments)\n"
        "print(json.dumps(ours))"
    )
    with embedded(real_store.name, requirepass=SECRET) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiodlock", "run", "name", "--", sys.executable, "-c", look),
            env={**os.environ, "AIODLOCK_URL": with_secret(server)},
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
    assert process.returncode == 0
    arguments = json.loads(printed)
    assert sum("aiodlock" in one for one in arguments) >= 2  # the command, and the guardian
    assert not [one for one in arguments if SECRET in one]
