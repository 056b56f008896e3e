"""Names, owners and sequencers that are meant to do harm: no key outside, no key shared."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import aiodlock
from aiodlock._model import Kind
from aiodlock.backends.redis.keys import keys_of, name_of

from ..servers import Store

_WORDS = "{ } {} : % %7B %61 * ? [ / .. é 🔒 :state :token }:marker: a b aiodlock:2:lock:{x}:state"
PIECES = st.sampled_from([*_WORDS.split(" "), " ", "\\", "\r\n", "\0", "$3\r\nfoo"])
NAMES = (
    st.text(min_size=1, max_size=40) | st.lists(PIECES, min_size=1, max_size=6).map("".join)
).filter(lambda name: len(name.encode()) <= 512)
KINDS: st.SearchStrategy[Kind] = st.sampled_from(["lock", "semaphore"])
KEY = re.compile(
    r"aiodlock:2:(lock|semaphore):\{[A-Za-z0-9_.~%-]+\}:(state|queue|waiters|token|broken|record|marker:)"
)


def keys(kind: Kind, name: str) -> set[str]:
    found = keys_of("aiodlock", kind, name)
    return set(found) - {found.changes}  # a channel


@given(KINDS, NAMES)
def test_every_key_is_of_the_prefix_and_has_one_hash_tag(kind: Kind, name: str) -> None:
    assert all(KEY.fullmatch(key) for key in keys(kind, name))
    assert len({key[key.index("{") : key.index("}")] for key in keys(kind, name)}) == 1


@given(KINDS, NAMES, KINDS, NAMES)
@example("lock", "a", "lock", "%61")
@example("lock", "a}:state", "lock", "a")
@example("lock", "é", "lock", "e\u0301")
def test_no_two_names_share_a_key(kind: Kind, name: str, other_kind: Kind, other: str) -> None:
    if (kind, name) != (other_kind, other):
        mine, others = keys(kind, name), keys(other_kind, other)
        assert not mine & others
        # Nor does a key of one begin with the marker prefix of another.
        assert not any(
            key.startswith(f"{keys_of('aiodlock', kind, name).marker}") for key in others
        )


@given(KINDS, NAMES)
def test_a_key_tells_its_name(kind: Kind, name: str) -> None:
    assert {name_of(key) for key in keys(kind, name)} == {(kind, name)}


hostile = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@pytest.mark.stores("valkey9")
def test_hostile_names_and_owners_are_kept_apart_on_a_server(store: Store) -> None:
    @hostile
    @given(NAMES, NAMES, NAMES)
    def check(name: str, other: str, owner: str) -> None:
        asyncio.run(use(store, name, other, owner))

    check()


async def use(store: Store, name: str, other: str, owner: str) -> None:
    raw = store._connect(decode_responses=True)
    try:
        await raw.flushall()
        await raw.set("somebody-elses", "untouched")
        async with aiodlock.Client(store.url) as client:
            lock = client.lock(name, owner=owner, timeout=5.0)
            async with lock as lease:
                info = await client.inspect(name)
                assert [(held.owner, held.token) for held in info.holders] == [(owner, lease.token)]
                assert await client.check_sequencer(lease.sequencer)
                if other != name:
                    assert (await client.inspect(other)).holders == ()
                    async with client.lock(other, owner=owner, timeout=5.0):
                        pass
                    async with client.semaphore(name, 1, timeout=5.0):
                        pass
                    # Neither the name of another lock nor that of another owner opens this one.
                with pytest.raises(aiodlock.WouldBlock):
                    await client.lock(name, owner=owner + "x").acquire_nowait()
                with pytest.raises(aiodlock.WouldBlock):
                    await client.lock(name).acquire_nowait()
                async with client.lock(name, owner=owner, timeout=5.0):
                    pass
                assert {info.name async for info in client.locks()} == {name}
        left = {str(key) for key in await raw.keys("*")} - {"somebody-elses"}
        assert all(KEY.match(key) for key in left)
        assert {name_of(key)[1] for key in left} <= {name, other}
        assert await raw.get("somebody-elses") == "untouched"
    finally:
        await raw.aclose()


SEQUENCERS = st.text(max_size=60) | st.lists(
    PIECES
    | st.sampled_from([":exclusive:", ":shared:", ":semaphore:", "1", "17", "-1", "1e3", "٣"]),
    max_size=8,
).map("".join)


@pytest.mark.stores("valkey9")
def test_sequencers_that_nobody_made_are_never_true_and_do_no_harm(store: Store) -> None:
    @hostile
    @given(st.lists(SEQUENCERS, min_size=5, max_size=20))
    def check(sequencers: list[str]) -> None:
        asyncio.run(use_sequencers(store, sequencers))

    check()


async def use_sequencers(store: Store, sequencers: list[str]) -> None:
    async with aiodlock.Client(store.url) as client, client.lock("a") as lease:
        real = lease.sequencer
        assert await client.check_sequencer(real)
        token = str(lease.token)
        forged = [
            *sequencers,
            *(real + one for one in sequencers if one),
            *(one + real for one in sequencers if one),
            real.replace("exclusive", "shared"),
            real.replace(token, f"0{token}"),
            real.replace(token, str(lease.token + 1)),
            real.replace("a:", "%61:"),
            real.upper(),
        ]
        for sequencer in forged:
            assert not await client.check_sequencer(sequencer), sequencer
    raw = store._connect(decode_responses=True)
    try:
        assert {name_of(str(key))[1] for key in await raw.keys("*")} <= {"a"}
    finally:
        await raw.aclose()


@given(st.text(max_size=600))
def test_text_that_is_no_name_is_refused_before_anything_is_sent(text: str) -> None:
    client = aiodlock.Client("redis://nowhere.invalid")
    legal = 1 <= len(text.encode("utf-8", "surrogatepass")) <= 512
    with contextlib.nullcontext() if legal else pytest.raises(ValueError):
        client.lock(text)
    with pytest.raises(ValueError):
        client.lock(text[:100] + "\ud800")
    with pytest.raises(ValueError):
        client.lock("name", owner="\udfff" + text[:100])
