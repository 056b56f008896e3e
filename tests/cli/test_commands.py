"""`ls`, `show`, `break`, `top`, `doctor`: what they print, and their exit codes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import aiodlock
from aiodlock.cli import _app, _doctor

from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")


async def call(store: Store, *arguments: str) -> tuple[int, str]:
    """Run a command in a thread, for it has a loop of its own; return exit code and output."""

    def run() -> tuple[int, str]:
        result = CliRunner().invoke(_app.app, arguments, env={"AIODLOCK_URL": store.url})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return await asyncio.to_thread(run)


async def test_ls_lists_what_is_held_or_waited_for(store: Store, client: aiodlock.Client) -> None:
    assert await call(store, "ls") == (0, "")
    assert await call(store, "ls", "--json") == (0, "[]\n")
    async with client.lock("b\nb"), client.rwlock("a").read as lease:
        code, out = await call(store, "ls")
        assert code == 0
        rows = [line.split("\t") for line in out.splitlines()]
        assert [row[0] for row in rows] == ["a", r"b\nb"]
        assert rows[0][1] == "shared"
        assert rows[0][-1] == str(lease.token)
        _, out = await call(store, "ls", "a*", "--json")
        (found,) = json.loads(out)
        assert found["name"] == "a"
        assert found["holders"][0]["token"] == lease.token


async def test_show_tells_holders_and_waiters(store: Store, client: aiodlock.Client) -> None:
    async with client.lock("x") as lease:
        waiting = asyncio.create_task(client.lock("x", owner="me").acquire())
        async with asyncio.timeout(5):
            while not (await client.inspect("x")).waiters:
                await asyncio.sleep(0.005)
        _, out = await call(store, "show", "x", "--json")
        shown = json.loads(out)
        assert shown["holders"][0]["token"] == lease.token
        assert [waiter["owner"] for waiter in shown["waiters"]] == ["me"]
        _, out = await call(store, "show", "x")
        assert f"token {lease.token}" in out
        assert "waiter 1" in out
    await (await waiting).release()
    assert "free" in (await call(store, "show", "x"))[1]


async def test_break_asks_first_and_tells_how_many(store: Store, client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    code, out = await call(store, "break", "x")
    assert code == 2
    assert "--yes" in out
    assert lease.held
    code, out = await call(store, "break", "x", "--yes", "--json")
    assert (code, json.loads(out)) == (0, {"name": "x", "broken": 1})
    assert (await lease.wait_lost()).reason == "broken"
    code, out = await call(store, "break", "x", "--yes")
    assert (code, out) == (1, "released 0 holders of 'x'\n")
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_top_counts(store: Store, client: aiodlock.Client) -> None:
    async with client.lock("x"):
        code, out = await call(store, "top", "--count", "2", "--interval", "0.05", "--json")
        looks = [json.loads(line) for line in out.splitlines()]
        assert code == 0
        assert [(look["locks"], look["holders"], look["waiters"]) for look in looks] == [
            (1, 1, 0)
        ] * 2
        _, out = await call(store, "top", "--count", "1")
        assert out.splitlines()[1].startswith("x\texclusive\t")


async def findings(store: Store, *options: str) -> dict[str, dict[str, Any]]:
    _, out = await call(store, "doctor", "--json", *options)
    return {finding["subject"]: finding for finding in json.loads(out)}


async def test_doctor_looks_at_everything_and_fixes_notifications(store: Store) -> None:
    found = await findings(store)
    subjects = "lock version notifications eviction persistence replicas acl clock"
    assert list(found) == subjects.split()
    assert found["lock"]["level"] == "ok"
    assert found["version"]["found"].startswith("valkey 9")
    assert found["acl"]["level"] == "ok", found["acl"]
    assert found["clock"]["level"] == "ok"
    assert found["notifications"]["level"] == "note"
    assert "CONFIG SET" in found["notifications"]["mend"]
    assert (await findings(store, "--fix"))["notifications"]["level"] == "ok"
    assert (await findings(store))["notifications"]["level"] == "ok"
    server = await store.raw()
    await server.config_set("notify-keyspace-events", "")


async def test_doctor_warns_of_eviction_and_ends_with_1(store: Store) -> None:
    server = await store.raw()
    try:
        await server.config_set("maxmemory", "1gb")
        await server.config_set("maxmemory-policy", "allkeys-lru")
        code, out = await call(store, "doctor")
        assert code == 1
        assert "error\teviction\tallkeys-lru" in out
        assert "noeviction" in out
    finally:
        await server.config_set("maxmemory-policy", "noeviction")
        await server.config_set("maxmemory", "0")


async def test_doctor_names_what_the_acl_forbids(store: Store) -> None:
    server = await store.raw()
    await server.execute_command(
        "ACL", "SETUSER", "poor", "on", "nopass", "~*", "&*", "+@all", "-publish"
    )  # type: ignore[no-untyped-call]
    try:
        doctor = _doctor._Doctor(server, "aiodlock")
        refused = await doctor.acl()
        assert refused.level == "ok"
        whoami = server.execute_command

        async def as_poor(*words: str) -> Any:
            return "poor" if words[:2] == ("ACL", "WHOAMI") else await whoami(*words)  # type: ignore[no-untyped-call]

        setattr(server, "execute_command", as_poor)  # noqa: B010
        refused = await doctor.acl()
        assert refused.level == "error"
        assert "PUBLISH" in refused.found
        assert "ACL SETUSER poor" in refused.mend
    finally:
        setattr(server, "execute_command", whoami)  # noqa: B010
        await server.execute_command("ACL", "DELUSER", "poor")  # type: ignore[no-untyped-call]


async def test_store_away_gives_69() -> None:
    """All at the same time, for each tries for almost five seconds."""

    async def ends(*command: str) -> None:
        url = ["--url", "unix:///nowhere/at/all"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiodlock", command[0], *url, *command[1:]),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert (process.returncode, out) == (69, b""), command
        assert b"cannot reach" in err

    await asyncio.gather(
        *(ends("ls"), ends("show", "x"), ends("break", "x", "-y"), ends("doctor")),
        ends("run", "x", "--", "true"),
    )


async def test_bad_input_gives_2(store: Store) -> None:
    for arguments in (["show", ""], ["ls", "--url", "ftp://x"], ["ls", "--prefix", "{"]):
        code, out = await call(store, *arguments)
        assert (code, out.startswith("aiodlock: ")) == (2, True), out


def test_missing_packages_are_named() -> None:
    code = "import sys; sys.modules['typer'] = None; from aiodlock.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert "pip install 'aiodlock[cli]'" in done.stderr
