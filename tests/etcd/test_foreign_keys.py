"""Keys below a name that somebody else has written, by hand or by mistake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiodlock
from aiodlock import BackendError, BackendUnavailable
from aiodlock._model import ENDED, Granted, Waiting
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.recipe import Keys, Queue
from aiodlock.backends.etcd.store import EtcdBackend

from ..scenes import bounded
from .conftest import Direct
from .servers import EtcdCluster
from .test_faults import _left

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]

VALUES = (b"", b"hello", b"[1]", b"\xff\xfe", b"[" * 20_000, b'{"mode": "shared"}')


async def _put(direct: Direct, key: bytes, value: bytes = b"hello") -> None:
    step = m.RequestOp(request_put=m.PutRequest(key, value))
    await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[step]))


async def _delete(direct: Direct, key: bytes) -> None:
    step = m.RequestOp(request_delete_range=m.DeleteRangeRequest(key))
    await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[step]))


async def _refused(asking: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(BackendError) as refused:
        async with bounded(5.0):
            await asking
    assert not isinstance(refused.value, BackendUnavailable)
    return str(refused.value)


@pytest.mark.parametrize("below", [b"q/other", b"d/other", b"h/other", b"q/\xff"])
@pytest.mark.parametrize("known", [False, True])
async def test_request_behind_a_key_that_cannot_be_read_is_told_which_and_leaves_nothing(
    one_node: EtcdCluster, make_direct: MakeDirect, below: bytes, known: bool
) -> None:
    direct = await make_direct(one_node)
    base = direct.store.cluster.keys("lock", "name").base
    holder, _ = direct.place()
    waiter, heard = direct.place()
    if known:  # the client follows the name
        assert isinstance(await holder.acquire(wait=True), Granted)
        assert isinstance(await waiter.acquire(wait=True), Waiting)
    await _put(direct, base + below)
    for wait in (True, False):
        place, _ = direct.place()
        text = await _refused(place.acquire(wait=wait))
        assert below.decode(errors="backslashreplace") in text.replace("\\\\", "\\")
        await place.leave(ENDED)
    if known:
        # Who stood before it does not mind.
        await holder.leave(ENDED)
        await heard.until("granted")
        await waiter.leave(ENDED)
    assert await _left(direct) == [base + below]
    assert (await direct.store.inspect("lock", "name")).holders == ()
    await _delete(direct, base + below)
    place, _ = direct.place()
    assert isinstance(await place.acquire(wait=True), Granted)
    await place.leave(ENDED)


@pytest.mark.parametrize("below", [b"mine", b"\xff\xfe/x", b"x/other"])
async def test_key_of_no_kind_of_ours_disturbs_nobody(
    one_node: EtcdCluster, make_direct: MakeDirect, below: bytes
) -> None:
    direct = await make_direct(one_node)
    await _put(direct, direct.store.cluster.keys("lock", "name").base + below)
    for wait in (True, False):
        place, _ = direct.place()
        assert isinstance(await place.acquire(wait=wait), Granted)
        waiter, heard = direct.place()
        assert isinstance(await waiter.acquire(wait=True), Waiting)
        assert [name async for name in direct.store.names("*")] == ["name"]
        await place.leave(ENDED)
        await heard.until("granted")
        await waiter.leave(ENDED)


async def test_nobody_is_let_in_behind_a_holder_whose_key_was_written_over(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    one, prefix = await make_direct(one_node, prefix="over"), "over"
    two = await make_direct(one_node, prefix=prefix)
    holder, _ = one.place()
    assert isinstance(await holder.acquire(wait=True), Granted)
    waiter, heard = two.place()
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    await _put(one, holder.key, b"by hand")
    room = two.store.cluster.rooms.of(waiter.keys)
    async with bounded(5.0):
        while room.queue is None or not room.queue.foreign:
            await asyncio.sleep(0.01)
    place, _ = two.place()
    assert str(holder.id) in await _refused(place.acquire(wait=True))
    await place.leave(ENDED)
    room._missed()  # the name is read anew
    async with bounded(5.0):
        rooms = two.store.cluster.rooms
        while (read := rooms.of(waiter.keys).queue) is None or read.find(holder.id) is not None:
            await asyncio.sleep(0.01)
    assert heard.words == []
    await holder.leave(ENDED)
    await heard.until("granted")
    await waiter.leave(ENDED)


async def test_record_that_cannot_be_read_is_told(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    keys = direct.store.cluster.keys("once", "name")
    await _put(direct, keys.record)
    for wait in (True, False):
        place, _ = direct.place(kind="once")
        assert "/o/name/r" in await _refused(place.acquire(wait=wait))
        await place.leave(ENDED)


async def test_message_of_somebody_else_to_a_client_does_not_end_it(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    start = direct.store.cluster.message_key("")
    await _put(direct, start + b"\xff")
    await _put(direct, start + b"recall", b"\xff")
    await asyncio.sleep(0.2)
    place, _ = direct.place()
    assert isinstance(await place.acquire(wait=True), Granted)
    assert direct.store.cluster.is_up


async def test_user_is_told_the_key_and_lists_other_names(one_node: EtcdCluster) -> None:
    async with aiodlock.Client(one_node.url, prefix="strangers") as client:
        assert client._core.session is not None
        store = client._core.session.backend
        assert isinstance(store, EtcdBackend)
        direct, base = Direct(store), store.cluster.keys("lock", "name").base
        await _put(direct, base + b"q/other")
        async with client.lock("another"):
            with pytest.raises(BackendError, match="strangers/1/l/name/q/other"):
                await client.lock("name").acquire()
            assert [info.name async for info in client.locks()] == ["another"]
        assert await _left(direct) == [base + b"q/other"]


@pytest.mark.parametrize("value", VALUES)
def test_no_value_is_an_error_of_the_queue(value: bytes) -> None:
    keys = Keys.of("p", "once", "name")
    for key in (keys.request("a"), keys.delay("a"), keys.hold("a"), keys.record, keys.base):
        queue = Queue(keys, 9, [m.KeyValue(key, 5, 6, 2, value)])
        assert list(queue.foreign) == ([] if key == keys.base else [key])
        queue.delete(key)
        queue.check()
