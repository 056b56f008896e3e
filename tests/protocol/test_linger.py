"""linger: who is recalled, and how a client learns it, as the scripts keep it."""

from __future__ import annotations

from typing import Any

from .direct import Direct, Heard

LINGERS = " g=1"


async def acquire(direct: Direct, id: str, mode: str = "x", **options: Any) -> list[Any]:
    return await direct.acquire(id, mode, words=LINGERS, **options)


async def marks(direct: Direct) -> dict[str, str]:
    """Return what the record of each holder that lingers says of that."""
    found = await direct.holders()
    return {
        id: word[2:] for id, one in found.items() for word in one.words if word.startswith("g=")
    }


async def recalls(heard: Heard) -> list[tuple[str, str]]:
    return [(client, id) for client, word, id in await heard.notices() if word == "recall"]


async def test_first_who_queues_recalls_the_holder_once(direct: Direct, heard: Heard) -> None:
    assert (await acquire(direct, "a"))[0] == "granted"
    assert (await direct.extend("a"))[0] == "held"
    assert await marks(direct) == {"a": "1"}
    await direct.acquire("b")
    assert await recalls(heard) == [("client-of-a", "a")]
    await direct.acquire("c")
    assert await recalls(heard) == []
    assert (await direct.extend("a"))[0] == "recalled"
    assert (await acquire(direct, "a"))[0] == "recalled", "a repetition is told, too"


async def test_recalled_holder_stays_recalled_when_nobody_waits_any_more(direct: Direct) -> None:
    await acquire(direct, "a")
    await direct.acquire("b")
    assert await direct.leave("b") == ["withdrawn"]
    assert (await direct.extend("a"))[0] == "recalled"


async def test_refusal_recalls_once(direct: Direct, heard: Heard) -> None:
    await acquire(direct, "a")
    for _ in range(2):
        assert await direct.acquire("b", wait=False) == ["busy"]
    assert await recalls(heard) == [("client-of-a", "a")]
    assert await marks(direct) == {"a": "2"}


async def test_writer_recalls_all_readers_that_linger(direct: Direct, heard: Heard) -> None:
    await acquire(direct, "a", "s")
    await acquire(direct, "b", "s")
    await direct.acquire("c", "s")
    await direct.acquire("w")
    assert sorted(await recalls(heard)) == [("client-of-a", "a"), ("client-of-b", "b")]


async def test_reader_that_gets_in_recalls_nobody(direct: Direct, heard: Heard) -> None:
    await acquire(direct, "a", "s")
    assert (await acquire(direct, "b", "s"))[0] == "granted"
    assert await recalls(heard) == []


async def test_notice_tells_that_others_wait_behind(direct: Direct, heard: Heard) -> None:
    await direct.acquire("a")
    await acquire(direct, "b")
    await direct.acquire("c")
    await heard.so_far()
    assert await direct.leave("a") == ["released"]
    ((_, notice),) = [one for one in await heard.so_far() if one[1].startswith("granted")]
    assert notice.split(" ")[2] == "b"
    assert notice.endswith("r")
    assert await marks(direct) == {"b": "2"}
    assert (await direct.extend("b"))[0] == "recalled"
    assert await recalls(heard) == []


async def test_last_of_the_queue_is_not_recalled(direct: Direct, heard: Heard) -> None:
    await direct.acquire("a")
    await acquire(direct, "b")
    await heard.so_far()
    await direct.leave("a")
    ((_, notice),) = await heard.so_far()
    assert notice.split(" ")[3].isdecimal()
    assert (await direct.extend("b"))[0] == "held"


async def test_release_tells_its_own_client_the_same(direct: Direct) -> None:
    await direct.acquire("a", client="one")
    await acquire(direct, "b", client="one")
    await direct.acquire("c", client="two")
    reply = await direct.leave("a")
    assert reply[:1] == ["released"]
    assert reply[2] == "b"
    assert reply[3].endswith("r")


async def test_readers_that_are_granted_together_are_recalled_for_the_writer_behind(
    direct: Direct,
) -> None:
    await direct.acquire("a")
    for id in "bc":
        await acquire(direct, id, "s")
    await direct.acquire("w")
    await direct.leave("a")
    assert await marks(direct) == {"b": "2", "c": "2"}
    await direct.leave("w")
    for id in "bc":
        await direct.leave(id)
    await direct.acquire("d")
    for id in "ef":
        await acquire(direct, id, "s")
    await direct.leave("d")
    assert await marks(direct) == {"e": "1", "f": "1"}


async def test_owner_that_gets_in_past_a_waiter_is_recalled_with_its_answer(
    direct: Direct,
) -> None:
    await direct.acquire("a", owner="ume")
    await direct.acquire("b")
    assert (await acquire(direct, "c", owner="ume"))[0] == "recalled"


async def test_waiter_whose_owner_came_to_hold_is_recalled_with_its_answer(
    direct: Direct,
) -> None:
    await direct.acquire("a")
    await direct.acquire("b", owner="ume")
    await direct.acquire("c")
    await acquire(direct, "d", owner="ume")
    await direct.leave("a")
    assert (await direct.extend("d", owner="ume"))[0] == "recalled"


async def test_overdue_holder_is_not_recalled(direct: Direct, heard: Heard) -> None:
    await acquire(direct, "a", delay=60_000)
    await direct.age("a", by=200_000)
    await direct.acquire("b")
    assert await recalls(heard) == []


async def test_holder_that_does_not_linger_is_not_recalled(direct: Direct, heard: Heard) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    assert await recalls(heard) == []
    assert (await direct.extend("a"))[0] == "held"
