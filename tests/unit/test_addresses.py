"""Which address of a server's name is dialled next."""

from __future__ import annotations

import itertools
import socket

import pytest

from aiodlock.backends._addresses import Addresses, resolve

HERE = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


@pytest.fixture
async def turning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the resolver turn the addresses of each name round at each question."""
    asked = itertools.count()

    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        first = next(asked) % len(HERE)
        found = HERE[first:] + HERE[:first]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.usefixtures("turning")
async def test_all_addresses_are_dialled_before_one_is_dialled_again() -> None:
    addresses = Addresses()
    for _ in range(4):
        assert sorted([await addresses.choose("name", 1) for _ in HERE]) == HERE


@pytest.mark.usefixtures("turning")
async def test_address_that_was_lost_is_dialled_after_the_others() -> None:
    addresses = Addresses()
    served = await addresses.choose("name", 1)
    addresses.served(served)
    addresses.lost(served)
    others = [await addresses.choose("name", 1) for _ in HERE[1:]]
    assert sorted([served, *others]) == HERE


@pytest.mark.usefixtures("turning")
async def test_address_that_served_again_is_as_good_as_the_others() -> None:
    addresses = Addresses()
    for _ in range(3 * len(HERE)):
        addresses.served(await addresses.choose("name", 1))
    chosen = [await addresses.choose("name", 1) for _ in HERE]
    assert sorted(chosen) == HERE


@pytest.mark.parametrize("host", ["10.0.0.1", "::1"])
async def test_address_needs_no_resolver(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert await Addresses().choose(host, 1) == host


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
async def test_what_cannot_be_a_name_cannot_be_looked_up(host: str) -> None:
    """A node of a cluster may be called so: that is no bug of ours, which would end the session."""
    with pytest.raises(OSError, match="can be no name"):
        await resolve(host, 1)
