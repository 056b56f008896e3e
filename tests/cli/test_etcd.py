"""The command on etcd: doctor, ls, show, break."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from aiodlock import Client

from .. import forked
from ..etcd.servers import find_etcd
from ..servers import Servers

pytestmark = pytest.mark.skipif(find_etcd() is None, reason="etcd is not installed")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run("aiodlock", *words, capture_output=True, timeout=60)


async def test_people_see_and_break_locks(servers: Servers) -> None:
    url = servers.store("etcd").url
    async with Client(url) as client:
        lease = await client.lock("order:42", on_lost="flag").acquire()
        listed = await asyncio.to_thread(command, "ls", "--url", url, "--json")
        assert "order:42" in listed.stdout
        shown = await asyncio.to_thread(command, "show", "order:42", "--url", url)
        assert str(lease.token) in shown.stdout
        broken = await asyncio.to_thread(command, "break", "order:42", "--url", url, "--yes")
        assert broken.returncode == 0, broken.stderr
        assert (await lease.wait_lost()).reason == "broken"


def test_doctor_examines_every_member(servers: Servers) -> None:
    url = servers.store("etcd").url
    done = command("doctor", "--url", f"{url},127.0.0.1:1")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    found = {line[1]: line[0] for line in lines}
    member = url.removeprefix("etcd://")
    assert done.returncode == 0, done.stderr
    assert found["lock"] == "ok"
    assert found[f"member {member}"] in ("ok", "warning")  # an old one is warned of
    assert found["member 127.0.0.1:1"] == "warning"
    assert found["alarms"] == "ok"
    assert "writes" in found


def test_bench_measures_other_stores_too(servers: Servers) -> None:
    done = command("bench", "--seconds", "0.1", "--url", servers.store("etcd").url)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
