"""Bad input is refused when it is handed in; whatever else is text is a legal name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

import aiodlock
from aiodlock import Client
from aiodlock._options import check_text
from aiodlock.backends.redis.keys import keys_of, name_of

NOT_NUMBERS: Sequence[Any] = ["1", b"1", True, False, [], object(), 1j]
NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.fixture
def described() -> Client:
    """Give a client that was never entered: describing locks needs no more."""
    return Client("redis://localhost:1")


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "x" * 513, "é" * 257, "\ud800", "a\udfffb"])
def test_illegal_name_is_a_value_error(described: Client, name: str) -> None:
    with pytest.raises(ValueError):
        described.lock(name)
    with pytest.raises(ValueError):
        described.rwlock(name)


@pytest.mark.parametrize("name", [None, b"x", 1, ["x"], object()])
def test_name_that_is_no_text_is_a_type_error(described: Client, name: Any) -> None:
    with pytest.raises(TypeError):
        described.lock(name)


@pytest.mark.parametrize("name", ["x" * 512, "é" * 256, "{}", "a\0b", " ", "\n", "🔒", "%41"])
def test_any_other_text_is_a_legal_name(described: Client, name: str) -> None:
    assert described.lock(name).name == name


@given(st.text(min_size=1, max_size=128), st.text(min_size=1, max_size=128))
def test_two_names_never_share_a_key(one: str, other: str) -> None:
    keys, others = keys_of("aiodlock", "lock", one), keys_of("aiodlock", "lock", other)
    assert (one == other) == bool(set(keys) & set(others))
    assert name_of(keys.state) == ("lock", one)


@given(st.text(min_size=1, max_size=128))
def test_keys_of_a_name_have_one_hash_tag(name: str) -> None:
    for key in keys_of("aiodlock", "lock", name):
        assert key.count("{") == key.count("}") == 1
        assert key.isascii()
        assert key.isprintable()


def test_letters_and_digits_stay_readable_in_keys() -> None:
    assert "{Order42%3Ax}" in keys_of("aiodlock", "lock", "Order42:x").state


@given(st.text(max_size=600))
def test_check_text_takes_1_to_512_bytes_of_utf8(text: str) -> None:
    size = len(text.encode())
    if 1 <= size <= 512:
        assert check_text("name", text) == text
    else:
        with pytest.raises(ValueError):
            check_text("name", text)


# -- options of a lock -----------------------------------------------------------------------------

DURATIONS = ["ttl", "timeout", "max_hold", "lock_delay", "margin"]


@pytest.mark.parametrize("option", DURATIONS)
@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_duration_that_is_no_number_is_a_type_error(
    described: Client, option: str, value: Any
) -> None:
    with pytest.raises(TypeError, match=option):
        described.lock("x", **{option: value})


@pytest.mark.parametrize("option", DURATIONS)
@pytest.mark.parametrize("value", [*NOT_FINITE, -1, -0.001])
def test_duration_out_of_range_is_a_value_error(
    described: Client, option: str, value: float
) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=option):
        described.lock("x", **options)


@pytest.mark.parametrize("ttl", [0, 0.0, 0.049, pytest.param(10**400, id="10**400")])
def test_ttl_under_a_twentieth_or_absurd_is_a_value_error(described: Client, ttl: float) -> None:
    with pytest.raises(ValueError, match="ttl"):
        described.lock("x", ttl=ttl)
    with pytest.raises(ValueError, match="ttl"):
        Client("redis://localhost", ttl=ttl)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"ttl": 1}, {"ttl": True}),
        ({"ttl": 1.0}, {"ttl": True}),
        ({"auto_extend": True}, {"auto_extend": 1}),
        ({"confirm_release": False}, {"confirm_release": 0.0}),
        ({"timeout": 0}, {"timeout": False}),
    ],
)
def test_what_is_equal_to_an_option_that_was_checked_before_is_refused(
    described: Client, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    for _ in range(2):
        described.lock("a", **good)
        with pytest.raises(TypeError, match="must be"):
            described.lock("a", **bad)


def test_shortest_ttl_is_legal(described: Client) -> None:
    described.lock("x", ttl=0.05)


@pytest.mark.parametrize("on_lost", ["", "ignore", "Cancel", "raise"])
def test_unknown_on_lost_is_a_value_error(described: Client, on_lost: Any) -> None:
    with pytest.raises(ValueError, match="on_lost"):
        described.lock("x", on_lost=on_lost)


@pytest.mark.parametrize("on_lost", [None, 1, ["cancel"], {}])
def test_on_lost_of_another_type_is_refused(described: Client, on_lost: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="on_lost"):
        described.lock("x", on_lost=on_lost)


@pytest.mark.parametrize("flag", ["auto_extend", "confirm_release"])
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_flag_that_is_no_bool_is_a_type_error(described: Client, flag: str, value: Any) -> None:
    with pytest.raises(TypeError, match=flag):
        described.lock("x", **{flag: value})


@pytest.mark.parametrize(("ttl", "margin"), [(1.0, 1.0), (1.0, 2.0)])
def test_margin_that_eats_the_ttl_is_a_contradiction(
    described: Client, ttl: float, margin: float
) -> None:
    with pytest.raises(ValueError, match="margin"):
        described.lock("x", ttl=ttl, margin=margin)


def test_margin_that_eats_max_hold_is_a_contradiction(described: Client) -> None:
    with pytest.raises(ValueError, match="margin"):
        described.lock("x", ttl=10, margin=2, max_hold=1)


def test_margin_is_checked_against_the_ttl_of_the_client() -> None:
    with pytest.raises(ValueError, match="margin"):
        Client("redis://localhost", ttl=1.0).lock("x", margin=1.5)


@pytest.mark.parametrize("owner", ["", "x" * 513, "\ud800"])
def test_illegal_owner_is_a_value_error(described: Client, owner: str) -> None:
    with pytest.raises(ValueError, match="owner"):
        described.lock("x", owner=owner)


@pytest.mark.parametrize("owner", [1, b"me", object()])
def test_owner_that_is_no_text_is_a_type_error(described: Client, owner: Any) -> None:
    with pytest.raises(TypeError, match="owner"):
        described.lock("x", owner=owner)


def test_unknown_option_is_a_type_error(described: Client) -> None:
    options: dict[str, Any] = {"tll": 1}
    with pytest.raises(TypeError):
        described.lock("x", **options)
    with pytest.raises(TypeError):
        described.rwlock("x", **options)


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, math.inf])
async def test_bad_timeout_of_acquire_is_a_value_error_before_anything_else(
    described: Client, timeout: float
) -> None:
    # The client is not even entered: the input is looked at first.
    with pytest.raises(ValueError, match="timeout"):
        await described.lock("x").acquire(timeout=timeout)


@pytest.mark.parametrize("timeout", NOT_NUMBERS)
async def test_timeout_of_acquire_that_is_no_number_is_a_type_error(
    described: Client, timeout: Any
) -> None:
    with pytest.raises(TypeError, match="timeout"):
        await described.lock("x").acquire(timeout=timeout)


# -- options of a client ---------------------------------------------------------------------------

CLIENT_DURATIONS = ["ttl", "waiter_ttl", "token_retention", "unavailable_after", "close_timeout"]


@pytest.mark.parametrize("option", CLIENT_DURATIONS)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, None])
def test_client_duration_that_is_no_number_is_a_type_error(option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=option):
        Client("redis://localhost", **{option: value})


@pytest.mark.parametrize("option", CLIENT_DURATIONS)
@pytest.mark.parametrize("value", [*NOT_FINITE, -1])
def test_client_duration_out_of_range_is_a_value_error(option: str, value: float) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=option):
        Client("redis://localhost", **options)


@pytest.mark.parametrize("prefix", ["", "a{b", "a}b", "a*", "a b", "é"])
def test_prefix_that_would_break_keys_is_a_value_error(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        Client("redis://localhost", prefix=prefix)


@pytest.mark.parametrize("prefix", [None, b"x", 1])
def test_prefix_that_is_no_text_is_a_type_error(prefix: Any) -> None:
    with pytest.raises(TypeError, match="prefix"):
        Client("redis://localhost", prefix=prefix)


@pytest.mark.parametrize("number", [-1])
def test_negative_min_replicas_is_a_value_error(number: int) -> None:
    with pytest.raises(ValueError, match="min_replicas"):
        Client("redis://localhost", min_replicas=number)


@pytest.mark.parametrize("number", [1.0, "1", True, None])
def test_min_replicas_that_is_no_int_is_a_type_error(number: Any) -> None:
    with pytest.raises(TypeError, match="min_replicas"):
        Client("redis://localhost", min_replicas=number)


@pytest.mark.parametrize("value", [0, 1, None])
def test_configure_notifications_must_be_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="configure_notifications"):
        Client("redis://localhost", configure_notifications=value)


@pytest.mark.parametrize("source", ["", "localhost:6379", "http://localhost", "mem"])
def test_source_of_no_known_scheme_is_a_value_error(source: str) -> None:
    with pytest.raises(ValueError):
        Client(source)


@pytest.mark.parametrize("source", ["redis://localhost:99999", "redis://localhost:port"])
def test_source_with_an_impossible_port_is_a_value_error(source: str) -> None:
    with pytest.raises(ValueError):
        Client(source)


@pytest.mark.parametrize("source", [None, 1, b"redis://localhost", {"url": "x"}, object()])
def test_source_of_another_type_is_a_type_error(source: Any) -> None:
    with pytest.raises(TypeError):
        Client(source)


@pytest.mark.parametrize("source", [[], ()])
def test_empty_list_of_sources_is_a_value_error(source: Any) -> None:
    with pytest.raises(ValueError):
        Client(source)


def test_blocking_redis_client_is_refused() -> None:
    source: Any = redis.Redis()
    with pytest.raises(TypeError, match="asyncio"):
        Client(source)


# -- what a description says -----------------------------------------------------------------------


def test_repr_never_shows_a_password() -> None:
    sources: list[Any] = [
        "redis://user:s3cret@localhost:6379/0",
        "redis://:s3cret@localhost:6379",
        "rediss://user:s3cret@localhost:6379/0?ssl_cert_reqs=none",
        "redis://localhost:6379/0?password=s3cret",
        "unix://user:s3cret@/run/redis.sock?db=1",
        "unix:///run/redis.sock?password=s3cret",
        redis.asyncio.Redis(password="s3cret"),
        redis.asyncio.Redis.from_url("redis://user:s3cret@localhost"),
    ]
    for source in sources:
        client = Client(source)
        rw = client.rwlock("order:42")
        for described in (client, client.lock("order:42"), rw, rw.read, rw.write):
            assert "s3cret" not in repr(described), repr(described)


@pytest.mark.parametrize("source", ["redis://u:s3cret@localhost:port", "foo://u:s3cret@localhost"])
def test_refused_source_does_not_show_its_password(source: str) -> None:
    with pytest.raises(ValueError) as refused:
        Client(source)
    assert "s3cret" not in str(refused.value)


def test_repr_of_a_lock_names_it_its_mode_and_its_client(described: Client) -> None:
    text = repr(described.lock("order:42"))
    assert "'order:42'" in text
    assert "exclusive" in text
    assert "localhost:1" in text


def test_lock_has_name_and_mode(described: Client) -> None:
    both = described.rwlock("n", ttl=3)
    assert (both.read.name, both.read.mode) == ("n", "shared")
    assert (both.write.name, both.write.mode) == ("n", "exclusive")
    assert isinstance(both.write, aiodlock.Lock)
    lock = described.lock("n")
    assert (lock.name, lock.mode) == ("n", "exclusive")


def test_constructing_needs_no_event_loop_and_no_server() -> None:
    Client("redis://nowhere.invalid:1").lock("x")
    Client("memory://").lock("x")
    Client("unix:///nowhere/redis.sock").lock("x")


_REDIS_ONE = ["redis://h", "redis+sentinel://h:1/s", "redis+cluster://h:1"]
_QUORUM = ["redis://a", "redis://b", "redis://c"]
_SOURCES: list[Any] = [
    *_REDIS_ONE,
    _QUORUM,
    *("memory://", "memory://name", "postgresql://h/d", "etcd://h:1", "zookeeper://h:1"),
]
#: Options that some stores have no use for, and the sources that take them.
_OF_SOME: dict[str, tuple[Any, list[Any]]] = {
    "min_replicas": (1, _REDIS_ONE),
    "configure_notifications": (True, [*_REDIS_ONE, _QUORUM]),
    "restart_delay": (3.0, [_QUORUM]),
    "listen_source": ("postgresql://h/d", ["postgresql://h/d"]),
    "create": (True, ["postgresql://h/d"]),
}


@pytest.mark.parametrize("option", _OF_SOME)
@pytest.mark.parametrize("source", _SOURCES, ids=str)
def test_option_is_taken_by_the_sources_that_have_a_use_for_it(option: str, source: Any) -> None:
    value, takes = _OF_SOME[option]
    if source in takes:
        Client(source, **{option: value})
    else:
        # Unsupported is one: of what is promised elsewhere, and cannot be had here.
        with pytest.raises(ValueError, match=option):
            Client(source, **{option: value})


@pytest.mark.parametrize("ttl", [2, 2.0])
def test_seconds_are_floats_however_they_were_given(ttl: float) -> None:
    lock = Client("memory://").lock("name", ttl=ttl, max_hold=3, linger=1, timeout=1)
    options = lock._described.options
    given = (options.ttl, options.max_hold, options.linger, options.timeout, options.margin)
    assert [type(seconds) for seconds in given] == [float] * 5
