"""`doctor`: what it finds on servers of every kind, and that its advice is right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aiodlock.cli import _doctor

from ..servers import Store, embedded
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
        assert header.split("\t") == list(_doctor.COLUMNS)
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
        assert found["acl"]["level"] == "ok"
        for subject in ("version", "notifications", "eviction", "persistence", "replicas"):
            assert "unknown" in found[subject]["found"]
        assert (await call(poor, "ls"))[0] == 0
        assert (await call(poor, "break", "x", "--yes"))[0] == 1
    finally:
        await acl("DELUSER", "poor")


async def test_doctor_tells_a_replica() -> None:
    with embedded("valkey9", tcp=True, repl_diskless_sync_delay=0) as primary:
        host, _, port = primary.url.removeprefix("redis://").partition(":")
        with embedded("valkey9", replicaof=f"{host} {port.partition('/')[0]}") as replica:
            code, out = await call(Store("valkey9", replica.url), "doctor", "--json")
    found = {finding["subject"]: finding for finding in json.loads(out)}
    assert code == 1
    assert found["lock"]["level"] == found["replicas"]["level"] == "error"
    assert "primary" in found["replicas"]["fix"]
