"""The code of the pages about topologies, on the real thing. (tests/docs only compiles it.)"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import aiodlock
from aiodlock._embedded import find_valkey9

from ..docs.pages import ROOT, blocks
from .cluster import Cluster
from .servers import SentinelService


async def _type_in(page: str, shown: str, real: str) -> dict[str, Any]:
    names: dict[str, Any] = {"aiodlock": aiodlock}
    text = (ROOT / page).read_text()
    assert shown in text
    code = [block.code for block in blocks(text) if block.language == "python"]
    assert code
    for source in code:
        top = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compiled = compile(source.replace(shown, real), page, "exec", flags=top, dont_inherit=True)
        result = eval(compiled, names)
        if inspect.iscoroutine(result):
            await result
    return names


async def test_code_about_clusters_runs() -> None:
    with Cluster(find_valkey9(), replicas=0) as cluster:
        names = await _type_in(
            "docs/topologies/cluster.md", "redis+cluster://node1:6379,node2:6379", cluster.url
        )
    assert isinstance(names["lease"], aiodlock.Lease)


async def test_code_about_sentinel_runs(service: SentinelService) -> None:
    names = await _type_in(
        "docs/topologies/sentinel.md",
        "redis+sentinel://sentinel1:26379,sentinel2:26379,sentinel3:26379/mymaster/0",
        service.url,
    )
    assert isinstance(names["lease"], aiodlock.Lease)
    async with names["client"] as client, client.lock("confirmed by a replica") as lease:
        assert lease.held
