"""The limit that is in use for a semaphore, and who changes it."""

from __future__ import annotations

from .direct import Direct, Heard


async def test_differing_limit_is_refused_while_nobody_resizes(direct: Direct) -> None:
    await direct.acquire("a", "s2")
    assert await direct.acquire("b", "s3") == ["limit", "s2"]


async def test_growing_grants_all_that_fit_in_their_order(direct: Direct, heard: Heard) -> None:
    await direct.acquire("a", "s1")
    for id in ("b", "c", "d"):
        await direct.acquire(id, "s1", client=id)
    await heard.notices()
    assert (await direct.acquire("e", "s3", how="resize"))[0] == "waiting"
    said = await heard.notices()
    assert [(client, word) for client, word, _ in said if word == "granted"] == [
        ("b", "granted"),
        ("c", "granted"),
    ]
    assert set(await direct.holders()) == {"a", "b", "c"}
    await direct.leave("a")
    assert set(await direct.holders()) == {"b", "c", "d"}


async def test_shrinking_throws_nobody_out_and_lets_nobody_in(direct: Direct) -> None:
    for id in ("a", "b", "c"):
        await direct.acquire(id, "s3")
    assert (await direct.acquire("d", "s1", how="resize"))[0] == "waiting"
    assert set(await direct.holders()) == {"a", "b", "c"}
    for id in ("a", "b"):
        await direct.leave(id)
        assert (await direct.extend("d"))[0] == "waiting"
    await direct.leave("c")
    assert set(await direct.holders()) == {"d"}


async def test_others_follow_the_limit_that_somebody_set(direct: Direct) -> None:
    await direct.acquire("a", "s2", how="resize")
    assert (await direct.acquire("b", "s5"))[0] == "granted"
    assert await direct.acquire("c", "s5", wait=False) == ["busy"]
    assert {holder.mode for holder in (await direct.holders()).values()} == {"s2r"}


async def test_limit_outlives_the_request_that_set_it(direct: Direct) -> None:
    await direct.acquire("a", "s1")
    await direct.acquire("b", "s1")
    await direct.acquire("c", "s3", how="resize")
    for id in ("c", "a"):
        await direct.leave(id)
    assert {holder.mode for holder in (await direct.holders()).values()} == {"s3r"}
    assert (await direct.acquire("d", "s1"))[0] == "granted"


async def test_repeated_request_does_not_set_its_limit_again(direct: Direct) -> None:
    await direct.acquire("a", "s1", how="resize")
    await direct.acquire("b", "s3", how="resize")
    assert (await direct.acquire("a", "s1", how="resize"))[0] == "granted"
    assert (await direct.holders())["a"].mode == "s3r"
