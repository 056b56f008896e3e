"""`doctor`: what it finds on servers of every kind, and that its advice is right."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from typer.testing import CliRunner

from aiodlock.cli import _app, _finding

from ..scenes import bounded
from ..servers import BINARIES, CLUSTER, SENTINEL, Store, embedded
from ..topology.cluster import Cluster, port
from ..topology.servers import Node
from .test_commands import call

SUBJECTS = [
    "lock",
    "version",
    "notifications",
    "eviction",
    "persistence",
    "replicas",
    "acl",
    "clock",
]


async def findings(store: Store, *options: str) -> dict[str, dict[str, Any]]:
    _, out = await call(store, "doctor", "--json", *options)
    return {finding["subject"]: finding for finding in json.loads(out)}


@pytest.mark.stores("valkey9")
async def test_doctor_looks_at_everything_and_fixes_notifications(store: Store) -> None:
    found = await findings(store)
    assert list(found) == SUBJECTS
    assert found["lock"]["level"] == "ok"
    assert found["version"]["found"].startswith("valkey 9")
    assert found["acl"]["level"] == "ok", found["acl"]
    assert found["clock"]["level"] == "ok"
    assert found["notifications"]["level"] == "note"
    assert "CONFIG SET" in found["notifications"]["fix"]
    assert (await findings(store, "--fix"))["notifications"]["level"] == "ok"
    assert (await findings(store))["notifications"]["level"] == "ok"
    server = await store.raw()
    await server.config_set("notify-keyspace-events", "")


@pytest.mark.stores("valkey9")
async def test_doctor_tells_how_often_the_append_only_file_is_synced(store: Store) -> None:
    server = await store.raw()
    await server.config_set("appendonly", "yes")
    try:
        for fsync, level in (("always", "ok"), ("everysec", "ok"), ("no", "note")):
            await server.config_set("appendfsync", fsync)
            found = (await findings(store))["persistence"]
            assert fsync in found["found"]
            assert found["level"] == level
            assert ("may lose the grants" in found["meaning"]) == (fsync != "always")
    finally:
        await server.config_set("appendfsync", "everysec")
        await server.config_set("appendonly", "no")


@pytest.mark.stores("valkey9")
async def test_doctor_warns_of_eviction_and_ends_with_1(store: Store) -> None:
    server = await store.raw()
    try:
        await server.config_set("maxmemory", "1gb")
        await server.config_set("maxmemory-policy", "allkeys-lru")
        code, out = await call(store, "doctor")
        assert code == 1
        assert "error\teviction\tallkeys-lru" in out
        assert "noeviction" in out
        _, out = await call(store, "doctor", "--header")
        header, *lines = out.splitlines()
        assert header.split("\t") == list(_finding.COLUMNS)
        assert [line.split("\t")[1] for line in lines] == SUBJECTS
        assert {line.count("\t") for line in lines} == {header.count("\t")}
    finally:
        await server.config_set("maxmemory-policy", "noeviction")
        await server.config_set("maxmemory", "0")


@pytest.mark.real_store
async def test_doctor_names_what_the_acl_forbids_and_fixes_it(store: Store) -> None:
    server = await store.raw()

    async def acl(*words: str) -> None:
        await server.execute_command("ACL", *words)  # type: ignore[no-untyped-call]

    await acl("SETUSER", "poor", "on", ">secret", "~*", "&*", "+@all", "-publish", "-hset")
    poor = Store(store.name, store.url.replace("unix://", "unix://poor:secret@"))
    try:
        code, out = await call(poor, "doctor", "--json")
        found = {finding["subject"]: finding for finding in json.loads(out)}
        assert code == 1
        assert list(found) == SUBJECTS
        assert found["lock"]["level"] == found["acl"]["level"] == "error"
        for word in ("poor", "PUBLISH", "HSET"):
            assert word in found["acl"]["found"]
        fix = found["acl"]["fix"].partition(";")[0].split()
        assert fix[:3] == ["ACL", "SETUSER", "poor"]
        # Exactly what it says is enough, for a user who may do nothing else.
        await acl("SETUSER", "poor", "reset", "on", ">secret", *fix[3:])
        code, out = await call(poor, "doctor", "--json")
        found = {finding["subject"]: finding for finding in json.loads(out)}
        assert code == 0
        assert list(found) == SUBJECTS
        assert found["acl"]["level"] == "warning"
        assert "default needs no password" in found["acl"]["found"]
        for subject in ("version", "notifications", "eviction", "persistence", "replicas"):
            assert "unknown" in found[subject]["found"]
        assert (await call(poor, "ls"))[0] == 0
        assert (await call(poor, "break", "x", "--yes"))[0] == 1
    finally:
        await acl("DELUSER", "poor")


async def test_doctor_takes_no_refusal_for_an_answer() -> None:
    """Each of INFO and CONFIG alone tells that the file is appended to, and how much memory there is."""
    own = ("ON", ">secret", "~*", "&*", "+@all", "-@admin", "+acl|whoami")
    with Node(BINARIES["valkey9"](), appendonly="yes") as node:
        node.call("CONFIG", "SET", "maxmemory", "100mb", "maxmemory-policy", "allkeys-lru")
        node.call("CONFIG", "SET", "appendfsync", "always")
        store = Store("valkey9", f"redis://own:secret@127.0.0.1:{node.port}/0")
        for rights in (("+config|get", "-info"), ("+info",)):
            node.call("ACL", "SETUSER", "own", "RESET", *own, *rights)
            found = await findings(store)
            assert found["acl"]["level"] == "warning"
            assert found["eviction"]["level"] == "error"
            assert "append-only" in found["persistence"]["found"]
        node.call("ACL", "SETUSER", "default", "off")
        assert (await findings(store))["acl"]["level"] == "ok"


@pytest.mark.stores("valkey9")
async def test_doctor_examines_a_server_that_lets_the_user_do_hardly_anything(store: Store) -> None:
    """What is refused first is not the script, but what each connection begins with."""
    server = await store.raw()
    rights = ("on", ">secret", "~app:*", "&*", "+get", "+ping", "+hello", "+client")
    await server.execute_command("ACL", "SETUSER", "least", *rights)  # type: ignore[no-untyped-call]
    try:
        least = Store(store.name, store.url.replace("unix://", "unix://least:secret@"))
        code, out = await call(least, "doctor", "--json")
        found = {finding["subject"]: finding for finding in json.loads(out)}
        assert code == 1
        assert list(found) == SUBJECTS
        assert "NOPERM" in found["acl"]["found"]
        assert found["acl"]["fix"].startswith("ACL SETUSER least ")
    finally:
        await server.execute_command("ACL", "DELUSER", "least")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("command", ["doctor", "init", "ls"])
@pytest.mark.parametrize("url", ["localhost:6379", "mysql://localhost/a", "garbage"])
def test_url_of_no_store_is_answered_with_those_that_are(command: str, url: str) -> None:
    ended = CliRunner().invoke(_app.app, [command, "--url", url])
    assert ended.exit_code == 2
    assert "redis://, rediss://" in ended.output
    assert len(ended.output.splitlines()) == 1


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    monkeypatch.delitem(sys.modules, "aiodlock.cli._doctor_postgres", raising=False)
    for module in [name for name in sys.modules if name.startswith("aiodlock.backends.postgres")]:
        monkeypatch.delitem(sys.modules, module)
    ended = CliRunner().invoke(_app.app, ["doctor", "--url", "postgresql://localhost/a"])
    assert ended.exit_code == 70
    assert "pip install 'aiodlock[postgres]'" in ended.output


@pytest.mark.stores(CLUSTER, SENTINEL)
async def test_doctor_examines_every_primary_behind_one_url(store: Store) -> None:
    code, out = await call(store, "doctor", "--json")
    assert code == 0, out
    found = {finding["subject"]: finding["level"] for finding in json.loads(out)}
    assert found["lock"] == "ok"
    primaries = [subject for subject in found if subject.endswith(": eviction")]
    assert primaries
    assert all(found[subject] == "ok" for subject in primaries)


async def test_doctor_names_the_dead_primary_of_a_cluster() -> None:
    with Cluster(BINARIES["valkey9"](), primaries=3, replicas=0) as cluster:
        dead = cluster.nodes[2]
        where = f"primary 127.0.0.1:{port(dead)}"
        dead.kill()
        async with bounded(60):
            found: dict[str, Any] = {}
            while found.get("cluster", {}).get("level") != "error":
                code, out = await call(Store("valkey9", cluster.url), "doctor", "--json")
                found = {finding["subject"]: finding for finding in json.loads(out)}
        assert code == 1
        assert found[where]["level"] == "error"
        assert "slots have no primary" in found["cluster"]["found"]


async def test_doctor_says_that_the_memory_is_full() -> None:
    with embedded("valkey9", maxmemory="3mb", maxmemory_policy="noeviction") as server:
        async with Redis.from_url(server.url) as filling:
            with contextlib.suppress(RedisError):
                for number in range(100):
                    await filling.set(f"full:{number}", "x" * 100_000)
                    await filling.time()
        code, out = await call(Store("valkey9", server.url), "doctor", "--json")
    found = {finding["subject"]: finding for finding in json.loads(out)}
    assert found["eviction"]["level"] in ("warning", "error"), found
    assert "maxmemory" in found["eviction"]["found"]
    assert code == (1 if "error" in {one["level"] for one in found.values()} else 0)


async def test_doctor_says_of_every_node_of_a_cluster_that_it_is_one() -> None:
    """Its lock has a slot on one of them, where all would be well."""
    with Cluster(BINARIES["valkey9"](), primaries=2, replicas=0) as cluster:
        for node in cluster.nodes:
            url = f"redis://127.0.0.1:{port(node)}"
            code, out = await call(Store("valkey9", url), "doctor", "--json")
            found = {finding["subject"]: finding for finding in json.loads(out)}
            assert code == 1
            assert list(found) == SUBJECTS
            assert found["lock"]["level"] == "error"
            assert "redis+cluster://" in found["lock"]["fix"]


async def test_doctor_tells_a_replica() -> None:
    with embedded("valkey9", tcp=True, repl_diskless_sync_delay=0) as primary:
        host, _, port = primary.url.removeprefix("redis://").partition(":")
        with embedded("valkey9", replicaof=f"{host} {port.partition('/')[0]}") as replica:
            code, out = await call(Store("valkey9", replica.url), "doctor", "--json")
    found = {finding["subject"]: finding for finding in json.loads(out)}
    assert code == 1
    assert found["lock"]["level"] == found["replicas"]["level"] == "error"
    assert "primary" in found["replicas"]["fix"]
