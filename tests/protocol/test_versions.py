"""Two versions of the scripts on the same names: each leaves alone what it does not know."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase

from aiodlock.backends.redis import scripts
from aiodlock.backends.redis.scripts import Script

from ..model.test_scripts import Locks, Semaphores, VirtualDirect, connect, take_steps
from ..servers import Store
from .direct import Direct


def later_version() -> dict[str, str]:
    """Return the scripts of a version that adds a word to each record that it makes."""
    sources = {script.name: script.source.decode() for script in scripts.ALL}
    for old, new in (
        (
            "local words, how = ARGV[12], ARGV[13]",
            "local words, how = ARGV[12] .. ' z=new', ARGV[13]",
        ),
        (
            "int(now + ARGV[5]) .. ' ' .. ARGV[5])\n",
            "int(now + ARGV[5]) .. ' ' .. ARGV[5] .. ' y=new')\n",
        ),
    ):
        assert sources["acquire"].count(old) == 1, f"this is not in the script any more: {old}"
        sources["acquire"] = sources["acquire"].replace(old, new)
    return sources


async def test_word_of_a_later_version_survives_a_hand_off_and_extensions_by_this_one(
    direct: Direct,
) -> None:
    later = Direct(direct.redis, sources=later_version())
    await direct.acquire("a")
    await later.acquire("b")
    await direct.acquire("c")
    await direct.extend("b")
    assert (await direct.redis.hget(direct.keys.waiters, "b")).endswith(" y=new")
    await direct.leave("a")
    assert (await direct.holders())["b"].words == ("z=new",)
    await direct.extend("b")
    assert (await direct.holders())["b"].words == ("z=new",)
    await later.leave("b")
    assert set(await direct.holders()) == {"c"}


async def test_word_of_a_later_version_survives_the_general_hand_off(direct: Direct) -> None:
    later = Direct(direct.redis, sources=later_version())
    await direct.acquire("a")
    for id in ("b", "c"):
        await later.acquire(id, "s")
    await direct.leave("a", ambiguous=True)
    assert {holder.words for holder in (await direct.holders()).values()} == {("z=new",)}


class TwoVersions(VirtualDirect):
    """Each call is made by one version or the other, in turn."""

    def __init__(self, connection: Any, kind: str) -> None:
        super().__init__(connection, kind)
        self._later = VirtualDirect(connection, kind, later_version())
        self._later.keys = self.keys
        self._calls = 0

    async def _run(self, script: Script, keys: list[str], arguments: list[str | int]) -> Any:
        self._calls += 1
        if self._calls % 2:
            return await super()._run(script, keys, arguments)
        self._later.time = self.time
        reply = await self._later._run(script, keys, arguments)
        self._said += self._later.said()
        return reply


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("machine", [Locks, Semaphores])
def test_two_versions_side_by_side_keep_the_rules_of_the_machine(
    store: Store, machine: type[Locks]
) -> None:
    with connect(store) as connection:
        take_steps(
            lambda: machine(TwoVersions(connection, machine.kind)), 700, phases=[Phase.generate]
        )
