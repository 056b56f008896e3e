"""Bad input gets `TypeError` or `ValueError` before anything is sent; any other `str` is a name."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiodlock

from ..proxy import FaultProxy
from ..scenes import held_elsewhere
from ..servers import BEYOND, Store

WRONG = (TypeError, ValueError)
#: Never entered, and nothing listens: what reached the network would raise something else.
AWAY = aiodlock.Client("redis://127.0.0.1:1/0")

BAD_NAMES = [
    "",
    "x" * 513,
    "é" * 257,
    "😀" * 129,
    "\ud800",
    "a\udfffb",
    "\udc80",
    b"x",
    None,
    1,
    True,
    ["x"],
    ("x",),
    object(),
]
GOOD_NAMES = [
    "x" * 512,
    "é" * 256,
    "😀" * 128,
    "{}",
    "{x}",
    "}{",
    "a{b}c",
    " ",
    "\x00",
    "a\x00b",
    "\n",
    "\r\n",
    "\t",
    "😀",
    "%",
    "%41",
    "A",
    ":",
    "a:b:c",
    "*",
    "?",
    "[a]",
    "\\",
    "/",
    "..",
    "\x7f",
    "\u202e",
    "\ufeff",
    "ÅÅ",
    "-",
    "None",
    '"',
    "'",
    "\x1b[31m",
]
NOT_SECONDS: list[Any] = [math.nan, "1", b"1", True, False, [1], object(), 1j]
INFINITE: list[Any] = [math.inf, -math.inf]

Make = Callable[[Any], Any]
MAKERS: dict[str, Make] = {
    "lock": lambda name: AWAY.lock(name),
    "rwlock": lambda name: AWAY.rwlock(name),
    "semaphore": lambda name: AWAY.semaphore(name, 1),
    "election": lambda name: AWAY.election(name),
    "multilock": lambda name: AWAY.multilock("good", name),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:20])
def test_bad_name_is_refused(make: Make, name: Any) -> None:
    with pytest.raises(WRONG):
        make(name)


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:20])
async def test_bad_name_is_refused_by_what_only_looks(name: Any) -> None:
    for ask in (AWAY.inspect(name), AWAY.break_lock(name)):
        with pytest.raises(WRONG):
            await ask


@pytest.mark.scripted
@pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)
async def test_any_other_name_is_legal_and_its_own(store: Store, client: aiodlock.Client) -> None:
    leases = {name: await client.lock(name).acquire() for name in GOOD_NAMES}
    seen = {info.name: info async for info in client.locks()}
    assert set(seen) == set(GOOD_NAMES)
    for name, lease in leases.items():
        assert lease.name == name
        assert (await client.inspect(name)).holders[0].token == lease.token
        assert await client.check_sequencer(lease.sequencer), name
        assert lease.sequencer.isprintable()
        with pytest.raises(aiodlock.WouldBlock) as raised:
            await client.lock(name, owner="other").acquire_nowait()
        assert raised.value.name == name
    raw = await store.raw()
    for key in map(str, await raw.keys("*")):
        assert key.isascii()
        assert key.isprintable()
        assert " " not in key
    for lease in leases.values():
        await lease.release()
    assert not [info async for info in client.locks()]


@pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)
async def test_names_that_unicode_calls_equal_are_two_locks(client: aiodlock.Client) -> None:
    async with client.lock("\u00e9"):
        assert not await client.lock("e\u0301").locked()


@pytest.mark.scripted
@pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)
async def test_letters_and_digits_stay_readable_in_keys(
    store: Store, client: aiodlock.Client
) -> None:
    async with client.lock("Order42é"):
        keys = await (await store.raw()).keys("*")
        assert all("Order42%" in key for key in keys), keys


@pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)
async def test_an_encoded_name_is_another_name(client: aiodlock.Client) -> None:
    async with client.lock("%7B"):
        assert not await client.lock("{").locked()


@pytest.mark.parametrize("value", [*NOT_SECONDS, *INFINITE, 0, 0.0, 0.049, -1, None])
def test_client_ttl_is_at_least_50_ms_and_finite(value: Any) -> None:
    with pytest.raises(WRONG):
        aiodlock.Client("memory://", ttl=value)
    with pytest.raises(WRONG):
        aiodlock.Client("memory://", waiter_ttl=value)


@pytest.mark.parametrize("value", [*NOT_SECONDS, *INFINITE, 0, 0.0, 0.049, -1])
def test_lock_ttl_is_at_least_50_ms_and_finite(value: Any) -> None:
    for make in (AWAY.lock, AWAY.rwlock, AWAY.election, AWAY.multilock):
        with pytest.raises(WRONG):
            make("x", ttl=value)
    with pytest.raises(WRONG):
        AWAY.semaphore("x", 1, ttl=value)


def test_smallest_ttl_is_legal() -> None:
    AWAY.lock("x", ttl=0.05)
    aiodlock.Client("memory://", ttl=0.05, waiter_ttl=0.05)


@pytest.mark.parametrize("value", [*NOT_SECONDS, -1, -0.001, -math.inf])
async def test_bad_timeout_is_refused_when_made_and_when_acquiring(value: Any) -> None:
    for make in (AWAY.lock, AWAY.rwlock, AWAY.election, AWAY.multilock):
        with pytest.raises(WRONG):
            make("x", timeout=value)
    with pytest.raises(WRONG):
        AWAY.semaphore("x", 1, timeout=value)
    for attempt in (
        AWAY.lock("x").acquire(timeout=value),
        AWAY.semaphore("x", 1).acquire(timeout=value),
        AWAY.multilock("x").acquire(timeout=value),
    ):
        with pytest.raises(WRONG):
            await attempt


@pytest.mark.parametrize("value", ["", "CANCEL", "raise", None, True, 1, b"cancel"])
def test_unknown_on_lost_is_refused(value: Any) -> None:
    with pytest.raises(WRONG):
        AWAY.lock("x", on_lost=value)


@pytest.mark.parametrize("option", ["auto_extend", "confirm_release"])
@pytest.mark.parametrize("value", [None, 0, 1, "yes", 1.0])
def test_a_flag_is_a_bool(option: str, value: Any) -> None:
    with pytest.raises(WRONG):
        AWAY.lock("x", **{option: value})


@pytest.mark.parametrize("option", ["lock_delay", "margin", "max_hold"])
@pytest.mark.parametrize("value", [*NOT_SECONDS, -1, -math.inf])
def test_durations_of_a_lock_are_checked(option: str, value: Any) -> None:
    with pytest.raises(WRONG):
        AWAY.lock("x", **{option: value})


@pytest.mark.parametrize("option", ["lock_delay", "margin"])
@pytest.mark.parametrize("value", [math.inf, None])
def test_delay_and_margin_are_finite_numbers(option: str, value: Any) -> None:
    with pytest.raises(WRONG):
        AWAY.lock("x", **{option: value})


def test_max_hold_of_nothing_is_refused() -> None:
    with pytest.raises(WRONG):
        AWAY.lock("x", max_hold=0)


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": 1, "margin": 1},
        {"ttl": 1, "margin": 2},
        {"max_hold": 1, "margin": 2},
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        AWAY.lock("x", **options)


def test_margin_as_long_as_the_clients_ttl_is_refused() -> None:
    with pytest.raises(ValueError):
        aiodlock.Client("memory://", ttl=1).lock("x", margin=1)


@pytest.mark.parametrize("value", ["", 1, True, b"me", object(), "\ud800"])
def test_bad_owner_is_refused(value: Any) -> None:
    with pytest.raises(WRONG):
        AWAY.lock("x", owner=value)


def test_unknown_options_are_refused() -> None:
    makers: list[Callable[..., Any]] = [
        AWAY.lock,
        AWAY.rwlock,
        AWAY.multilock,
        AWAY.election,
        lambda name, **options: AWAY.semaphore(name, 1, **options),
        lambda name, **options: aiodlock.Client("memory://", **options),
    ]
    for make in makers:
        with pytest.raises(TypeError):
            make("x", time_out=1)


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError):
        AWAY.lock("x", 10)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        aiodlock.Client("memory://", "prefix")  # type: ignore[call-arg]


@pytest.mark.parametrize("limit", [0, -1, 1.5, 1.0, True, "1", None, math.nan, math.inf])
def test_bad_limit_of_a_semaphore_is_refused(limit: Any) -> None:
    with pytest.raises(WRONG):
        AWAY.semaphore("x", limit)


def test_a_semaphore_is_not_reentrant_so_an_owner_is_refused() -> None:
    with pytest.raises(WRONG):
        AWAY.semaphore("x", 1, owner="me")  # type: ignore[call-arg]


def test_multilock_needs_names() -> None:
    with pytest.raises(WRONG):
        AWAY.multilock()


def test_multilock_refuses_what_is_neither_name_nor_lock() -> None:
    for other in (1, None, AWAY, ["a", "b"], AWAY.rwlock("x")):
        with pytest.raises(WRONG):
            AWAY.multilock("a", other)  # type: ignore[arg-type]


def test_multilock_refuses_a_lock_of_another_client() -> None:
    with pytest.raises(WRONG):
        AWAY.multilock("a", aiodlock.Client("memory://").lock("b"))


@pytest.mark.parametrize("option", ["token_retention", "unavailable_after", "close_timeout"])
@pytest.mark.parametrize("value", [*NOT_SECONDS, -1, -math.inf, None])
def test_durations_of_a_client_are_checked(option: str, value: Any) -> None:
    with pytest.raises(WRONG):
        aiodlock.Client("memory://", **{option: value})


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", None])
def test_bad_number_of_replicas_is_refused(value: Any) -> None:
    with pytest.raises(WRONG):
        aiodlock.Client("redis://localhost", min_replicas=value)


@pytest.mark.parametrize("value", ["", None, 1, b"x", "\ud800"])
def test_bad_prefix_is_refused(value: Any) -> None:
    with pytest.raises(WRONG):
        aiodlock.Client("memory://", prefix=value)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_configure_notifications_is_a_bool(value: Any) -> None:
    with pytest.raises(WRONG):
        aiodlock.Client("memory://", configure_notifications=value)


@pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)
async def test_extend_checks_its_ttl(client: aiodlock.Client) -> None:
    async with client.lock("x") as lease:
        for value in (*NOT_SECONDS, *INFINITE, 0, 0.01, -1):
            with pytest.raises(WRONG):
                await lease.extend(value)
        assert lease.held


@pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)
async def test_extend_may_not_contradict_the_margin(client: aiodlock.Client) -> None:
    async with client.lock("x", ttl=2, margin=0.5) as lease:
        with pytest.raises(ValueError):
            await lease.extend(0.5)
        assert lease.held


@pytest.mark.parametrize("match", ["", None, 1, b"*", "\ud800"])
async def test_bad_glob_is_refused_or_matches_nothing(match: Any) -> None:
    async with aiodlock.Client("memory://") as client, client.lock("x"):
        try:
            assert not [info async for info in client.locks(match=match)]
        except WRONG:
            pass


@pytest.mark.parametrize("value", [None, 1, b"x"])
async def test_a_sequencer_is_a_string(value: Any) -> None:
    async with aiodlock.Client("memory://") as client:
        with pytest.raises(TypeError):
            await client.check_sequencer(value)


@pytest.mark.parametrize("value", [None, 1, b"x", "\ud800"])
async def test_a_leaders_value_is_a_string(value: Any) -> None:
    async with aiodlock.Client("memory://") as client:
        with pytest.raises(WRONG):
            async with client.election("x").lead(value):
                pass


@pytest.mark.stores("valkey9")
async def test_nothing_is_sent_for_bad_input(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client:
        await client.inspect("x")
        proxy.forget()
        for wrong in (
            lambda: client.lock("x").acquire(timeout=-1),
            lambda: client.lock("x", ttl=0.01).acquire(),
            lambda: client.inspect(""),
            lambda: client.break_lock("\ud800"),
        ):
            with pytest.raises(WRONG):
                await wrong()
        async with held_elsewhere(client.lock("y")):
            pass
        assert not [command for command in proxy.log if b"{x}" in command.raw]


async def test_wrong_use_of_values_as_awaitable() -> None:
    """A lock is no context manager of the other kind, and cannot be awaited by mistake."""
    lock: Any = AWAY.lock("x")
    with pytest.raises((TypeError, AttributeError)):
        with lock:
            pass
    assert not isinstance(lock, Awaitable)
