"""The mark of the versions that may work under a prefix."""

from __future__ import annotations

import logging

import pytest

import aiodlock
from aiodlock import BackendError, BackendUnavailable
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.link import Link
from aiodlock.backends.etcd.store import EtcdBackend

from ..scenes import bounded
from .servers import EtcdCluster


def _link(client: aiodlock.Client) -> Link:
    assert client._core.session is not None
    store = client._core.session.backend
    assert isinstance(store, EtcdBackend)
    return store.cluster.link


async def _mark(client: aiodlock.Client, prefix: str, mark: bytes) -> None:
    step = m.RequestOp(request_put=m.PutRequest(f"{prefix}/versions".encode(), mark))
    await _link(client).call(api.TXN, m.TxnRequest(success=[step]))


@pytest.mark.parametrize("mark", [b"2 3", b"0 0", b"", b"two", b"2 3 and more", b"\xff \xff"])
async def test_client_does_not_work_beside_versions_that_it_does_not_know(
    one_node: EtcdCluster, mark: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = f"marked-{mark.hex()}"
    async with aiodlock.Client(one_node.url, prefix="other") as other:
        await _mark(other, prefix, mark)
        with pytest.raises(BackendError, match="use the release that the other clients") as refused:
            await aiodlock.Client(one_node.url, prefix=prefix).__aenter__()
        assert not isinstance(refused.value, BackendUnavailable)
        assert not [one for one in caplog.records if one.levelno >= logging.ERROR]  # it was raised
        async with other.lock("name") as lease:  # it has a prefix of its own
            assert lease.held


@pytest.mark.parametrize("mark", [b"1 1", b"0 2", b"1 4 with more"])
async def test_client_works_beside_versions_that_it_knows(
    one_node: EtcdCluster, mark: bytes
) -> None:
    prefix = f"shared-{mark.hex()}"
    async with aiodlock.Client(one_node.url, prefix="other") as other:
        await _mark(other, prefix, mark)
    async with aiodlock.Client(one_node.url, prefix=prefix) as client, client.lock("name") as lease:
        assert lease.held


async def test_mark_is_read_again_on_each_connection(one_node: EtcdCluster) -> None:
    async with (
        aiodlock.Client(one_node.url, prefix="later") as client,
        aiodlock.Client(one_node.url, prefix="other") as other,
        client.lock("name", ttl=30.0) as lease,
    ):
        await _mark(other, "later", b"2 2")
        link = _link(client)
        link.failed(link.generation, BackendUnavailable("moved by the test"))
        with pytest.raises(BackendUnavailable, match="use the release that the other clients"):
            await client.lock("another").acquire(timeout=2.0)
        assert lease.held
        await _mark(other, "later", b"1 2")  # it is an outage: the mark is taken back
        async with bounded(10.0), client.lock("another"):
            pass
